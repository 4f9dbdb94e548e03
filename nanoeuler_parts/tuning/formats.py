"""The forms of fine-tuning examples.  All become the messages before the answer, and the answers:

    Alpaca        {instruction, input, output}, and {system, history}
    OpenAI, TRL   {messages}, or {prompt, completion} and {prompt, chosen, rejected} with messages
    ShareGPT      {conversations}; with pairs, it holds the question
    hh-rlhf       {chosen, rejected}, whole texts with "\\n\\nHuman:" and "\\n\\nAssistant:"

A field that is read is taken out of its entry.  Of the fields that remain, only those whose names
are HARMLESS are ignored.  All others are rejected, because the model may have to learn something
else with them than without them."""
import re
from typing import Any, NamedTuple

from bpe import need, UserError
from nanoeuler_parts.chat.messages import messages_in

QUESTION = "instruction", "prompt"
CONVERSATION = "messages", "conversations"   # with pairs, the question
ANSWER_NAMES = {"output": ("output", "completion", *CONVERSATION)}
ANSWER = ["answer"]                          # the key of questions for eval
BESIDE = "input", "system", "history"        # fields beside a question
# Names of fields without effect, in an example and in a message: where it comes from, what it is
# about, when and with what it was made.  Names count in lower case, with _ for blanks and hyphens.
HARMLESS = frozenset("""
    id _id ids uid uuid guid idx index row row_id key hash sha256 md5 __index_level_0__ unnamed:_0
    message_id parent parent_id parent_message_id conversation_id conversation_hash chat_id
    thread_id session_id turn_id user_id author_id annotator_id prompt_id question_id example_id
    sample_id doc_id document_id group_id task_id tool_call_id
    created created_at create_time updated updated_at update_time date time timestamp
    name author annotator username
    source sources origin dataset dataset_name data_source subset split file filename path url link
    license licence copyright citation reference_url
    model model_name generator provider finish_reason usage
    category categories subcategory topic topics tag tags domain subject genre type task task_name
    task_type title language lang locale country
    version revision meta metadata note notes comment comments annotations cache_control
    tokens n_tokens num_tokens token_count length num_turns
    match score_chosen score_rejected
    """.split()) | {""}                      # pandas writes an index as a column without a name
# Parts of what is said.  Readers that do not train reject only these.
PARTS = frozenset("""tools functions function_call tool_calls images image audios audio videos video
    documents refusal thinking reasoning reasoning_content chat_template_kwargs""".split())
# Does this field say that a message, or an example, is trained?  {name: its value if so}
TRAINED = {"weight": 1, "train": True, "training": True, "trained": True, "trainable": True,
           "loss": True, "mask": False, "masked": False}
READ_IN_MESSAGE = {"role", "content", "from", "value"}
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                  "system": "system", "tool": "tool", "function_response": "tool",
                  "observation": "tool"}

class Field(NamedTuple):
    name: str
    value: Any                               # None if the entry lacks the field

def names_of(answers):
    """The names of all fields that are read, for sft or dpo"""
    own = {name: None for key in answers for name in ANSWER_NAMES.get(key, (key,))}
    return [*QUESTION, *BESIDE, *own, *(name for name in CONVERSATION if name not in own)]

def forms(answers):
    """The accepted forms, for error messages"""
    if answers == ANSWER:
        return "(question, answer), (messages, answer), or a form that sft reads"
    if len(answers) < 2:
        either = "(instruction, input, output), (prompt, completion), (messages) or (conversations)"
        return either if answers else f"{either}, where output may be missing"
    return ("(instruction, input, chosen, rejected), (prompt, chosen, rejected), (conversations, "
            "chosen, rejected) or (chosen, rejected)")

# ---- fields
def is_blank(x):
    return x is None or x in ("", [], {})

def has_answer(entry):
    """Does it have a field that may hold the answer to a question?"""
    return any(entry.get(name) is not None for name in ANSWER_NAMES["output"])

