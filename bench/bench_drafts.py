"""What drafts bring: texts of a checkpoint with and without them, and what the steps cost.

    python bench/bench_drafts.py [MODEL.bin] [--gpu]     a minute; prints a table
    python bench/bench_drafts.py MODEL.bin --equal 1000  of random prompts: are texts equal?
    python bench/bench_drafts.py MODEL.bin --prices 69 130 142           where steps take so long

Prompts are 16 tokens from random places of the text that was held out, or of Shakespeare if the
model's text is not there, a hundred tokens follow;
the ways take turns, medians over rounds.  The ceiling is what drafting would bring if Python took
no time: tokens a step, times a step of one row, over a step of as many rows as there are drafts
and one, and the guesses.

With --prices the clock is another machine's: us of a step that was queued ahead, of one that was
not, and of one with drafts.  The texts are real, and so is what the program decides by that clock.
"""
import argparse
import pathlib
import statistics
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import set_num_threads

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne
from common import cpu_model

PROMPT, TOKENS = 16, 100


class Way(NamedTuple):
    """Of so many drafts a step: seconds of all texts, the texts, and what ne.Pace counted"""
    seconds: float
    texts: list
    tokens_a_step: float
    accepted: list                           # shares, by position


@dataclass
class PricedPace(ne.Pace):
    """Counts the seconds of another machine, on which a step is queued ahead as the GPU's `draw`
    does it: if no drafts were asked for, from the third step on that has none."""
    prices: tuple = ()                       # seconds: queued ahead, not, with drafts
    without: int = 0                         # steps without drafts, in a row
    taken: float = 0.0

    def count(self, tokens, seconds, asked, found, reading):
        queued, waited, drafted = self.prices
        self.without = 0 if found else self.without + 1
        seconds = drafted if found else queued if self.without > 2 and not asked else waited
        self.taken += seconds
        super().count(tokens, seconds, asked, found, reading)


def prompts_of(c, n, rng):
    """n of PROMPT tokens each, from the tail that was held out"""
    path = ROOT / c.state.options.get("data", "")
    if not path.is_file():
        path = ROOT / "data/shakespeare.txt"
    data = path.read_bytes()
    ids = c.tokenizer.encode(data[int(0.9 * len(data)):])
    starts = rng.integers(0, len(ids) - PROMPT, n)
    return [ids[i:i + PROMPT].tolist() for i in starts]


def write(decoder, prompts, temperature, drafts, prices=None):
    """A Way: prompts one after another, or as many at once as the decoder has slots"""
    sampling = ne.Sampling(temperature=temperature, tokens=TOKENS, speculate=drafts)
    replies = [ne.Reply(ids, sampling, ne.rng_of(1, i)) for i, ids in enumerate(prompts)]
    pace, began = PricedPace(prices=prices) if prices else ne.Pace(), time.perf_counter()
    for _ in ne.generate_many(decoder, replies, pace):
        pass
    seconds = pace.taken if prices else time.perf_counter() - began
    shares = [a / n for a, n in zip(pace.accepted, pace.offered) if n]
    return Way(seconds, [reply.tokens for reply in replies],
               pace.tokens / pace.steps, shares)


def seconds_of(call, n=300):
    found = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def step_seconds(decoder, prompt, rows):
    """A step of so many rows behind a prompt"""
    decoder.truncate(0)
    decoder.read([ne.Part(0, prompt, 1)])

    def step():
        decoder.truncate(len(prompt))
        decoder.read([ne.Part(0, prompt[:rows], rows)])

    return seconds_of(step)


def machine(gpu):
    if gpu:
        import nanoeuler_cuda as nc
        return nc.cuda.get_current_device().name
    cpu = cpu_model()
    return f"{cpu.name} ({cpu.detail}), {ne.get_num_threads()} threads"


def new_decoder(c, weights, gpu, slots=1):
    if gpu:
        import nanoeuler_cuda as nc
        return nc.make_decoder(c.cfg, c.flat, weights or "bf16", slots=slots)
    return ne.Decoder(c.cfg, c.flat, weights or "f32", slots=slots)


