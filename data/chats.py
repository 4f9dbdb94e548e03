"""Instructions and their answers, and the templates that make a chat one text."""
import codecs
import hashlib
import json
import pathlib
import re

from bpe import UserError, need, reading

# Stanford Alpaca's templates; what follows them is the response
PROMPT = ("Below is an instruction that describes a task. Write a response that appropriately "
          "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n")
PROMPT_INPUT = ("Below is an instruction that describes a task, paired with an input that provides "
                "further context. Write a response that appropriately completes the request.\n\n"
                "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")

def prompt_of(example):
    return (PROMPT_INPUT if example["input"] else PROMPT).format(**example)

def held_out(example):
    """About one example in 50, by a hash: the same question is always on the same side."""
    question = f"{example['instruction']}\0{example['input']}".encode()
    return int.from_bytes(hashlib.sha256(question).digest()[:4], "big") % 50 == 0

def read_examples(path, *answers):
    """The {instruction, input, *answers} of a JSON list, or one a line, and the file's SHA-256."""
    keys, examples = ("instruction", "input", *answers), []
    remedy = f"give {', '.join(keys)} with --data, as a JSON list or one a line"
    with reading(path, remedy):
        text = pathlib.Path(path).read_bytes()
        listed = text.lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] == b"["
        lines = [(f"line {i}", s) for i, s in enumerate(text.splitlines(), 1) if s.strip()]
        entries = [(f"entry {i}", e) for i, e in enumerate(json.loads(text))] if listed else lines
    for name, e in entries:
        with reading(f"{path}, {name}", remedy):
            e = e if listed else json.loads(e)
            need(isinstance(e, dict), f"it is a {type(e).__name__}, expected an object")
            e = {"input": "", **e}
            for key in keys:
                need(isinstance(e.get(key), str), f"{key} is {e.get(key)!r:.40}, expected text")
                e[key].encode()              # half a surrogate pair is no text
            examples.append(e)
    need(examples, f"{path}: it is empty; {remedy}")
    return examples, hashlib.sha256(text).hexdigest()

ALPACA = ("{% for message in messages %}{% if message['role'] == 'user' %}" + PROMPT.replace(
    "{instruction}", "{{ message['content'] }}") + "{% else %}{{ message['content'] + eos_token }}"
    "{% endif %}{% endfor %}")
# ChatML as Jinja text without blanks, and what may add a system message where there is none
CHATML = (r"{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\n'+message['content']+"
          r"'<|im_end|>'+'\n'}}{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\n'}}"
          r"{%endif%}")
SYSTEM = re.compile(r"{% if loop.first and messages\[0\]\['role'\] != 'system' %}{{ ?"
                    r"'<\|im_start\|>system\\n([^\\']*)<\|im_end\|>\\n' ?}}{% endif %}")

def render(template, messages, state):
    """The text of messages [(role, content)] with what begins the next answer.
    Alpaca's knows of one question only.  Templates that are neither are jinja2's to render."""
    if template in ("", "alpaca", ALPACA):
        return PROMPT.format(instruction=messages[-1][1])
    written = template.replace("\n", "\\n")
    if template == "chatml" or SYSTEM.sub("", written).replace(" ", "") == CHATML:
        if (default := SYSTEM.search(written)) and messages[0][0] != "system":
            messages = [("system", default[1]), *messages]
        return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + (
            "<|im_start|>assistant\n")
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment as sandbox
        return sandbox(trim_blocks=True, lstrip_blocks=True).from_string(template).render(
            messages=[dict(role=role, content=text) for role, text in messages],
            add_generation_prompt=True, bos_token=state.bos, eos_token=state.eos)
    except Exception as e:                   # a template is a program: it may fail in any way
        raise UserError(f"the model's chat template: {type(e).__name__}: {e}; pip install jinja2, "
                        f"or choose --template alpaca or chatml".replace("\n", " ")) from None

def chat_ids(template, messages, state, tokenizer):
    """The ids of a conversation.  Only the template makes special tokens, never what users say:
    private characters stand for their words while the text is cut at special tokens."""
    slots = [(role, chr(0xF0000 + i)) for i, (role, _) in enumerate(messages)]
    said = {0xF0000 + i: text for i, (_, text) in enumerate(messages)}
    names, ids = sorted(map(re.escape, tokenizer.specials), key=len, reverse=True), []
    for piece in re.split(f"({'|'.join(names) or '(?!)'})", render(template, slots, state)):
        special = tokenizer.specials.get(piece)
        text = piece.translate(said)
        ids += tokenizer.encode(text).tolist() if special is None else [special]
    need(ids, "the model's chat template makes no text of it; choose --template alpaca or chatml")
    return ids
