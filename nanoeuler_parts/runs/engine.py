"""The interface of a model that can be trained."""
from typing import Protocol

from nanoeuler import Config

class Engine(Protocol):
    """The interface of a model that can be trained: Model of nanoeuler.py or nanoeuler_cuda.py.
    B sequences of T tokens, P = cfg.n_mtp heads, N parameters in the order of param_table."""
    cfg: Config
    program: str                             # the file with its command line
    talk: str                                # the verb of that file that talks to a trained model

    @staticmethod
    def ready(options=None):
        """Prepares the process; called before its first model is made.  options: those of the run,
        if there is one.  Invalid options are rejected."""

    def __init__(self, cfg, flat, moments=(), options=None):
        """flat (N,) float32.  moments: AdamW's (m, v), or () at the start.  options: the run's"""

    def micro_batch(self, B, asked=None, T=None):
        """The number of sequences that `gradient` takes at once: `asked`, or as many of B as suit
        the memory.  Each has T tokens, by default cfg.seq_len."""

    def gradient(self, tokens, targets, weight):
        """g += d(sum_bk weight[b, k] CE_bk)/dp.  Also adds CE to the losses that `update` returns.
        tokens (B, T) int32, targets (P, B, T) int32, -1 for none, weight (B, P) or (P,) float64, or
        (B, P, T) with a factor of its own for each token.
        It may return before the computation is done."""

    def update(self, hyper):
        """AdamW with this Hyper, and Muon for the matrices of the layers if hyper.muon_lr is not 0.
        The next `gradient` begins with zero gradients and losses.
        Returns the summed CE of each head since the last update, nats, (P,) float64, and |g|.  If
        |g| is not finite, p, m and v stay, and the caller may skip the step."""

    def losses(self, tokens, targets):
        """Summed CE of head 0 of each sequence, nats, (B,) float64
        tokens, targets (B, T) int32"""

    def token_losses(self, tokens, targets):
        """CE of head 0 at every token, nats, (B, T) float64, 0 where the target is -1
        tokens, targets (B, T) int32"""

    def buffers(self):
        """The arrays that a checkpoint stores: p, m, v, each (N,) float32 on the host"""

    def decoder(self):
        """A Decoder of the current parameters, with an empty KV cache"""

    def device(self):
        """The device and dtype of the computation, in words"""

    def first_bad_tensor(self):
        """The tensor of the last step that is not finite, in words"""
