"""The verbs of nanoeuler_cuda.py and their flags.

This module needs no GPU and no numba-cuda until a verb runs, so `--help` works everywhere.
"""
import argparse
import os
from dataclasses import dataclass, fields, replace
from functools import partial

import nanoeuler as ne
from bpe import need, note
from nanoeuler_parts import flags
from nanoeuler_parts.chat.sampling import ChatSampling, Sampling
from nanoeuler_parts.chat.verbs import chat, generate_text, TO_GENERATE
from nanoeuler_parts.cli import run_verb
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.flags import ADAPTER, arg, MODEL, RUN, SHAPE
from nanoeuler_parts.gpu.doctor import links_found, nccl_found, report
from nanoeuler_parts.gpu.place import PLACE
from nanoeuler_parts.runs import run
from nanoeuler_parts.runs.options import options_class
from nanoeuler_parts.runs.start import INIT, launch_any
from nanoeuler_parts.tuning import dpo, rl, sft
from nanoeuler_parts.tuning.lora import is_run_with_lora

class CountsGpus:
    """A run that stores the number of its GPUs, and warns if --resume changes it"""

    def __init__(self, out, start, options, engine):
        before = start.state.options.get("gpus", 1) if start.state.options else PLACE.size
        if before != PLACE.size:
            start = start._replace(state=replace(start.state, micro_batch=None))
            note(f"{out} was trained on {counted(before, 'GPU')}, and continues on "
                 f"{PLACE.size}: its results will differ by rounding from those of a run on an "
                 f"unchanged number")
        options.gpus = PLACE.size
        super().__init__(out, start, options, engine)

class Run(CountsGpus, run.Run):
    verb, Options, preset, larger_data = "t", options_class("t"), "base", "data/pretrain.txt"
    most_final = 1 << 21                     # a GPU reads more in the same time

class SftRun(CountsGpus, sft.SftRun):
    verb, Options = "s", options_class("s", sft.ChecksColumns)

class DpoRun(CountsGpus, dpo.DpoRun):
    verb, Options = "d", options_class("d", dpo.ChecksPairs)

class RlRun(rl.RlRun):
    verb, Options = "r", options_class("r", rl.ChecksReward)
    row_unit = 64                            # whole tiles, which attention on `wgmma` needs

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.reference.kept = 1              # it only runs forward

    def log_probabilities(self, model, tokens, targets):
        """The number of rows differs from batch to batch.  The buffers always have room for a whole
        micro-batch, because the order of sums depends on their size: otherwise a resumed run would
        not be bit-identical."""
        model.prepare(min(self.B, self.state.micro_batch), tokens.shape[1])
        return super().log_probabilities(model, tokens, targets)

def device_verb(verb, **engine):
    """Returns the function of a verb that runs on the GPU: it opens the GPU, then calls `verb`.
    engine: {name of an argument of `verb`: name of the object in nanoeuler_cuda.py to pass}"""
    def run(**flags):
        import nanoeuler_cuda as nc
        nc.open_device()
        return verb(**{name: getattr(nc, part) for name, part in engine.items()}, **flags)
    return run

def self_tests(**flags):
    """Opens the GPU and runs the self-tests."""
    import nanoeuler_cuda as nc
    from nanoeuler_parts.selftests import run
    nc.open_device()
    return run.self_tests(**flags)

def gradient_check(**flags):
    """Opens the GPU and compares the gradient of a whole model with the CPU's."""
    import nanoeuler_cuda as nc
    from nanoeuler_parts.selftests import gradient
    nc.open_device()
    return gradient.gradient_check(**flags)

def ladder(**flags):
    """Opens the GPU and runs the ladder of matrix products."""
    import nanoeuler_cuda as nc
    from nanoeuler_parts.selftests import ladder
    nc.open_device()
    return ladder.ladder(**flags)

def on_one_gpu(run, default, flags):
    """Trains on one GPU, with LoRA if --lora is given or the run to resume has it.
    run: a class of runs     default: of --out"""
    import nanoeuler_cuda as nc
    from nanoeuler_parts.gpu_lora import LoraModel
    nc.open_device()
    return launch_any(run, default, nc.Model, LoraModel, **flags)

def training_verb(run, default):
    """Returns the function of a verb that trains: under a launcher as one rank, with --gpus by
    starting all ranks, otherwise on one GPU.     run, default: as for `on_one_gpu`"""
    def start(**flags):
        several = PLACE.size > 1 or flags.get("gpus", 1) > 1
        need(not (several and (flags.get("lora") or is_run_with_lora(flags["out"]))), "--lora runs "
             "on one GPU; start it without --gpus, and without a launcher")
        if PLACE.size > 1:
            from nanoeuler_parts.ranks.processes import launch_ranks
            return launch_ranks(run, flags)
        if several:
            from nanoeuler_parts.ranks.processes import start_ranks
            return start_ranks(flags["gpus"])
        return on_one_gpu(run, default, flags)
    return start

def reinforcement(**flags):
    """The verb `r`, on one GPU"""
    need(PLACE.size == 1, "r runs on one GPU; start it without a launcher")
    return on_one_gpu(RlRun, RL_OUT, flags)

# Default --out of each verb that trains
T_OUT, S_OUT, D_OUT, RL_OUT = (f"nanoeuler{x}.bin" for x in ("", "_chat", "_dpo", "_rl"))

