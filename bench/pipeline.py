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
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.flags import SHAPE
from nanoeuler_parts.runs.run import Run
from nanoeuler_parts.tools import on_gpu
from nanoeuler_parts.tuning.dpo import DpoRun
from nanoeuler_parts.tuning.examples import held_out, prompt_of, read_examples
from nanoeuler_parts.tuning.rows import Examples
from nanoeuler_parts.tuning.sft import SftOptions, SftRun

REPORT = "pipeline.md"                       # git ignores it, and the checkpoints
KINDS = {"sort": "Sort these words", "reverse": "Reverse the order", "add": r"Add \d|What is \d",
         "count": "Count the words|How many words", "capitals": "Write the word",
         "first letter": "What is the first letter"}
MAX_TRIES = 100_000                          # for one more question of a kind
AT_ONCE = 32                                 # answers


class Stage(NamedTuple):
    title: str
    verb: str
    gpu_verb: str
    out: str                                 # its checkpoint
    flags: list
    gpu_flags: list


STAGES = [
    Stage("pretrained", "train", "t", "pipeline.bin",
          flags=["--minutes", "3"],
          gpu_flags=["--cuts", "0.02"]),
    Stage("fine-tuned", "sft", "s", "pipeline_chat.bin",
          flags=["--seq-len", "256", "--epochs", "2"],
          gpu_flags=["--seq-len", "256", "--epochs", "6", "--batch", "16384", "--lr", "2e-3",
                     "--mtp-weight", "0", "--cuts", "0.1"]),
    Stage("preferences", "dpo", "d", "pipeline_dpo.bin",
          flags=["--nll", "1", "--rehearse", "0"],
          gpu_flags=["--batch", "4096", "--lr", "2.4e-4", "--nll", "5", "--epochs", "2",
                     "--rehearse", "0"])]


def complete(path):
    if not os.path.exists(path):
        return False
    s = ne.read_checkpoint(path).state
    return s.n_steps is not None and s.n_steps <= s.step


def run_stage(stage, before, args):
    """One verb as a user types it.  Seconds it took, in this and in earlier sittings."""
    data = {"sft": args.instructions, "dpo": args.pairs}.get(stage.verb)
    if os.path.exists(stage.out) and not args.force:
        flags = ["--resume"]
    else:
        for later in STAGES[STAGES.index(stage) + 1:]:   # made from a checkpoint that goes now
            Path(later.out).unlink(missing_ok=True)
        flags = [*(stage.gpu_flags if args.gpu else stage.flags), "--force"]
        if before:
            flags.insert(0, before)
        if data:
            flags += ["--data", data]
        elif args.minutes:
            flags += ["--minutes", str(args.minutes)]
    program, verb = ("nanoeuler.py", stage.verb)
    if args.gpu:
        program, verb = ("nanoeuler_cuda.py", stage.gpu_verb)
    command = [sys.executable, str(ROOT / program), verb, *flags, "--out", stage.out]
    print("\n$ " + " ".join(command), flush=True)
    code = run_child(command)
    if code or not complete(stage.out):
        sys.exit(f"{stage.out} is not complete; the same command goes on, without --force")
    made = ne.read_checkpoint(stage.out).state
    if data and made.options["data"] != data:
        sys.exit(f"{stage.out} was made of {made.options['data']}, not of {data}; --force begins "
                 f"anew")
    return made.elapsed


def run_child(command, seconds=None):
    """Exit code.  Of Ctrl-C and SIGTERM, and after so many seconds, the child saves what it has; it
    is waited for."""
    child = subprocess.Popen(command)
    previous = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        child.wait()
    except KeyboardInterrupt:                # a terminal sends it to the child as well
        child.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
    return child.returncode


def response_nats(model, tokenizer, e, key):
    """-log pi of the response to an example, nats; None if it does not fit."""
    T = model.cfg.seq_len
    prompt = tokenizer.encode(prompt_of(e))
    response = np.append(tokenizer.encode(e[key]), np.int32(tokenizer.specials["</s>"]))
    if len(prompt) + len(response) - 1 > T:
        return None
    tokens, targets = Examples([(prompt, response)], T, model.cfg.n_mtp, 1).batch([0])
    return np.sum(model.losses(tokens, targets[0]))