def report(c, weights, rounds, gpu):
    decoder = new_decoder(c, weights, gpu)
    prompts = prompts_of(c, 10, np.random.default_rng(1))
    counts = [*range(1 + decoder.heads)] if decoder.heads else [0, 2, 4]
    steps = {k: step_seconds(decoder, prompts[0], 1 + k) for k in counts}
    guesses = seconds_of(lambda: decoder.guesses(0).argmax(1)) if decoder.heads else 0.0
    print(f"{machine(gpu)}, {ne.n_params(c.cfg):,} parameters, "
          f"{weights or ('bf16' if gpu else 'f32')}.\nA step in us, by its rows: "
          f"{', '.join(f'{1 + k}: {1e6 * t:.0f}' for k, t in steps.items())}; guesses of "
          f"{decoder.heads} heads {1e6 * guesses:.0f}.\n")
    print(f"| temperature | drafts | ms for {TOKENS} tokens | lowest - highest | against none | "
          f"tokens a step | accepted by position | ceiling |")
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for temperature in (0.0, 0.8):
        ways = [*counts, -1]
        found = {k: [] for k in ways}
        for _ in range(rounds):
            for k in ways:
                found[k].append(write(decoder, prompts, temperature, k))
        for k in ways:
            show(temperature, k, found, steps, guesses)


def show(temperature, k, found, steps, guesses):
    per_text = [1e3 * way.seconds / len(way.texts) for way in found[k]]
    plain = statistics.median(way.seconds for way in found[0])
    gain = plain / statistics.median(way.seconds for way in found[k])
    way = found[k][-1]
    assert way.texts == found[0][0].texts, "drafts have changed a text"
    ceiling = f"{way.tokens_a_step * steps[0] / (steps[k] + guesses):.2f}" if k > 0 else ""
    print(f"| {temperature:g} | {'as many as pay' if k < 0 else k} | "
          f"{statistics.median(per_text):.2f} | {min(per_text):.2f} - {max(per_text):.2f} | "
          f"{gain:.2f} | {way.tokens_a_step:.2f} | "
          f"{', '.join(f'{share:.0%}' for share in way.accepted)} | {ceiling} |", flush=True)


def report_prices(c, weights, prices):
    decoder = new_decoder(c, weights, gpu=False)
    prompts = prompts_of(c, 30, np.random.default_rng(1))
    print(f"| temperature | drafts | ms for {TOKENS} tokens | against none | tokens a step |\n"
          "|---|---:|---:|---:|---:|")
    for temperature in (0.0, 0.8):
        ways = {k: write(decoder, prompts, temperature, k, prices)
                for k in (0, decoder.heads or ne.DEFAULT_DRAFTS, -1)}
        for k, way in ways.items():
            print(f"| {temperature:g} | {'as many as pay' if k < 0 else k} | "
                  f"{1e3 * way.seconds / len(prompts):.2f} | {ways[0].seconds / way.seconds:.2f} | "
                  f"{way.tokens_a_step:.2f} |", flush=True)


def compare(c, weights, n, gpu):
    """n prompts of 1 to 40 random tokens: are the texts equal, with drafts and without?"""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, c.cfg.vocab_size, rng.integers(1, 41)).tolist() for _ in range(n)]
    decoder = new_decoder(c, weights, gpu, slots=16)
    for temperature in (0.0, 0.8):
        plain, drafted = (write(decoder, prompts, temperature, k)
                          for k in (0, decoder.heads or ne.DEFAULT_DRAFTS))
        equal = sum(a == b for a, b in zip(plain.texts, drafted.texts))
        shares = ", ".join(f"{share:.1%}" for share in drafted.accepted)
        print(f"temperature {temperature:g}: {equal:,} of {n:,} texts are equal; accepted by "
              f"position: {shares}", flush=True)
        if equal < n:
            sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="nanoeuler.bin")
    parser.add_argument("--weights", help="f32, bf16 or int8; default: f32, on a GPU bf16")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--equal", type=int, default=0, metavar="N", help="prompts to compare")
    parser.add_argument("--prices", type=float, nargs=3, metavar="US", help="of another machine")
    args = parser.parse_args()
    set_num_threads(args.threads)
    c = ne.read_checkpoint(args.model, moments=False)
    if args.equal:
        compare(c, args.weights, args.equal, args.gpu)
    elif args.prices:
        report_prices(c, args.weights, tuple(1e-6 * us for us in args.prices))
    else:
        report(c, args.weights, args.rounds, args.gpu)


if __name__ == "__main__":
    main()
