"""The bundled model, from texts to data/model.bin and its card, in stages.

    make model                                   all stages, on a GPU
    python bench/make_model.py all --gpu --limit 9
    python bench/make_model.py pretrain --gpu [--text FILE] --limit 9
    python bench/make_model.py sft|dpo|quantize|evaluate|card ...

    pretrain   base.bin: a tokenizer and a model of this text
    sft        examples.json, of everyday conversations, instructions and questions of skill, and
               chat.bin, which has learned them
    dpo        dpo.bin, which has learned to prefer
    quantize   model.bin, the same in int8
    evaluate   evaluation.json: what all of these can do
    card       MODEL.md, of what was measured

All of it is written into --folder.  The data are those of this repository: data/books.txt, which
`make data-books` builds, all instructions and pairs, and conversations by data/everyday.py.  A
stage is not run again once it is complete.  --limit MINUTES ends a command after that time: it
saves, and its exit code is 3.  The same command continues; `make model` repeats it until all is
done.
RECIPE has the flags of the verbs; --pretrain, --sft and --dpo add to them, and go before them.  To
ship what was made: cp FOLDER/model.bin FOLDER/MODEL.md data/
"""
import argparse
import contextlib
import importlib
import json
import lzma
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import nanoeuler as ne
from nanoeuler_parts.files.texts import read_text, split_text
from nanoeuler_parts.files.writing import replacing
from nanoeuler_parts.interchange.quantize import quantize as write_int8
from nanoeuler_parts.tuning.examples import (
    answered_in, asked_in, held_out, prompt_of, question_hash, read_entries, read_examples,
)
from nanoeuler_parts.tuning.formats import words_of
import pipeline
import refusals
from common import out_folder
from nanoeuler_parts.chat.templates import default_system
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.runs import evaluation
from nanoeuler_parts.tuning.rows import chatml_row, Examples

TEXT = ROOT / "data" / "books.txt"
INSTRUCTIONS = ROOT / "data" / "instruct_open.json.xz"
PAIRS = ROOT / "data" / "prefs_open.jsonl.xz"
EVERYDAY = ROOT / "data" / "everyday.py"     # which makes conversations
PROMPTS = ROOT / "bench" / "everyday_prompts.jsonl"      # and must not make these, nor those of
                                             # refusals.py
RECIPE = {
    "pretrain": ["--n-layer", "7", "--n-embd", "384", "--n-head", "6", "--n-kv-head", "2",
                 "--head-dim", "64", "--n-hidden", "1152", "--seq-len", "512",
                 "--vocab-size", "2048", "--n-mtp", "1", "--batch", "32768", "--steps", "24000",
                 "--holdout", "0.02", "--weight-decay", "0.3", "--cuts", "0.02"],
    "sft": ["--row-len", "256", "--batch", "16384", "--lr", "6e-4", "--epochs", "10",
            "--cuts", "0.1", "--rehearse", "0"],
    "dpo": ["--row-len", "256", "--batch", "4096", "--lr", "3e-5", "--nll", "5",
            "--epochs", "1", "--rehearse", "0"]}
EVERYDAY_COUNT = 34_000      # conversations: what people type first is the most important
MADE = 24_000                # questions of skill, of which as many are learned as may be
SKILL_SHARE = 0.25           # of the tokens that fine-tuning learns, at most
# of the questions that are made: what is hard to learn more often than what is easy
KINDS = ("sort",) * 6 + ("reverse",) * 3 + ("add",) * 4 + ("capitals",) * 3 + ("count",
                                                                            "first letter")
ALIKE = 0.01                 # int8 may cost so much of the bits a byte
TAIL = 400_000               # bytes of the held-out text on which rounding is measured
NOT_YET = 3                  # exit code
MEASURING = 120              # seconds: with less time left, the next command quantizes and measures


class Stage(NamedTuple):
    verb: str                                # of nanoeuler.py
    gpu_verb: str                            # of nanoeuler_cuda.py
    begins_with: str                         # of the folder
    out: str


STAGES = {"pretrain": Stage("train", "t", "", "base.bin"),
          "sft": Stage("sft", "s", "base.bin", "chat.bin"),
          "dpo": Stage("dpo", "d", "chat.bin", "dpo.bin")}