def take(e, *names):
    """The field that has one of these names, which mean the same.  A blank one counts only if all
    are blank."""
    there = [Field(name, e.pop(name)) for name in names if name in e]
    filled = [x for x in there if not is_blank(x.value)]
    need_advised(len(filled) < 2, f"expected one of the fields "
                 f"{' and '.join(x.name for x in filled)}, found both; remove one")
    return (filled or there or [Field(names[0], None)])[0]

class Advised(UserError):
    """An error whose message ends with a remedy of its own"""

def need_advised(ok, message):
    if not ok:
        raise Advised(message)

class AllBut(frozenset):
    """All names but these"""
    def __contains__(self, name):
        return not super().__contains__(name)

NOT_TRAINED = AllBut(PARTS)                  # as `ignore`, for readers that do not train

def plain_name(name):
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")

def need_harmless(fields, ignore, place="", trained=True):
    """Rejects the fields of an example or of a message that may change what is learned.
    ignore: names that the user declares harmless; trained: is this message or example trained?"""
    for name, x in fields.items():
        plain = plain_name(name)
        if is_blank(x) or plain in HARMLESS or name in ignore:
            continue
        if plain in TRAINED and x in (0, 1):
            says = x == TRAINED[plain]
            if says == trained or (says and plain == "weight"):      # 1 is its default
                continue
        flag = "" if isinstance(ignore, AllBut) else f", or ignore it with --ignore {name}"
        found = f"{place}found the field {name}, {x!r:.40}"
        need_advised(plain not in TRAINED or not place or not trained, f"{found}, but every answer "
                     f"of the assistant is trained; put messages that are not trained into prompt, "
                     f"and the answer into completion{flag}")
        need_advised(plain not in TRAINED or not place, f"{found}, but only the answers of the "
                     f"assistant are trained; remove the field or the example{flag}")
        need_advised(False, f"{found}, which is not supported and may change what is "
                     f"{'learned' if flag else 'asked'}; remove the field or the example{flag}")

def text_in(field):
    need(isinstance(field.value, str), f"{field.name} is {field.value!r:.40}, expected text")
    return field.value

# ---- messages
def words_of(messages):
    """The texts of the assistant's messages"""
    return [text for role, text in messages if role == "assistant"]

def holds_messages(field):
    return isinstance(field.value, list | dict) or (
        field.name in CONVERSATION and field.value is not None)

def openai_message(message, place):
    """{role, content} of a message in the form of OpenAI or of ShareGPT"""
    m = {name: x for name, x in message.items() if x is not None}
    role, content = m.get("role"), m.get("content")
    if {"from", "value"} & m.keys():
        need_advised(not {"role", "content"} & m.keys(), f"{place}: expected role and content, or "
                     f"from and value, found {', '.join(m):.40}; remove two of them")
        role, content = m.get("from"), m.get("value")
        need(isinstance(role, str) and role in SHAREGPT_ROLES, f"{place}: expected one of the "
             f"roles {', '.join(SHAREGPT_ROLES)}, found {role!r:.40}")
        role = SHAREGPT_ROLES[role]
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        need(kind in (None, "text"), f"{place}: expected a text, found a part of type {kind!r:.40}")
    return {"role": role, "content": content}

def listed_in(field):
    return [field.value] if isinstance(field.value, dict) else field.value

def need_harmless_messages(field, ignore, answers):
    """Rejects fields of messages as `need_harmless` does.  answers: are the messages of the
    assistant trained?"""
    listed = listed_in(field)
    for i, m in enumerate(listed) if isinstance(listed, list) else ():
        if not isinstance(m, dict):
            continue
        place = f"{field.name}[{i}]: "
        said = m.get("role", m.get("from"))
        trained = answers and said in ("assistant", "gpt")
        need_harmless({x: m[x] for x in m.keys() - READ_IN_MESSAGE}, ignore, place, trained)
        content = m.get("content", m.get("value"))
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in (None, "text"):
                need_harmless({x: part[x] for x in part.keys() - {"type", "text"}}, ignore, place,
                              trained)