# (name, module, help): see `add_verbs` in cli.py
VERBS = [(name, "nanoeuler_parts.tools.on_gpu", text) for name, text in (
    ("test", "run the self-tests: compare every kernel with the CPU"),
    ("g", "compare the gradient of the whole model with the CPU's (also: check)"),
    ("ladder", "run the matrix products from the naive one to the fastest, and print their speeds"),
    ("t", "pretrain a model on a text; writes a checkpoint and a log (also: train)"),
    ("tr", "continue the run of t (also: resume)"),
    ("i", "continue or answer one prompt, or a file of prompts (also: generate)"),
    ("s", "supervised fine-tuning: train a checkpoint to answer questions (also: sft)"),
    ("d", "direct preference optimization: train a chat checkpoint on preferred answers "
          "(also: dpo)"),
    ("r", "reinforcement learning: train a chat checkpoint on rewards of its own answers (also: "
          "rl)"),
    ("c", "talk to a model in the terminal; a base model continues the text (also: chat)"),
    ("eval", "measure a model: perplexity and bits per byte of texts, accuracy on questions"),
    ("serve", "serve models over HTTP: web pages and an OpenAI-compatible API"),
    ("doctor", "print which required packages, drivers and GPUs this machine has"))]

# Long names of verbs, most of which are those of nanoeuler.py
LONG = {"check": "g", "train": "t", "resume": "tr", "generate": "i", "sft": "s", "dpo": "d",
        "rl": "r", "chat": "c"}

PRESET = arg("--preset", default=argparse.SUPPRESS, choices=list(ne.PRESETS),
             help="size of a new model (default: base)")

def test_verb(add):
    add(self_tests,
        arg("--quick", action="store_true", help="skip the largest shapes"),
        arg("--only", nargs="+", default=(), metavar="GROUP", help="run only these groups of "
            "tests, for example: matmul attention"),
        arg("--jobs", type=int, default=0, help="number of processes that compile and run the "
            "tests; 0: one per CPU core, at most 16"))

def g_verb(add):
    add(gradient_check, PRESET,
        arg("--batch", type=int, default=1, help="number of sequences"))

def ladder_verb(add):
    add(ladder,
        arg("rung", nargs="?", default="", help="naive, tiled, one-tile-mma, one-tile-wgmma, mma, "
            "or wgmma (default: all)"),
        arg("--size", type=int, default=4096, help="rows and columns of the matrices"))

def t_verb(add):
    return add(training_verb(Run, T_OUT), PRESET, INIT, flags.out(T_OUT), *RUN,
               settings=fields(Run.Options), shape=SHAPE)

def tr_verb(add):
    t_verb(add).set_defaults(resume=True)

def i_verb(add):
    add(device_verb(generate_text, decoder="make_decoder"), *TO_GENERATE,
        settings=fields(Sampling))

def s_verb(add):
    add(training_verb(SftRun, S_OUT), sft.start_argument(SftRun), flags.out(S_OUT), *RUN,
        settings=fields(SftRun.Options), shape=sft.CONTEXT)

def d_verb(add):
    add(training_verb(DpoRun, D_OUT), sft.start_argument(DpoRun), flags.out(D_OUT), *RUN,
        settings=fields(DpoRun.Options), shape=sft.CONTEXT)

def r_verb(add):
    add(reinforcement, sft.start_argument(RlRun), flags.out(RL_OUT), *RUN,
        settings=fields(RlRun.Options))

def c_verb(add):
    add(device_verb(chat, decoder="make_decoder"), MODEL, ADAPTER, settings=fields(ChatSampling))

def eval_verb(add):
    from nanoeuler_parts.tools.evaluation import EVAL_ARGUMENTS, EvalOptions, evaluate

    @dataclass
    class Options(EvalOptions):
        batch: int = ne.setting(64, 1, 1 << 16, "largest number of sequences computed at once")
        dtype: str = ne.setting("bf16", 0, 0, "precision of texts and choices: bf16 or f32; "
                               "replies have --weights")
        matmul: str = ne.setting("wgmma", 0, 0)          # this and `recompute` have no flag
        recompute: bool = ne.setting(True, 0, 0)         # no backward pass needs activations

    call = device_verb(partial(evaluate, settings=Options), decoder="make_decoder", engine="Model")
    add(call, *EVAL_ARGUMENTS, settings=fields(Options))

def serve_verb(add):
    from nanoeuler_parts.serve.verb import serve, SERVED, Serving
    add(device_verb(serve, decoder="make_decoder"), SERVED, settings=fields(Serving))

def doctor_verb(add):
    add(doctor)

def doctor():
    """Prints which required packages, drivers and GPUs this machine has.  Returns the exit code."""
    from numba import cuda

    import nanoeuler_cuda as nc
    from nanoeuler_parts.gpu.launches import gpus_here
    rows = [("CUDA target", f"numba-cuda, {os.path.dirname(cuda.__file__)}")]
    problem = nc.gpu_problem()
    if not problem:
        free, total = cuda.current_context().get_memory_info()
        found = cuda.get_current_device()    # the first visible one
        rows += [("uses", "{}, sm_{}{}".format(found.name, *found.compute_capability)),
                 ("matmul, attention", nc.kernel_path()),
                 ("memory", f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}"),
                 ("this process", f"rank {PLACE.rank} of {PLACE.size}, sees "
                                  f"{counted(gpus_here(), 'GPU')}"),
                 ("NCCL", nccl_found()), ("links", links_found() or "none found by nvidia-smi")]
    return report(problem, rows)

def show_help(argv, reason):
    """Prints the help that argv requests, when the GPU program cannot run for this reason."""
    verb, *others = argv
    if verb in ("-h", "--help"):
        print(f"Only the verb doctor can run on this machine: {reason}\n")
    return run_verb(VERBS, TITLE, [LONG.get(verb, verb), *others])

TITLE = "NanoEuler on the GPU.  Without a verb: the self-tests"
