"""State: what a checkpoint stores besides the configuration, the tokenizer and the numbers."""
import math
from dataclasses import dataclass, field, replace

from bpe import need
from nanoeuler_parts.files.settings import need_setting, Settings

def need_thinking(value):
    need_setting(value in ("", "on", "off"), "thinking", f"expected on or off, found {value}")

# ---- a run's state, its tensors and moments
@dataclass
class State(Settings):
    """Everything that a checkpoint stores besides configuration, tokenizer, weights and moments."""
    kind: str = "base"         # "chat" after fine-tuning
    template: str = ""         # chat template, in Jinja; empty: Alpaca's
    bos: str = ""              # names of the tokens that begin and end a text
    eos: str = "</s>"
    stops: list = field(default_factory=list)  # names of further tokens that end an answer
    thinking: str = ""         # on or off: passed to the chat template as enable_thinking
    weights: str = ""          # format in memory while decoding, unless --weights is given
    step: int = 0
    n_steps: int | None = None         # of the whole run; None: not planned yet
    tokens_seen: int = 0
    vocab_size: int | None = None      # --vocab-size of a run whose text has too few pairs for it
    micro_batch: int | None = None     # sequences per pass; the order of sums, and so the last
                                       # bits, may depend on it
    elapsed: float = 0.0       # seconds of training
    bits_per_byte: float | None = None         # of the latest validation
    best: float | None = None  # the lowest validation on ESTIMATE rows, and its step
    best_step: int = 0
    rewards: list = field(default_factory=list)        # rl: the held-out reward before the first
                               # step, and the highest one, both on ESTIMATE questions
    reward_sha256: str = ""    # rl: of the Python file of --reward
    mtp_phase: int = 0         # of the auxiliary heads: ON, OFF or ON_AGAIN
    log_sha256: str = ""       # of the first line of the run's log: `log_identity`
    text_sha256: str = ""      # of the training data; "" marks a fresh run, until `Run.__init__`
                               # has loaded the data
    source: str = ""           # name of the checkpoint that the run began with, and its digest
    source_sha256: str = ""
    options: dict = field(default_factory=dict)
    learned: list = field(default_factory=list)        # SHA-256 of the examples that earlier runs
                               # of sft and dpo trained this model on, the first run first
    rehearsed_sha256: str = "" # of the old examples of `--rehearse`
    own_answers: list = field(default_factory=list)    # [[question, input, answer]] of the model
                               # that the run began with, which are its old examples
    old_right: list = field(default_factory=list)      # numbers of the old questions that this
                               # model answered right
    old_known: list = field(default_factory=list)      # numbers of the old examples that this model
                               # knew, the only ones that are rehearsed
    reference: list = field(default_factory=list)      # dpo: -log ref of every response, float; a
                               # tensor of the file.  Older files have it in the JSON header

    def written(self):
        """{name: value} for the JSON header, which is limited to MAX_HEADER bytes.  The reference
        is left out, because it grows with the data."""
        values = super(State, replace(self, reference=[])).written()
        del values["reference"]
        return values

    def check(self):
        super().check()
        need(all(isinstance(name, str) for name in self.stops),
             f"stops: expected a list of names, found {self.stops}")
        need(all(isinstance(x, str) for x in self.learned),
             f"learned: expected a list of digests, found {self.learned!r:.60}")
        need(len(self.rewards) in (0, 2) and all(type(x) is float and math.isfinite(x)
                                                 for x in self.rewards),
             f"rewards: expected none or two numbers, found {self.rewards!r:.60}")
        need(all(isinstance(x, list) and len(x) == 3 and all(isinstance(text, str) for text in x)
                 for x in self.own_answers), "own_answers: expected a list of lists [question, "
             f"input, answer], found {self.own_answers!r:.60}")
        for name in ("old_right", "old_known"):
            numbers = getattr(self, name)
            need(all(type(x) is int and x >= 0 for x in numbers),
                 f"{name}: expected a list of whole numbers, found {numbers!r:.60}")
        need_thinking(self.thinking)
        texts = {name: getattr(self, name) for name in ("template", "bos", "eos")}
        for name, text in (texts | {f"stops[{i}]": x for i, x in enumerate(self.stops)}).items():
            need(text == text.encode(errors="replace").decode(),
                 f"{name} contains half of a surrogate pair, expected whole characters")
        return self
