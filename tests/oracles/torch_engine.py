"""The model in PyTorch as an engine that whole runs train, and its greedy decoder."""
import functools
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F

import nanoeuler as ne

from .torch_peer import Peer, make_optimizer, peer_config


def summed_ce(net, tokens, targets):
    """CE summed over each row (B, P), nats.     tokens (B, T), targets (P, B, T), -1: none"""
    (B, T), P = tokens.shape, len(targets)
    ce = F.cross_entropy(net.logits(tokens).flatten(0, 2), targets.permute(1, 2, 0).flatten(),
                         ignore_index=-1, reduction="none")
    return ce.view(B, T, P).sum(1)


class Twin:
    """The peer as an Engine (runs/engine.py), so that Run, SftRun and DpoRun train it.

    Options of the GPU program, which have a --matmul, put it on the GPU."""
    program = "bench/twin.py"
    talk = "chat"

    @staticmethod
    def ready(options=None):
        """Nothing: run_side has compiled the decoder's kernels."""

    def __init__(self, cfg, flat, moments=(), options=None):
        if cfg.tie_embeddings:
            raise ne.UserError("the twin has no tied embedding; start with a model without one")
        gpu = hasattr(options, "matmul")
        self.dtype = options.dtype if gpu else {4: "f32", 8: "f64"}[flat.itemsize]
        self.cfg = cfg
        self.place = torch.device("cuda" if gpu else "cpu")
        self.net = Peer(peer_config(cfg), torch.float64 if self.dtype == "f64" else torch.float32)
        self.load(flat, moments)
        self.net.to(self.place)
        self.cast = functools.partial(torch.autocast, self.place.type, torch.bfloat16,
                                      enabled=self.dtype == "bf16")
        self.summed_ce = summed_ce
        if gpu:
            self.summed_ce = torch.compile(summed_ce, fullgraph=True, dynamic=False)
        self.optimizer = make_optimizer(self.net)        # two groups: matrices, vectors
        self.ce = torch.zeros(cfg.n_mtp, dtype=torch.float64, device=self.place)
        self.is_weighted = np.zeros(cfg.n_mtp, bool)     # the heads with a weight since `update`

    def put(self, x, dtype=torch.int64):
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.place, dtype)

    def gradient(self, tokens, targets, weight):
        with self.cast():
            ce = self.summed_ce(self.net, self.put(tokens), self.put(targets))
        (ce * self.put(np.asarray(weight), ce.dtype)).sum().backward()
        self.ce += ce.detach().sum(0, dtype=torch.float64)
        self.is_weighted |= np.atleast_2d(weight).any(0)

    def load(self, flat, moments):
        """The optimizer wants to know the step beside the moments (m, v): they wait for the next
        update, whose hyper tells it."""
        self.net.load_numpy(ne.views(flat, ne.param_table(self.cfg))._asdict())
        self.moments = moments

    def restore(self, beta2, correct2):
        """Hands AdamW's moments to the optimizer, which counts steps t: correct2 = 1 - beta2^t."""
        steps = 1e6                          # so late that beta2^t is lost beside 1
        if correct2 != 1:
            steps = round(math.log(1 - correct2, beta2))
        tables = [ne.views(x, ne.param_table(self.cfg))._asdict() for x in self.moments]
        for name, (weights, _) in self.net.table().items():
            m, v = (self.put(x[name], weights[0].dtype).view(-1, *weights[0].shape)
                    for x in tables)
            for i, w in enumerate(weights):
                self.optimizer.state[w] = dict(
                    step=torch.tensor(steps - 1.0, device=self.place), exp_avg=m[i].clone(),
                    exp_avg_sq=v[i].clone())
        self.moments = ()

    def update(self, hyper):
        if self.moments:
            self.restore(hyper.beta2, hyper.correct2)
        ce = self.ce.cpu().numpy().copy()
        weights = list(self.net.parameters())
        norms = torch.stack([torch.linalg.vector_norm(w.grad, dtype=torch.float64)
                             for w in weights])          # in float32 it is 3e-5 off on the CPU
        norm = norms.norm().item()
        self.ce.zero_()
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(weights, hyper.clip, norms.norm())
            for group, wd in zip(self.optimizer.param_groups, (hyper.weight_decay, 0.0)):
                group.update(lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps,
                             weight_decay=wd)
            before = [x.clone() for x in self.of_heads()]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.undo_heads_off(before)
        self.is_weighted[:] = False
        return ce, norm

    def of_heads(self):
        """The matrix of all heads (P * V, C), and its moments if it has any"""
        w = self.net.lm_head.weight
        state = self.optimizer.state.get(w, {})
        return [w.detach(), *(state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)]

    def undo_heads_off(self, before):
        """Auxiliary heads without a weight stay as they were, where PyTorch lets them decay."""
        V = self.cfg.vocab_size
        for k in np.flatnonzero(~self.is_weighted):
            for i, x in enumerate(self.of_heads()):
                rows = x[k * V:(k + 1) * V]
                if k > 0 and i < len(before):
                    rows.copy_(before[i][k * V:(k + 1) * V])
                elif k > 0:                  # the first step made the moments
                    rows.zero_()

    @torch.no_grad()
    def losses(self, tokens, targets):
        with self.cast():
            logits = F.linear(self.net.trunk(self.put(tokens)),
                              self.net.head0())
            ce = F.cross_entropy(logits.flatten(0, 1), self.put(targets).flatten(),
                                 ignore_index=-1, reduction="none")
        return ce.view(tokens.shape).sum(1, dtype=torch.float64).cpu().numpy()

    def micro_batch(self, B, asked=None, T=None):
        return asked or B

    def gathered(self, of):
        """(N,) of(weight) of every weight, in the order of the flat buffer."""
        table = self.net.table()
        parts = []
        for x in ne.param_table(self.cfg):
            weights, _ = table.get(x.name, ([], ()))     # the model may not have it
            parts += [of(w).detach().flatten() for w in weights]
        return torch.cat(parts).cpu().numpy()

    def weights(self):
        return self.gathered(lambda w: w)

    def buffers(self):
        if self.moments:                     # no update has handed them over yet
            return [self.weights(), *self.moments]
        state = self.optimizer.state

        def moment(name):                    # zeros before the first step
            return self.gathered(lambda w: state[w].get(name, torch.zeros_like(w)))

        return [self.weights(), moment("exp_avg"), moment("exp_avg_sq")]

    def decoder(self):
        program = sys.modules["nanoeuler_cuda"] if self.place.type == "cuda" else ne
        return program.Decoder(self.cfg, self.weights())

    def device(self):
        name = f"{torch.get_num_threads()} threads"
        if self.place.type == "cuda":
            name = torch.cuda.get_device_name()
        return f"PyTorch {torch.__version__}, {name}, {self.dtype}"

    def first_bad_tensor(self):
        for name, w in self.net.named_parameters():
            for what, x in (("parameter", w), ("gradient", w.grad)):
                if x is not None and not x.isfinite().all():
                    return f"{what} {name} is not finite"
        return "the loss is not finite"