# ---- questions of skill
class Draw(NamedTuple):
    """What chance decides about a question.  All of it is drawn for each, used or not."""
    x: int
    y: int
    words: list
    word: str
    addition: str
    wrong_sum: int                           # this much beside the right one
    counting: str
    wrong_count: int


# kind -> instruction, input, chosen, rejected
def sort_question(d):
    words = sorted(d.words)
    return ("Sort these words in alphabetical order.", ", ".join(d.words),
            ", ".join(words), ", ".join(words[::-1]))


def reverse_question(d):
    return ("Reverse the order of this list.", ", ".join(d.words),
            ", ".join(d.words[::-1]), ", ".join(d.words))


def add_question(d):
    right = f"{d.x} plus {d.y} is {d.x + d.y}."
    return (d.addition.format(x=d.x, y=d.y), "",
            right, f"{d.x} plus {d.y} is {d.x + d.y + d.wrong_sum}.")


def count_question(d):
    n = len(d.words)
    return (d.counting, ", ".join(d.words),
            f"There are {n} words in the list.",
            f"There are {n + d.wrong_count} words in the list.")


def capitals_question(d):
    return f'Write the word "{d.word}" in capital letters.', "", d.word.upper(), d.word


def first_letter_question(d):
    return (f'What is the first letter of "{d.word}"?', "",
            f'The first letter of "{d.word}" is "{d.word[0]}".',
            f'The first letter of "{d.word}" is "{d.word[-1]}".')


MAKERS = {"sort": sort_question, "reverse": reverse_question, "add": add_question,
          "count": count_question, "capitals": capitals_question,
          "first letter": first_letter_question}
MOST_WORDS = {"sort": 6, "count": 7}         # of the other kinds 5


def unseen(n):
    """n held-out questions of skill."""
    return questions(n, held=True, seed=2)   # on those of 1 the flags of STAGES were chosen


def questions(n, held, seed, kinds=tuple(KINDS)):
    """n questions of skill, of these kinds in turn, after those of the instruction file: of those
    that are held out, or of the others"""
    shipped, _ = read_examples(ROOT / SftOptions.data, "output")
    seen = {(e["instruction"], e["input"]) for e in shipped}
    lists = [e["input"].split(", ") for e in shipped if e["source"] == "skill" and e["input"]]
    common = sorted({word for words in lists for word in words})
    # one word in 50 is held out for a question about it: these need more of them
    known = sorted({w for e in shipped for w in re.findall(r"\b[a-z]{4,10}\b", e["output"])})
    rng = random.Random(seed)
    out = []
    tries = 0
    while len(out) < n:
        kind = kinds[len(out) % len(kinds)]
        draw = Draw(
            x=rng.randint(2, 60), y=rng.randint(2, 60),
            words=rng.sample(common, rng.randint(3, MOST_WORDS.get(kind, 5))),
            word=rng.choice(known),
            addition=rng.choice(["Add {x} and {y}.", "What is {x} plus {y}?"]),
            wrong_sum=rng.choice([-10, -2, -1, 1, 2, 10]),
            counting=rng.choice(["Count the words in the list.",
                                 "How many words are in this list?"]),
            wrong_count=rng.choice([-1, 1, 2]))
        instruction, words, chosen, rejected = MAKERS[kind](draw)
        e = dict(instruction=instruction, input=words, output=chosen, chosen=chosen,
                 rejected=rejected, source="skill")
        question = instruction, words
        tries += 1
        if held_out(e) == held and chosen != rejected and question not in seen:
            seen.add(question)
            out.append(e)
            tries = 0
        ne.need(tries < MAX_TRIES, f"--unseen {n}: no more held-out questions of {kind} are found; "
                f"ask for at most {len(out)}")
    return out


