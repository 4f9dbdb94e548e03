r"""Hostile input, by the thousand: each is accepted, or refused in one line, and forges nothing.

    python tests/attack.py [--only CLASS ...] [--n N] [--renderings N] [--seed S] [--out FILE]

Input number i of a class depends on its seed, S + i, and on nothing else: what was found with a
seed is found again with --only CLASS --seed SEED --n 1, a rendering with --renderings 1.

    checkpoints   bytes, header, settings, tokenizer and weights changed, mostly with a checksum
                  that fits; then a verb that reads it: info, generate, chat, lens, export, a run
    adapters      of LoRA: each file of a folder changed, missing, replaced, a link to a file of the
                  user, which must stay as it is; then a verb with it
    folders       of Hugging Face: every file of one changed, missing, replaced; import, then use
    gguf          bytes, fields, tensors and their types changed; import, then use
    data          texts, examples, preferences, logs, tokenizers, and what is typed into a chat
    corpora       compressed texts, JSON lines, Parquet, folders of them, and their token files
    questions     of eval, and texts that it measures
    commands      verbs, flags and names that make no sense, or too much of it
    templates     conversations that try to make special tokens, through `chat_ids`

    accepted      exit code 0; on stderr nothing but notes
    refused       exit code 2; on stderr, beside notes, one line that begins with the program's name
    crashed       anything else: a traceback, another exit code, a warning, two lines
    hung          not done after LIMIT seconds
    forged        a special token that the template did not write

Whether a token is forged is decided by a twin of the template, which knows nothing of marks or of
how `chat_ids` works.  Wherever a template writes a special name of its own, bos and eos included,
its twin writes one private character, which nobody says: U+E000 for the first name, and so on.
What a template does with what is said, and what it looks for in it, the twin does, too.  So both
take the same turns, and in the twin's text each private character is a special token, and all else
is ordinary text, whatever it looks like.  `chat_ids` must refuse, or give these tokens with these
texts between them: the right number at another place is a forgery as well.

A template that does what it will with its own words may well make special tokens of them: no
generated one has halves of a name that are a name where nothing is said.

It needs pip install -e .[dev], and Linux or macOS: the watch is an alarm of the system.
"""
import argparse
import bz2
import contextlib
import copy
import faulthandler
import gzip
import html
import io
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, namedtuple
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numba
import numpy as np
from helpers import TEXT, TINY, before_muon, put_together, random_flat, take_apart
from models import CHATML, SPECIALS
from templates import GEMMA, TEMPLATES
from templates import SPECIALS as OF_TEMPLATES

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.templates import AFTER, ALPACA, BEFORE, chat_ids, unmarked
from nanoeuler_parts.files import corpora as of_corpora
from nanoeuler_parts.interchange.gguf import gguf_meta, write_gguf
from nanoeuler_parts.chat.jinja import marked, render
from nanoeuler_parts.interchange.tokenizers import gguf_of_tokenizer, SPLIT
from nanoeuler_parts.kernels import compile_kernels, compile_lora_kernels
from nanoeuler_parts.runs.options import TrainOptions
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.tokenizers.families import tokenizer_of_model
from nanoeuler_parts.tokenizers.sentencepiece import root_of_pieces
from nanoeuler_parts.tuning.examples import read_entries, read_examples, read_file

LIMIT = 20                   # seconds for one input; a good one takes some milliseconds
MEMORY = 2 << 30             # bytes to spare: no size that a file names is believed unchecked
SHORT_STEP = 5000            # tokens; runs of larger batches end where they would begin to learn
SAME_TEMPLATE = 20           # seeds in a row: to compile a template takes longer than to render it
VERDICTS = "accepted", "refused", "crashed", "hung", "forged"


# ---- one input, and what becomes of it
class Hung(BaseException):
    """Not an Exception: nothing that is attacked may catch it."""


class Crashed(Exception):
    """The program ended in a way that is neither success nor refusal."""


class Forged(Exception):
    """A special token that is not the template's."""


def ring(number, frame):
    raise Hung


def main_of_bpe(argv):
    """bpe.py, as it runs as a program."""
    with mock.patch.object(sys, "argv", ["bpe.py", *argv]):
        try:
            bpe.main()
        except (OSError, ne.UserError) as e:
            print(f"bpe.py: {bpe.printable(str(e))}", file=sys.stderr)
            return 2


def runs(*args, stdin=b"", program="nanoeuler"):
    """Runs a verb in this process.  Is it done?  If not it has refused, in one line."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace"), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin), "utf-8", errors="replace")
    main = {"nanoeuler": ne.main, "bpe.py": main_of_bpe}[program]
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          mock.patch.object(sys, "stdin", typed)):
        try:
            code = main([str(x) for x in args])
        except SystemExit as e:              # --help
            code = e.code
    lines = [s for s in err.getvalue().split("\n") if s and not s.startswith("note:")]
    probabilities = args[0] == "generate" and any(str(x).startswith("--logp") for x in args)
    if code in (0, None) and (not lines or probabilities):
        return True
    one = len(lines) == 1 and lines[0].startswith(f"{program}: ") and lines[0].isprintable()
    if not (code == 2 and one):
        raise Crashed(f"{args[0]} ends with {code} and says {lines[:3]}")
    return False


def reads(call, *args):
    """Calls a function that reads.  A UserError is a refusal."""
    call(*args)
    return True


def place_of(error):
    """The line of the programs in which it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if Path(f.filename).name in ("nanoeuler.py", "bpe.py")]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def verdict(trial, limit=LIMIT):
    """(one of VERDICTS, what is known of it) of a trial, which returns whether it was accepted."""
    before = signal.signal(signal.SIGALRM, ring)
    faulthandler.dump_traceback_later(4 * limit, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return ("accepted" if trial() else "refused"), ""
    except ne.UserError:
        return "refused", ""
    except Hung:
        return "hung", f"more than {limit} s"
    except Forged as e:
        return "forged", "\n    ".join(e.args)
    except Crashed as e:
        return "crashed", str(e)[:300]
    except Exception as e:
        return "crashed", f"{type(e).__name__}: {str(e)[:300]}{place_of(e)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


# ---- mutations
NUMBERS = [-1, 0, 1, 2, 3, 7, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 62, 10 ** 30, -10 ** 30, 0.5,
           5e-324, 1e-9, 1e300, 1e308, float("nan"), float("inf"), -float("inf")]
WORDS = ["", "x", "\0", "\n", "x" * 5000, "\ud800", "\udc00", "\u2028", "\x1b[31m", "</s>", "../x",
         "/dev/zero", "{{ 1 / 0 }}", "{% if %}", "9" * 5000]
NASTY = [*NUMBERS, *WORDS, None, True, False, [], {}, [[]], [1, 2], {"a": 1}, ["x"] * 300]
DEEP = b"[" * 100_000

# what a field of this name may hold, and does seldom
TEMPTING = {
    "kind": ["chat", "base", "", "x"], "eos": ["", "</s>", "<|im_end|>", "no", "\ud800", "a"],
    "bos": ["", "</s>", "<|im_start|>", "no", "\ud800", "a"],
    "template": ["", "alpaca", "chatml", CHATML, ALPACA, GEMMA, "{% if %}", "{{ '\ud800' }}x",
                 "{{ 'a' * 10 ** 9 }}", "{{ messages }}", "\udc00\udc01", "\0", "x" * 99_999,
                 "{% for m in messages %}{{ m.content }}{% endfor %}",
                 "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"],
    "elapsed": [0.0, 5e-324, 1e-300, 1e18], "step": [-5, 0, 1, 3, 1 << 62, 10 ** 400],
    "n_steps": [0, 1, 3, 1 << 40, 1 << 62], "tokens_seen": [0, 1 << 62],
    "micro_batch": [0, 1, 1 << 40, 1 << 62], "bits_per_byte": [0.0, 1e18, 1e308, -1e308],
    "seq_len": [1, 2, 7, 1 << 17], "rope_theta": [1, 1.0, 1e12], "norm_eps": [1e-12, 1, 1.0],
    "data": ["text.txt", "", "no", ".", "/dev/zero", "\ud800", "a\0b", "x\n.txt", "nanoeuler.bin"],
    "optimizer": ["adamw", "muon", "", None], "dtype": ["f32", "", "f64", None],
    "batch": [1, 64, 1 << 20], "row_len": [0, 1, 2, 9, 1 << 17], "cuts": [0.0, 0.5, 1e-9],
    "lr": [1e-9, 1.0], "warmup": [0, 1 << 40], "eval_every": [1, 2], "save_every": [1, 2],
    "field": [[], ["output=answer"], ["output"], [7], "output=x"], "truncate": [True, False],
    "role": ["user", "assistant", "human", "tool", "<|im_end|>"],
    "from": ["human", "gpt", "function_call", "observation", "role"], "weight": [0, 1, 0.5],
    "holdout": [0.0001, 0.5, 0.9], "reference": [[], [1.0], [1.0] * 24, ["x"] * 24],
    "chat_template": ["", CHATML, GEMMA, "{% if %}", [{"name": "default", "template": CHATML}]],
    "data_offsets": [[0, 0], [0, 4], [4, 0], [0, 1 << 60], [-8, 0], [0], "ab"],
    "shape": [[], [0], [8], [1 << 50], [-1], [-1, -1], [2.0, 4], ["8"]],
    "id": [0, 1, 261, 262, -1, 1 << 40, 1.0, "1"],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "gpt2", "qwen3_moe", "", None],
    "architectures": [["LlamaForCausalLM"], ["Qwen3ForCausalLM"], ["GPT2LMHeadModel"], [], "x"],
    "rope_type": ["default", "linear", "llama3", "yarn", "dynamic", "", None],
    "rope_scaling": ["linear", "llama3", "yarn", "", {}, {"type": "yarn", "factor": 4.0}],
    "factor": [1.0, 1e-3, 1e6, 0, -1.0], "rope_factor": [1.0, 1e-3, 1e6],
    "original_max_position_embeddings": [0, 1, 64, 1 << 24, 1 << 40, 0.5],
    "rope_original": [1, 64, 1 << 24], "low_freq_factor": [0, 1e-6, 4.0], "rope_low": [1e-6, 4.0],
    "high_freq_factor": [1.0, 1e6], "beta_fast": [0, 1, 1e6], "mscale": [0, 1e-30, 1e30],
    "attention_factor": [0, 1.0, 1e7], "sliding_window": [None, 0, 1, 5, 300, 1 << 17, 1 << 40],
    "window": [None, 1, 5, 300, 1 << 17], "use_sliding_window": [True, False, None],
    "layer_types": [[], ["full_attention"] * 2, ["sliding_attention", "full_attention"], "x"],
    "attention_bias": [True, False, None], "qkv_bias": [True, False], "qk_norm": [True, False],
    "eos_token_id": [0, [0, 1], [], [1 << 40], -1, None, "0"],
    "stops": [[], ["</s>"], ["no"], [""], ["\ud800"], "</s>"]}