def take_messages(e, field):
    """The messages of a field.  Other fields of the messages become fields NAME.FIELD of e."""
    listed = listed_in(field)
    if isinstance(listed, list):
        for m in listed:
            if isinstance(m, dict):
                e.update({f"{field.name}.{name}": m[name] for name in m.keys() - READ_IN_MESSAGE})
        listed = [openai_message(m, f"{field.name}[{i}]") if isinstance(m, dict) else m
                  for i, m in enumerate(listed)]
    return messages_in(listed, field.name)

def up_to_answer(messages):
    """The messages before the first answer of the assistant"""
    roles = [role for role, _ in messages] + ["assistant"]
    return messages[:roles.index("assistant")]

def begin_alike(conversations):
    """The messages that all conversations begin with, without the last message of any of them"""
    alike = []
    for messages in zip(*(x[:-1] for x in conversations)):
        if len({*messages}) > 1:
            break
        alike.append(messages[0])
    return alike

def leading_systems(messages):
    roles = [role for role, _ in messages] + ["user"]
    return next(i for i, role in enumerate(roles) if role != "system")

def without(n, said):
    """The answers without the n messages that each begins with"""
    return {key: messages[n:] for key, messages in said.items()}

# ---- one reader for each form; each returns (messages before the answer, {key: messages})
def read_history(field):
    """The messages of Alpaca's history: pairs of a question and its answer, oldest first"""
    pairs = [] if is_blank(field.value) else field.value
    ok = isinstance(pairs, list) and all(
        isinstance(x, list) and [*map(type, x)] == [str, str] for x in pairs)
    need(ok, f"history is {pairs!r:.40}, expected a list of pairs [question, answer]")
    return [message for question, answer in pairs
            for message in (("user", question), ("assistant", answer))]

def read_listed_question(e, question, said):
    """TRL's form: question and answers are lists of messages.  Some files repeat the question in
    each answer."""
    asked, n = take_messages(e, question), len(question.value)
    said = {key: take_messages(e, x) for key, x in said.items()}
    repeated = all(messages[:n] == asked for messages in said.values())
    return asked, without(n, said) if repeated else said

def read_conversations(e, stated, said):
    """Answers that are lists of messages.  They begin with the question, unless it is `stated`,
    messages made of other fields.  Some files state a question that is one of the messages."""
    said = {key: take_messages(e, x) for key, x in said.items()}
    first, *others = said.values()
    whole = begin_alike(said.values()) if others else up_to_answer(first)
    n = leading_systems(whole)
    if not stated:
        return whole, without(len(whole), said)
    if whole[n:] and whole[n][0] == "user":
        there = {text.strip() for role, text in first if role != "assistant"}
        need_advised({text.strip() for _, text in stated} <= there, "expected one question, found "
                     "messages and another question beside them; remove one")
        return whole, without(len(whole), said)
    return [*whole[:n], *stated], without(n, said)

SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")

def messages_of_text(field):
    before, *parts = SPEAKER.split(text_in(field))
    need(parts and not before, f"{field.name}: expected a question in the field prompt or "
         f"instruction, or a whole conversation that begins with '\\n\\nHuman:', found neither")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [(roles[who], text.strip()) for who, text in zip(parts[::2], parts[1::2])]

def read_whole_texts(said):
    """hh-rlhf's form: each text is a whole conversation, "\\n\\nHuman: ...\\n\\nAssistant: ...\""""
    said = {key: messages_of_text(x) for key, x in said.items()}
    asked = begin_alike(said.values())
    return asked, without(len(asked), said)

# ---- any form
def conversation(asked, answers):
    """The example made of `asked`, the messages before the answer, and answers {key: messages}"""
    for messages in answers.values():
        need_advised(words_of(messages), "expected a message of the assistant, found none; add the "
                     "answer as a message with the role assistant")
    questions = [text for role, text in asked if role == "user"]
    return {"instruction": "".join(questions[-1:]), "input": "", "asked": asked, **answers}