# What is known of data, by the name of the file or the SHA-256 of a text
MIX = "e19c407b20da175956a3dc856c0f4794a16e265d1de0eb50d45c9201cd1cc373"
WORDNET = ("WordNet 3.0, Copyright 2006 by Princeton University (its license is in "
           "data/README.md)")
KNOWN = {
    MIX: "205 MB of English prose. 65% books in the public domain, 12% ELTeC novels, 11% "
         "OpenStax textbooks (CC BY 3.0, OpenStax, Rice University). 6% messages of presidents of "
         "the United States, 3% the CIA World Factbook, 3% Shakespeare and Milton.",
    "books.txt": "200 MB of English prose, built by data/get_books.py: books in the public "
                 "domain, ELTeC novels, OpenStax textbooks (CC BY 3.0, OpenStax, Rice University), "
                 "messages of presidents of the United States, the CIA World Factbook. "
                 "data/books.tsv lists the documents.",
    "everyday.jsonl": "everyday conversations, generated by data/everyday.py (MIT)",
    "shakespeare.txt": "Shakespeare's plays and poems, in the public domain",
    "examples.json": "all examples of fine-tuning: conversations, instructions, questions of skill",
    "skill": "questions of skill, generated by bench/pipeline.py (MIT)"}
FROM_WORDNET = {"instructions.json", "instruct_open.json", "preferences_sample.jsonl",
                "prefs_open.jsonl"}
# Files of this repository, or made by it
OURS = {"books.txt", "shakespeare.txt", "everyday.jsonl", "examples.json", "instructions.json",
        "instruct_open.json.xz", "preferences_sample.jsonl", "prefs_open.jsonl.xz"}


def described(path, sha256):
    name = os.path.basename(path)
    if name.removesuffix(".xz") in FROM_WORDNET:
        return ("Definitions, synonyms and opposites from " + WORDNET + ". The CIA World Factbook "
                "and Shakespeare, both in the public domain. Questions of skill (MIT).")
    return KNOWN.get(sha256) or KNOWN.get(name) or "a file of the person who made this model"


# ---- the verbs, and the clock
def learn(name, args, data):
    """One of STAGES, from its beginning or from where it is; exits where the time is up."""
    stage = STAGES[name]
    out = args.folder / stage.out
    if pipeline.complete(out):
        print(f"{out} is complete", flush=True)
        return
    program, verb = ("nanoeuler_cuda.py", stage.gpu_verb) if args.gpu else ("nanoeuler.py",
                                                                           stage.verb)
    command = [sys.executable, str(ROOT / program), verb]
    if out.exists():
        command += ["--resume"]
    else:
        begins_with = [str(args.folder / stage.begins_with)] if stage.begins_with else []
        command += [*begins_with, "--data", str(data), "--seed", str(args.seed), *RECIPE[name],
                    *shlex.split(getattr(args, f"{name}_flags"))]
    command += ["--out", str(out)]
    print("$ " + shlex.join(command), flush=True)
    left = None if args.ends is None else max(1.0, args.ends - time.monotonic())
    code = pipeline.run_child(command, left)
    if not pipeline.complete(out):
        if code or not out.exists():
            print(f"{out} is not made: exit code {code}", flush=True)
        print(f"{name} is not done: the same command goes on", flush=True)
        sys.exit(NOT_YET if args.ends is not None and time.monotonic() >= args.ends else code or 1)


def unpacked(args):
    """The text to pretrain on; one that xz has packed is unpacked into the folder, once."""
    remedy = "build it with make data-books" if args.text == str(TEXT) else "name another --text"
    ne.need(os.path.exists(args.text), f"{args.text}: No such file; {remedy}")
    if not args.text.endswith(".xz"):
        return args.text
    path = args.folder / Path(args.text).stem
    if not path.exists():
        print(f"unpacking {args.text}", flush=True)
        with replacing(path, "free space") as temporary, lzma.open(args.text) as packed:
            with open(temporary, "wb") as f:
                shutil.copyfileobj(packed, f, 1 << 24)
    return str(path)


# ---- what fine-tuning learns
def everyday(args):
    """The file of conversations, made here unless one is named."""
    if args.everyday:
        return args.everyday
    path = args.folder / "everyday.jsonl"
    if not path.exists():
        subprocess.run([sys.executable, str(EVERYDAY), "--out", str(path), "--seed", str(args.seed),
                        "--count", str(EVERYDAY_COUNT), "--exclude", str(PROMPTS),
                        "--exclude", str(refusals.PROMPTS)], check=True)
    return path


