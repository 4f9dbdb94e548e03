"""Messages of a conversation, checked: every conversation passes through `messages_in`."""
from bpe import need

# Templates copy a role into the text, so an arbitrary role could spell the name of a special token.
ROLES = "system", "user", "assistant", "tool"

def text_of(content, place):
    """The text of a message, which may come in parts: [{"type": "text", "text": ..}, ..]"""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        need(is_text and isinstance(text, str), f"{place}: expected a text as its content, found "
             f"{text!r:.40}")
    return "".join(part["text"] for part in parts)

def checked_message(role, content, place):
    """(role, text) of a message.  place: its position, for an error message"""
    need(isinstance(role, str) and role in ROLES, f"{place}: expected one of the roles "
         f"{', '.join(ROLES)}, found {role!r:.40}")
    return role, text_of(content, place)

def messages_in(listed, name):
    """[(role, text)] of a conversation from a file or a caller: a list of {"role": ..,
    "content": ..}, or of pairs (role, text).  Every conversation passes through this function."""
    need(isinstance(listed, list | tuple) and listed, f"{name}: expected a list of messages, found "
         f"{listed!r:.40}")
    messages = []
    for i, message in enumerate(listed):
        place = f"{name}[{i}]"
        if isinstance(message, dict):
            message = message.get("role"), message.get("content")
        need(isinstance(message, list | tuple) and len(message) == 2, f"{place}: expected a "
             f"message with role and content, found {message!r:.40}")
        messages.append(checked_message(*message, place))
    return messages
