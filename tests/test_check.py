"""check.py finds nothing in nanoeuler.py, and finds every error planted in a copy of it.

A mutant is nanoeuler.py with one formula changed, run as plain Python: without the compiler it
takes a fraction of a second.  Only the definition in which the formula stands is read anew.
The copy uses tests/oracles/plain_parts.py in place of nanoeuler_parts, which are machine code.  All
blocks are 4 rows, so that a tiny model has edges of blocks; the unchanged copy passes.
"""
import ast
import inspect
import re
import sys
import types
from dataclasses import replace

import numba
import numpy as np
import pytest
from helpers import ROOT, few, may_stay_idle, nanoeuler, ok, slow
from oracles import plain_parts

import check
import nanoeuler as ne
from nanoeuler_parts.tuning import dpo, grpo

pytestmark = pytest.mark.unit
SOURCE = (ROOT / "nanoeuler.py").read_text(encoding="utf-8")
BLOCKS = [("BR = 32 ", "BR = 4 "), ("KC = 64 ", "KC = 4 "), ("NB = 128 ", "NB = 4 "),
          ("COLUMNS = 16 ", "COLUMNS = 4 ")]

MUTANTS = {
    "embedding overwrites": ("entry[c] += row[c]", "entry[c] = row[c]"),
    "embedding of another token": ("dwte[tokens[b, t], c0", "dwte[tokens[b, 0], c0"),
    "rmsnorm without the mean": ("- x[t, c] * mean)", ")"),
    "rmsnorm, sign of the mean": ("- x[t, c] * mean)", "+ x[t, c] * mean)"),
    "rmsnorm, mean without the gain": ("total += gain[c] * dy[t, c] * x[t, c]",
                                       "total += dy[t, c] * x[t, c]"),
    "rmsnorm, mean with one rstd": ("total * r * r / C", "total * r / C"),
    "rmsnorm without the gain": ("r * (gain[c] * dy[t, c] - x", "r * (dy[t, c] - x"),
    "rmsnorm, gain's gradient": ("dgain[c] += dy_row[c] * row[c] * r",
                                 "dgain[c] += dy_row[c] * row[c]"),
    "a gain's gradient, other columns": ("x[t, c0:c0 + len(dgain)]", "x[t, :len(dgain)]"),
    "a part of the work left out": ("min(n, (part + 1) * size)", "min(n, (part + 1) * size) - 1"),
    "residual path dropped": ("dx[t, c] = dnext[t, c] + r *", "dx[t, c] = r *"),
    "rope turns on": ("H + G, cos.dtype.type(-1)", "H + G, cos.dtype.type(1)"),
    "rope on the queries only": ("rope(d.qkv[b, l, t0:t1], cos[t0:t1], sin[t0:t1], H + G",
                                 "rope(d.qkv[b, l, t0:t1], cos[t0:t1], sin[t0:t1], H"),
    "attention without dot": ("* (dS_row[j] - dot) * scale", "* dS_row[j] * scale"),
    "attention, sign of dot": ("* (dS_row[j] - dot) * scale", "* (dS_row[j] + dot) * scale"),
    "attention without scale": ("* (dS_row[j] - dot) * scale", "* (dS_row[j] - dot)"),
    "attention without P": ("P_row[j] * (dS_row[j] - dot)", "(dS_row[j] - dot)"),
    "attention, lse": ("P_row[j] * scale - lse_row)",
                       "P_row[j] * scale - 0.9 * lse_row)"),
    "attention, dQ from V": ("dS, qkv[k0:t1, k:k + D])", "dS, qkv[k0:t1, v:v + D])"),
    "attention, dK from K": ("(dk, dS, qkv[t0:t1, q:q + D]", "(dk, dS, qkv[t0:t1, k:k + D]"),
    "attention, dV from dS": ("(dv, P, do", "(dv, dS, do"),
    "attention, dV not summed": ("add_transposed_product(dv, P,", "tiled_matmul(dv, P.T,"),
    "attention, dK not summed": ("add_transposed_product(dk, dS,", "tiled_matmul(dk, dS.T,"),
    "attention, not causal": ("dS_row[j] = 0", "dS_row[j] = 1"),
    "attention, a longer window": ("range(t - k0 + 1 - window)", "range(t - k0 - window)"),
    "bias, one row alone": ("dbias[c] += row[c]", "dbias[c] = row[c]"),
    "bias, other columns": ("d.qkv[b, l], c0)", "d.qkv[b, l], 0)"),
    "head norm without the mean": ("- value(x[i]) * mean)", ")"),
    "head norm, the keys' gain from the queries": ("q_gain if h < H else k_gain", "q_gain"),
    "head gain without rstd": ("dgain[i] += dy[i] * value(x[i]) * r",
                               "dgain[i] += dy[i] * value(x[i])"),
    "head gain of the other heads": ("qk, rstd, H, H + G, D, i0)", "qk, rstd, 0, H, D, i0)"),
    "head gain, other entries": ("h * D + i0", "h * D"),
    "norms of heads before RoPE's gradient": ("if p.q_norm.size:                    # norms",
                                              "if False:                            # norms"),
    # with one of the two features, where a test of both would find nothing
    "biases learn only beside norms": (
        "if p.qkv_bias.size:\n            for c0",
        "if p.qkv_bias.size and p.q_norm.size:\n            for c0"),
    "norms learn only beside biases": ("if p.q_norm.size:                    # norms",
                                       "if p.q_norm.size and p.qkv_bias.size:  # norms"),
    "the gradient without a window": ("c.D, c.window, len(o)", "c.D, len(o), len(o)"),
    "swiglu, gate": ("sigma * (one + z * (one - sigma))", "sigma * (one + z * sigma)"),
    "swiglu, up": ("rounded(row[f] * z * sigma", "rounded(row[f] * sigma"),
    "cross-entropy without the target": ("row[y] -= scale", "row[y] -= 0"),
    "cross-entropy without the weight": ("norm = scale / total", "norm = 1 / total"),
    "cross-entropy, masked rows": ("row[:] = 0\n            continue", "continue"),
    "matmul_add without base": ("tile(rows, added, left, b, m, j, 1)",
                                "tile(rows, added, left, b, m, j, 0)"),
    "weight gradient, block edge": ("t_end = min(T, t + KC)", "t_end = min(T, t + KC - 1)"),
    "weight gradient, last block": ("for t in range(0, T, KC)", "for t in range(0, T - KC, KC)"),
    "weight gradient, other rows": ("dy[b, t:t_end, n0 + n:n0 + n_end]", "dy[b, t:t_end, n:n_end]"),
    "weight gradient overwrites": ("left, right, 0, j, 1)", "left, right, 0, j, 0)"),
    "last rows of a matrix": ("min(n + NB, N)", "min(n + NB, N - 1)"),
    "attn_proj from the wrong step": ("d.x[:, 2 * l + 1], a.att[:, l]",
                                      "d.x[:, 2 * l + 2], a.att[:, l]"),
    "down from the wrong step": ("d.x[:, 2 * l + 2], a.swiglu", "d.x[:, 2 * l + 1], a.swiglu"),
    "heads after the first ignored": ("in range(batch.n_outputs):\n            tiled_matmul_add(dy",
                                      "in range(1):\n            tiled_matmul_add(dy"),
    "adjoint of the wrong step": ("rmsnorm_backward(dx, dx1, dnorm",
                                  "rmsnorm_backward(dx, d.x[b, 2 * l + 2, t0:t1], dnorm"),
    "norm gains not accumulated": ("gradient += row", "gradient[...] = row"),
    "tied head's gradient lost": ("p.wte if k < tied else p.lm_head[k - tied]",
                                  "p.lm_head[k - tied]"),
    "weight of the other heads": ("mtp_weight / (P - 1)", "mtp_weight / P"),
    "weights with one count": ("np.array(of_heads) / count", "np.array(of_heads) / count[0]"),
    "weights count masked targets": ("-1) >= 0).sum(1)", "-1) >= -1).sum(1)"),
    "dpo, sign of the rejected": ("np.stack((slope, -slope), 1)", "np.stack((slope, slope), 1)"),
    "dpo, chosen for rejected": ("np.stack((slope, -slope), 1)", "np.stack((-slope, slope), 1)"),
    "dpo, other side of the sigmoid": ("np.exp(-np.logaddexp(0, margin))",
                                       "np.exp(-np.logaddexp(0, -margin))"),
    "dpo without beta": ("slope = beta * np.exp", "slope = np.exp"),
    "dpo, not a mean": ("margin)) / len(margin)", "margin))"),
    "dpo without the reference": ("(reference - ce).reshape", "(0 - ce).reshape"),
    "rl, sign of the advantage": ("ratio * A) + kl", "-ratio * A) + kl"),
    "rl, clipped above only": ("ratio < 1 - clip)", "ratio < 0)"),
    "rl, clipped below only": ("np.where(A > 0, ratio > 1 + clip", "np.where(A > 0, ratio < 0"),
    "rl, both limits for any advantage": ("np.where(A > 0, ratio > 1 + clip, ratio < 1 - clip)",
                                          "(abs(ratio - 1) > clip)"),
    "rl, no clipping": ("np.where(is_clipped, 0.0, ratio * A)", "ratio * A"),
    "rl without the ratio": ("0.0, ratio * A)", "0.0, A)"),
    "rl, KL the other way round": ("d = reference - logp", "d = logp - reference"),
    "rl, sign of the KL": ("+ kl * (np.exp(d) - 1)", "- kl * (np.exp(d) - 1)"),
    "rl, estimator k1": ("+ kl * (np.exp(d) - 1)", "- kl"),
    "rl, the mask of the next token": ("np.where(is_answer, slope",
                                       "np.where(np.roll(is_answer, 1, 1), slope"),
    "rl, not a mean": ("slope, 0.0) / n", "slope, 0.0)"),
    "one weight for all sequences": ("weight[b, k, t0:t1])", "weight[0, k, t0:t1])"),
    "other heads weighed as head 0": ("weight[b, k, t0:t1])", "weight[b, 0, t0:t1])"),
    "weights of other tokens": ("weight[b, k, t0:t1])", "weight[b, k, :t1 - t0])"),
    "one weight for all tokens": ("dtype.type(weight[t])", "dtype.type(weight[0])"),
}


