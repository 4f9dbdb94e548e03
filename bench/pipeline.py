"""The whole life of a model: tokenizer, pretraining, fine-tuning, preferences, and a report.

    python bench/pipeline.py [--gpu] [--minutes M] [--instructions FILE] [--pairs FILE] [--unseen N]

Runs the three verbs of the CPU program on the data that ship (7 minutes on two cores), or those of
the GPU program, base preset, on data/pretrain.txt; --minutes is the length of pretraining.  After
each stage it asks held-out questions, always with the template and the likeliest answer, and writes
what came out to REPORT.  What is complete is not run again and what was interrupted is gone on
with; --force begins anew.

    responses   bits per byte of the held-out responses, given their questions
    exact       held-out questions of skill (sort, count, add) answered as the key does
    prefers     held-out pairs with log pi(chosen) > log pi(rejected), summed over the response

The files hold few questions of skill: --unseen N makes N more after their pattern, none of them in
the files, all held out by the same hash, each with a wrong answer for a pair.
"""
import argparse
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne

REPORT = "pipeline.md"                       # git ignores it, and the checkpoints
KINDS = {"sort": "Sort these words", "reverse": "Reverse the order", "add": r"Add \d|What is \d",
         "count": "Count the words|How many words", "capitals": "Write the word",
         "first letter": "What is the first letter"}
# title, verbs of the CPU and of the GPU program, file, flags of the one and of the other
STAGES = [("pretrained", "train", "t", "pipeline.bin", ["--minutes", "3"],
           ["--cuts", "0.02"]),
          ("fine-tuned", "sft", "s", "pipeline_chat.bin", ["--seq-len", "256", "--epochs", "2"],
           ["--seq-len", "256", "--epochs", "6", "--batch", "16384", "--lr", "2e-3",
           "--mtp-weight", "0", "--cuts", "0.1"]),
          ("preferences", "dpo", "d", "pipeline_dpo.bin", ["--nll", "1"],
           ["--batch", "4096", "--lr", "2.4e-4", "--nll", "5", "--epochs", "2"])]


def complete(path):
    if not os.path.exists(path):
        return False
    s = ne.read_checkpoint(path).state
    return 0 < s.n_steps <= s.step


def run_stage(stage, before, args):
    """One verb as a user types it.  Seconds it took, in this and in earlier sittings."""
    _, verb, gpu_verb, out, *flags = stage
    data = {"sft": args.instructions, "dpo": args.pairs}.get(verb)
    command = [sys.executable, str(ROOT / ("nanoeuler_cuda.py" if args.gpu else "nanoeuler.py")),
               gpu_verb if args.gpu else verb]
    if os.path.exists(out) and not args.force:
        flags = ["--resume"]
    else:
        for _, _, _, later, *_ in STAGES[STAGES.index(stage) + 1:]:      # it came from another
            Path(later).unlink(missing_ok=True)
        flags = ([before] if before else []) + flags[args.gpu] + ["--force"]
        if data:
            flags += ["--data", data]
        elif args.minutes:
            flags += ["--minutes", str(args.minutes)]
    command += flags + ["--out", out]
    print("\n$ " + " ".join(command), flush=True)
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())      # as Ctrl-C: the stage saves
    try:
        child.wait()
    except KeyboardInterrupt:                # which the stage got as well: it saves
        child.wait()
    if child.returncode or not complete(out):
        sys.exit(f"{out} is not complete; the same command goes on, without --force")
    made = ne.read_checkpoint(out).state
    if data and made.options["data"] != data:
        sys.exit(f"{out} was made of {made.options['data']}, not of {data}; --force begins anew")
    return made.elapsed


def summed(model, tokenizer, e, key):
    """-log pi of the response to an example, nats; None if it does not fit."""
    prompt, T = tokenizer.encode(ne.prompt_of(e)), model.cfg.seq_len
    response = np.append(tokenizer.encode(e[key]), np.int32(tokenizer.specials["</s>"]))
    if len(prompt) + len(response) - 1 > T:
        return None
    tokens, targets = ne.Examples([(prompt, response)], T, model.cfg.n_mtp, 1).batch([0])
    return np.sum(model.losses(tokens, targets[0]))


