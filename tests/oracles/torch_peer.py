"""The same model in plain PyTorch: the peer of every benchmark and the second opinion of the tests.

Decoder-only, pre-norm RMSNorm, half-split RoPE, grouped-query attention, SwiGLU, no biases, P
output heads in one matrix, of which the first may be tied to the embedding; optional norms of q and
k.  Written as its own experts would: fused projections, SDPA,
fused AdamW, torch.compile around the loss; on a GPU bfloat16 autocast over float32 weights and, if
asked for, the whole step in one CUDA graph.  Parameters come and go as NumPy arrays under the names
of nanoeuler's param_table, so that both programs can start from one state and compare gradients.

Shapes: B batch, T time, C n_embd, H n_head, G n_kv_head, D head_dim, F n_hidden, V vocab, P n_mtp.
"""
import contextlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class PeerConfig:
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int = 2
    head_dim: int = 32
    n_layer: int = 4
    seq_len: int = 128
    vocab_size: int = 512
    n_hidden: int = 344
    n_mtp: int = 4
    mtp_weight: float = 0.3
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False


PRESETS = {"small": PeerConfig(),
           "big": PeerConfig(n_embd=320, n_head=10, n_kv_head=5, n_layer=8, seq_len=256,
                             n_hidden=856)}


ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer_config(cfg):
    """A PeerConfig from any object that carries the same field names (nanoeuler.Config does)."""
    names = PeerConfig.__dataclass_fields__
    return PeerConfig(**{k: getattr(cfg, k) for k in names if hasattr(cfg, k)})


