"""Settings of a reply: how tokens are sampled, and how many."""
from dataclasses import dataclass, field

from nanoeuler import MOST_DRAFTS
from nanoeuler_parts.checkpoint.state import need_thinking
from nanoeuler_parts.files.settings import need_setting, setting, Settings
from nanoeuler_parts.flags import as_text

@dataclass
class Sampling(Settings):
    """How a text is sampled, and how long it may be."""
    temperature: float = setting(0.8, 0, 100, "sampling temperature, a divisor of the logits; 0: "
                                 "always the most probable token")
    top_k: int = setting(0, 0, 1 << 40, "top-k sampling: sample from the k most probable tokens; "
                         "0: all")
    top_p: float = setting(1.0, 0, 1, "nucleus sampling: keep the smallest set of tokens whose "
                           "total probability is at least p; 1: all")
    min_p: float = setting(0.0, 0, 1, "min-p sampling: drop tokens less probable than this "
                           "fraction of the most probable one's; 0: none")
    presence_penalty: float = setting(0.0, -100, 100, "presence penalty: subtracted from the "
                                      "logits of tokens that the reply contains; 0: none")
    frequency_penalty: float = setting(0.0, -100, 100, "frequency penalty: subtracted from a "
                                       "logit once per occurrence in the reply; 0: none")
    repeat_penalty: float = setting(1.0, 0.01, 100, "repeat penalty: divides the positive logits "
                                    "of recent tokens, prompt included, and multiplies their "
                                    "negative logits; 1: none")
    repeat_last_n: int = setting(64, -1, 1 << 40, "number of recent tokens that the repeat penalty "
                                 "affects; 0: none, -1: all")
    tokens: int = setting(200, 0, 1 << 40, "largest number of tokens in a reply")
    stop: list = field(default_factory=list, metadata={
        "help": "text that ends a reply and is left out of it; may be given several times"})
    logprobs: int = setting(0, 0, 1 << 20, "also report the log-probabilities of the n most "
                            "probable tokens at each position; 0: none")
    speculate: int = setting(-1, -1, MOST_DRAFTS, "speculative decoding: number of draft tokens "
                             "per step, which do not change the text; 0: off; -1: chosen by "
                             "measurement")
    n: int = setting(1, 1, 1 << 16, "number of replies per prompt; in the terminal, a numbered "
                     "line precedes each of several")
    seed: int = setting(1, 0, 1 << 60, "random seed of the sampling")
    json_schema: str = setting("", 0, 0, "JSON mode: the reply fits the JSON schema in this file; "
                               "object: it is any JSON object; empty: off")
    weights: str = setting("", 0, 0, "format of the weights in memory: f32, bf16, or on the CPU "
                           "int8; empty: f32, on a GPU bf16 if supported")
    template: str = setting("", 0, 0, "chat template: alpaca or chatml; empty: the model's own")
    thinking: str = setting("", 0, 0, "on or off, for models that think before they answer, as "
                            "Qwen3 does; empty: the default of the chat template")

    def check(self):
        super().check()
        need_setting(all(isinstance(text, str) and text and text == as_text(text)
                         for text in self.stop), "stop",
                     f"expected non-empty texts, found {self.stop}")
        need_thinking(self.thinking)
        return self

    @property
    def penalizes(self):
        """Do penalties change the logits?"""
        return bool(self.presence_penalty or self.frequency_penalty or self.repeat_penalty != 1)

@dataclass
class ChatSampling(Sampling):
    """How answers are sampled in a chat: at a lower temperature, which makes fewer mistakes
    (bench/NOTES.md) but still varies the answers"""
    temperature: float = setting(0.5, 0, 100, "sampling temperature, a divisor of the logits; 0: "
                                 "always the most probable token")
    n: int = setting(1, 1, 1)                # a chat has one answer, without log-probabilities
    logprobs: int = setting(0, 0, 0)
    json_schema: str = setting("", 0, 0)