# ---- what a stage can do
def answers(decoder, tokenizer, examples, longest):
    """The likeliest reply to each example, written together; longest: of each, tokens"""
    end = tokenizer.specials["</s>"]
    replies = [ne.Reply(tokenizer.encode(prompt_of(e)),
                        ne.Sampling(temperature=0.0, tokens=n), None, end)
               for e, n in zip(examples, longest)]
    if replies:
        slots = decoder.with_slots(min(AT_ONCE, len(replies)) if decoder.rows_are_cheap else 1)
        for _ in ne.generate_many(slots, replies):
            pass                             # which fills the replies
    return [tokenizer.decode(reply.tokens).decode("utf-8", "replace") for reply in replies]


def exact(decoder, tokenizer, examples):
    """Is the likeliest reply the key, however it is spelled?  A token has a byte or more."""
    longest = [len(e["output"].encode()) + 1 for e in examples]
    return [said == e["output"]
            for said, e in zip(answers(decoder, tokenizer, examples, longest), examples)]


def of(right):
    """How many of a list of bools are true, in words."""
    return f"{sum(right)} of {len(right)}"


def prefers(model, tokenizer, pairs):
    """How many of the pairs that fit have the likelier answer chosen."""
    right = []
    for e in pairs:
        chosen = response_nats(model, tokenizer, e, "chosen")
        rejected = response_nats(model, tokenizer, e, "rejected")
        if chosen is not None and rejected is not None:
            right.append(chosen < rejected)
    return of(right)


def flags_of(c, run, start):
    """What a stage was started with, where it differs from the defaults and the Config it had."""
    default = asdict(run.Options()) | asdict(start)
    given = c.state.options | {f.name: getattr(c.cfg, f.name) for f in SHAPE}
    words = [run.verb]
    for name, value in given.items():
        if value != default.get(name):
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


class Measured(NamedTuple):
    """Of a stage."""
    cfg: ne.Config
    seconds: float
    started: str                             # verb and flags
    row: list                                # of the first table
    unseen_row: list                         # of the second; empty without --unseen
    answers: list                            # (example, reply) of five questions


def measure(path, engine, run, start, seconds, examples, pairs, more):
    c = ne.read_checkpoint(path)
    # every stage at the longest context: no weight depends on it
    model = engine.Model(ne.replace(c.cfg, seq_len=max(256, c.cfg.seq_len)), c.flat)
    decoder = model.decoder()
    nats = 0.0
    size = 0                                 # bytes of the responses that fit
    for e in examples:
        x = response_nats(model, c.tokenizer, e, "output")
        if x is not None:
            nats += x
            size += len(e["output"].encode())
    skill = [e for e in examples if e.get("source") == "skill"]
    row = [f"{nats / np.log(2) / size:.3f}", of(exact(decoder, c.tokenizer, skill)),
           prefers(model, c.tokenizer, pairs)]
    unseen_row = []
    if more:                                 # question k is of kind k modulo their number
        right = exact(decoder, c.tokenizer, more)
        unseen_row = [of(right[k::len(KINDS)]) for k in range(len(KINDS))]
        unseen_row += [of(right), prefers(model, c.tokenizer, more)]
    questions = [examples[i] for i in np.linspace(0, len(examples) - 1, 5).astype(int)]
    said = answers(decoder, c.tokenizer, questions, [100] * len(questions))
    return Measured(c.cfg, seconds, flags_of(c, run, start), row, unseen_row,
                    [*zip(questions, said)])