def nodes(tree, path=()):
    """The paths of all places in a JSON tree."""
    yield path
    if isinstance(tree, dict):
        for key in tree:
            yield from nodes(tree[key], (*path, key))
    elif isinstance(tree, list):
        for k in range(min(len(tree), 40)):
            yield from nodes(tree[k], (*path, k))


def one_of(rng, values):
    """A copy of one: what is made of it stays out of the next input."""
    return copy.deepcopy(rng.choice(values))


def changed(rng, tree):
    """The tree with one random place replaced, removed, copied, multiplied, or exchanged with
    another."""
    paths = [path for path in nodes(tree) if path]
    if not paths:
        return one_of(rng, NASTY)
    path = min(rng.sample(paths, min(len(paths), 2)), key=len)       # rather not a merge of many
    spot = tree
    for key in path[:-1]:
        spot = spot[key]
    last = path[-1]
    values = TEMPTING.get(last) or NASTY
    action = rng.randrange(8)
    if action == 0:
        del spot[last]
    elif action == 1 and isinstance(spot, dict):
        name = rng.choice(["", "x", "n_embd", "__metadata__", "\ud800", *map(str, spot)])
        spot[name] = copy.deepcopy(spot[last])
    elif action == 2 and type(spot[last]) in (int, float):
        spot[last] *= rng.choice([-1, 2, 1 << 10, 1 << 20, 1 << 40, 0.5])
    elif action == 3:
        other = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
        spot[last], spot[other] = spot[other], spot[last]
    elif action == 4:
        spot[last] = one_of(rng, NASTY)
    else:
        spot[last] = one_of(rng, values)
    return tree


def often_changed(rng, tree):
    """Changed once, or a few times."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if isinstance(tree, (dict, list)):
            tree = changed(rng, tree)
    return tree


def spoilt(rng, raw, end=None):
    """Bytes of which some, before `end`, are others, or are missing, or are there twice."""
    b = bytearray(raw)
    place = partial(rng.randrange, max(1, min(len(b), end or len(b))))
    action = rng.randrange(8)
    if action == 0:
        del b[place():]
    elif action == 1:
        i = place()
        del b[i:i + rng.choice([1, 2, 8, 99])]
    elif action == 2:
        i = place()
        b[i:i] = b[place():][:rng.choice([1, 8, 99])]
    elif action == 3:
        b += rng.choice([b"\0", b"\0" * 999, b"\n", bytes(raw)])
    elif action == 4:
        b[place():] = rng.choice([b"", DEEP, rng.randbytes(500), b"\xff" * 9])
    else:
        for _ in range(rng.choice([1, 1, 3, 50])):
            if b:
                b[place()] = rng.choice([0, 1, 10, 127, 128, 255, rng.randrange(256)])
    return bytes(b)


# ---- good files, of which the hostile ones are made
def log_lines():
    """A log of three steps and a validation."""
    steps = [dict(step=t, loss=5.0 / t, heads=[5.0 / t], lr=1e-3, norm=1.0, bits_per_byte=7.0 / t,
                  ms=1.0, tokens_per_s=9.0) for t in (1, 2, 3)]
    return [*steps, dict(step=3, val_bits_per_byte=2.5, windows=None)]


def as_lines(entries):
    return "".join(json.dumps(e) + "\n" for e in entries).encode()


# Families of Llamas, by the parts that they add
OTHERS = {"llama3": dict(rope_scaling="llama3", rope_factor=8.0, rope_original=64),
          "mistral": dict(window=20), "qwen2": dict(qkv_bias=True, window=40),
          "qwen3": dict(qk_norm=True, rope_scaling="yarn", rope_factor=4.0, rope_original=64)}


def write_good_files():
    """Into this folder, which is empty."""
    text = TEXT.read_bytes()[:3000]
    tokenizer = bpe.train(b"to be or not to be, that is the question", 262, SPECIALS)
    few = bpe.Tokenizer({"</s>": 0, "t": 1, "o": 2, "to": 3}, ["t o"], ["</s>"])   # not even blanks
    flat = random_flat(TINY, 1, np.float32)
    options = dict(data="text.txt", batch=64, warmup=1)
    state = ne.State(step=3, n_steps=9, options=before_muon(**options))
    of_muon = replace(state, options=asdict(TrainOptions(**options)))
    chat = replace(TINY, seq_len=300, tie_embeddings=True, n_mtp=1)
    tiny = replace(TINY, vocab_size=4)
    of_few = random_flat(tiny, 3, np.float32)
    nothing = bpe.Tokenizer({"</s>": 0, "\u0100": 1}, [], ["</s>"])      # the byte zero alone
    none = replace(TINY, vocab_size=2)
    moments = flat * 0.5, flat * flat
    ne.write_checkpoint("adamw.bin", TINY, tokenizer, state, flat, moments)
    ne.write_checkpoint("muon.bin", TINY, tokenizer, of_muon, flat, moments)
    ne.write_checkpoint("chat.bin", chat, tokenizer, ne.State(
        kind="chat", template=GEMMA, bos="<|im_start|>"), random_flat(chat, 2, np.float32))
    ne.write_checkpoint("few.bin", tiny, few, replace(state, text_sha256=""),
                        of_few, (of_few, of_few * of_few))
    runs("quantize", "chat.bin", "int8.bin")
    Path("few.json").write_bytes(as_lines([dict(instruction="Add 1 and 1.", output="2")]))
    runs("sft", "chat.bin", "--data", "few.json", "--lora", 2, "--steps", 1, "--batch", 400,
         "--out", "adapter", "--threads", 1)
    ne.write_checkpoint("none.bin", none, nothing, ne.State(), random_flat(none, 4, np.float32))
    runs("export", "chat.bin", "hf", "--gguf", "model.gguf")
    for name, parts in OTHERS.items():
        cfg = replace(chat, **parts)
        state = ne.State(kind="chat", template=CHATML, stops=["<|im_end|>"])
        ne.write_checkpoint(f"{name}.bin", cfg, tokenizer, state, random_flat(cfg, 2, np.float32))
        runs("export", f"{name}.bin", f"hf_{name}", "--gguf", f"{name}.gguf")
    examples = [dict(instruction=f"Add {k} and 1.", input="x" * (k % 2), output=str(k + 1))
                for k in range(12)]
    pairs = [dict(instruction=e["instruction"], input="", chosen=e["output"], rejected="No.")
             for e in examples]
    said = [[dict(role="system", content="Be brief."), dict(role="user", content=e["instruction"]),
             dict(role="assistant", content=[dict(type="text", text=e["output"])])]
            for e in examples]
    sharegpt = [[{"from": {"assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
                 for m in x] for x in said]
    forms = [form for e, x, y in zip(examples, said, sharegpt) for form in (
        {"messages": x, "id": 7}, {"conversations": y}, {"prompt": x[:2], "completion": x[2:]},
        {**e, "system": "Be brief.", "history": [["Add 1 and 1.", "2"]], "tools": []},
        {"messages": x[1:], "system": "Be brief.", "prompt": e["instruction"]})]
    no = {"from": "gpt", "value": "No."}
    forms_of_pairs = [form for e, x, y in zip(pairs, said, sharegpt) for form in (
        {"conversations": y[:2], "chosen": y[2], "rejected": no},
        {"prompt": x[:2], "chosen": x[2:], "rejected": [dict(role="assistant", content="No.")]},
        {"chosen": y, "rejected": [*y[:2], no]},
        {key: f"\n\nHuman: {e['instruction']}\n\nAssistant: {e[key]}"
         for key in ("chosen", "rejected")},
        {**e, "system": "Be brief.", "history": []})]
    rows = "".join(f'"{e["instruction"]}\nNow!","{e["output"]}",{k}\n'
                   for k, e in enumerate(examples))
    files = {"forms.jsonl": as_lines(forms), "forms_of_pairs.jsonl": as_lines(forms_of_pairs),
             "table.csv": f"question,answer,id\n{rows}".encode(), "text.txt": text,
             "examples.json": json.dumps(examples).encode(),
             "examples.jsonl": as_lines(examples), "pairs.jsonl": as_lines(pairs),
             "pairs.json": json.dumps(pairs).encode(), "log.jsonl": as_lines(log_lines()),
             "tokenizer.json": tokenizer.to_json().encode(), **files_of_families(tokenizer)}
    for name, content in files.items():
        Path(name).write_bytes(content)
    tokenizer.save("gpt2")
    Path("books/sub").mkdir(parents=True)
    documents = [text[i:i + 100].decode() for i in range(0, 3000, 100)]
    for name in CORPORA:
        write_corpus(Path(name), documents)
    Path("questions.jsonl").write_bytes(as_lines(questions_of(examples)))


def message(*fields):
    """A protobuf message of (number, value): an int, a float or bytes, all of them small"""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(bytes([number << 3, value]))
        elif isinstance(value, float):
            parts.append(bytes([number << 3 | 5]) + struct.pack("<f", value))
        else:
            parts.append(bytes([number << 3 | 2, len(value)]) + value)
    return b"".join(parts)


def files_of_families(tokenizer):
    """Tokenizers of nanoeuler_parts/tokenizers: tokenizer.json of each, and a tokenizer.model"""
    root = json.loads(tokenizer.to_json())
    root["added_tokens"][-1]["special"] = False
    template = {"single": [{"SpecialToken": {"id": "</s>"}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"</s>": {"ids": [tokenizer.specials["</s>"]]}}}
    root["post_processor"] = {"type": "TemplateProcessing", **template}
    root["model"]["ignore_merges"] = True
    qwen = {**root, "pre_tokenizer": SPLIT[[*SPLIT][1]], "normalizer": {"type": "NFC"}}
    gpt4o = {**root, "pre_tokenizer": SPLIT[[*SPLIT][2]]}
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581",
             *"tobenr", "to", "\u2581to", "be", "\u2581be", "<x>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(names) - 260) + [4]
    pieces = [(name, float(-k), kind) for k, (name, kind) in enumerate(zip(names, kinds))]
    llama = root_of_pieces(pieces[:-1], True, ["<s>"])
    mistral = {**root_of_pieces(pieces, False), "normalizer": None, "pre_tokenizer": {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}}
    model = [(1, message((1, name.encode()), (2, score), (3, kind)))
             for name, score, kind in pieces]
    of_model = message(*model, (2, message((3, 2))), (3, message((4, 0))))
    roots = {"qwen.json": qwen, "gpt4o.json": gpt4o, "llama.json": llama, "mistral.json": mistral}
    return {**{name: json.dumps(x).encode() for name, x in roots.items()}, "pieces.model": of_model}


@contextlib.contextmanager
def empty_folder():
    """A working directory of its own, and what was there before."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@cache