def lines_of(path):
    """The objects of a JSON list, or of a file of one a line."""
    return [entry for _, entry in read_entries(path)[0]]


def learned_tokens(entry, tokenizer):
    """Of the answers of an example."""
    texts = [m["content"] for m in entry.get("messages", ()) if m["role"] == "assistant"]
    return sum(len(tokenizer.encode(text)) + 1 for text in texts or [entry["output"]])


def is_skill(entry):
    return "skill" in entry.get("source", "")


def numbers_of(entry):
    """The numbers that a question adds, the smaller first: however a sum is worded, it is the same
    one; None of a question of another kind"""
    if found := re.match(r"(\d+) plus (\d+) is ", entry.get("output", "")):
        return tuple(sorted(map(int, found.groups())))
    return None


def mix_examples(args, tokenizer):
    """Writes examples.json: conversations, instructions, and as many questions of skill, those of
    the files first, as SKILL_SHARE allows.  Returns what is in it, by source."""
    path = args.folder / "examples.json"
    talks = lines_of(everyday(args))
    given = lines_of(args.instructions)
    made = [{key: e[key] for key in ("instruction", "input", "output", "source")}
            for e in pipeline.questions(args.made, held=False, seed=args.seed + 2, kinds=KINDS)]
    asked = {numbers_of(e) for e in pipeline.unseen(args.unseen)} - {None}
    skill = [e for e in [*filter(is_skill, given), *made] if numbers_of(e) not in asked]
    random.Random(args.seed).shuffle(skill)
    chosen = [e for e in talks if is_skill(e)]
    others = [e for e in talks + given if not is_skill(e)]
    n_others = sum(learned_tokens(e, tokenizer) for e in others)
    most = n_others * SKILL_SHARE / (1 - SKILL_SHARE)
    n_skill = sum(learned_tokens(e, tokenizer) for e in chosen)
    for e in skill:
        n = learned_tokens(e, tokenizer)
        if n_skill + n <= most:
            n_skill += n
            chosen.append(e)
    path.write_text(json.dumps(others + chosen, ensure_ascii=False, indent=0), encoding="utf-8")
    return {"examples": len(others) + len(chosen), "of_skill": len(chosen),
            "skill_share_of_tokens": n_skill / max(1, n_skill + n_others)}


# ---- what the models can do
def rows_of(e, key, c):
    """An example as ids: [asked, answered, ...], in the template of this chat model."""
    asked, answer = asked_in(e), answered_in(e, key)
    if c.state.template:
        default = default_system(c.state.template, asked)
        return chatml_row([*default, *asked, *answer], len(default) + len(asked), c.tokenizer,
                             lambda text: c.tokenizer.encode(text.encode()))
    end = np.int32(c.tokenizer.specials[c.state.eos])
    return [c.tokenizer.encode(prompt_of(e)), np.append(c.tokenizer.encode(answer[0][1]), end)]


def batch_of(examples, key, c):
    """(tokens, targets, bytes of the answers) of the examples that fit into the context"""
    T, rows, size = c.cfg.seq_len, [], 0
    for e in examples:
        row = rows_of(e, key, c)
        if sum(map(len, row)) <= T + 1:
            rows.append(row)
            size += sum(len(x.encode()) for x in words_of(answered_in(e, key)))
    ne.need(rows, "no held-out example fits into the context")
    tokens, targets = Examples(rows, T, 1, 1).batch(slice(None))
    return tokens, targets[0], size


def tail_of(path, holdout, c):
    """(tokens, targets, bytes) of the beginning of the held-out part of a text"""
    _, val = split_text(memoryview(read_text(path)), holdout)
    part = bytes(val[:TAIL])
    ids = c.tokenizer.encode(part)
    T = c.cfg.seq_len
    tokens, targets = ne.windows(ids, range(0, max(1, len(ids) - 1), T), T, P=1)
    return tokens, targets[0], len(part)


def skill(speaker, asked):
    """{kind: how many answers are exactly the key}"""
    prompts = [asked_in(e)[0][1] for e in asked]
    longest = max(len(e["output"].encode()) for e in asked) + 1
    replies = speaker.generate(prompts, batch=pipeline.AT_ONCE, temperature=0.0, tokens=longest)
    right = [r.answer == e["output"] for r, e in zip(replies, asked)]
    kinds = list(pipeline.KINDS)             # question k is of kind k modulo their number
    return {kind: sum(right[k::len(kinds)]) for k, kind in enumerate(kinds)}


