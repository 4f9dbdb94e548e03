"""The table of an adapter: which matrices A and B it has, and where they lie in its flat buffer."""
import math
from collections import namedtuple
from typing import NamedTuple

import numpy as np

from nanoeuler import aligned, dims_of, FILE_NAMES, need_setting, slices

# The projections that an adapter may change, in the order in which the matrices of a layer are
# stacked: {name on the command line: (matrix of Params, name in a Llama)}
PROJECTIONS = {"q": ("qkv", "self_attn.q_proj"), "k": ("qkv", "self_attn.k_proj"),
               "v": ("qkv", "self_attn.v_proj"), "o": ("attn_proj", "self_attn.o_proj"),
               "gate": ("gate_up", "mlp.gate_proj"), "up": ("gate_up", "mlp.up_proj"),
               "down": ("down", "mlp.down_proj")}
MATRICES = "qkv", "attn_proj", "gate_up", "down"         # of a layer, with projections stacked
assert [x for m in MATRICES for _, x, _ in FILE_NAMES[m]] == [x for _, x in PROJECTIONS.values()]
MOST_RANK = 1024

class Lora(NamedTuple):
    """The settings of an adapter.  targets: names of the projections that learn"""
    rank: int
    alpha: float
    targets: tuple = tuple(PROJECTIONS)

    @property
    def scale(self):
        """s = alpha / r, the factor of (x A^T) B^T"""
        return self.alpha / self.rank

def targets_in(text):
    """The targets in a text such as "q,v", in the order of PROJECTIONS"""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PROJECTIONS]
    need_setting(not unknown, "lora_targets", f"expected projections among "
                 f"{', '.join(PROJECTIONS)}, with commas between them, found "
                 f"{', '.join(unknown).replace('{', '').replace('}', '')!r:.60}")
    return tuple(name for name in PROJECTIONS if name in names)

class Site(NamedTuple):
    """Where a projection lies in the matrices of a layer"""
    name: str                # key of PROJECTIONS
    matrix: str              # field of Params: the stacked matrix W
    rows: tuple              # its rows in W (N, K): first and end
    columns: tuple           # its columns in x A^T of the stacked A: first and end

def sites_of(cfg, rank):
    """{name: Site} of the seven projections.  A of a stacked matrix has r rows for each of its
    projections, and B (N, r) has the rows of W."""
    size, sites = dims_of(cfg), {}
    n_rows = {"q": size.HD, "k": size.G * size.D, "v": size.G * size.D, "o": size.C,
              "gate": size.F, "up": size.F, "down": size.C}
    row, column = dict.fromkeys(MATRICES, 0), dict.fromkeys(MATRICES, 0)
    for name, (matrix, _) in PROJECTIONS.items():
        rows = row[matrix], row[matrix] + n_rows[name]
        columns = column[matrix], column[matrix] + rank
        sites[name] = Site(name, matrix, rows, columns)
        row[matrix], column[matrix] = rows[1], columns[1]
    return sites

def shape_of(cfg, matrix):
    """(N, K) of a stacked matrix of one layer"""
    size = dims_of(cfg)
    return {"qkv": (size.QKV, size.C), "attn_proj": (size.C, size.HD),
            "gate_up": (2 * size.F, size.C), "down": (size.C, size.F)}[matrix]

# The tensors of an adapter, of all layers: A and B of each stacked matrix.  A projection that is no
# target has zeros, which stay zeros.
Adapter = namedtuple("Adapter", [f"{m}_{x}" for m in MATRICES for x in "ab"])

def adapter_shapes(cfg, rank):
    """A (L, n r, K) of n stacked projections, and B (L, N, r)"""
    shapes, sites = {}, sites_of(cfg, rank).values()
    for matrix in MATRICES:
        N, K = shape_of(cfg, matrix)
        n = sum(site.matrix == matrix for site in sites)
        shapes[f"{matrix}_a"] = cfg.n_layer, n * rank, K
        shapes[f"{matrix}_b"] = cfg.n_layer, N, rank
    return Adapter(**shapes)

def adapter_views(cfg, rank, flat):
    """The Adapter in a flat buffer"""
    return Adapter(*slices(flat, adapter_shapes(cfg, rank)))

def n_entries(cfg, rank):
    """The length of an adapter's flat buffer"""
    return sum(map(math.prod, adapter_shapes(cfg, rank)))

def n_trained(cfg, lora):
    """The number of parameters that learn: those of the targets"""
    total = 0
    for name, site in sites_of(cfg, lora.rank).items():
        if name in lora.targets:
            _, K = shape_of(cfg, site.matrix)
            total += lora.rank * (K + site.rows[1] - site.rows[0])
    return total * cfg.n_layer

def tensors_of(cfg, lora, flat):
    """{name: (A (L, r, K), B (L, N, r))} of the targets, views of the flat buffer"""
    adapter, found = adapter_views(cfg, lora.rank, flat), {}
    for name in lora.targets:
        site = sites_of(cfg, lora.rank)[name]
        a, b = (getattr(adapter, f"{site.matrix}_{x}") for x in "ab")
        found[name] = a[:, slice(*site.columns)], b[:, slice(*site.rows)]
    return found

def init_adapter(cfg, lora, seed, dtype=np.float32):
    """A fresh flat buffer: A uniform in (-1 / sqrt(K), 1 / sqrt(K)), as in PEFT, and B zero"""
    rng = np.random.default_rng(seed)
    flat = aligned((n_entries(cfg, lora.rank),), dtype)
    for a, _ in tensors_of(cfg, lora, flat).values():
        bound = 1 / math.sqrt(a.shape[2])
        a[...] = rng.uniform(-bound, bound, a.shape)
    return flat

def first_bad_entry(cfg, rank, flat, g_flat):
    """The first entry of an adapter or its gradient that is not finite, in words"""
    for kind, x in ("parameter", flat), ("gradient of parameter", g_flat):
        for name, x in adapter_views(cfg, rank, x)._asdict().items():
            finite = np.isfinite(x)
            if not finite.all():
                at = tuple(int(i) for i in np.unravel_index(finite.argmin(), x.shape))
                return f"{kind} {name}{list(at)} is {x[at]}"
    return "the loss is not finite"

def delta_of(a, b, scale):
    """s B A (N, K), which an adapter adds to W     a (r, K), b (N, r)"""
    with np.errstate(over="ignore", invalid="ignore"):   # who samples from the logits reports it
        return np.float32(scale) * (b @ a)