def unseen(n):
    """n held-out questions of skill, as many of each kind, after those of the instruction file."""
    shipped, _ = ne.read_examples(ROOT / ne.SftOptions.data, "output")
    seen = {(e["instruction"], e["input"]) for e in shipped}
    lists = [e["input"].split(", ") for e in shipped if e["source"] == "skill" and e["input"]]
    common = sorted({word for words in lists for word in words})
    # one word in 50 is held out for a question about it: these need more of them
    known = sorted({w for e in shipped for w in re.findall(r"\b[a-z]{4,10}\b", e["output"])})
    rng, out = random.Random(2), []          # on those of 1 the flags of STAGES were chosen
    while len(out) < n:
        kind, x, y = list(KINDS)[len(out) % len(KINDS)], rng.randint(2, 60), rng.randint(2, 60)
        words = rng.sample(common, rng.randint(3, {"sort": 6, "count": 7}.get(kind, 5)))
        word = rng.choice(known)
        k = len(words)
        instruction, chosen, rejected = {
            "sort": ("Sort these words in alphabetical order.", ", ".join(sorted(words)),
                     ", ".join(sorted(words)[::-1])),
            "reverse": ("Reverse the order of this list.", ", ".join(words[::-1]),
                        ", ".join(words)),
            "add": (rng.choice([f"Add {x} and {y}.", f"What is {x} plus {y}?"]),
                    f"{x} plus {y} is {x + y}.",
                    f"{x} plus {y} is {x + y + rng.choice([-10, -2, -1, 1, 2, 10])}."),
            "count": (rng.choice(["Count the words in the list.",
                                  "How many words are in this list?"]),
                      f"There are {k} words in the list.",
                      f"There are {k + rng.choice([-1, 1, 2])} words in the list."),
            "capitals": (f'Write the word "{word}" in capital letters.', word.upper(), word),
            "first letter": (f'What is the first letter of "{word}"?',
                             f'The first letter of "{word}" is "{word[0]}".',
                             f'The first letter of "{word}" is "{word[-1]}".')}[kind]
        e = dict(instruction=instruction, input=", ".join(words) if kind in (
            "sort", "reverse", "count") else "", output=chosen, chosen=chosen, rejected=rejected,
            source="skill")
        question = instruction, e["input"]
        if ne.held_out(e) and chosen != rejected and question not in seen:
            seen.add(question)
            out.append(e)
    return out


def answer(decoder, tokenizer, e, n=100):
    prompt = tokenizer.encode(ne.prompt_of(e)).tolist()
    decoder.tokens = os.path.commonprefix([decoder.tokens, prompt[:-1]])         # of the template
    ids = ne.generate(decoder, prompt[len(decoder.tokens):], n, None, ne.Sampling(temperature=0.0),
                      tokenizer.specials["</s>"])
    return tokenizer.decode(list(ids)).decode("utf-8", "replace")


def exact(decoder, tokenizer, examples):
    """Is the likeliest reply the key, however it is spelled?  A token has a byte or more."""
    return [answer(decoder, tokenizer, e, len(e["output"].encode()) + 1) == e["output"]
            for e in examples]


def prefers(model, tokenizer, pairs):
    """How many of the pairs that fit have the likelier answer chosen."""
    nats = [[summed(model, tokenizer, e, key) for key in ("rejected", "chosen")] for e in pairs]
    fit = [r > c for r, c in nats if r is not None and c is not None]
    return f"{sum(fit)} of {len(fit)}"


def flags(c, run, start):
    """What a stage was started with, where it differs from the defaults and the Config it had."""
    default = asdict(run.Options()) | asdict(start)
    given = c.state.options | {f.name: getattr(c.cfg, f.name) for f in ne.SHAPE}
    return " ".join([run.verb, *(f"--{name.replace('_', '-')} {value}" for name, value in
                                 given.items() if value != default.get(name))])


def measure(path, engine, run, start, examples, pairs, more):
    """Config and flags of a stage, a row of each table, and the answers to five questions."""
    c = ne.read_checkpoint(path)
    # every stage at the longest context: no weight depends on it
    model = engine.Model(ne.replace(c.cfg, seq_len=max(256, c.cfg.seq_len)), c.flat)
    decoder = model.decoder()
    nats = [(summed(model, c.tokenizer, e, "output"), len(e["output"].encode())) for e in examples]
    fit = [(x, n) for x, n in nats if x is not None]
    skill = exact(decoder, c.tokenizer, [e for e in examples if e.get("source") == "skill"])
    row = (f"{sum(x for x, _ in fit) / np.log(2) / sum(n for _, n in fit):.3f}",
           f"{sum(skill)} of {len(skill)}", prefers(model, c.tokenizer, pairs))
    kinds = [exact(decoder, c.tokenizer, more[k::len(KINDS)]) for k in range(len(KINDS))]
    unseen_row = (*(f"{sum(k)} of {len(k)}" for k in (*kinds, sum(kinds, []))),
                  prefers(model, c.tokenizer, more)) if more else ()
    questions = [examples[i] for i in np.linspace(0, len(examples) - 1, 5).astype(int)]
    return c.cfg, flags(c, run, start), row, unseen_row, [
        (e, answer(decoder, c.tokenizer, e)) for e in questions]