@torch.inference_mode()
def replies(net, prompts, stop):
    """The likeliest continuation of each prompt (ids), up to and with `stop`, or to a full context.

    Position t of every row is read at once, a token of the prompt or the row's own: no padding."""
    T = net.cfg.seq_len
    place = net.cos.device
    ids = torch.full((len(prompts), T + 1), -1)          # -1: nothing is there yet
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.as_tensor(prompt)
    ids = ids.to(place)
    start = torch.tensor([len(prompt) for prompt in prompts], device=place)
    shape = len(prompts), net.cfg.n_kv_head, T, net.cfg.head_dim
    cache = [[torch.zeros(shape, dtype=net.cos.dtype, device=place) for _ in "kv"]
             for _ in net.blocks]
    for t in range(T):
        x = net.wte(ids[:, t:t + 1])
        for block, (kc, vc) in zip(net.blocks, cache):
            q, k, v = block.attn.qkv_heads(block.attn_norm(x), net.cos[t:t + 1], net.sin[t:t + 1])
            kc[:, :, t], vc[:, :, t] = k[:, :, 0], v[:, :, 0]
            q = q[:, :, 0].unflatten(1, (net.cfg.n_kv_head, -1)) / math.sqrt(net.cfg.head_dim)
            y = (q @ kc[:, :, :t + 1].mT).softmax(-1) @ vc[:, :, :t + 1]         # no copy of k, v
            x = x + block.attn.proj(y.flatten(1)[:, None])
            x = x + block.mlp(block.mlp_norm(x))
        likeliest = F.linear(net.final_norm(x[:, 0]), net.head0())
        own = t + 1 >= start                 # rows that are past their prompt
        ids[own, t + 1] = likeliest.argmax(-1)[own]
        ended = (ids == stop) & (torch.arange(T + 1, device=place) >= start[:, None])
        if ended.any(1).all():
            break
    out = []
    for row, prompt in zip(ids.tolist(), prompts):
        reply = row[len(prompt):]
        if stop in reply:
            out.append(reply[:reply.index(stop) + 1])
        else:
            out.append([i for i in reply if i >= 0])
    return out
