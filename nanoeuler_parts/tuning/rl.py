"""The verb `rl`: reinforcement learning on sampled answers, with a reward for each answer."""
import contextlib
import math
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from bpe import need, note
from nanoeuler import Epochs, generate_many, Reply, rng_of
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.chat.templates import chat_ids, ends_of
from nanoeuler_parts.checkpoint.bundled import model_path, shown_name
from nanoeuler_parts.checkpoint.file import read_checkpoint
from nanoeuler_parts.files.printing import counted, with_progress
from nanoeuler_parts.flags import out, RUN
from nanoeuler_parts.runs.data import DataSet, Validation
from nanoeuler_parts.runs.guards import need_data, need_source, NEW_RUN
from nanoeuler_parts.runs.options import options_class
from nanoeuler_parts.runs.run import ESTIMATE, Run
from nanoeuler_parts.runs.start import launch_any
from nanoeuler_parts.tuning.examples import (
    asked_in, columns_of, content_of, held_out, question_hash,
)
from nanoeuler_parts.tuning.grpo import advantages, grpo_loss
from nanoeuler_parts.tuning.rehearsal import AT_ONCE
from nanoeuler_parts.tuning.rewards import need_reward, read_for, Rewards
from nanoeuler_parts.tuning.sft import FEWEST_TO_HOLD_OUT, start_argument

class ChecksReward:
    """Settings whose `field` names columns of a question and its answer"""

    def check(self):
        super().check()
        columns_of(self.field, ["output"])
        need_reward(self.reward)
        return self

RlOptions = options_class("rl", ChecksReward)

class Question(NamedTuple):
    example: dict
    ids: list                                # the conversation up to the answer

class Answered(Reply):
    """A Reply that keeps the token that ended it"""
    last = None

    def append_token(self, token):
        self.last = token
        return super().append_token(token)

    @property
    def ids(self):
        """The sampled tokens, with the one that ended the answer"""
        return [*self.tokens, *([self.last] if self.finish == "stop" else [])]

class Samples(NamedTuple):
    """The answers of one batch that are learned from, B' rows of T tokens, the shortest first"""
    tokens: np.ndarray         # (B', T) int32
    targets: np.ndarray        # (P, B', T) int32: tokens of answers for head 0, else -1
    advantage: np.ndarray      # (B',) float64
    old: np.ndarray            # (B', T): -CE under the model that sampled them
    reference: np.ndarray      # (B', T): -CE under the model at step 0
    measures: dict             # of all B answers, for the log

HELD_OUT, LARGEST_SHARE = 30, 0.2     # questions held out by default, up to this share of all
WITHOUT_SIGNAL = 10      # batches in a row after which a note says that nothing is learned

class SampledBatches:
    """The rows that a run learns from, in place of `Prefetched`: answers that its model samples.
    They serve for --updates steps.  A run that resumes within a batch samples it again."""

    def __init__(self, run):
        self.run, self.number, self.samples = run, None, None

    def prepare(self, i, B):
        """Nothing: the next answers are those of the model after the next update."""

    def take(self, i, B):
        """tokens (B', T), targets (P, B', T) of the step of this run"""
        number = self.run.step // self.run.options.updates
        if number != self.number:
            self.number, self.samples = number, self.run.sample_batch(number)
        return self.samples.tokens, self.samples.targets

class BetweenBatches:
    """The signals so far.  It is true only when a batch of samples has had all its updates, so that
    a resumed run need not sample it again, with other parameters."""

    def __init__(self, run, caught):
        self.run, self.caught = run, caught

    def __bool__(self):
        return bool(self.caught) and self.run.ends_batch()