def table(head, rows):
    return ["", "| after | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head),
            *(f"| {title} | " + " | ".join(row) + " |" for (title, *_), row in zip(STAGES, rows))]


def report(rows, out, gpu):
    """The Markdown text: tables of the stages, then questions with one answer a stage."""
    c, text = ne.read_checkpoint(out), ne.read_checkpoint(STAGES[0][3]).state
    dpo = [r for r in ne.read_log(os.path.splitext(out)[0] + ".jsonl") if "val_loss" in r][-1]
    seconds, started, rows, more, answers = zip(*rows)
    program = "nanoeuler_cuda.py" if gpu else "nanoeuler.py"
    lines = [f"# {ne.n_params(c.cfg):,} parameters, from bytes to answers", "",
             f"{sum(seconds) / 60:.0f} minutes of training; tokenizer of {c.cfg.vocab_size:,} "
             f"tokens.  Text: {text.options['data']}, {text.bits_per_byte:.4f} bits per byte held "
             f"out.", "",
             *(f"    {program} {verb_and_flags}" for verb_and_flags in started), *table(
                 ["minutes", "responses, bits/byte", "exact (skill)", "prefers the chosen"],
                 [(f"{s / 60:.1f}", *row) for s, row in zip(seconds, rows)])]
    if more[0]:
        lines += ["", "Questions of skill that are in no file, made after the pattern of those "
                  "that are; how many are answered as the key does:",
                  *table([*KINDS, "together", "prefers the chosen"], more)]
    lines += ["", f"Held-out pairs after DPO: loss {dpo['val_loss']:.3f}, reward accuracy "
              f"{dpo['val_accuracy']:.0%}, margin {dpo['val_margin']:.3f}, KL "
              f"{dpo['val_kl']:.2f} nats a response.", "", "## Questions nobody trained on"]
    for i, (e, _) in enumerate(answers[0]):
        lines += ["", "**" + " ".join(f"{e['instruction']} {e['input']}".split()) + "**", "",
                  f"- key: {e['output']}"]
        lines += [f"- {title}: {' '.join(said[i][1].split())}"
                  for (title, *_), said in zip(STAGES, answers)]
    return "\n".join(lines) + "\n"


def main():
    try:
        pipeline()
    except ne.UserError as e:
        sys.exit(f"pipeline: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on, without --force")


def pipeline():
    parser = argparse.ArgumentParser(description="pretraining, SFT, DPO, report")
    parser.add_argument("--gpu", action="store_true", help="with nanoeuler_cuda.py")
    parser.add_argument("--minutes", type=float, help="of pretraining")
    parser.add_argument("--instructions", default="data/instructions.json", metavar="FILE")
    parser.add_argument("--pairs", default="data/preferences_sample.jsonl", metavar="FILE")
    parser.add_argument("--unseen", type=int, default=0, metavar="N", help="questions of skill")
    parser.add_argument("--force", action="store_true", help="begin anew")
    args = parser.parse_args()
    engine = importlib.import_module("nanoeuler_cuda") if args.gpu else ne
    if args.gpu:
        engine.open_device()
    held = []
    for path, *keys in ((args.instructions, "output"), (args.pairs, "chosen", "rejected")):
        held.append([e for e in ne.read_examples(path, *keys)[0] if ne.held_out(e)])
        ne.need(held[-1], f"{path}: no example of it is held out; use more")
    rows, before, began, more = [], None, time.perf_counter(), unseen(args.unseen)
    cfg = ne.PRESETS[engine.Run.preset]
    for stage, run in zip(STAGES, (engine.Run, engine.SftRun, engine.DpoRun)):
        before, seconds = stage[3], run_stage(stage, before, args)
        cfg, *measured = measure(before, engine, run, cfg, *held, more)
        rows.append((seconds, *measured))
    text = report(rows, before, args.gpu)
    Path(REPORT).write_text(text, encoding="utf-8")
    print(f"\n{text}\n{REPORT} holds this; {(time.perf_counter() - began) / 60:.0f} minutes.  "
          f"Talk to it with:\n    python nanoeuler.py chat {before}")


if __name__ == "__main__":
    main()
