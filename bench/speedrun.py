"""Trains the base preset on a GPU in minutes, and reports the loss over time.

    python bench/speedrun.py                                       data/pretrain.txt, from make data
    python bench/speedrun.py --data mix.txt --target 1.2796        your own text, and a goal
    python bench/speedrun.py --gpus 2 --steps 5000                 further flags are those of `t`

Runs `nanoeuler_cuda.py t` with the settings of RECIPE.  A run of three steps comes first, which
compiles the kernels and encodes the text, so that the minutes are those of training.  A run that
was interrupted is resumed by the same command.  A complete run is only reported again.  --force
starts from the beginning.

speedrun.bin     the model; `python nanoeuler_cuda.py i "It was" speedrun.bin` continues a text
speedrun.md      minutes, tokens, and the loss at each validation
speedrun.png     the loss curve, if matplotlib is installed

The exit code is 1 if the loss of the final validation is above --target.
"""
import argparse
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

from pipeline import complete, run_child

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne
from nanoeuler_parts.files.logs import read_log
from nanoeuler_parts.files.printing import counted

PROGRAM, VERB = "nanoeuler_cuda.py", "t"
DATA = "data/pretrain.txt"
RECIPE = ["--preset", "base", "--vocab-size", "16384", "--n-mtp", "1", "--optimizer", "muon",
          "--batch", "16384", "--eval-every", "1000"]        # bench/NOTES.md says why
MINUTES = 6.5                                # of training


def command_of(*flags):
    """The command of the training verb with these flags"""
    return [sys.executable, str(ROOT / PROGRAM), VERB, *flags]


def train(out, data, minutes, flags, force):
    """Starts the run, or resumes it.  Exits if it fails or is interrupted."""
    if os.path.exists(out) and not force:
        command = command_of("--resume", *flags, "--out", out)
    else:
        flags = [*RECIPE, "--data", data, *flags]
        print("a run of three steps compiles the kernels and encodes the text ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            first = subprocess.run(command_of(*flags, "--steps", "3", "--warmup", "1", "--out",
                                              f"{folder}/first.bin"), stdout=subprocess.DEVNULL)
        if first.returncode:
            sys.exit(first.returncode)
        command = command_of("--steps", "0", "--minutes", str(minutes), *flags, "--out", out,
                             "--force")
    print("$ " + shlex.join(command[1:]), flush=True)
    if code := run_child(command):
        sys.exit(code)
    if not complete(out):
        sys.exit(f"{out} is not complete: the same command resumes it, without --force")


def curve(records):
    """The rows of the table, one for each validation of a log: (step, tokens, minutes of training
    steps, mean bits per byte of the training steps since the last row, bits per byte of the
    held-out text)"""
    rows, tokens, ms, recent = {}, 0.0, 0.0, []
    for r in records:
        if "ms" in r:
            if r["step"] - 1 in rows:
                recent = []
            tokens += r["tokens_per_s"] * r["ms"] / 1e3
            ms += r["ms"]
            recent.append(r["bits_per_byte"])
        if "val_bits_per_byte" in r:         # the last step has two, the second of more text
            mean = statistics.mean(recent)
            rows[r["step"]] = r["step"], round(tokens), ms / 60e3, mean, r["val_bits_per_byte"]
    return list(rows.values())


def report(out, target):
    """(Markdown text, whether the target was reached)"""
    c = ne.read_checkpoint(out)
    o, rows = c.state.options, curve(read_log(out.removesuffix(".bin") + ".jsonl"))
    step, tokens, _, _, bits = rows[-1]
    reached = target is None or bits <= target
    goal = "" if target is None else (
        f"  The target was {target:g}: it was {'' if reached else 'not '}reached.")
    lines = [f"# {ne.n_params(c.cfg):,} parameters, {tokens:,} tokens, "
             f"{c.state.elapsed / 60:.1f} minutes", "",
             f"{bits:.4f} bits per byte of held-out text in the final validation.{goal}", "",
             f"{step:,} steps of {tokens // step:,} tokens of {o['data']}, with the optimizer "
             f"{o['optimizer']}, on {counted(o.get('gpus', 1), 'GPU')}.  The title "
             f"counts the minutes of validations, and the table does not.  Before the last row, "
             f"the held-out loss is an estimate, from a part of the text.", "",
             "| step | tokens | minutes | bits per byte of training text | of held-out text |",
             "|---:|---:|---:|---:|---:|"]
    lines += [f"| {step:,} | {tokens:,} | {minutes:.2f} | {mean:.4f} | {bits:.4f} |"
              for step, tokens, minutes, mean, bits in rows]
    return "\n".join(lines) + "\n", reached


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--data", default=DATA, help=f"the text (default {DATA})")
    parser.add_argument("--minutes", type=float, default=MINUTES,
                        help=f"of training, without compilation (default {MINUTES})")
    parser.add_argument("--target", type=float, help="bits per byte of the held-out text to reach")
    parser.add_argument("--out", default="speedrun.bin", help="the model (default speedrun.bin)")
    parser.add_argument("--force", action="store_true", help="start from the beginning")
    a, flags = parser.parse_known_args()
    if not os.path.exists(a.data):
        sys.exit(f"{a.data} does not exist; make it with `make data`, or name a text with --data")
    if os.path.exists(a.out) and not a.force:
        data = ne.read_checkpoint(a.out).state.options["data"]
        if data != a.data:
            sys.exit(f"{a.out} was trained on {data}, not on {a.data}; name another --out, or "
                     f"start from the beginning with --force")
    if a.force or not complete(a.out):
        train(a.out, a.data, a.minutes, flags, a.force)
    name = a.out.removesuffix(".bin")
    text, reached = report(a.out, a.target)
    pathlib.Path(f"{name}.md").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "nanoeuler.py"), "plot", f"{name}.jsonl", "--out",
                    f"{name}.png", "--force"])
    print(f"\n{text}\n{name}.md holds this text.  Continue a sentence with:\n"
          f'    python {PROGRAM} i "It was" {a.out}')
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