def with_system(field, asked, said):
    """The messages before the answer, with the text of the field `system` as the first one"""
    if is_blank(field.value):
        return asked
    there = [role for messages in (asked, *said.values()) for role, _ in messages]
    need_advised("system" not in there, "expected one system message, found the field system and a "
                 "system message; remove one")
    return [("system", text_in(field)), *asked]

class Fields(NamedTuple):
    """The fields of an entry that are read"""
    question: Field
    added: Field                             # Alpaca's input
    system: Field
    history: Field
    said: dict                               # {key: Field}, the answers

def take_fields(e, answers):
    asked = "output" not in answers          # messages are the question, without its answer
    is_pair = {"chosen", "rejected"} <= e.keys() and not e.keys() & {*ANSWER_NAMES["output"]}
    need_advised(asked or not is_pair, "expected the field output, found a preference pair; train "
                 "on pairs with dpo")
    for name in e.keys() & {*CONVERSATION} if asked else ():
        if e[name] in (e.get("chosen"), e.get("rejected")):      # a copy, as in UltraFeedback
            del e[name]
    return Fields(question=take(e, *QUESTION, *(CONVERSATION if asked else ())),
                  added=take(e, "input"), system=take(e, "system"), history=take(e, "history"),
                  said={key: take(e, *ANSWER_NAMES.get(key, (key,))) for key in answers})

def of_whole_texts(f):
    return f.question.value is None and len(f.said) > 1 and all(
        isinstance(x.value, str) for x in f.said.values())

def of_messages(f):
    return any(map(holds_messages, (f.question, *f.said.values())))

def read_form(e, f, history):
    """(messages before the answer, {key: messages}) of an entry in any form"""
    if of_whole_texts(f) or holds_messages(f.question):
        need_advised(is_blank(f.added.value) and not history, "expected no input and no history "
                     "beside messages; remove them")
        return (read_whole_texts(f.said) if of_whole_texts(f) else
                read_listed_question(e, f.question, f.said))
    texts = [text_in(x) for x in (f.question, f.added) if not is_blank(x.value)]
    stated = [*history, ("user", "\n\n".join(texts))]
    if of_messages(f):
        return read_conversations(e, stated if texts or history else [], f.said)
    return stated, {key: [("assistant", text_in(x))] for key, x in f.said.items()}

def as_example(entry, answers, ignore=()):
    """The example of an entry: {instruction, input, *answers} and the fields without effect.  If it
    consists of messages, it also has `asked`, and its answers are lists of messages.  A null field
    counts as missing.  ignore: names of fields that the user declares harmless, or NOT_TRAINED"""
    e = {name: x for name, x in entry.items() if x is not None}
    f = take_fields(e, answers)
    texts = not (of_messages(f) or of_whole_texts(f))
    needed = [f.question, *f.said.values()] if texts else f.said.values()
    missing = [x.name for x in needed if x.value is None]
    others = [x for x in e if plain_name(x) not in HARMLESS]
    name = "".join(missing[:1])
    remedy = (f"rename a field, or read it from a column, such as --field {name}={others[0]}"
              if others else f"add the field {name}, or remove the example")
    need_advised(not missing, f"{name} is missing or null; the fields are "
                 f"{', '.join(map(str, entry)) or 'none':.80}, expected {forms(answers)}; {remedy}")
    need_harmless(e, ignore)
    e.pop("asked", None)                     # a field of this name would be taken for messages
    for field in (f.question, *f.said.values()):
        need_harmless_messages(field, ignore, answers=field is not f.question)
    history = read_history(f.history)
    if texts and not history and is_blank(f.system.value):
        added = Field("input", "") if is_blank(f.added.value) else f.added
        fields = {"instruction": f.question, "input": added, **f.said}
        return {**e, **{name: text_in(x) for name, x in fields.items()}}
    asked, said = read_form(e, f, history)
    if history and len(answers) == 1:        # the answers in it are trained, too
        [key] = answers
        messages = [*asked, *said[key]]
        asked = up_to_answer(messages)
        said = {key: messages[len(asked):]}
    return {**e, **conversation(with_system(f.system, asked, said), said)}