def good_files():
    """{name: bytes}"""
    with empty_folder():
        write_good_files()
        return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def lay(*names):
    """Good files into the working directory; those of a folder by its name and a slash."""
    for name, content in good_files().items():
        if name in names or name.startswith(tuple(x for x in names if x.endswith("/"))):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)


# ---- checkpoints
def checked(tree, data, path):
    """Writes a checkpoint whose checksum fits, if its header still has a place for one."""
    if isinstance(tree, dict) and isinstance(tree.get("__metadata__"), dict):
        return put_together(path, tree, data)
    text = json.dumps(tree).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_field(rng, header):
    """A setting, a number of the state, or a part of the tokenizer."""
    meta = header["__metadata__"]
    key = rng.choice(["config", "state", "state", "state", "tokenizer"])
    meta[key] = json.dumps(often_changed(rng, json.loads(meta[key])))
    if key == "tokenizer" and rng.random() < 0.8:
        with contextlib.suppress(ne.UserError), bpe.reading("a tokenizer", "mend it"):
            meta["tokenizer_sha256"] = bpe.Tokenizer.from_json(meta[key]).hash()


def tempt(rng, header):
    """One to three numbers or names of the state that are well-formed, and seldom."""
    state = json.loads(header["__metadata__"]["state"])
    for part in (state, state["options"]):
        known = [key for key in part if key in TEMPTING]
        for key in rng.sample(known, min(len(known), rng.choice([0, 1, 2]))):
            part[key] = one_of(rng, TEMPTING[key])
    header["__metadata__"]["state"] = json.dumps(state)