def conversations(speaker, prompts):
    """Each prompt's turns, answered one after the other, by the likeliest tokens."""
    found = []
    for p in prompts:
        speaker.forget()
        answers, ended = [], True
        for turn in p["turns"]:
            answers.append(speaker.say(turn))
            ended &= speaker.last.finish == "stop"
        found.append({"id": p["id"], "kind": p["kind"], "turns": p["turns"], "answers": answers,
                      "ended": ended})
    return found


def preferred(model, pairs, c):
    """How many of the pairs have the likelier answer chosen, and of how many."""
    nats = []
    for key in ("chosen", "rejected"):
        tokens, targets, _ = batch_of(pairs, key, c)
        nats.append(np.concatenate([model.losses(tokens[i:i + 16], targets[i:i + 16])
                                    for i in range(0, len(tokens), 16)]))
    return [int((nats[0] < nats[1]).sum()), len(nats[0])]


def short_enough(pairs, c):
    """The pairs of which both answers fit into the context."""
    return [e for e in pairs if all(sum(map(len, rows_of(e, key, c))) <= c.cfg.seq_len + 1
                                    for key in ("chosen", "rejected"))]


def data_row(path):
    digest = sha256_of(path)
    return {"file": os.path.basename(path), "bytes": os.path.getsize(path), "sha256": digest,
            "what": described(path, digest)}


def history(args):
    """What each stage was, of its checkpoint"""
    rows = []
    for name, stage in STAGES.items():
        s = ne.read_checkpoint(str(args.folder / stage.out), moments=False).state
        options = {key: value for key, value in s.options.items()
                   if key not in ("data", "eval_every", "save_every", "micro_batch")}
        rows.append({"stage": name, "steps": s.step, "tokens": s.tokens_seen, "seconds": s.elapsed,
                     "bits_per_byte": s.bits_per_byte, "options": options})
    return rows


def commit_of(args):
    if args.commit:
        return args.commit
    with contextlib.suppress(OSError):       # there may be no git
        git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
                             capture_output=True, encoding="utf-8")
        if git.stdout.strip():
            return git.stdout.strip()
    return "unknown"


def evaluate(args):
    """evaluation.json"""
    engine = importlib.import_module("nanoeuler_cuda") if args.gpu else ne
    whole, rounded = str(args.folder / "dpo.bin"), str(args.folder / "model.bin")
    c, small = ne.read_checkpoint(whole, moments=False), ne.read_checkpoint(rounded)
    ne.need(small.matrices == "int8", f"{rounded} is not int8")
    learned, _ = read_examples(args.folder / "examples.json", "output")
    # of copies one, and in one order
    held = list({question_hash(e): e for e in learned if held_out(e)}.values())
    pairs, _ = read_examples(args.pairs, "chosen", "rejected")
    pairs = short_enough([e for e in pairs if held_out(e)], c)
    asked, stages, text = pipeline.unseen(args.unseen), history(args), unpacked(args)
    found = {"commit": commit_of(args), "seed": args.seed, "kind": c.state.kind,
             "device": "", "history": stages, "config": ne.asdict(small.cfg),
             "parameters": ne.n_params(small.cfg), "sha256": sha256_of(rounded),
             "bytes": os.path.getsize(rounded),
             "data": [*map(data_row, (text, everyday(args), args.instructions, args.pairs,
                                      args.folder / "examples.json"))],
             "mixture": json.loads((args.folder / "mixture.json").read_text(encoding="utf-8")),
             "held_out_answers": len(held), "questions": len(asked)}
    holdout = stages[0]["options"]["holdout"]
    for name, x in (("float32", c), ("int8", small)):
        model = engine.Model(x.cfg, x.flat)
        found["device"] = args.trained_on or model.device()
        found[name] = {"answers": evaluation.evaluate(model, *batch_of(held, "output", x)),
                       "text": evaluation.evaluate(model, *tail_of(text, holdout, x)),
                       "prefers": preferred(model, pairs, x)}
    for name, path, weights in (("float32", whole, "f32"), ("int8", rounded, "int8")):
        found[name]["skill"] = skill(ne.load(path, weights=weights), asked)
        print(f"{name}: {found[name]}", flush=True)
    prompts = lines_of(PROMPTS)
    speaker = ne.load(rounded, temperature=0.0)
    found["everyday"] = conversations(speaker, prompts)
    found["refusals"] = refusals.summary(refusals.measure(speaker))
    (args.folder / "evaluation.json").write_text(json.dumps(found, indent=1, ensure_ascii=False),
                                                 encoding="utf-8")
    print(f"{args.folder / 'evaluation.json'} is written")