# Errors in Part I, for --plain: at least one in each op and in its gradient
PLAIN_MUTANTS = {
    "matmul, a weight left out": ("for k in range(x_row.size):\n                total",
                                  "for k in range(x_row.size - 1):\n                total"),
    "matmul_add without base": ("y_row[n] += base_row[n]", "y_row[n] += 0"),
    "matmul, dx overwrites": ("dx_row[k] += slope", "dx_row[k] = slope"),
    "matmul, dw overwrites": ("dw_row[k] += slope", "dw_row[k] = slope"),
    "matmul, dx not cleared": ("dx[:] = 0\n    matmul_backward_add", "matmul_backward_add"),
    "embedding of another token": ("wte[tokens[t]]\n        for c in range(row.size):\n"
                                   "            row[c] =",
                                   "wte[tokens[0]]\n        for c in range(row.size):\n"
                                   "            row[c] ="),
    "embedding overwrites": ("entry[c] += row[c]", "entry[c] = row[c]"),
    "rmsnorm, rstd not kept": ("rstd[t] = r\n        for c", "rstd[t] = 1\n        for c"),
    "rmsnorm without the mean": ("- x[t, c] * mean)", ")"),
    "rmsnorm, gain's gradient": ("dgain[c] += dy_row[c] * row[c] * r",
                                 "dgain[c] += dy_row[c] * row[c]"),
    "rope turns one entry": ("rounded(y * cos_t[i] + x * sine, hi)", "rounded(y * cos_t[i], hi)"),
    "rope turns on": ("cos, c.sin, H + G, c.cos.dtype.type(-1)",
                      "cos, c.sin, H + G, c.cos.dtype.type(1)"),
    "attention, not causal": ("range(max(0, t + 1 - window), t + 1):",
                              "range(max(0, t + 1 - window), T):"),
    "attention, a longer window": ("range(max(0, t + 1 - window)", "range(max(0, t - window)"),
    "attention, lse": ("lse[h, t] = m +", "lse[h, t] = 0.9 * m +"),
    "attention without its sum": ("ds = p * (dp - do_o)", "ds = p * dp"),
    "attention, dq from v": ("dq[i] += ds * k[i]", "dq[i] += ds * v[i]"),
    "attention, dk overwrites": ("dk[i] += ds", "dk[i] = ds"),
    "attention, dv from ds": ("dv[i] += p *", "dv[i] += ds *"),
    "swiglu, gate": ("sigma * (one + z * (one - sigma))", "sigma * (one + z * sigma)"),
    "swiglu, up": ("rounded(row[f] * z * sigma", "rounded(row[f] * sigma"),
    "cross-entropy without the target": ("row[y] -= scale", "row[y] -= 0"),
    "cross-entropy, of the next entry": ("of_target = row_max(row), row[y]",
                                         "of_target = row_max(row), row[y - 1]"),
    "bias of one row": ("dbias[c] += row[c]", "dbias[c] = row[c]"),
    "bias without its gradient": ("if p.qkv_bias.size:\n            add_bias_gradient",
                                  "if False:\n            add_bias_gradient"),
    "head norm without the mean": ("- value(x[i]) * mean)", ")"),
    "head gain of the queries alone": ("dgain = dq_gain if h < H else dk_gain", "dgain = dq_gain"),
    "forward, attention's residual": ("matmul_add(x1, x, a.att", "matmul_add(x1, 0 * x, a.att"),
    "backward, swiglu's residual": ("rmsnorm_backward(dx1, dx2, d.norm",
                                    "rmsnorm_backward(dx1, 0 * dx2, d.norm"),
    "backward, the wrong step": ("matmul_backward(d.att, g.attn_proj[l], dx1",
                                 "matmul_backward(d.att, g.attn_proj[l], dx2"),
    "heads after the first ignored": ("for k in range(n_outputs):               # the",
                                      "for k in range(1):                       # the"),
    "loss, one weight for all heads": ("targets[k], weight[k])", "targets[k], weight[0])"),
}