def apply_rope(x, cos, sin):
    """x (B, heads, T, D), the pair (i, i + D/2) turned by +angle; cos, sin (T, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.H, self.G, self.D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.qkv = nn.Linear(cfg.n_embd, (self.H + 2 * self.G) * self.D, bias=False)
        self.proj = nn.Linear(self.H * self.D, cfg.n_embd, bias=False)
        norm = nn.RMSNorm if cfg.qk_norm else lambda *args, **kwargs: nn.Identity()
        self.q_norm, self.k_norm = (norm(self.D, eps=cfg.norm_eps) for _ in "qk")
        self.sdpa = False                    # in `decode`

    def qkv_heads(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).transpose(1, 2).split(
            (self.H, self.G, self.G), dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def forward(self, x, cos, sin):
        q, k, v = self.qkv_heads(x, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def decode(self, x, cos, sin, kc, vc, pos, mask):
        """A token of each of B texts, all at position pos, x (B, 1, C).  kc, vc (B, G, T, D) are
        written there; mask (T,) has t <= pos.

        Written out, not SDPA: Inductor fuses it, which measured 5-25 % faster for one query."""
        q, k, v = self.qkv_heads(x, cos, sin)
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        B = len(x)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, kc, vc, attn_mask=mask[None], enable_gqa=True)
            return self.proj(y.reshape(B, 1, -1))
        q = q.view(B * self.G, -1, 1, self.D)                # the queries that share a key head
        s = (q * kc.view(B * self.G, 1, -1, self.D)).sum(-1) / math.sqrt(self.D)
        p = s.masked_fill(~mask, -math.inf).softmax(-1)
        y = (p[..., None] * vc.view(B * self.G, 1, -1, self.D)).sum(-2)
        return self.proj(y.view(B, 1, -1))

    def prompt(self, x, cos, sin, kc, vc):
        """forward, which leaves keys and values in the cache"""
        q, k, v = self.qkv_heads(x, cos, sin)
        kc[:, :, :x.shape[1]] = k
        vc[:, :, :x.shape[1]] = v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_up = nn.Linear(cfg.n_embd, 2 * cfg.n_hidden, bias=False)
        self.down = nn.Linear(cfg.n_hidden, cfg.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.attn = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))

    def decode(self, x, *state):
        x = x + self.attn.decode(self.attn_norm(x), *state)
        return x + self.mlp(self.mlp_norm(x))

    def prompt(self, x, *state):
        x = x + self.attn.prompt(self.attn_norm(x), *state)
        return x + self.mlp(self.mlp_norm(x))


class Peer(nn.Module):
    def __init__(self, cfg, dtype=torch.float32, seed=0, residual=None):
        """residual: the type of the residual stream, where it is not that of the weights"""
        super().__init__()
        self.cfg = cfg
        self.residual = residual or dtype
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.final_norm = nn.RMSNorm(cfg.n_embd, eps=cfg.norm_eps)
        self.untied = cfg.n_mtp - cfg.tie_embeddings         # heads in lm_head
        self.lm_head = None
        if self.untied:
            self.lm_head = nn.Linear(cfg.n_embd, self.untied * cfg.vocab_size, bias=False)
        self.to(dtype)
        pair = torch.arange(0, cfg.head_dim, 2, dtype=torch.float64)
        freq = cfg.rope_theta ** (-pair / cfg.head_dim)
        angle = torch.outer(torch.arange(cfg.seq_len, dtype=torch.float64), freq)
        self.register_buffer("cos", angle.cos().to(dtype))
        self.register_buffer("sin", angle.sin().to(dtype))
        gen = torch.Generator(self.wte.weight.device).manual_seed(seed)
        out_std = 0.02 / math.sqrt(2 * cfg.n_layer)
        for name, w in self.named_parameters():
            if w.dim() == 2:
                writes = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(w, std=out_std if writes else 0.02, generator=gen)

    def trunk(self, idx):
        T = idx.shape[1]
        x = self.wte(idx).to(self.residual)  # autocast leaves what an embedding returns as it is
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.final_norm(x)

    def logits(self, idx):
        """idx (B, T) -> logits of all heads (B, T, P, V)."""
        x = self.trunk(idx)
        if not self.cfg.tie_embeddings:
            logits = self.lm_head(x)
        elif self.untied:
            logits = torch.cat([F.linear(x, self.wte.weight), self.lm_head(x)], dim=-1)
        else:
            logits = F.linear(x, self.wte.weight)
        return logits.view(*idx.shape, self.cfg.n_mtp, -1)

    def forward(self, idx, targets):
        """Loss: CE of head 0 + mtp_weight * mean of the others' CE, each over its valid targets.

        idx (B, T), targets (P, B, T) with -1 where there is none."""
        P, V = self.cfg.n_mtp, self.cfg.vocab_size
        want = targets.permute(1, 2, 0).reshape(-1)      # (B, T, P), as the logits are
        ce = F.cross_entropy(self.logits(idx).view(-1, V), want, ignore_index=-1, reduction="none")
        count = (want.view(-1, P) >= 0).sum(0).clamp(min=1)
        ce = ce.view(-1, P).sum(0) / count               # (P,) means
        if P == 1:
            return ce[0]
        return ce[0] + self.cfg.mtp_weight * ce[1:].mean()

    def decode(self, idx, pos, cache):
        """idx (B, 1), pos (1,) -> the greedy next tokens (B, 1); writes the cache."""
        cos, sin = self.cos[pos], self.sin[pos]
        mask = torch.arange(self.cfg.seq_len, device=pos.device) <= pos
        x = self.wte(idx)
        for block, (kc, vc) in zip(self.blocks, cache):
            x = block.decode(x, cos, sin, kc, vc, pos, mask)
        return self.greedy(x)

    def prompt(self, idx, cache):
        """idx (B, T) from position 0 on -> the greedy next tokens (B, 1); writes the cache."""
        x, T = self.wte(idx), idx.shape[1]
        for block, (kc, vc) in zip(self.blocks, cache):
            x = block.prompt(x, self.cos[:T], self.sin[:T], kc, vc)
        return self.greedy(x[:, -1:])

    def greedy(self, x):
        return F.linear(self.final_norm(x), self.head0()).argmax(-1)

    def head0(self):
        """The matrix (V, C) of output head 0"""
        return (self.wte if self.cfg.tie_embeddings else self.lm_head).weight[:self.cfg.vocab_size]

    def new_cache(self, batch=1):
        """[(keys, values)] of the layers, each (batch, G, T, D).  All are tensors of their own: of
        views of one tensor, Inductor would copy the whole at every write."""
        c = self.cfg
        empty = self.cos.new_zeros((batch, c.n_kv_head, c.seq_len, c.head_dim))
        return [tuple(empty.clone() for _ in "kv") for _ in range(c.n_layer)]

    # ---- parameters and gradients as the nine arrays of nanoeuler.param_table
    def table(self):
        """name -> (torch parameters that make it up, shape as one array)."""
        c, b = self.cfg, self.blocks
        per_layer = {"qkv": [x.attn.qkv.weight for x in b],
                     "attn_proj": [x.attn.proj.weight for x in b],
                     "gate_up": [x.mlp.gate_up.weight for x in b],
                     "down": [x.mlp.down.weight for x in b],
                     "attn_norm": [x.attn_norm.weight for x in b],
                     "mlp_norm": [x.mlp_norm.weight for x in b]}
        if c.qk_norm:
            per_layer |= {"q_norm": [x.attn.q_norm.weight for x in b],
                          "k_norm": [x.attn.k_norm.weight for x in b]}
        table = {k: (ws, (c.n_layer, *ws[0].shape)) for k, ws in per_layer.items()}
        table["wte"] = [self.wte.weight], (c.vocab_size, c.n_embd)
        if self.untied:
            table["lm_head"] = [self.lm_head.weight], (self.untied, c.vocab_size, c.n_embd)
        table["final_norm"] = [self.final_norm.weight], (c.n_embd,)
        return table

    @torch.no_grad()
    def load_numpy(self, arrays):
        """Copies a dict of arrays (wte, qkv, attn_proj, ...) in; names and shapes must fit.  Empty
        arrays, of tensors that the model does not have, are ignored."""
        table = self.table()
        arrays = {name: x for name, x in arrays.items() if x.size}
        if set(arrays) != set(table):
            raise ValueError(f"parameters {sorted(arrays)}, expected {sorted(table)}")
        for name, (weights, shape) in table.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}, expected {shape}")
            source = torch.tensor(np.ascontiguousarray(arrays[name]))
            for w, s in zip(weights, source.view(len(weights), *weights[0].shape)):
                w.copy_(s)
        return self

    def numpy_params(self):
        return {name: torch.stack([w.detach() for w in ws]).reshape(shape).cpu().numpy()
                for name, (ws, shape) in self.table().items()}

    def numpy_grads(self):
        return {name: torch.stack([w.grad for w in ws]).reshape(shape).cpu().numpy()
                for name, (ws, shape) in self.table().items()}


def make_optimizer(model, lr=3e-3, weight_decay=0.1):
    """AdamW in one fused kernel per tensor; decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=weight_decay),
              dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True,
                             capturable=matrices[0].is_cuda)