# ---- the card
def quoted(text):
    """Text as it stands, on one line of Markdown."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<") or "(nothing)"


def percent(x):
    return f"{100 * x:.2f}%"


def command_of(e):
    """The command that made the model of evaluation.json"""
    text, _, instructions, pairs, _ = names = [d["file"] for d in e["data"]]
    gpu = " --gpu" if "NVIDIA" in e["device"] else ""
    if gpu and {TEXT.name, INSTRUCTIONS.name, PAIRS.name} <= {*names}:
        return "make model"
    return (f"python bench/make_model.py all{gpu} --text {text} --instructions {instructions} "
            f"--pairs {pairs}")


def card_text(e, wrong=(), same_at=None):
    """MODEL.md, of what evaluation.json holds
    wrong      numbers of the conversations that somebody has read and found wrong
    same_at    commit of another run that gave the same model"""
    cfg, one, other = e["config"], e["float32"], e["int8"]
    heads = "one output head" if cfg["n_mtp"] == 1 else f"{cfg['n_mtp']} output heads"
    ended = sum(x["ended"] for x in e["everyday"])
    lines = [
        "# The bundled model", "",
        f"`model.bin` is a chat model of {e['parameters']:,} parameters in int8, "
        f"{e['bytes'] / 1e6:.1f} MB. `bench/make_model.py` trained it from random weights. "
        "`make chat` talks to it. To fine-tune it: `python nanoeuler.py sft bundled --data "
        "yours.json`. This learns at a low rate and rehearses examples of its own training data, "
        "so that it forgets less.", "",
        f"- **Shape**: {cfg['n_layer']} layers, width {cfg['n_embd']}, {cfg['n_head']}/"
        f"{cfg['n_kv_head']} heads of {cfg['head_dim']}, SwiGLU {cfg['n_hidden']}, {heads}, "
        f"vocabulary {cfg['vocab_size']:,}, context {cfg['seq_len']} tokens, "
        f"{'tied' if cfg['tie_embeddings'] else 'separate'} embeddings",
        f"- **File**: {e['bytes']:,} bytes, sha256 `{e['sha256']}`",
        f"- **Made by**: `{command_of(e)}`, at commit {e['commit']}, seed {e['seed']}, on "
        f"{e['device'].split(', ')[0]}",
        "- **License**: MIT, like the code; the licenses of its training data are listed below", "",
        "## Abilities and limits", "",
        "The model was taught to greet, to say what it is, and to answer short questions of a few "
        "kinds. It was also taught small tasks with words and numbers, and to begin a story. The "
        "tables and samples below show how well. Its limits:", "",
        "- It knows next to nothing. It learned to say so, but often invents an answer.",
        "- Facts, sums and advice may be wrong, in fluent sentences.",
        "- What it answers well, it has usually read in training. A right answer shows that it "
        "remembers, not that it understands.",
        "- It reads and writes English only.",
        "- Nothing was done to prevent harmful answers.",
        "- Its purpose is to show how such a model works. Do not rely on it for anything else.", "",
        "## Measurements", "",
        "| | float32 | int8, as shipped |", "|---|---:|---:|",
        f"| held-out answers, bits per byte ({e['held_out_answers']:,} answers) | "
        f"{one['answers']:.4f} | {other['answers']:.4f} |",
        f"| held-out text, bits per byte | {one['text']:.4f} | {other['text']:.4f} |",
        f"| held-out pairs: prefers the chosen answer | {one['prefers'][0]} of "
        f"{one['prefers'][1]} | {other['prefers'][0]} of {other['prefers'][1]} |"]
    for kind in one["skill"]:
        lines.append(f"| unseen questions of skill, exact: {kind} | {one['skill'][kind]} | "
                     f"{other['skill'][kind]} |")
    said = e["refusals"]
    lines += [
        f"| ... together, of {e['questions']} | {sum(one['skill'].values())} | "
        f"{sum(other['skill'].values())} |", "",
        f"The model declines to answer {said['refused']} of {said['of']} questions about things "
        f"that do not exist, and {said['answerable_refused']} of {said['answerable']} answerable "
        "ones (`python bench/refusals.py`).", "",
        f"Rounding to int8 changes the bits per byte of answers by "
        f"{percent(other['answers'] / one['answers'] - 1)}, and of text by "
        f"{percent(other['text'] / one['text'] - 1)}. In {ended} of {len(e['everyday'])} "
        "conversations below, every answer ends by itself.", "",
        f"Chat tuning costs text. After pretraining, the whole held-out text had "
        f"{e['history'][0]['bits_per_byte']:.2f} bits per byte. The finished model has "
        f"{other['text']:.2f} on at most the first {TAIL:,} bytes of it. It was tuned on short "
        "answers and predicts books less well.", "",
        "## Training", "",
        "| stage | steps | tokens | minutes | held out, bits per byte | settings |",
        "|---|---:|---:|---:|---:|---|"]
    for h in e["history"]:
        unused = "minutes" if h["options"].get("steps") else ""
        settings = ", ".join(f"{key} {value}" for key, value in h["options"].items()
                             if value not in (0, 0.0, "") and key != unused
                             and (key != "lora_targets" or h["options"].get("lora")))
        lines.append(f"| {h['stage']} | {h['steps']:,} | {h['tokens']:,} | {h['seconds'] / 60:.1f} "
                     f"| {h['bits_per_byte']:.4f} | {settings} |")
    lines += ["", "The column \"held out\" is the validation at the end of each stage:", "",
              "- pretrain: held-out text", "- sft: all held-out examples, repeated ones included",
              "- dpo: the chosen answers of held-out pairs", "",
              "The measurements above are of the finished model, and count each held-out question "
              "once."]
    mixture = e["mixture"]
    lines += ["", f"Fine-tuning used {mixture['examples']:,} examples. {mixture['of_skill']:,} "
              f"of them are questions of skill, with "
              f"{percent(mixture['skill_share_of_tokens'])} of the trained tokens.", "",
              "## Training data", "", "| file | bytes | sha256 | contents and license |",
              "|---|---:|---|---|"]
    lines += [f"| `{d['file']}` | {d['bytes']:,} | `{d['sha256'][:16]}` | {d['what']} |"
              for d in e["data"]]
    if missing := [f"`{d['file']}`" for d in e["data"] if d["file"] not in OURS]:
        lines += ["", f"**You cannot rebuild this file.** {', '.join(missing)}: not distributed, "
                  "and no script of this repository makes them. `make model` makes another model "
                  "in the same way, from the data of this repository."]
    else:
        minutes = sum(h["seconds"] for h in e["history"]) / 60
        gpu = " on one GPU" if "NVIDIA" in e["device"] else ""
        again = (f"Two runs on {e['device'].split(', ')[0]}s, at commits {same_at} and "
                 f"{e['commit']}, gave the same parameters, bit by bit. ") if same_at else ""
        lines += ["", f"**Rebuild it** with `make data-books` and `make model`, at commit "
                  f"{e['commit']}. Training takes {minutes:.0f} minutes{gpu}. {again}"
                  "`python bench/make_model.py all --text YOURS` makes another model in the same "
                  "way, from a text of yours."]
    lines += ["", "## Samples, not selected", "",
              f"The {len(e['everyday'])} conversations of `bench/everyday_prompts.jsonl`, with "
              "greedy answers. The prompts were written before the first training example. Their "
              "questions of more than two words were left out of the training data, and shorter "
              "ones, such as *hi*, occur in both. Recipes were compared on these prompts.", ""]
    if wrong:
        lines += [f"{len(e['everyday']) - len(wrong)} of these {len(e['everyday'])} conversations "
                  "are right, by our own reading. The others are marked as wrong: at least one "
                  "answer is false, senseless or does not fit the question.", ""]
    for x in e["everyday"]:
        lines += ["", f"{x['id']}. *{x['kind']}*" + (", **wrong**" if x["id"] in wrong else "")]
        for turn, answer in zip(x["turns"], x["answers"]):
            lines += [f"   - **{quoted(turn)}**", f"   - {quoted(answer)}"]
        if not x["ended"]:
            lines.append("   - (it did not end by itself)")
    return "\n".join(lines) + "\n"


# ---- the stages
def pretrain(args):
    learn("pretrain", args, unpacked(args))


def sft(args):
    base = args.folder / STAGES["pretrain"].out
    ne.need(pipeline.complete(base), f"{base} is not complete; run pretrain first")
    if not (args.folder / STAGES["sft"].out).exists():
        mixture = mix_examples(args, ne.read_checkpoint(str(base), moments=False).tokenizer)
        (args.folder / "mixture.json").write_text(json.dumps(mixture), encoding="utf-8")
        print(f"examples.json: {mixture}", flush=True)
    learn("sft", args, args.folder / "examples.json")


def dpo(args):
    chat = args.folder / STAGES["sft"].out
    ne.need(pipeline.complete(chat), f"{chat} is not complete; run sft first")
    learn("dpo", args, args.pairs)


def quantize(args):
    made = args.folder / STAGES["dpo"].out
    ne.need(pipeline.complete(made), f"{made} is not complete; run dpo first")
    need_time(args)
    write_int8(str(made), str(args.folder / "model.bin"), force=True)


def need_time(args):
    """Ends a command whose time does not suffice to quantize and to measure.  A command that has
    not trained anything has all of its time."""
    left = None if args.ends is None else args.ends - time.monotonic()
    if left is not None and left < min(MEASURING, 60 * args.limit / 2):
        print("all models are trained: the same command measures", flush=True)
        sys.exit(NOT_YET)


def card(args):
    found = json.loads((args.folder / "evaluation.json").read_text(encoding="utf-8"))
    ne.need(found["sha256"] == sha256_of(args.folder / "model.bin"),
            f"{args.folder / 'evaluation.json'} is of another model.bin; run evaluate first")
    (args.folder / "MODEL.md").write_text(card_text(found, args.wrong, args.same_at),
                                           encoding="utf-8")
    worse = found["int8"]["answers"] / found["float32"]["answers"] - 1
    print(f"{args.folder / 'MODEL.md'} is written; int8 costs {percent(worse)}"
          f"{'' if worse <= ALIKE else ', MORE than it may'}.  To ship both:\n    "
          f"cp {shlex.quote(str(args.folder / 'model.bin'))} "
          f"{shlex.quote(str(args.folder / 'MODEL.md'))} data/")


VERBS = {"pretrain": pretrain, "sft": sft, "dpo": dpo, "quantize": quantize, "evaluate": evaluate,
         "card": card}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*VERBS, "all"])
    parser.add_argument("--folder", type=Path, help="for all that is made (bench/out/model)")
    parser.add_argument("--gpu", action="store_true", help="with nanoeuler_cuda.py")
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="of this command's training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", default=str(TEXT), help="to pretrain on; may be packed by xz "
                        "(default: data/books.txt)")
    parser.add_argument("--everyday", help="a file of conversations (default: it is made)")
    parser.add_argument("--instructions", default=str(INSTRUCTIONS),
                        help="default: data/instruct_open.json.xz")
    parser.add_argument("--pairs", default=str(PAIRS), help="default: data/prefs_open.jsonl.xz")
    parser.add_argument("--made", type=int, default=MADE, help="questions of skill to choose from")
    parser.add_argument("--unseen", type=int, default=600, help="questions of skill to be asked")
    parser.add_argument("--commit", help="of the code, where git does not know")
    parser.add_argument("--wrong", type=int, nargs="+", default=(), metavar="NUMBER",
                        help="conversations to mark as wrong in the card, once you have read them")
    parser.add_argument("--same-at", metavar="COMMIT", help="of another run that gave the same "
                        "parameters, for the card")
    parser.add_argument("--trained-on", metavar="DEVICE", help="if it is not this one")
    for name in STAGES:
        parser.add_argument(f"--{name}", dest=f"{name}_flags", default="", metavar="FLAGS",
                            help=f"of {STAGES[name].verb}, before those of RECIPE")
    args = parser.parse_args(argv)
    args.folder = args.folder or out_folder() / "model"
    args.ends = None if args.limit is None else time.monotonic() + 60 * args.limit
    return args


def main(argv=None):
    args = parse(argv)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in VERBS if args.stage == "all" else [args.stage]:
            print(f"\n# {name}", flush=True)
            VERBS[name](args)
    except (ne.UserError, OSError) as e:
        sys.exit(f"make_model: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on")


if __name__ == "__main__":
    main()
