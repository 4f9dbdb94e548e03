"""A conversation as token ids: the built-in chat templates, and `chat_ids`.

A chat model reads one text: the conversation so far and the beginning of its next answer.  A
template defines how this text is written.  Two templates are built in: Alpaca's, which has a place
for one question, and ChatML,

    <|im_start|>user
    What is a cat?<|im_end|>
    <|im_start|>assistant

where <|im_start|> and <|im_end|> are special tokens.  A message must never become a special token,
even where its text spells the name of one.  So a conversation is a list of pieces, (text, role of
its speaker).  The template's own pieces have the role "", and only in these pieces are names
replaced by special tokens.  An imported model brings its own template, a Jinja program.  jinja.py
runs the program and splits its output into pieces.
"""
import re

from bpe import need
from nanoeuler import CHATML, PROMPT
from nanoeuler_parts.chat.messages import messages_in

# The two built-in templates as Jinja programs, for exported models
ALPACA = (r"{% set told = namespace(text='') %}{% for message in messages %}"
          r"{% if message['role'] == 'system' %}"
          r"{% set told.text = told.text + message['content'] + '\n\n' %}"
          r"{% elif message['role'] == 'user' %}" + PROMPT.replace(
              "{instruction}", "{{ told.text + message['content'] }}") +
          r"{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}")

OTHER_TEMPLATE = "choose --template chatml or alpaca"

TEMPLATES = "", "alpaca", "chatml"           # values of --template
# The part of some spellings of ChatML that adds a default system message if there is none
SYSTEM = re.compile(r"{% if loop.first and messages\[0\]\['role'\] != 'system' %}{{ ?"
                    r"'<\|im_start\|>system\\n([^\\']*)<\|im_end\|>\\n' ?}}{% endif %}")

def line_ends_spelled(template):
    """The template with each line end as the two characters \\n, as some templates write it"""
    return template.replace("\n", "\\n")

def without_blanks(template):
    """The template without blanks outside of quotes"""
    def squeezed(part):
        return part[0] if part[0].startswith("'") else ""

    return re.sub(r"'[^']*'| +", squeezed, template)

def is_chatml(template):
    """Is the template a spelling of ChatML?  Spellings differ in line ends, in blanks outside of
    quotes, and in whether they add a default system message."""
    rest = SYSTEM.sub("", line_ends_spelled(template))
    return template == "chatml" or without_blanks(rest) == without_blanks(CHATML)

def default_system(template, messages):
    """[("system", text)] if this spelling of ChatML adds one to these messages, else []"""
    default = SYSTEM.search(line_ends_spelled(template))
    has_one = messages and messages[0][0] == "system"
    return [("system", default[1])] if default and not has_one else []

# jinja.py marks every character of a message, to recognize it in a template's output
BEFORE, AFTER = "\udc00", "\udc01"   # lone surrogates, which valid text never contains

def unmarked(text):
    return text.replace(BEFORE, "").replace(AFTER, "")

def is_alpaca(template):
    return template in ("", "alpaca", ALPACA)

def alpaca_instruction(messages):
    """The last question.  Alpaca's template has no place for system messages, so they precede the
    question, as in Mistral's template."""
    *before, (_, question) = messages
    return "\n\n".join([*(text for role, text in before if role == "system"), question])

def alpaca_pieces(messages):
    before, after = PROMPT.split("{instruction}")
    return [(before, ""), (alpaca_instruction(messages), "user"), (after, "")]

def chatml_pieces(template, messages):
    """The pieces of messages in ChatML, with the default system message of this spelling, if any"""
    pieces, ended = [], ""
    for _, text in default_system(template, messages):
        ended = f"<|im_start|>system\n{text}<|im_end|>\n"
    for role, text in messages:
        pieces += [(f"{ended}<|im_start|>{role}\n", ""), (text, role)]
        ended = "<|im_end|>\n"
    return [*pieces, (f"{ended}<|im_start|>assistant\n", "")]

def own_pieces(template, messages):
    """The pieces of messages [(role, text)] in a built-in template; None for any other template"""
    if is_alpaca(template):
        return alpaca_pieces(messages)
    return chatml_pieces(template, messages) if is_chatml(template) else None

def special_names(tokenizer):
    """Regular expression of all special tokens' names, longest first.  If there are none, it never
    matches."""
    return "|".join(map(re.escape, sorted(tokenizer.specials, key=len, reverse=True))) or "(?!)"

def ends_of(state, tokenizer):
    """The ids of the tokens that end an answer, a tuple"""
    found = (tokenizer.specials.get(name) for name in (state.eos, *state.stops))
    return tuple(k for k in found if k is not None)

class IdsOfPieces:
    """The ids of a text that arrives in pieces.  A word may span two of them, so the characters are
    encoded only when a token follows, or the end."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.text = tokenizer, [], ""      # text: not encoded yet

    def add_tokens(self, ids):
        encode = self.tokenizer.encode_after if self.ids else self.tokenizer.encode
        self.ids += [*encode(self.text).tolist(), *ids]
        self.text = ""

def chat_ids(template, messages, state, tokenizer, sampled=None):
    """The ids of a conversation, up to the place where the next answer begins.  The messages are
    checked here, so that no caller can forget it.
    sampled: {answer: the ids that the model sampled for it}; encoding its text may give others"""
    messages = [(role, unmarked(text)) for role, text in messages_in(messages, "messages")]
    pieces = own_pieces(template, messages)
    if pieces is None:
        from nanoeuler_parts.chat.jinja import third_party_pieces
        pieces = third_party_pieces(template, messages, state, tokenizer)
    found = IdsOfPieces(tokenizer)
    for piece, speaker in pieces:
        for part in [piece] if speaker else re.split(f"({special_names(tokenizer)})", piece):
            if speaker == "assistant" and sampled and part in sampled:
                found.add_tokens(sampled[part])
            elif not speaker and part in tokenizer.specials:
                found.add_tokens([tokenizer.specials[part]])
            else:
                found.text += part
    found.add_tokens([])
    need(found.ids, f"the model's chat template turns the messages into an empty text; "
         f"{OTHER_TEMPLATE}")
    return found.ids

def rewind_to(decoder, ids):
    """Truncates the KV cache of slot 0 to the tokens that it shares with the start of ids.
    Returns the ids that are still to be read: at least the last one, whose logits are needed."""
    n = 0
    for held, token in zip(decoder.tokens, ids[:-1]):
        if held != token:
            break
        n += 1
    return ids[decoder.truncate(n):]
