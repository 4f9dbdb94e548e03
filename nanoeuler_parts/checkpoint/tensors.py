"""The tensors of a checkpoint: parameters and moments by their names in the file."""
import numpy as np

from nanoeuler import aligned, llama_tensors, muon_slice, n_params, slices

def tensor_shapes(cfg):
    """name -> shape of the tensors of a checkpoint, in buffer order"""
    return {x.name: x.shape for x in llama_tensors(cfg)}

def named(cfg, flat):
    """name -> view of the flat buffer"""
    shapes = tensor_shapes(cfg)
    return dict(zip(shapes, slices(flat, shapes.values()), strict=True))

def moment_shapes(cfg, optimizer):
    """name -> shape of the optimizer's moments.  AdamW keeps two numbers per parameter.  Muon keeps
    one per entry of its matrices, and leaves all other parameters to AdamW."""
    N, part = n_params(cfg), muon_slice(cfg)
    n = part.stop - part.start
    if optimizer == "muon":
        return {"muon.momentum": (n,), "adamw.m": (N - n,), "adamw.v": (N - n,)}
    return {"adamw.m": (N,), "adamw.v": (N,)}

def named_moments(cfg, optimizer, m, v):
    """name -> array of the moments m, v (N,).  Muon never writes its part of v, which stays zero
    and is not stored."""
    if optimizer == "muon":
        part = muon_slice(cfg)
        return {"muon.momentum": m[part], "adamw.m": np.delete(m, part),
                "adamw.v": np.delete(v, part)}
    return {"adamw.m": m, "adamw.v": v}

def read_moments(cfg, tensors):
    """(m, v), each (N,) float32, from the tensors of a checkpoint"""
    m, v = (aligned((n_params(cfg),), np.float32) for _ in range(2))
    of_adamw = np.ones(n_params(cfg), bool)
    if "muon.momentum" in tensors:
        part = muon_slice(cfg)
        m[part], of_adamw[part] = tensors["muon.momentum"], False
    m[of_adamw], v[of_adamw] = tensors["adamw.m"], tensors["adamw.v"]
    return m, v