@pytest.fixture(scope="module")
def programs():
    """(a copy of nanoeuler.py with small blocks, check.py on tiny cases of it), not compiled."""
    ne, check = types.ModuleType("nanoeuler"), types.ModuleType("check")
    ne.__file__ = str(ROOT / "nanoeuler.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "DISABLE_JIT", 1)
        patch.setitem(sys.modules, "nanoeuler_parts", None)          # as if it were not there
        patch.setitem(sys.modules, "nanoeuler", ne)
        exec(compile(COPY, "nanoeuler.py", "exec"), vars(ne))
        exec(compile((ROOT / "check.py").read_text(encoding="utf-8"), "check.py", "exec"),
             vars(check))
    vars(ne).update((name, x) for name, x in vars(plain_parts).items() if name[0] != "_")
    ne.nanoeuler_parts = plain_parts
    ne.get_num_threads = lambda: 3           # so that there are parts, though one does them all
    small = dict(n_embd=6, n_hidden=5, head_dim=2, vocab_size=9, n_mtp=3, n_layer=1)
    check.CASES = [check.Case("untied", small, 6, (1, 1)),
                   check.Case("tied", {**small, "tie_embeddings": True}, 5, (2,)),
                   check.Case("preferences", small, 6, (1, 3), "pairs"),
                   check.Case("answers", small, 6, (1, 3), "answers"),
                   *(check.Case(name, {**small, "n_mtp": 1, "head_dim": D, **feature}, 6, (1, 1))
                     for name, D, feature in (("norms of q and k", 6, {"qk_norm": True}),
                                              ("biases", 2, {"qkv_bias": True}),
                                              ("a window", 2, {"window": 3}))),
                   check.Case("biases, norms of q and k, a window", {
                       **small, "head_dim": 6, "qkv_bias": True, "qk_norm": True, "window": 3,
                       "n_mtp": 1}, 6, (1, 1))]
    # An entry and a direction of each tensor: a wrong formula shows in any direction.
    check.ENTRIES, check.DIRECTIONS, check.SEEDS, check.set_num_threads = 1, 1, 1, lambda n: None
    return ne, check


def mutate(source, old, new):
    """Changes the last place: forward stands before backward."""
    assert old in source, f"nanoeuler.py has no {old!r} any more: adapt this mutant"
    i = source.rindex(old)
    return source[:i] + new + source[i + len(old):]


def small_blocks():
    source = SOURCE
    for old, new in BLOCKS:
        source = mutate(source, old, new)
    return source


def definitions(source):
    """The texts of its functions and classes, in order."""
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first, *_ = *(x.lineno for x in node.decorator_list), node.lineno
            yield "".join(lines[first - 1:node.end_lineno])


COPY = small_blocks()
DEFINITIONS = {"": [*definitions(COPY)],
               "--plain": [*definitions(SOURCE.split("# ======== Part II")[0])]}
OF_PREFERENCES, OF_ANSWERS = map(inspect.getsource, (dpo.dpo_loss, grpo.grpo_loss))


def run_check(monkeypatch, programs, *change, flag=""):
    """The exit code of check.py with this change of the last definition that can be changed so.
    Its cases one by one, up to the first that shows the error: the verdict is of the worst."""
    ne, check = programs
    before, cases = dict(vars(ne)), check.CASES
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr("nanoeuler_parts.kernels.compile_passes",
                        may_stay_idle(lambda dtype: None))
    try:
        if change and change[0] in OF_PREFERENCES:
            found = {"np": np}
            exec(compile(mutate(OF_PREFERENCES, *change), "dpo.py", "exec"), found)
            monkeypatch.setattr(dpo, "dpo_loss", found["dpo_loss"])
        elif change and change[0] in OF_ANSWERS:
            found = {"np": np}
            exec(compile(mutate(OF_ANSWERS, *change), "grpo.py", "exec"), found)
            monkeypatch.setattr(grpo, "grpo_loss", found["grpo_loss"])
        elif change:
            texts = [x for x in DEFINITIONS[flag] if change[0] in x]
            assert texts, f"nanoeuler.py has no {change[0]!r} any more: adapt this mutant"
            exec(compile(mutate(texts[-1], *change), "nanoeuler.py", "exec"), vars(ne))
        for check.CASES in ([case] for case in cases):
            if code := check.main([flag] if flag else []):
                return code
        return 0
    finally:
        check.CASES = cases
        vars(ne).update(before)


@pytest.mark.parametrize("flag", DEFINITIONS)
def test_unchanged_copy_passes(programs, monkeypatch, capsys, flag):
    _, check = programs
    assert run_check(monkeypatch, programs, flag=flag) == 0
    assert capsys.readouterr().out.count(">>> backward OK") == len(check.CASES)


@pytest.mark.parametrize("name", few(MUTANTS, 12))
def test_planted_error_is_found(name, programs, monkeypatch, capsys):
    assert run_check(monkeypatch, programs, *MUTANTS[name]) == 1
    assert ">>> backward WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", few(PLAIN_MUTANTS, 12))