class RlRun(Run):
    """Reinforcement learning: the loop of `Run` on answers that the model itself samples.  A step
    is an update.  Each batch of answers serves for --updates of them."""
    verb, kind = "rl", "chat"
    Options = RlOptions
    begins_with, made_by, needs_chat = "nanoeuler_chat.bin", "sft", True
    only_teaches = "rl only strengthens answers that the model already gives sometimes"
    keeps_template = True
    row_unit = 1                             # the length of rows is a multiple of it
    line = ("reward {reward:.3f}  {length:.1f} tokens  KL {kl:.4f}  signal in {signal:.0%} of "
            "groups")

    @classmethod
    def need_data(cls, data, out):
        need_data(data, out)

    @classmethod
    def digest_of(cls, data, options):
        return content_of(data)[1]

    # ---- the data
    def read_data(self, start):
        """Reads the questions and the reward, and encodes the questions."""
        o, s = self.options, self.state
        self.path, self.rewards = self.data_file(), Rewards(o.reward)
        fresh = not s.text_sha256
        need(fresh or self.rewards.sha256 == s.reward_sha256, f"{o.reward} has changed since "
             f"{self.out} was started; restore it, or {NEW_RUN}")
        s.reward_sha256 = self.rewards.sha256
        if s.template == "alpaca":
            s.template = ""
        examples, self.digest, self.ignored = read_for(o.reward, self.path, o.field, o.ignore)
        self.same_data(self.digest)
        self.ends = ends_of(s, start.tokenizer)
        most, questions = start.cfg.seq_len - o.tokens, []
        for e in with_progress(examples, "encoding", noun="question"):
            questions.append(Question(e, [int(i) for i in chat_ids(
                s.template, asked_in(e), s, start.tokenizer)]))
        self.questions = [q for q in questions if len(q.ids) <= most]
        self.n_long = len(questions) - len(self.questions)
        need(self.questions, f"{self.path}: none of {counted(len(questions), 'question')} leaves "
             f"{o.tokens} tokens for an answer in the context of {start.cfg.seq_len}; use fewer "
             f"--tokens, or shorter questions")
        self.learned, self.tested = self.split()

    def split(self):
        """(questions to learn from, held-out questions)"""
        o, s, n = self.options, self.state, len(self.questions)
        if not s.text_sha256 and "holdout" not in o.given:
            more = max(o.holdout, min(LARGEST_SHARE, HELD_OUT / n))
            self.set_option("holdout", more if n >= FEWEST_TO_HOLD_OUT else 0.0)
        held = [held_out(q.example, o.holdout) for q in self.questions]
        if o.holdout and not any(held):      # hold out one
            hashes = [question_hash(q.example) for q in self.questions]
            held[hashes.index(min(hashes))] = True
        if all(held):
            held = [False for _ in held]
        self.holds_out = any(held)
        need(self.holds_out or not o.keep_best, f"--keep-best: expected held-out questions, which "
             f"show the best model, found none; hold some of the {counted(n, 'question')} out, for "
             f"example with --holdout 0.2, or use --no-keep-best")
        learned = [q for q, is_held in zip(self.questions, held) if not is_held]
        return learned, [q for q, is_held in zip(self.questions, held) if is_held] or learned

    def row_length(self, start):
        return max(len(q.ids) for q in self.questions) + self.options.tokens

    def rows_per_step(self):
        o = self.options
        return o.group * max(1, round(o.batch / o.group))

    def load(self, cfg, tokenizer):
        o, n = self.options, len(self.tested)
        held = f"{n:,} held out" if self.holds_out else "none held out"
        steps = o.steps and -(-o.steps // o.updates) * o.updates     # whole batches
        if self.B != o.batch and not self.state.text_sha256:
            note(f"--batch {o.batch} becomes {self.B}, because a batch has whole groups of --group "
                 f"{o.group} answers")
        suited = {"warmup": max(1, steps // 10), "eval_every": max(5, steps // 4)} if steps else {}
        for name in suited.keys() - o.given if not self.state.text_sha256 else ():
            self.set_option(name, min(getattr(o, name), suited[name]))
        return DataSet(
            path=self.path, sha256=self.digest, tokenizer=tokenizer,
            batches=Epochs(len(self.learned), 1, o.seed),
            validation=Validation(np.zeros((n, 1), np.int32), np.full((n, 1), -1, np.int32), 0),
            bytes_per_token=1.0, steps=steps,
            table=[("questions", f"{self.path}, {len(self.learned):,} for training, {held}"),
                   *([("left out", f"{counted(self.n_long, 'question')} longer than "
                                   f"{cfg.seq_len - o.tokens} tokens")] if self.n_long else []),
                   ("reward", o.reward),
                   ("answers", f"{counted(self.B // o.group, 'group')} of {o.group} per batch, of "
                               f"up to {o.tokens} tokens, {counted(o.updates, 'update')} per batch"
                    ),
                   ("loss", f"advantages {'' if o.scale_rewards else 'not '}divided by the "
                            f"standard deviation, clip ratio {o.clip_ratio:g}, KL {o.kl:g}")])

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.reference = self.make_reference()
        self.n_without_signal, self.seen = 0, []         # seen: the lowest and the highest reward

    def make_batches(self):
        return SampledBatches(self)

    def make_reference(self):
        """The model at step 0, which gives log ref"""
        flat = read_checkpoint(model_path(self.state.source), moments=False).flat
        return self.engine(self.model.cfg, flat, (), self.options)

    # ---- answers
    def answers_to(self, prompts, rngs, temperature):
        """[Answered] to these prompts, lists of ids"""
        o = self.options
        sampling = Sampling(temperature=temperature, tokens=o.tokens)
        reader = self.model.decoder().with_slots(min(AT_ONCE, len(prompts)), self.T)
        replies = (Answered(ids, sampling, rng, self.ends, self.tokenizer.vocab)
                   for ids, rng in zip(prompts, rngs))
        found = dict(generate_many(reader, replies))
        return [found[i] for i in range(len(prompts))]

    def greedy(self, questions):
        """[(Answered, its reward)] with the most probable token at each place"""
        replies = self.answers_to([q.ids for q in questions], [rng_of(1) for _ in questions], 0.0)
        return [(x, self.rewards(q.example, x.answer)) for q, x in zip(questions, replies)]

    def sample_batch(self, number):
        """The Samples of a batch of this number.  Its questions and its random numbers follow from
        the seed and the number alone."""
        o, n = self.options, self.B // self.options.group
        picked = [self.learned[self.data.batches.entry(i)[1]]
                  for i in range(number * n, (number + 1) * n)]
        questions = [q for q in picked for _ in range(o.group)]
        rngs = [rng_of(o.seed, number + 1, i + 1) for i in range(self.B)]
        replies = self.answers_to([q.ids for q in questions], rngs, o.temperature)
        rewards = np.array(self.rewards.of([q.example for q in questions],
                                           [x.answer for x in replies])).reshape(n, o.group)
        advantage = advantages(rewards, o.scale_rewards)
        signal = advantage.any(1).mean()
        self.count_signal(signal, rewards)
        self.seen = [*self.seen, np.nanmin(rewards), np.nanmax(rewards)]
        self.seen = [min(self.seen), max(self.seen)]
        measures = dict(reward=float(np.nanmean(rewards)), signal=float(signal),
                        length=float(np.mean([len(x.tokens) for x in replies])),
                        failed=int(np.isnan(rewards).sum()))
        rows = [(q.ids, x.ids, a) for q, x, a in zip(questions, replies, advantage.ravel())]
        return self.as_samples(rows, measures)

    def count_signal(self, signal, rewards):
        """Prints a note after WITHOUT_SIGNAL batches in a row whose answers all had the reward of
        the others in their group."""
        self.n_without_signal = 0 if signal else self.n_without_signal + 1
        if self.n_without_signal == WITHOUT_SIGNAL:
            note(f"in {WITHOUT_SIGNAL} batches in a row, all answers of a group had the same "
                 f"reward, such as {rewards.ravel()[0]:g}: nothing can be learned from them; use "
                 f"easier or harder questions, a larger --group, or a reward that also counts "
                 f"partly right answers")

    def as_samples(self, rows, measures):
        """Without a KL penalty, rows with advantage 0 have no gradient and are left out, except
        one.     rows: [(ids of the question, ids of the answer, advantage)]"""
        n_tokens = sum(len(answer) for _, answer, _ in rows)
        if not self.options.kl:
            rows = [row for row in rows if row[2]] or rows[:1]
        rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
        T = len(rows[-1][0]) + len(rows[-1][1]) - 1
        T = min(-(-T // self.row_unit) * self.row_unit, self.model.cfg.seq_len)
        tokens = np.zeros((len(rows), T), np.int32)
        targets = np.full((self.model.cfg.n_mtp, len(rows), T), -1, np.int32)
        for i, (asked, answer, _) in enumerate(rows):
            whole = [*asked, *answer]
            tokens[i, :len(whole) - 1] = whole[:-1]
            targets[0, i, len(asked) - 1:len(whole) - 1] = answer
        old, reference = (self.log_probabilities(model, tokens, targets[0])
                          for model in (self.model, self.reference))
        advantage = np.array([a for *_, a in rows])
        return Samples(tokens, targets, advantage, old, reference,
                       measures | {"n_tokens": n_tokens})

    def log_probabilities(self, model, tokens, targets):
        """log pi of the tokens of answers (B', T), 0 elsewhere, one micro-batch at a time"""
        micro = self.state.micro_batch
        return -np.concatenate([model.token_losses(tokens[b:b + micro], targets[b:b + micro])
                                for b in range(0, len(tokens), micro)])

    # ---- the loop
    def ce_weights(self, tokens, targets):
        """In the first update of a batch, the model is the one that sampled it."""
        o, x = self.options, self.batches.samples
        is_first = self.step % o.updates == 0
        logp = x.old if is_first else self.log_probabilities(self.model, tokens, targets[0])
        is_answer = targets[0] >= 0
        measures, of_tokens = grpo_loss(logp, x.old, x.reference, is_answer, x.advantage,
                                        o.clip_ratio, o.kl)
        share = np.count_nonzero(is_answer) / x.measures["n_tokens"]     # rows that are left out
        weight = np.zeros((len(tokens), len(targets), tokens.shape[1]))
        weight[:, 0] = share * of_tokens
        return weight, {**x.measures, **measures, "loss": share * measures["loss"],
                        "clipped": share * measures["clipped"]}

    def ends_batch(self):
        """Has the batch had all its updates?"""
        return self.step % self.options.updates == 0

    @contextlib.contextmanager
    def updating(self):
        self.is_updating = True
        yield
        self.is_updating = False             # only without an error

    def stopping(self, caught):
        return BetweenBatches(self, caught)

    def due(self, what):
        """As in `Run`, but postponed to the end of a batch"""
        if self.step == self.n_steps or not self.ends_batch():
            return False
        every = {"validate": self.options.eval_every, "save": self.options.save_every}[what]
        return self.step // every > (self.step - self.options.updates) // every

    def log_entry(self, losses, norm, hyper, seconds):
        s = self.state
        return {"step": s.step, "lr": hyper.lr, "norm": norm, "ms": 1e3 * seconds,
                "tokens_per_s": self.measures["n_tokens"] / seconds, "n_steps": s.n_steps}

    def measures_in(self, r):
        failed = f"  {r['failed']:,} of {self.B:,} rewards failed" if r["failed"] else ""
        return super().measures_in(r) + failed

    def planned(self):
        n, updates = super().planned(), self.options.updates
        return n and -(-n // updates) * updates

    # ---- the held-out reward
    def begin(self):
        self.validate()
        return True

    def rewards_of(self, most):
        """[(Answered, reward)] of greedy answers to this number of held-out questions, or to all,
        spread evenly"""
        n = len(self.tested)
        pick = np.linspace(0, n - 1, min(n, most or n)).astype(int)
        found = self.greedy([self.tested[i] for i in pick])
        self.rewards.need_one([reward for _, reward in found])
        return found

    def measure(self, rows=None):
        """The mean reward of greedy answers to held-out questions; rows: how many, None: all"""
        found = self.rewards_of(rows)
        self.held_reward, n = mean_reward(found), len(found)
        failed = sum(math.isnan(reward) for _, reward in found)
        self.write(step=self.step, val_reward=self.held_reward, questions=n, val_failed=failed,
                   val_length=float(np.mean([len(x.tokens) for x, _ in found])))
        said = f"reward {self.held_reward:.3f} on"
        if not failed:
            return f"{said} {counted(n, self.tested_noun())}"
        return (f"{said} {n - failed:,} of {counted(n, self.tested_noun())}, "
                f"{counted(failed, 'reward')} failed")

    def tested_noun(self):
        return "held-out question" if self.holds_out else "training question"

    def compare(self, estimate):
        """Keeps the highest reward so far, as `Run` keeps the lowest loss."""
        s, now = self.state, self.held_reward
        first, best = s.rewards or (now, -math.inf)
        if now > best:
            before = s.rewards, s.best_step
            s.rewards, s.best_step = [first, now], s.step
            if self.options.keep_best and not self.save(best=True):
                s.rewards, s.best_step = before

    def final_validation(self):
        return self.measure()

    def compare_last(self):
        if len(self.tested) > ESTIMATE:      # the last validation took all: not comparable
            self.held_reward = mean_reward(self.rewards_of(ESTIMATE))
        self.compare(None)
        return self.note_of_end()

    def note_of_end(self):
        """A note if the reward has not risen, or if it was higher before the end"""
        now, (first, best) = self.held_reward, self.state.rewards
        if now == first and self.seen and self.seen[0] == self.seen[1]:
            return (f"all sampled answers had the same reward, {self.seen[0]:g}, so nothing was "
                    f"learned; use a reward that differs between answers, or other questions; "
                    f"docs/rl.md says what to try")
        if now <= first:
            return (f"the reward on {self.tested_noun()}s was {first:.3f} before the run and is "
                    f"{now:.3f} after it; docs/rl.md says what to try")
        if now < best:
            return (f"the highest reward was {best:.3f}, at step {self.state.best_step:,}; the "
                    f"same questions now have {now:.3f}")
        return ""

    def where_best_is(self):
        """Nothing if the best model is the one before the run"""
        return super().where_best_is() if self.state.best_step else ""

    def sample_text(self, n):
        """Greedy answers to two of the held-out questions, with their rewards"""
        k = len(self.tested)
        some = [self.tested[(self.step + i) % k] for i in range(min(2, k))]
        return "\n".join(f"> {q.example['instruction']} {q.example['input']}\n{x.answer}\n"
                         f"({'no reward' if math.isnan(reward) else f'reward {reward:g}'})"
                         for q, (x, reward) in zip(some, self.greedy(some)))

    # ---- files
    @staticmethod
    def read_own(out, file):
        """The run to resume, and the model that it began with, the reference: it must be there."""
        c = read_checkpoint(out)
        return named_source(c, out, file)

def mean_reward(answered):
    """The mean of the rewards that are known.     answered: [(Answered, reward)]"""
    return float(np.nanmean([reward for _, reward in answered]))

def named_source(c, out, file):
    """The Checkpoint of a run, whose State names the model that it began with by the name `file`.
    Rejects a model that has changed."""
    source = file or model_path(c.state.source)
    need_source(source, out, c.state)
    return c._replace(state=replace(c.state, source=shown_name(source)))

def rl_verb(add):
    default = "nanoeuler_rl.bin"
    add(partial(launch_any, RlRun, default), start_argument(RlRun), out(default), *RUN,
        settings=fields(RlOptions))