def table(head, rows):
    lines = ["", "| after | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for stage, row in zip(STAGES, rows):
        lines.append(f"| {stage.title} | " + " | ".join(row) + " |")
    return lines


def report(stages, out, gpu):
    """The Markdown text: tables of the Measured stages, then questions with one answer a stage."""
    c = ne.read_checkpoint(out)
    pretrained = ne.read_checkpoint(STAGES[0].out).state
    log = read_log(os.path.splitext(out)[0] + ".jsonl")
    dpo = [r for r in log if "val_loss" in r][-1]
    program = "nanoeuler_cuda.py" if gpu else "nanoeuler.py"
    minutes = sum(stage.seconds for stage in stages) / 60
    lines = [f"# {ne.n_params(c.cfg):,} parameters, from bytes to answers", "",
             f"{minutes:.0f} minutes of training; tokenizer of {c.cfg.vocab_size:,} "
             f"tokens.  Text: {pretrained.options['data']}, {pretrained.bits_per_byte:.4f} bits "
             f"per byte held out.", ""]
    lines += [f"    {program} {stage.started}" for stage in stages]
    lines += table(["minutes", "responses, bits/byte", "exact (skill)", "prefers the chosen"],
                   [[f"{stage.seconds / 60:.1f}", *stage.row] for stage in stages])
    if stages[0].unseen_row:
        lines += ["", "Questions of skill that are in no file, made after the pattern of those "
                  "that are; how many are answered as the key does:",
                  *table([*KINDS, "together", "prefers the chosen"],
                         [stage.unseen_row for stage in stages])]
    lines += ["", f"Held-out pairs after DPO: loss {dpo['val_loss']:.3f}, reward accuracy "
              f"{dpo['val_accuracy']:.0%}, margin {dpo['val_margin']:.3f}; log p of the chosen "
              f"responses {dpo['val_chosen']:+.2f} nats.", "", "## Questions nobody trained on"]
    for i, (e, _) in enumerate(stages[0].answers):
        question = " ".join(f"{e['instruction']} {e['input']}".split())
        lines += ["", f"**{question}**", "", f"- key: {e['output']}"]
        for stage, measured in zip(STAGES, stages):
            _, reply = measured.answers[i]
            lines.append(f"- {stage.title}: {' '.join(reply.split())}")
    return "\n".join(lines) + "\n"


def main():
    try:
        pipeline()
    except ne.UserError as e:
        sys.exit(f"pipeline: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on, without --force")


def held_out_of(path, *keys):
    examples, _ = read_examples(path, *keys)
    held = [e for e in examples if held_out(e)]
    ne.need(held, f"{path}: no example of it is held out; use more")
    return held


def pipeline():
    parser = argparse.ArgumentParser(description="pretraining, SFT, DPO, report")
    parser.add_argument("--gpu", action="store_true", help="with nanoeuler_cuda.py")
    parser.add_argument("--minutes", type=float, help="of pretraining")
    parser.add_argument("--instructions", default="data/instructions.json", metavar="FILE")
    parser.add_argument("--pairs", default="data/preferences_sample.jsonl", metavar="FILE")
    parser.add_argument("--unseen", type=int, default=0, metavar="N", help="questions of skill")
    parser.add_argument("--force", action="store_true", help="begin anew")
    args = parser.parse_args()
    engine, runs = ne, (Run, SftRun, DpoRun)
    if args.gpu:
        engine = importlib.import_module("nanoeuler_cuda")
        engine.open_device()
        runs = on_gpu.Run, on_gpu.SftRun, on_gpu.DpoRun
    examples = held_out_of(args.instructions, "output")
    pairs = held_out_of(args.pairs, "chosen", "rejected")
    more = unseen(args.unseen)
    began = time.perf_counter()
    cfg = ne.PRESETS[runs[0].preset]
    before = None                            # the checkpoint that a stage starts from
    stages = []
    for stage, run in zip(STAGES, runs):
        seconds = run_stage(stage, before, args)
        stages.append(measure(stage.out, engine, run, cfg, seconds, examples, pairs, more))
        cfg = stages[-1].cfg
        before = stage.out
    text = report(stages, before, args.gpu)
    Path(REPORT).write_text(text, encoding="utf-8")
    print(f"\n{text}\n{REPORT} holds this; {(time.perf_counter() - began) / 60:.0f} minutes.  "
          f"Talk to it with:\n    python nanoeuler.py chat {before}")


if __name__ == "__main__":
    main()