def test_an_error_in_part_one_is_found(name, programs, monkeypatch, capsys):
    assert run_check(monkeypatch, programs, *PLAIN_MUTANTS[name], flag="--plain") == 1
    assert ">>> backward WRONG" in capsys.readouterr().out


def test_nan_is_an_error(programs, monkeypatch, capsys):
    old = "rounded(row[f] * z * sigma"
    assert run_check(monkeypatch, programs, old, "rounded(row[f] * z * math.nan") == 1
    assert run_check(monkeypatch, programs) == 0         # each leaves the copy as it was


def test_a_derivative_leaves_the_model_as_it_was():
    """Weights and their panels: what runs next must not see the last displacement."""
    rng = np.random.default_rng(1)
    model = ne.Model(check.BASE, check.random_params(check.BASE, rng))
    tokens, targets = check.random_batch(check.BASE, 2, 7, rng)
    before = [x.copy() for x in (model.flat, *model.w, *model.wt)]
    check.derivative(model, model.p.qkv, np.ones_like(model.p.qkv), tokens, targets, None)
    after = (model.flat, *model.w, *model.wt)
    assert all(np.array_equal(x, y) for x, y in zip(before, after))


@pytest.mark.parametrize("flags, cases", [
    (("--quick",), check.CASES[:1]), slow((), check.CASES), slow(("--plain",), check.CASES)],
    ids=["quick", "all", "plain"])
def test_every_gradient_of_every_case(flags, cases, tmp_path):
    """The compiled program, in the original's form: a line a tensor, the worst, the verdict."""
    said = ok(nanoeuler("--seed", "1", *flags, program="check.py", cwd=tmp_path))
    errors = [float(s) for s in re.findall(r"^  \w[\w. ]*: max rel err (\S+)$", said, re.M)]
    present = sum(x.start < x.end for case in cases
                  for x in ne.param_table(replace(check.BASE, **case.changes)))
    of_heads = len(re.findall(r"heads 1..", said))
    assert len(errors) == present + of_heads and bool(of_heads) == (cases == check.CASES)
    assert max(errors) < 1e-6
    assert float(re.search(r"^max relative error: (\S+)", said, re.M)[1]) == max(errors)
    assert said.rstrip().endswith(">>> backward OK (error < 1e-6)")
