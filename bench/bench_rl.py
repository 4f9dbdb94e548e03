"""Reinforcement learning on two skills of the bundled model, in harder variants.

    python bench/bench_rl.py [--skill reverse] [--seed 1] [flags of rl, such as --steps 60]

reverse   the words of a list in reverse order: six words; the model was trained on three to five
sort      the same for alphabetical order: seven words

For each skill and seed, `rl bundled --reward exact` learns from 3,000 questions.  Then 200 other
questions are asked at temperature 0, before and after, and the bits per byte of the held-out
answers in data/instructions.json are measured: do they stay?  Writes to bench/out/rl/.
"""
import argparse
import json
import math
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import nanoeuler as ne
from common import out_folder
from nanoeuler_parts.chat.templates import chat_ids, ends_of
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.tuning.examples import asked_in, held_out, read_examples

INSTRUCTIONS, BUNDLED = str(ROOT / "data/instructions.json"), str(ROOT / "data/model.bin")
SKILLS = {"reverse": ("Reverse the order of the words.", 6, lambda words: words[::-1]),
          "sort": ("Sort these words alphabetically.", 7, sorted)}
TRAINED, ASKED = 3000, 200


def questions(skill, n, seed):
    """Examples of a skill, made of the words in lists of data/instructions.json"""
    instruction, size, ordered = SKILLS[skill]
    examples, _ = read_examples(INSTRUCTIONS, "output")
    words = sorted({word for e in examples if e.get("source") == "skill" and e["input"]
                    for word in e["input"].split(", ")})
    rng, found = random.Random(seed), []
    for _ in range(n):
        some = rng.sample(words, size)
        found.append(dict(instruction=instruction, input=", ".join(some),
                          output=", ".join(ordered(some))))
    return found


def accuracy(file, examples):
    """How many of these questions the model answers right, word for word"""
    speaker = ne.load(file, weights="f32")
    asked = [asked_in(e)[0][1] for e in examples]
    said = speaker.generate(asked, temperature=0.0, tokens=48)
    return sum(r.answer.strip() == e["output"] for r, e in zip(said, examples))


def bits_of_answers(file):
    """Bits per byte of the held-out answers in data/instructions.json, and their number"""
    c = ne.read_checkpoint(file, moments=False)
    model, [end, *_] = ne.Model(c.cfg, np.array(c.flat)), ends_of(c.state, c.tokenizer)
    examples, _ = read_examples(INSTRUCTIONS, "output")
    nats = n_bytes = n = 0
    for e in filter(held_out, examples):
        asked = [int(i) for i in chat_ids(c.state.template, asked_in(e), c.state, c.tokenizer)]
        answer = [*c.tokenizer.encode_after(e["output"]).tolist(), end]
        whole = np.array([asked + answer], np.int32)
        if whole.size <= c.cfg.seq_len:
            targets = whole[:, 1:].copy()
            targets[:, :len(asked) - 1] = -1
            nats += model.losses(whole[:, :-1], targets)[0]
            n_bytes += len(e["output"].encode())
            n += 1
    return float(nats / math.log(2) / n_bytes), n


def measures_of(file):
    """The measures of the run that wrote this file, over its last ten steps"""
    log = read_log(file.removesuffix(".bin") + ".jsonl")
    steps = [r for r in log if "reward" in r]
    return dict(steps=len(steps), kl=float(np.mean([r["kl"] for r in steps[-10:]])),
                reward=float(np.mean([r["reward"] for r in steps[-10:]])),
                seconds=sum(r["ms"] for r in steps) / 1e3,
                held_out=[(r["step"], r["val_reward"]) for r in log if "val_reward" in r])


def measure(skill, file):
    """What the bundled model, or a model that learned the skill, can do"""
    learned = {e["input"] for e in questions(skill, TRAINED, 1)}
    unseen = [e for e in questions(skill, 2 * ASKED, 999) if e["input"] not in learned][:ASKED]
    bits, n = bits_of_answers(file)
    found = dict(right=accuracy(file, unseen), of=len(unseen), bits_per_byte=bits, answers=n)
    if file != BUNDLED:
        found |= measures_of(file)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skill", choices=SKILLS, action="append")
    parser.add_argument("--seed", type=int, action="append")
    args, flags = parser.parse_known_args()
    folder = out_folder() / "rl"
    folder.mkdir(exist_ok=True)
    for skill in args.skill or SKILLS:
        data = folder / f"{skill}.jsonl"
        data.write_text("".join(json.dumps(e) + "\n" for e in questions(skill, TRAINED, 1)),
                        encoding="utf-8")
        print(json.dumps(dict(skill=skill, model="bundled", **measure(skill, BUNDLED))), flush=True)
        for seed in args.seed or (1, 2, 3):
            file = str(folder / f"{skill}_{seed}.bin")
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run([sys.executable, str(ROOT / "nanoeuler.py"), "rl", "bundled", "--data",
                            str(data), "--seed", str(seed), "--out", file, "--force", "--tokens",
                            "32", *flags], check=True, stdout=sys.stderr)
            cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            print(json.dumps(dict(skill=skill, seed=seed, cpu_seconds=round(cpu),
                                  **measure(skill, file))), flush=True)


if __name__ == "__main__":
    main()