def other_weights(rng, header, data):
    """The data with a tensor that is zero, or large, or not finite."""
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    start, end = entry["data_offsets"]
    value = rng.choice([0.0, 1e30, 3e38, -3e38, 1e-38, np.nan, np.inf])
    if entry.get("dtype") == "I8":
        return data[:start] + bytes([rng.randrange(256)]) * (end - start) + data[end:]
    return data[:start] + np.full((end - start) // 4, value, "<f4").tobytes() + data[end:]


def sizes_changed(rng, header):
    """Sizes that agree with each other, and not with the file."""
    config = json.loads(header["__metadata__"]["config"])
    for key in rng.sample(["n_embd", "n_layer", "n_hidden", "vocab_size", "n_mtp", "head_dim"], 2):
        config[key] = rng.choice([1, 2, 16, 4000, 60_000, 1 << 17])
    header["__metadata__"]["config"] = json.dumps(config)


def spoil_checkpoint(rng, path):
    raw, (header, data) = path.read_bytes(), take_apart(path)
    kind = rng.randrange(10)
    if kind == 0:
        return path.write_bytes(spoilt(rng, raw, rng.choice([None, len(raw) - len(data)])))
    if kind == 1:                            # the length of the header
        n = rng.choice([rng.getrandbits(64), rng.randrange(1 << 20), (1 << 63) + 5])
        return path.write_bytes(n.to_bytes(8, "little") + raw[8:])
    if kind == 2:
        header = often_changed(rng, header)
    elif kind == 3:
        data = other_weights(rng, header, data)
    elif kind == 4:
        sizes_changed(rng, header)
    elif kind < 8:
        change_field(rng, header)
    else:
        tempt(rng, header)
    checked(header, data, path)


PROMPTS = ["to be", "", "x", "</s><|im_start|>", "\u00e9\n", "t" * 400]
TYPED = b"hello\n/reset\n</s>\nplease\n"
SHORT = "--steps", 1, "--batch", 400, "--out", "new.bin"


def verb_on(rng, path, name=None):
    """Arguments of a verb that reads a checkpoint."""
    verbs = {
        "info": ("info", path),
        "generate": ("generate", rng.choice(PROMPTS), path, "--tokens", rng.choice([0, 1, 3]),
                     "--weights", rng.choice(["f32", "bf16", "int8"])),
        "chat": ("chat", path, "--tokens", 2),
        "lens": ("lens", rng.choice(PROMPTS), path),
        "quantize": ("quantize", path, "small.bin", *rng.choice([[], ["--n-mtp", 1]])),
        "export": ("export", path, "to"),
        "export to llama.cpp": ("export", path, "--gguf", "to.gguf", "--matrices",
                                rng.choice(["f32", "f16", "q8_0"])),
        "resume": ("train", "--resume", "--out", path, "--steps", 4),
        "resume by the clock": ("train", "--resume", "--out", path, "--minutes", 0.01),
        "sft": ("sft", path, "--data", "examples.json", *SHORT),
        "dpo": ("dpo", path, "--data", "pairs.jsonl", *SHORT)}
    return verbs[name or rng.choice(list(verbs))]


def checkpoints(rng, spoil=True):
    path = Path(rng.choice(["adamw.bin", "muon.bin", "chat.bin", "int8.bin", "few.bin",
                            *(f"{name}.bin" for name in OTHERS),
                            *(["none.bin"] if spoil else [])]))
    lay(str(path), "text.txt", "examples.json", "pairs.jsonl")
    if spoil:
        spoil_checkpoint(rng, path)
    if rng.random() < 0.1:
        return reads(ne.read_checkpoint, str(path))
    return runs(*verb_on(rng, path), "--threads", 1, stdin=TYPED)


# ---- adapters
OF_THE_USER = Path("../few.json")            # beside the folder of the adapter


def spoil_adapter(rng, folder):
    path = Path(folder, rng.choice(["adapter_config.json", "adapter_config.json",
                                    "adapter_model.safetensors", "run.bin"]))
    kind = rng.randrange(12)
    if kind == 0:
        path.unlink()
        rng.choice([lambda: None, lambda: path.mkdir(), lambda: path.symlink_to(OF_THE_USER),
                    lambda: path.symlink_to("nowhere"), lambda: os.mkfifo(path)])()
    elif kind == 1:
        path.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", DEEP, b"\xff\xfe", b"\0" * 99]))
    elif path.suffix == ".json":
        if kind == 2:
            return path.write_bytes(spoilt(rng, path.read_bytes()))
        path.write_text(json.dumps(often_changed(rng, json.loads(path.read_bytes()))),
                        encoding="utf-8")
    elif kind < 5:
        header, data = take_apart(path)
        meta = header["__metadata__"]
        key = rng.choice([key for key in ("state", "config", "lora") if key in meta])
        meta[key] = json.dumps(often_changed(rng, json.loads(meta[key])))
        checked(header, data, path)
    else:
        spoil_weights(rng, path)


def adapters(rng, spoil=True):
    lay("chat.bin", "int8.bin", "few.bin", "few.json", "questions.jsonl", "adapter/")
    if spoil:
        spoil_adapter(rng, Path("adapter"))
    base = rng.choice(["chat.bin", "chat.bin", "int8.bin", *(["few.bin"] if spoil else [])])
    used = "--adapter", rng.choice(["adapter", "adapter", *(["few.json", "."] if spoil else [])])
    verbs = [("generate", rng.choice(PROMPTS[:1] if not spoil else PROMPTS), base, *used,
              "--tokens", rng.choice([0, 1, 3]), "--weights", rng.choice(["f32", "bf16", "int8"])),
             ("chat", base, *used, "--tokens", 2),
             ("eval", base, *used, "--questions", "questions.jsonl", "--tokens", 2),
             ("export", base, "to", "--merge", used[1]),
             ("sft", "--resume", "--out", "adapter", "--steps", 2),
             ("sft", "--resume", "--out", "adapter", "--steps", 2)]
    before = Path("few.json").read_bytes()
    done = runs(*rng.choice(verbs), "--threads", 1, stdin=TYPED)
    if Path("few.json").read_bytes() != before or Path("nowhere").exists():
        raise Crashed("a file is written where a link of the adapter leads")
    return done


# ---- Hugging Face folders and GGUF files
def used(path, rng):
    """Is the imported model of use, too?"""
    return runs(*verb_on(rng, path, rng.choice(["info", "generate", "chat", "export", "sft"])),
                "--threads", 1, stdin=TYPED)


def imported(rng, source):
    """Was it refused?  If not, a verb reads what was made of it."""
    lay("examples.json")
    if not runs("import", source, "b.bin", "--threads", 1):
        return False
    used("b.bin", rng)
    return True


def spoil_weights(rng, path):
    header, data = take_apart(path)
    kind = rng.randrange(4)
    if kind == 0:
        return path.write_bytes(spoilt(rng, path.read_bytes(), rng.choice([None, 3000])))
    if kind == 1:
        data = other_weights(rng, header, data)
    else:
        header = often_changed(rng, header)
    if kind == 3 and isinstance(header, dict):           # as others write it, without a checksum
        header["__metadata__"] = {"format": "pt"}
        text = json.dumps(header).encode()
        return path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    checked(header, data, path)


def spoil_folder(rng, folder):
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    kind = rng.randrange(12)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        rng.choice([lambda: path.mkdir(), lambda: path.symlink_to("/dev/zero"),
                    lambda: path.symlink_to("nowhere"), lambda: os.mkfifo(path)])()
    elif kind == 2:
        path.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", DEEP, b"\xff\xfe", b"\0" * 99]))
    elif kind == 3:
        name = rng.choice(["x.safetensors", "mtp.safetensors",
                           "config.json", "chat_template.jinja"])
        if path.name != name:
            shutil.copy(path, folder / name)
    elif kind == 4:
        template = rng.choice([t for t in TEMPTING["template"] if "\ud800" not in t])
        (folder / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    elif path.suffix == ".safetensors":
        spoil_weights(rng, path)
    elif kind == 5:
        path.write_bytes(spoilt(rng, path.read_bytes()))
    else:
        tree = often_changed(rng, json.loads(path.read_bytes()))
        path.write_text(json.dumps(tree), encoding="utf-8")


def folders(rng, spoil=True):
    folder = Path(rng.choice(["hf", *(f"hf_{name}" for name in OTHERS)]))
    lay(f"{folder}/")
    if spoil:
        spoil_folder(rng, folder)
        if rng.random() < 0.3:
            with contextlib.suppress(Exception):         # what is spoilt already may have no parts
                spoil_folder(rng, folder)
    return imported(rng, folder)


def spoil_parts(rng, path):
    """A number or a text of a field or of a tensor's entry, where its reader finds it."""
    import gguf
    file = gguf.GGUFReader(path, "r+")
    entry = rng.choice([rng.choice(list(file.fields.values())), rng.choice(file.tensors).field])
    part = rng.choice(entry.parts)
    value = rng.choice([0, 1, 2, 4, 7, 8, 24, 26, 28, 30, 255, rng.randrange(40), 1 << 31, 1 << 40])
    low, high = (0, np.iinfo(part.dtype).max) if part.dtype.kind in "iu" else (0, 1e30)
    part[rng.randrange(len(part))] = min(max(value, low), high)
    file.data.flush()


def rewrite_gguf(rng, path, c):
    """The model c, a Checkpoint, with other metadata, as the package writes it."""
    meta = gguf_meta(c)
    for key in rng.sample(list(meta), rng.choice([1, 1, 2])):
        if isinstance(meta[key], list):
            some = list(meta[key])
            other = rng.choice(["", "x", "a b", "\u2028"]) if isinstance(some[0], str) else 7
            rng.choice([some.reverse, some.pop, lambda: some.append(some[0]),
                        lambda: some.insert(0, other)])()
            meta[key] = some
        elif isinstance(meta[key], str):
            meta[key] = rng.choice(["", "x", "llama", "gpt2", "smollm", "\x1b[31m", "{% if %}",
                                    CHATML, GEMMA, "{{ lipsum(n=10 ** 7) }}"])
        elif type(meta[key]) is float:
            meta[key] = rng.choice([0.0, 1.0, 1e12, 1e-30, float("nan"), float("inf")])
        elif type(meta[key]) is int:
            meta[key] = rng.choice([0, 1, 2, 3, 4, 8, 300, 1 << 17, (1 << 32) - 1])
        else:
            meta[key] = True
    path.unlink()
    with mock.patch("nanoeuler_parts.interchange.gguf.gguf_meta", lambda c: meta):
        write_gguf(path, c, rng.choice(["f32", "f16", "BF16"]))


def gguf_files(rng, spoil=True):
    name = rng.choice(["chat", *OTHERS])
    path = Path("model.gguf" if name == "chat" else f"{name}.gguf")
    lay(str(path), f"{name}.bin")
    kind = rng.randrange(6) if spoil else 9
    if kind < 2:
        path.write_bytes(spoilt(rng, path.read_bytes(), rng.choice([None, 60, 700, 9000])))
    elif kind < 4:
        for _ in range(rng.choice([1, 1, 2])):
            with contextlib.suppress(ValueError, IndexError):        # the first broke its reader
                spoil_parts(rng, path)
    elif kind < 6:
        rewrite_gguf(rng, path, ne.read_checkpoint(f"{name}.bin"))
    return imported(rng, path)


# ---- data
LETTERS = ["a", " ", "\n", "\r", "\r\n", "\t", "e\u0301", "\u00e9", "\U0001f600", "\u2028", "\x85",
           "\x1b[2J", "\x00", "\ufeff", "</s>", "'s", "9", "\u0663", "  ", "to be "]


def any_text(rng):
    """Bytes that a text may hold, or should not."""
    n = rng.choice([0, 1, 2, 30, 400, 3000])
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(n)
    if kind == 1:
        return bytes([rng.choice([0, 10, 32, 97, 128, 191, 255])]) * n
    if kind == 2:
        return spoilt(rng, good_files()["text.txt"])
    text = "".join(rng.choices(LETTERS, k=n))
    if kind == 3:
        return text.encode(rng.choice(["utf-16", "utf-8-sig", "utf-32"]))
    return text.replace("\0", "").encode()


def spoilt_list(rng, name):
    """A good list of entries, one a line or as JSON, changed."""
    raw = good_files()[name]
    lines = name.endswith("l")
    kind = rng.randrange(5)
    if kind == 0:
        return spoilt(rng, raw)
    if kind == 1:
        text = raw.decode()
        return rng.choice([text.encode("utf-16"), text.encode("utf-8-sig"), b"\xbb" + raw, DEEP,
                           raw.replace(b"\n", b"\r"), raw.replace(b'"', b"'"),
                           raw + b'{"a":' * 99_999,
                           raw.replace(b"1", b"1" * 5000), raw.replace(b"e", b"\\ud800"),
                           raw.replace(b"1", b"NaN"), raw[:1] * 3 + raw[1:], b"\n" * 999])
    entries = [json.loads(x) for x in raw.splitlines()] if lines else json.loads(raw)
    entries = often_changed(rng, entries)
    if rng.random() < 0.3 and isinstance(entries, list):
        for e in entries:                    # all alike
            if isinstance(e, dict) and e:
                e[rng.choice(sorted(map(str, e)))] = one_of(rng, NASTY)
    if lines and isinstance(entries, list):
        return as_lines(entries)
    return json.dumps(entries).encode()


def texts(rng):
    """A run that goes on with another text, or a new one."""
    Path("text.txt").write_bytes(any_text(rng))
    if rng.random() < 0.1:
        return runs("train", "--data", "text.txt", "--seq-len", 8, "--vocab-size", rng.choice(
            [257, 300]), "--n-mtp", 1, "--cuts", rng.choice([0, 0.5]), *SHORT, "--threads", 1)
    lay("adamw.bin")
    header, data = take_apart(Path("adamw.bin"))
    state = json.loads(header["__metadata__"]["state"])
    state["options"]["cuts"] = rng.choice([0.0, 0.3])
    header["__metadata__"]["state"] = json.dumps(state)
    put_together(Path("adamw.bin"), header, data)
    return runs("train", "--resume", "--out", "adamw.bin", "--steps", 4, "--threads", 1)


def examples(rng, spoil=True):
    name = rng.choice(["examples.json", "examples.jsonl", "forms.jsonl", "table.csv"])
    lay("adamw.bin", name)
    if spoil:
        of_table = partial(spoilt, raw=good_files()[name])
        Path(name).write_bytes(of_table(rng) if name == "table.csv" else spoilt_list(rng, name))
    fields = ["instruction=question", "output=answer"] if name == "table.csv" else []
    if rng.random() < 0.2:
        suffix = rng.choice(list(PACK))
        packed = PACK[suffix](Path(name).read_bytes())
        name += suffix
        Path(name).write_bytes(spoilt(rng, packed) if spoil and rng.random() < 0.5 else packed)
    if rng.random() < 0.3:
        return reads(read_file, name, ["output"], fields)
    flags = rng.choice([[], ["--truncate"], ["--truncate", "--row-len", rng.choice([20, 60])]])
    return runs("sft", "adamw.bin", "--data", name, *SHORT, "--cuts", rng.choice([0, 0, 0.3]),
                *flags, *(x for text in fields for x in ("--field", text)), "--threads", 1)


def preferences(rng, spoil=True):
    name = rng.choice(["pairs.json", "pairs.jsonl", "forms_of_pairs.jsonl"])
    lay("chat.bin", name)
    if spoil:
        Path(name).write_bytes(spoilt_list(rng, name))
    if rng.random() < 0.3:
        return reads(read_examples, name, "chosen", "rejected")
    return runs("dpo", "chat.bin", "--data", name, *SHORT, *rng.choice([[], ["--truncate"]]),
                "--threads", 1)


def logs(rng, spoil=True):
    """A picture of a log, in both ways, or a run that goes on with it."""
    lay("log.jsonl", "adamw.bin", "text.txt")
    if spoil:
        Path("log.jsonl").write_bytes(spoilt_list(rng, "log.jsonl"))
    if rng.random() < 0.4:
        Path("log.jsonl").rename("adamw.jsonl")
        return runs("train", "--resume", "--out", "adamw.bin", "--steps", 4, "--threads", 1)
    hidden = {"matplotlib.figure": None} if rng.random() < 0.7 else {}
    with mock.patch.dict(sys.modules, hidden):
        out = rng.choice(PICTURES) if spoil and rng.random() < 0.2 else "x.png"
        return runs("plot", "log.jsonl", "--out", out, "--threads", 1)


def tokenizers(rng, spoil=True):
    """A tokenizer of any of its two forms, and what it makes of a text and of ids."""
    lay("tokenizer.json", "gpt2/", "text.txt")
    name = rng.choice(["tokenizer.json", "gpt2"])
    path = Path(rng.choice(["tokenizer.json", "gpt2/vocab.json", "gpt2/merges.txt"]))
    if spoil:
        raw = path.read_bytes()
        if path.suffix == ".txt" or rng.random() < 0.3:
            path.write_bytes(spoilt(rng, raw))
        else:
            path.write_text(json.dumps(often_changed(rng, json.loads(raw))), encoding="utf-8")
    Path("ids").write_bytes(rng.choice([b"1 2 3", b"-1", b"9" * 30, b"9" * 5000, b"x", b"\xff", b"",
                                        b"1.5", b"262", "\u0663".encode()]) if spoil else b"1 2")
    verb, file = rng.choice([("encode", "text.txt"), ("decode", "ids")])
    return runs(verb, file, "--tokenizer", name, program="bpe.py")


def use_tokenizer(tokenizer):
    """What programs do with it, for a text of all its tokens"""
    ids = tokenizer.encode_whole("to be\u2581\u20ac e\u0301 </s><x> 12 or  not\n")
    tokenizer.decode(ids)
    tokenizer.encode_after(b"\xff\0 be")
    again = bpe.Tokenizer.from_json(tokenizer.to_json())
    if again.hash() != tokenizer.hash() or again.encode_whole("to be").tolist() != (
            tokenizer.encode_whole("to be").tolist()):
        raise Crashed("another tokenizer comes back from its own file")
    gguf_of_tokenizer(tokenizer)


def families(rng, spoil=True):
    """A tokenizer of another family than GPT-2's, from JSON or from a file of sentencepiece"""
    path = Path(rng.choice(["qwen.json", "gpt4o.json", "llama.json", "mistral.json",
                            "pieces.model"]))
    lay(str(path))
    raw = path.read_bytes()
    spoil = spoil and rng.random() < 0.8     # few changed files are accepted
    if spoil and (path.suffix == ".model" or rng.random() < 0.2):
        raw = spoilt(rng, raw)
    elif spoil:                              # half of the time the settings alone
        root = json.loads(raw)
        kept = {}
        if rng.random() < 0.5:
            kept = {key: root["model"].pop(key) for key in ("vocab", "merges")}
        root = often_changed(rng, root)
        if isinstance(root, dict) and isinstance(root.get("model"), dict):
            root["model"] |= kept
        raw = json.dumps(root).encode()
    with bpe.reading(path, "choose another"):
        if path.suffix == ".model":
            tokenizer = tokenizer_of_model(raw, ["<s>"])
        else:
            tokenizer = bpe.Tokenizer.from_json(raw.decode())
    return reads(use_tokenizer, tokenizer)


def typed_chats(rng, spoil=True):
    """What is typed into a chat, or comes through a pipe."""
    name = rng.choice(["chat.bin", "adamw.bin"])
    lay(name)
    lines = [rng.choice([hostile(rng, OF_TEMPLATES).encode("utf-8", "surrogatepass"), any_text(rng),
                         b"/reset", b"/help", b"/quit ", b"/", b"t" * 3000])
             for _ in range(rng.choice([1, 3, 6]))]
    stdin = b"\n".join(lines) if spoil else TYPED
    flags = "--tokens", rng.choice([0, 1, 5]), "--template", rng.choice(["", "chatml", "alpaca"])
    verb = rng.choice([("chat", name), ("generate", "-", name)])
    return runs(*verb, *flags, "--threads", 1, stdin=stdin)


def data_files(rng, spoil=True):
    kinds = [examples, preferences, logs, tokenizers, typed_chats] + ([texts] if spoil else [])
    return rng.choice(kinds)(rng, **({"spoil": spoil} if not spoil else {}))


# ---- corpora
CORPORA = ["text.gz", "text.xz", "text.bz2", "text.zst", "books.jsonl", "books.jsonl.gz",
           "books.ndjson.zst", "books.parquet", "books/a.txt", "books/b.jsonl", "books/sub/c.xz",
           "books/sub/d.parquet", "books/e.jsonl.bz2"]
IN_MEMORY, IN_CHUNKS = 1 << 20, 900          # values of corpora.LARGE: tokens in memory, in a file


def zstd(data):
    import pyarrow
    return pyarrow.compress(data, "zstd", asbytes=True)


PACK = {".gz": partial(gzip.compress, mtime=0), ".xz": lzma.compress, ".bz2": bz2.compress,
        ".zst": zstd}


def write_table(path, columns):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_corpus(path, documents):
    """In the format of its name."""
    kind, packing = of_corpora.kind_of(path.name)
    if kind == ".parquet":
        return write_table(path, {"text": documents, "id": list(range(len(documents)))})
    data = "".join(documents).encode()
    if kind:
        data = as_lines([{"text": x, "id": k} for k, x in enumerate(documents)])
    path.write_bytes(PACK.get(packing, bytes)(data))


def odd_columns(rng):
    """A table with a column `text` that is seldom one of texts."""
    values = rng.choice([["a"], [""], [None], [None, "b"], [1], [b"x", b"\xff"], [["a"]],
                         [{"text": "x"}], [True], [0.5], ["\0"], ["</s>"], [], ["x" * 9999]])
    names = rng.choice([["text"], ["text", "text2"], ["Text"], ["text.a"], [""], ["x"]])
    return dict.fromkeys(names, values)


def spoil_corpus(rng, path):
    kind, packing = of_corpora.kind_of(path.name)
    raw, pack = path.read_bytes(), PACK.get(packing, bytes)
    action = rng.randrange(8)
    if kind == ".parquet" and action < 4:
        return write_table(path, odd_columns(rng))
    if action < 3:
        return path.write_bytes(spoilt(rng, raw))
    if action == 3:                          # two files in one
        return path.write_bytes(raw + rng.choice([raw, pack(b""), b"\0" * 9, raw[:9]]))
    if action == 4:
        content = rng.choice([b"", DEEP, b"\0", b"\n \n", pack(b"x"), b"x" * 10 ** 6])
        return path.write_bytes(rng.choice([pack, bytes])(content))
    if kind:
        return path.write_bytes(pack(spoilt_list(rng, "books.jsonl")))
    path.write_bytes(pack(any_text(rng)))


def odd_file(rng, folder):
    """Something else in a folder, or a file of an odd name."""
    name = folder / rng.choice(["x", "x.jsonl", "\udcff.txt", "a\nb.gz", "\x1b[31m.txt", "*", "[a]",
                                " ", "-", "~", "a.parquet", "x" * 250, ".hidden", "y.zst"])
    rng.choice([lambda: name.symlink_to("/dev/zero"), lambda: name.symlink_to("."),
                lambda: name.symlink_to("nowhere"), lambda: name.symlink_to("a.txt"),
                lambda: os.mkfifo(name), name.mkdir, name.touch, lambda: name.symlink_to(name),
                lambda: name.write_bytes(any_text(rng)), lambda: name.write_bytes(b"\0 binary"),
                lambda: name.write_bytes(b"</s>")])()


def tokens_of(names, tokenizer, large, cuts):
    """[training part, tail] as lists; none if the names are rejected."""
    with mock.patch.object(of_corpora, "LARGE", large), contextlib.redirect_stdout(None), (
            contextlib.redirect_stderr(None)):
        corpus = of_corpora.Corpus(names, "text", "", 0.1)
        corpus.encode(tokenizer, tokenizer.specials["</s>"], cuts, 1)
    return [part.tolist() for part in (corpus.train, corpus.tail)]


def tokens_in_files(rng, names, spoil):
    """The tokens in a file, spoilt or interrupted, are those in memory, or are made again."""
    tokenizer, cuts = bpe.Tokenizer.load("tokenizer.json"), 0.0
    want = tokens_of(names, tokenizer, IN_MEMORY, cuts)

    def interrupt(*args):
        raise KeyboardInterrupt

    stop = rng.randrange(4) if spoil else 9
    with mock.patch.object(of_corpora, "CHUNK", 700):
        encode = [of_corpora.encode_cut] * stop + [interrupt]
        with mock.patch.object(of_corpora, "encode_cut", lambda *args: encode.pop(0)(*args)), (
                contextlib.suppress(KeyboardInterrupt)):
            tokens_of(names, tokenizer, IN_CHUNKS, cuts)
        if rng.random() < 0.5:
            tokens_of(names, tokenizer, IN_CHUNKS, cuts)
        for path in sorted(Path().glob("*.tokens*")) if spoil else ():
            raw = path.read_bytes()
            if path.suffix == ".tokens":     # has a checksum; unfinished tokens have none
                path.write_bytes(spoilt(rng, raw, rng.choice([None, 300])))
            else:
                odd = [DEEP, b"[]"] if path.suffix == ".json" else []
                path.write_bytes(rng.choice([raw, raw[:rng.randrange(len(raw) + 1)], raw + b"\0",
                                             raw.replace(b": ", b": 1e"), *odd]))
        try:
            found = tokens_of(names, tokenizer, IN_CHUNKS, cuts)
        except ne.UserError as e:
            raise Crashed(f"the tokens are not made again: {e}") from None
    if found != want:
        raise Crashed(f"the tokens in a file differ: {len(found[0])} and {len(found[1])}, expected "
                      f"{len(want[0])} and {len(want[1])}")
    return True


def corpora(rng, spoil=True):
    names = rng.choice([*([name] for name in CORPORA), ["books"], ["books"], ["books"],
                        ["books/**/*.jsonl"], ["books", "text.gz"], ["text.txt", "text.xz"]])
    lay("adamw.bin", "tokenizer.json", "text.txt", "books/", *names)
    if spoil and rng.random() < 0.9:
        for _ in range(rng.choice([1, 1, 2])):
            files = [path for name in names for path in ([Path(name)] if Path(name).is_file() else
                                                         sorted(Path("books").rglob("*.*")))]
            path = rng.choice(files)
            if path.is_file() and path.stat().st_size:
                spoil_corpus(rng, path)
        if rng.random() < 0.4:
            with contextlib.suppress(FileExistsError):
                odd_file(rng, Path(rng.choice(["books", "books/sub"])))
    kind = rng.randrange(4)
    if kind == 0 and (not spoil or names == ["books"]):
        return tokens_in_files(rng, names, spoil)
    if kind == 1:
        return runs("eval", "adamw.bin", "--data", *names, "--threads", 1)
    with mock.patch.object(of_corpora, "LARGE", rng.choice([IN_MEMORY, IN_CHUNKS])):
        return runs("train", "--data", *names, *SHORT, "--init", "adamw.bin", "--threads", 1,
                    *rng.choice([[], [], ["--newlines", "unix"], ["--cuts", 0.3]]))


# ---- questions
def questions_of(examples):
    """Of all kinds: open ones, with choices, with messages, with patterns."""
    asked = [e["instruction"] for e in examples]
    said = [e["output"] for e in examples]
    return [form for q, a in zip(asked[:4], said) for form in (
        {"prompt": q, "answer": a}, {"question": q, "answer": [a, "7"], "match": "contains"},
        {"question": q, "choices": ["1", "2", a + "0"], "answer": 2, "domain": "sums"},
        {"prompt": q, "choices": ["no", a], "answer": a, "id": 7},
        {"messages": [{"role": "user", "content": q}], "answer": "^[0-9]+$", "match": "regex"})]


def questions(rng, spoil=True):
    name = rng.choice(["adamw.bin", "chat.bin", "int8.bin", *(["few.bin", "none.bin"] * spoil)])
    lay(name, "questions.jsonl", "text.txt", "books/")
    if spoil:
        Path("questions.jsonl").write_bytes(spoilt_list(rng, "questions.jsonl"))
        Path("text.txt").write_bytes(any_text(rng))
    asked = ["--questions", "questions.jsonl", "--tokens", rng.choice([1, 3])]
    read = ["--data", rng.choice(["text.txt", "books"])]
    flags = ["--context", "--stride", "--batch", "--show-wrong", "--stop", "--n"]
    if spoil and rng.random() < 0.3:
        asked += [rng.choice(flags), rng.choice(["0", "1", "2", "7", "-1", "99999", "x"])]
    truncate = rng.choice([[], ["--truncate"]])
    return runs("eval", name, *rng.choice([asked, asked, read, asked + read]), *truncate, "--json",
                "report.json", "--threads", 1)


# ---- command lines
VERBS = ["train", "sft", "dpo", "chat", "generate", "lens", "eval", "plot", "list", "info",
         "quantize", "export", "import", "compile"]
NAMES = ["nanoeuler.bin", "nanoeuler_chat.bin", "nanoeuler.jsonl", "text.txt", "examples.json",
         "pairs.jsonl", "hf", "model.gguf", "empty", "folder", "noise", "no", "no/such/x.bin", ".",
         "..", "", " ", "a\nb", "a\x1b[31m.bin", "caf\u00e9", "\udcff.bin", "-", "--", "-x", "new",
         "x" * 300, "x/" * 3000, "/dev/null", "/dev/zero", "/dev/stdin", "$x$.jsonl", "_x.jsonl",
         "*", "~"]
VALUES = ["-1", "0", "1", "2", "7", "8", "64", "300", "1000", "131072", "1000000000", "0.5", "1e-9",
          "0.0001", "nan", "inf", "-inf", "1e309", "1e300", "9" * 30, "9" * 5000, "0x10", "1_0", "",
          " ", "x", "\uff11\uff12", "\udcff", "f32", "bf16", "int8", "q8_0", "adamw", "muon",
          "alpaca", "chatml", "small", "big", "1,5", "True", "--", "-5", "a\nb"]
PICTURES = ["x.png", "x.svg", "x.pdf", "x.pgf", "x.ps", "x.eps", "x.raw", "x.webp", "x", "x.",
            ".png", "x.nosuch", "folder", "no/x.png", "x\udcff.png", "x.PNG", "x.txt"]


@cache
def flags_of(verb):
    """The flags that its help names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        ne.main([verb, "--help"])
    return sorted({flag for flag in re.findall("--[a-z][a-z0-9-]+", out.getvalue())})


def misspelt(rng, word):
    """Cut short, with a letter more, or in capitals."""
    i = rng.randrange(len(word) + 1)
    return rng.choice([word[:i], word[:i] + "x" + word[i:], word.upper(), word + "=", word[i:]])


def command_line(rng):
    verb = rng.choice(VERBS)
    if rng.random() < 0.03:
        return [misspelt(rng, verb), *rng.choices(VALUES, k=2)]
    words = []
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        words.append([rng.choice(NAMES[:9] if rng.random() < 0.6 else NAMES)])
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        flag = rng.choice(flags_of(verb)) if rng.random() < 0.9 else "--" + rng.choice(VALUES)
        if rng.random() < 0.05:
            flag = misspelt(rng, flag)
        value = rng.choice(PICTURES) if (verb, flag) == ("plot", "--out") else rng.choice(
            NAMES if flag in ("--out", "--data", "--gguf") else VALUES)
        words.append(rng.choice([[flag, value], [f"{flag}={value}"], [flag]])
                     if flag not in ("--force", "--resume", "--help") else [flag])
    rng.shuffle(words)
    line = [verb, *(word for part in words for word in part)]
    if verb in ("chat", "generate") and not any(word.startswith("--to") for word in line):
        line[1:1] = ["--tokens", "2"]        # 200 take a second
    return [word for word in line if "\0" not in word]


def commands(rng, spoil=True):
    """With files in place that make sense of them.  Runs end where they would begin to learn."""
    lay("text.txt", "examples.json", "pairs.jsonl", "hf/", "model.gguf", "log.jsonl", "adamw.bin",
        "chat.bin")
    Path("adamw.bin").rename("nanoeuler.bin")
    Path("chat.bin").rename("nanoeuler_chat.bin")
    Path("log.jsonl").rename("nanoeuler.jsonl")
    for name in "$x$.jsonl", "_x.jsonl":
        shutil.copy("nanoeuler.jsonl", name)
    for folder in "folder", "data":
        os.mkdir(folder)
    for name, default in (("text.txt", "shakespeare.txt"), ("examples.json", "instructions.json"),
                          ("pairs.jsonl", "preferences_sample.jsonl")):
        shutil.copy(name, f"data/{default}")
    Path("empty").write_bytes(b"")
    Path("noise").write_bytes(random.Random(1).randbytes(999))
    line = command_line(rng) if spoil else [rng.choice(["info", "plot", "train", "sft"])]
    if line in (["train"], ["sft"]):
        line += ["--out", "new.bin"]
    with mock.patch.object(Run, "go", lambda run: None):
        return runs(*line, stdin=TYPED)


# ---- chat templates, and their twins
Twins = namedtuple("Twins", "real twin")         # Jinja texts
Talk = namedtuple("Talk", "names tokenizer real twin")   # real, twin: the State of each

PRIVATE = 0xE000
BY_ROLE = "\uf000"           # in its place templates put <| and |> around the role
DELETED = ["/think", "/no_think", "<image>", "@@", "</think>", "<think>"]
# what a template may do with what is said: each follows an expression in brackets
STEPS = [
    *(f".replace('{word}', '')" for word in DELETED), ".split('@@') | join", ".split('@@')[-1]",
    ".split('</think>')[-1]", ".split('</think>')[0]", ".split('\\n')[0]", ".split() | join(' ')",
    ".split() | join", ".strip()", ".lstrip('\\n')", ".rstrip()", ".strip('<')", " | trim",
    " | trim('>')", " | title", " | lower", " | upper", " | capitalize", ".swapcase()",
    ".casefold()", " | striptags", " | e", " | e | string", " | safe", " | forceescape",
    " | urlize", " | tojson", " | pprint", " | string", " | urlencode",
    ".encode('ascii', 'ignore').decode()", ".encode('ascii', 'replace').decode()",
    ".encode('ascii', 'xmlcharrefreplace').decode()",
    ".encode('ascii', 'backslashreplace').decode()",
    ".encode('utf-8', 'ignore').decode('unicode_escape', 'ignore')",
    ".encode('utf-16-le', 'surrogatepass').decode('utf-8', 'ignore')",
    ".encode('utf-8', 'surrogatepass').decode('latin-1')",
    ".encode('utf-8', 'ignore').decode('utf-7', 'ignore')",
    "[::-1]", "[1::3]", "[::2]", "[2:]", "[:-1]", "[:9]", " | truncate(9)",
    " | truncate(9, true, '')",
    " | wordwrap(4)", " | indent(2)", " | center(30)", " | reverse", " | list | join",
    " | list | unique | join", " | sort | join", " | batch(2) | map('join') | join('')",
    " | replace('{', '<') | replace('}', '>')", " | replace('x', '')", " | replace(' ', '')",
    ".replace('&lt;', '<').replace('&gt;', '>')", ".replace('(', '<|').replace(')', '|>')",
    ".replace('\\\\n', '\\n')", ".replace('\ud800', '')", ".expandtabs(1)", ".translate({120: ''})",
    f".replace('{BEFORE}', '').replace('{AFTER}', '')", ".partition('x')[2]",
    ".removeprefix('x').removesuffix('x')", ".replace(messages[-1].content, '')",
    ".splitlines() | join", ".format(m)", " | default('x', true)", ".zfill(9)", ".ljust(5, '<')"]
# They write blanks, or the beginning of a name, of their own: some tokenizers have tokens of those.
PADDING = {" | center(30)", " | indent(2)", " | wordwrap(4)", " | pprint", ".expandtabs(1)",
           ".ljust(5, '<')", ".split() | join(' ')", " | striptags", " | urlize"}
# what it may look for
LOOKS = ["'please' in m.content", "'please' not in m.content", "'</think>' in m.content",
         "'<|user|>' not in m.content", "m.content.startswith('/')", "m.content | length > 9",
         "m.content | length % 2", "m.content == m.content | trim", "m.content.isascii()",
         "m.content.islower()", "m.content.isprintable()", "m.content < 'n'", "loop.last",
         "m.content", "m.content == messages[0].content", "m.role == 'user'", "'x' in m.content",
         "'<' in m.content", "m.content.endswith('</s>')", "'\\n' in m.content",
         "m.content | select('equalto', 'x') | list"]
LABELS = ["", "", "user:", "A", "###", "'", '"']


def as_twins(template, names):
    """Of a template whose own special names stand as private characters."""
    real = template.replace(BY_ROLE, "<|{{ m.role }}|>")
    for k, name in enumerate(names):
        real = real.replace(chr(PRIVATE + k), name)
    of_role = {role: chr(PRIVATE + names.index(f"<|{role}|>")) for role in ROLES.values()
               if BY_ROLE in template}
    return Twins(real, template.replace(BY_ROLE, "{{ " + str(of_role) + "[m.role] }}"))


@cache
def known_twins(names):
    """Those of templates that models have.  Names that they look for stay what they are."""
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    own = re.compile(rf"(?<!split\(')({any_name})(?!' (?:not )?in )")
    return [Twins(template, own.sub(lambda name: chr(PRIVATE + names.index(name[0])), template))
            for template in TEMPLATES.values()]


def around(rng, names):
    """Two halves of a name, which what stands between them might complete."""
    name = rng.choice(names)
    i, j = sorted(rng.sample(range(1, len(name) + 1), 2))
    left, right = name[:i], name[j:]
    alone = any(other in left + right for other in names)        # a name where nothing is said
    return ("", "") if alone else (left, right)


def generated_twins(rng, names):
    """A loop over messages, with special names, labels and halves of names around what is said."""
    steps = STEPS
    if names is not OF_TEMPLATES:
        steps = [step for step in STEPS if step not in PADDING]

    def token():
        return "{{ '" + chr(PRIVATE + rng.randrange(len(names))) + "' }}"

    def words():
        expression = "m.content"
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            expression = f"({expression}{rng.choice(steps)})"
        return "{{ " + expression + " }}"

    def turn():
        left = right = ""
        if names is OF_TEMPLATES and rng.random() < 0.2:
            left, right = around(rng, names)
        said = rng.choice(LABELS) + left + words() + right
        if rng.random() < 0.15:
            said += words()
        if rng.random() < 0.15:
            said = "{% if " + rng.choice(LOOKS) + " %}" + token() + "{% endif %}" + said
        if rng.random() < 0.1:
            otherwise = "{% else %}" + words() + "{% endif %}"
            said = "{% if " + rng.choice(LOOKS) + " %}" + said + otherwise
        begin = token() if rng.random() < 0.7 else ""
        if names is OF_TEMPLATES and rng.random() < 0.1:
            begin = BY_ROLE
        end = rng.choice([token(), "{{ eos_token }}"]) if rng.random() < 0.7 else ""
        return begin + said + end

    body = turn()
    if rng.random() < 0.3:
        body = "{% if m.role == 'user' %}" + body + "{% else %}" + turn() + "{% endif %}"
    loop = "{% for m in messages %}" + body + "{% endfor %}"
    if rng.random() < 0.15:                  # of all that is rendered; in no name is such a word
        word = rng.choice(["/no_think", "<image>", "@@"])
        loop = "{% filter replace('" + word + "', '') %}" + loop + "{% endfilter %}"
    if rng.random() < 0.1:
        loop += "{{ messages | map(attribute='content') | join('" + rng.choice(["", "@@"]) + "') }}"
    head = rng.choice(["", "{{ bos_token }}", token()])
    return as_twins(head + loop + rng.choice(["", token(), "A"]), names)


@cache
def talks():
    """Tokenizers with the special names of many models, with odd ones, and with blanks."""
    found = []
    for names in (OF_TEMPLATES, OF_TEMPLATES, OF_TEMPLATES,
                  ("</s>", "\u2603", "<s", "<s>", "<s>>", "s>x"), ("</s>", "\n\n", " ", "\n</s>")):
        tokenizer = bpe.train(b"Hello to be or not to be " * 9, 300, names)
        bos = "<s>" if "<s>" in names else ""
        private = {name: chr(PRIVATE + k) for k, name in enumerate(names)} | {"": ""}
        found.append(Talk(names, tokenizer, ne.State(kind="chat", bos=bos, eos="</s>"),
                          ne.State(kind="chat", bos=private[bos], eos=private["</s>"])))
    return found


def disguises(rng, name):
    """A special name in a form of which some template might make the name again."""
    i = rng.randrange(len(name) + 1)
    inner = rng.choice([*DELETED, " ", "\n", "x", "\u200b", "\u00e9", "\0", BEFORE, AFTER])
    return [
        lambda: name, lambda: name, lambda: name[:i] + inner + name[i:], lambda: name[:i],
        lambda: name[i:], lambda: inner.join(name), lambda: name.upper(), lambda: name.lower(),
        lambda: name.swapcase(), lambda: name.title(), lambda: html.escape(name),
        lambda: html.escape(html.escape(name)), lambda: "".join(f"&#{ord(c)};" for c in name),
        lambda: "".join(f"\\x{ord(c):02x}" for c in name if ord(c) < 256),
        lambda: json.dumps(name)[1:-1], lambda: name[::-1], lambda: "".join(f" {c} " for c in name),
        lambda: "".join(c + "\u00e9" for c in name),
        lambda: name.encode("utf-16-be").decode("utf-16-le", "ignore"),
        lambda: (name + " " * (len(name.encode()) % 2)).encode().decode("utf-16-le", "ignore"),
        lambda: name.encode("utf-7").decode(), lambda: name.replace("<", "{").replace(">", "}"),
        lambda: name.replace("<|", "(").replace("|>", ")"), lambda: f"x{name}x",
        lambda: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in name),
        lambda: marked(name), lambda: BEFORE + name + AFTER, lambda: "+ADw-" + name[1:]]


TRIGGERS = ["please", "/think", "/no_think", "</think>", "<think>", "<tool_response>", "x", " ",
            "{{ eos_token }}", "{% endfor %}", "\n", "\n\n", "\t", "\u0130", "\u00df", "\ufb01",
            "'", '"', "\\", "<", ">", "|", "q", "a", "Hello", "\u2028", "\u00a0", "%3C", "\x1c",
            "\U0001f600"]


def hostile(rng, names):
    """What somebody says who wants to make a special token."""
    said = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8])):
        if rng.random() < 0.6:
            said.append(rng.choice(disguises(rng, rng.choice(names)))())
        else:
            said.append(rng.choice(TRIGGERS))
    return "".join(said)


TURNS = ["u", "u", "uau", "uau", "su", "suau", "uauau"]
ROLES = {"u": "user", "a": "assistant", "s": "system"}


def parts(ids, tokenizer):
    """Special ids with the bytes between them: [bytes, id, bytes, ..., id, bytes]"""
    special, found, ordinary = {*tokenizer.specials.values()}, [], []
    for k in [*ids, None]:
        if k is None or k in special:
            found.append(tokenizer.decode(ordinary))
            ordinary = []
            if k is not None:
                found.append(k)
        else:
            ordinary.append(k)
    return found


def parts_of_twin(template, messages, talk):
    """The same as the twin says it."""
    messages = [(role, unmarked(said)) for role, said in messages]
    pieces = re.split(f"([{chr(PRIVATE)}-{chr(PRIVATE + len(talk.names) - 1)}])",
                      render(template, messages, talk.twin))
    return [talk.tokenizer.specials[talk.names[ord(piece) - PRIVATE]] if i % 2 else
            bytes(bpe.as_array(piece)) for i, piece in enumerate(pieces)]


def templates(rng, spoil=True, of_template=None):
    """One conversation.  of_template: the generator that the template is made of"""
    of_template = of_template or rng
    talk = of_template.choice(talks())
    if not spoil or of_template.random() < 0.25 and talk.names is OF_TEMPLATES:
        talk = talks()[0]
        twins = of_template.choice(known_twins(talk.names))
    else:
        twins = generated_twins(of_template, talk.names)
    messages = [(ROLES[turn], hostile(rng, talk.names) if spoil else "Hello")
                for turn in rng.choice(TURNS)]
    sampled = {}
    if rng.random() < 0.1:                   # answers as the model said them, letter by letter
        sampled = {said: [k for c in said for k in talk.tokenizer.encode(c).tolist()]
                   for role, said in messages if role == "assistant"}
    ids = chat_ids(twins.real, messages, talk.real, talk.tokenizer, sampled)
    got, want = parts(ids, talk.tokenizer), parts_of_twin(twins.twin, messages, talk)
    if got != want:
        raise Forged(repr(twins.real), f"makes {got[:9]} of {messages}, expected {want[:9]}")
    return True


def rendering(seed):
    return partial(templates, random.Random(f"said {seed}"),
                   of_template=random.Random(f"template {seed // SAME_TEMPLATE}"))


# ---- all of them
CLASSES = {"checkpoints": checkpoints, "adapters": adapters, "folders": folders,
           "gguf": gguf_files, "data": data_files, "tokenizers": families, "corpora": corpora,
           "questions": questions, "commands": commands, "templates": templates}
Result = namedtuple("Result", "counts findings seconds")         # findings: {what: seeds}


def trial(name, seed):
    if name == "templates":
        return rendering(seed)
    return partial(CLASSES[name], random.Random(f"{name} {seed}"))


def attack(name, n, seed, limit=LIMIT, say=lambda text: None):
    """The Result of n inputs of a class."""
    counts, findings, began = Counter(), {}, time.perf_counter()
    for i in range(n):
        with empty_folder() if name != "templates" else contextlib.nullcontext():
            what, why = verdict(trial(name, seed + i), limit)
        counts[what] += 1
        if what not in ("accepted", "refused"):
            if what == "crashed":            # wherever these programs stand
                why = re.sub(r"(/[\w.+-]+)+/", "", why)
            kind = why.split("\n    makes")[0]           # of a forgery the template
            findings.setdefault(f"{what}: {kind}", []).append(seed + i)
            say(f"{name} --seed {seed + i}  {what}: {why}")
        if (i + 1) % (n // 4 or 1) == 0:
            say(f"{name}: {i + 1:,} of {n:,}, {time.perf_counter() - began:.0f} s")
    return Result(counts, findings, time.perf_counter() - began)


def go_if_short(go):
    """The method `go` of a run, which leaves out what would take long because a file says so."""
    def short(run):
        steps = (run.state.n_steps or 0) - run.state.step
        if run.B * run.T <= SHORT_STEP and steps <= 9:
            go(run)
    return short


@contextlib.contextmanager
def prepared():
    """Kernels are compiled, each warning is a line, and runs are short.  A run that holds no
    example out would read thousands of the default data for some that fit into its short rows."""
    threads = numba.get_num_threads()
    compile_kernels()
    compile_lora_kernels(decoding=True)
    with (mock.patch("nanoeuler_parts.kernels.fill_cache", lambda needed: None),
          mock.patch("nanoeuler_parts.tuning.sft.read_entries",
                     lambda path: (read_entries(path)[0][:50], None)),
          mock.patch.object(Run, "go", go_if_short(Run.go)), warnings.catch_warnings()):
        for category in (RuntimeWarning, UserWarning):   # not once a line of the program
            warnings.simplefilter("always", category)
        try:
            yield
        finally:
            numba.set_num_threads(threads)


def warm_up(names, n=40):
    """Good input of each kind, without a watch: what it needs is loaded, and most of it, but for
    verbs that do not fit a checkpoint and prompts without a token, is accepted."""
    for name in names:
        accepted = 0
        for k in range(n):
            with empty_folder():
                accepted += CLASSES[name](random.Random(k), spoil=False)
        assert accepted > n / 2, f"{accepted} of {n} good inputs of the class {name} are accepted"


def table(results, seed):
    """The lines of a report."""
    lines = [f"{'class':<12}" + "".join(f"{word:>10}" for word in ("tried", *VERDICTS, "seconds"))]
    for name, r in results.items():
        row = [r.counts.total(), *(r.counts[what] for what in VERDICTS), round(r.seconds)]
        lines.append(f"{name:<12}" + "".join(f"{n:>10,}" for n in row))
    lines.append(f"seeds from {seed} on")
    for name, r in results.items():
        for what, seeds in r.findings.items():
            more = f" and {len(seeds) - 8} more" if len(seeds) > 8 else ""
            lines.append(f"{name} --seed {', '.join(map(str, seeds[:8]))}{more}\n    {what}")
    return lines


def limit_memory():
    """Where the system tells how much there is: what is asked for beyond MEMORY is not given."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=CLASSES, default=list(CLASSES),
                        metavar="CLASS", help=", ".join(CLASSES))
    parser.add_argument("--n", type=int, default=2100, help="inputs of each class")
    parser.add_argument("--renderings", type=int, default=100_000, help="of chat templates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="file for the table")
    args = parser.parse_args(argv)
    results, out = {}, args.out and os.path.abspath(args.out)
    with prepared():
        warm_up(args.only)
        if argv is None:                     # a process of its own
            limit_memory()
        for name in args.only:
            n = args.renderings if name == "templates" else args.n
            results[name] = attack(name, n, args.seed, say=partial(print, flush=True))
    report = "\n".join(table(results, args.seed)) + "\n"
    print(f"\n{report}", end="")
    if out:
        Path(out).write_text(report, encoding="utf-8", errors="backslashreplace")
    return int(any(r.findings for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