def make_step(model, compiled=True, bf16=False, lr=3e-3, mode=None, attention=None):
    """step(idx, targets) -> loss tensor: forward, backward, clip to norm 1, AdamW.

    mode is torch.compile's; attention: a name of ATTENTION, else SDPA chooses.  Nothing here waits
    for the device."""
    opt = make_optimizer(model, lr)
    loss_of = torch.compile(model, fullgraph=True, dynamic=False, mode=mode) if compiled else model
    params = list(model.parameters())
    device = params[0].device.type

    def step(idx, targets):
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with contextlib.ExitStack() as inside:
            if bf16:
                inside.enter_context(torch.autocast(device, torch.bfloat16))
            if attention:
                inside.enter_context(sdpa_kernel(ATTENTION[attention]))
            loss = loss_of(idx, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def captured(call, stream):
    """call() recorded as a CUDA graph: replay(), which does on the device what call() did.  replay
    returns the very tensors that call returned when it was recorded, with new numbers in them.

    The addresses are recorded, too: what call reads must stay where it is.  If call has a backward
    pass, its forward pass must have run on the same stream, best inside call.
    stream: one besides the current, as a graph cannot be recorded on the default stream"""
    current = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    current.wait_stream(stream)
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = call()
    finally:
        torch.cuda.set_stream(current)       # a capture that fails leaves the other one

    def replay(kept=call):                   # what call reads lives as long as its graph
        graph.replay()
        return out

    return replay


def make_decoder(model, compiled=True):
    """decode(idx, pos) -> greedy next token, all (1, 1) / (1,) tensors; the cache is static."""
    cache = model.new_cache()
    one = torch.compile(model.decode, fullgraph=True, dynamic=False) if compiled else model.decode

    def decode(idx, pos):
        with torch.inference_mode():
            return one(idx, pos, cache)

    return decode
