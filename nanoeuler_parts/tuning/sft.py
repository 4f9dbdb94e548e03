"""The verb `sft`: supervised fine-tuning on examples, with the loss on answers alone.  The verb
`dpo` builds on it."""
import argparse
import math
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from bpe import need
from nanoeuler import CHATML, CHATML_TOKENS
from nanoeuler_parts.chat.templates import (
    alpaca_instruction, chat_ids, default_system, ends_of, is_alpaca, is_chatml,
)
from nanoeuler_parts.checkpoint.bundled import beside_program, BUNDLED
from nanoeuler_parts.files.printing import counted, with_progress
from nanoeuler_parts.files.texts import encode_cut
from nanoeuler_parts.flags import arg, model_name, out, RUN, SHAPE
from nanoeuler_parts.runs.data import DataSet, Validation
from nanoeuler_parts.runs.guards import need_data, NEW_RUN
from nanoeuler_parts.runs.options import options_class
from nanoeuler_parts.runs.run import ESTIMATE, FEWEST, Run
from nanoeuler_parts.runs.start import launch_any
from nanoeuler_parts.tuning.examples import (
    answered_in, asked_in, columns_of, content_of, cut_versions, held_out, is_conversation,
    prompt_of, question_hash, read_entries, read_file,
)
from nanoeuler_parts.tuning.formats import as_example, words_of
from nanoeuler_parts.tuning.rehearsal import (
    answers_by, greedy_answers, is_right, known_sets, MixedBatches, of_own_answers,
    MOST_RECALLED, old_examples, OldExamples, own_questions, ROW, rows_rehearsed,
)
from nanoeuler_parts.tuning.rows import chatml_row, Examples

CONTEXT = [f for f in SHAPE if f.name == "seq_len"]      # the only flag of a model's shape

def start_argument(run):
    """The argument for the checkpoint that a run begins with.  It is absent by default, because
    --resume compares only a checkpoint that is named."""
    return arg("file", nargs="?", type=model_name, default=argparse.SUPPRESS,
               help=f"checkpoint whose weights the run starts from; {BUNDLED}: the bundled model "
                    f"(default: {run.begins_with})")

FEWEST_TO_HOLD_OUT = 30                  # of fewer examples, all are for training

class ChecksColumns:
    """Settings whose `field` names columns that hold a question or one of the R answers"""
    answers = ["output"]                     # the keys of the answers

    def check(self):
        super().check()
        columns_of(self.field, self.answers)
        return self

SftOptions = options_class("sft", ChecksColumns)

@dataclass
class ExampleSet(DataSet):
    """The data of a fine-tuning run.  Responses are held out with the questions they answer."""
    held: str                  # "a held-out"; "a training" if no example is held out
    questions: list            # the held-out examples, or else those for training
    responses: Examples        # all R responses to each question of the validation

# A model forgets if it has memorized the training examples, which a training loss of fewer than
# MEMORIZED nats shows, and the validation is worse than the best one by FORGOTTEN bits per byte.
# On fewer than FEWEST rows, it must also be RUINED times the best one.
MEMORIZED, FORGOTTEN, RUINED = 0.1, 0.1, 1.2

MOST_A_ROW = 2048        # tokens; longer examples need --row-len

def tokens_of(rows):
    """Input tokens of the longest row.  The last token of a row is only a target."""
    return max(sum(map(len, parts)) - 1 for parts in rows)

MANY_EXAMPLES = 10_000       # encoding these takes two seconds

MOST_NAMES = 8               # in a row of the table
MOST_EXPECTED = 300          # characters of an expected answer that are shown

def shown(names):
    more = len(names) - MOST_NAMES
    some = [name or "(unnamed)" for name in names[:MOST_NAMES]]
    return ", ".join(some) + (f" and {more:,} more" if more > 0 else "")

def has_chatml(tokenizer):
    return tokenizer.specials.keys() >= {*CHATML_TOKENS}

class SftRun(Run):
    """Supervised fine-tuning: the loop of `Run` on examples, with the loss on responses alone."""
    verb, kind = "sft", "chat"
    Options = SftOptions
    begins_with, made_by = "nanoeuler.bin", "train"
    larger_data, length_flag = "data/alpaca.json", "--epochs"
    held_scope, most_final = "all held-out responses", sys.maxsize
    overdone = "has memorized the training examples", "how to answer others"     # and forgets
    minimizes_bits = True                    # dpo does not, so a small rise of bits is normal
    answers = SftOptions.answers             # the keys of the R responses
    rehearsing_lr = 6e-5                     # the default --lr of a run that rehearses: a higher
                                             # rate forgets more (bench/NOTES.md)

    @classmethod
    def need_data(cls, data, out):
        need_data(data, out)

    @classmethod
    def digest_of(cls, data, options):
        return content_of(data)[1]

    def read_data(self, start):
        """Reads and encodes the examples now, because the length of a row depends on them."""
        o, s, tokenizer = self.options, self.state, start.tokenizer
        self.cut_rng = np.random.default_rng(o.seed)
        self.path = self.data_file()
        examples, self.digest, self.ignored = read_file(self.path, self.answers, o.field, o.ignore)
        self.same_data(self.digest)
        source = replace(s)                  # the model that a fresh run begins with
        if not s.text_sha256:                # a fresh run; a resumed one keeps its template
            own, s.template = s.template, self.template_for(examples, tokenizer)
            lost = own and not is_alpaca(own) and s.template != own
            if lost and not getattr(o, "template", ""):          # dpo has no --template
                name = "ChatML" if s.template else "Alpaca's template"
                print(f"note: training does not support the model's own chat template; it uses "
                      f"{name} instead", file=sys.stderr)
            s.eos = CHATML_TOKENS[1] if s.template else s.eos
        need(s.eos in tokenizer.specials, f"the model has no token {s.eos!r} to end a response")
        if len(examples) > MANY_EXAMPLES:
            print(f"encoding {len(examples):,} examples", flush=True)
        self.encoded = [(e, self.rows_of(e, tokenizer))
                        for e in with_progress(examples, "encoding examples")]
        self.old = self.find_old(start, source)

    def template_for(self, examples, tokenizer):
        """The template to train with; "" is Alpaca's.  --template takes precedence, then a chat
        model's own template, if it is ChatML or Alpaca's.  Otherwise conversations get ChatML, and
        single questions Alpaca's.  A model without ChatML's tokens can only use Alpaca's."""
        own, asked = self.state.template, self.options.template
        there = has_chatml(tokenizer)
        need(there or asked != "chatml", f"ChatML needs the tokens {' and '.join(CHATML_TOKENS)}, "
             f"which the model lacks; drop --template, or start from another model")
        if asked == "alpaca" or not there:
            return ""
        if is_chatml(own):
            return own
        of_messages = any(map(is_conversation, examples)) and not (own and is_alpaca(own))
        return CHATML if asked or of_messages else ""

    def row_length(self, start):
        """Tokens per row: --row-len if it is set, else the smallest multiple of 32 that fits every
        example of up to MOST_A_ROW tokens.  With --truncate, conversations that are longer than
        the model's context are cut first."""
        o, s = self.options, self.state
        T = o.row_len
        if s.step and not T:                 # older runs used rows of seq_len
            T = start.cfg.seq_len
        most = MOST_A_ROW
        if o.truncate:
            most = T or min(most, start.cfg.seq_len)
            self.n_cut = self.cut_longer(most, start.tokenizer)
        if T:
            return T
        lengths = [tokens_of(rows) for _, rows in self.encoded]
        longest = max((n for n in lengths if n <= most), default=most)
        if o.rehearse:
            longest = max(longest, min(ROW, most))
        T = min(-(-max(1, longest) // 32) * 32, most)
        self.set_option("row_len", T)
        return T

    def cut_longer(self, T, tokenizer):
        """Cuts each conversation of more than T tokens to the newest exchanges that fit, if any
        do.  Returns the number of conversations that were cut."""
        n_cut = 0
        for i, (example, rows) in enumerate(self.encoded):
            if tokens_of(rows) <= T:
                continue
            versions = cut_versions(example, self.answers)
            fits = bisect_left(versions, True, key=lambda version: tokens_of(
                self.rows_of(version(), tokenizer)) <= T)
            if fits < len(versions):
                cut = versions[fits]()
                self.encoded[i] = cut, self.rows_of(cut, tokenizer)
                n_cut += 1
        return n_cut

    def rows_of(self, example, tokenizer, cuts=0.0, keys=()):
        """[asked, answered, asked, ...] for each of the R responses, as arrays of ids.  An answer
        includes the token that ends it.  cuts: the share for `encode_cut`.  keys: of the answers,
        if they are not `self.answers`"""
        def encode(text, follows=True):
            return encode_cut(tokenizer, text.encode(), cuts, self.cut_rng, follows)

        asked = asked_in(example)
        answers = [answered_in(example, key) for key in keys or self.answers]
        if self.state.template:
            default = default_system(self.state.template, asked)
            return [chatml_row([*default, *asked, *answer], len(default) + len(asked), tokenizer,
                               encode) for answer in answers]
        *systems, last = [role for role, _ in asked] or [""]
        single = last == "user" and {*systems} <= {"system"} and all(len(x) == 1 for x in answers)
        remedy = "train with sft --template chatml"
        if not has_chatml(tokenizer):
            remedy = f"start from a model with the tokens {' and '.join(CHATML_TOKENS)}"
        need(single, f"{self.path} has conversations, but the model uses Alpaca's template, which "
             f"holds one question and one answer; {remedy}")
        if systems:
            example = {"instruction": alpaca_instruction(asked), "input": ""}
        prompt = encode(prompt_of(example), follows=False)
        end = np.int32(tokenizer.specials[self.state.eos])
        return [(prompt, np.append(encode(text), end)) for [(_, text)] in answers]

    def is_empty(self, example):
        """Is the question empty, or one of the answers?"""
        *_, (_, asked) = [("", ""), *asked_in(example)]
        answers = [words_of(answered_in(example, key)) for key in self.answers]
        return not (asked and all(map(all, answers)))

    def is_usable(self, example, rows):
        return not self.is_empty(example) and all(len(asked) for asked, *_ in rows)

    def split(self):
        """(train, val, n_long, n_empty): train and val are lists of (example, its rows), n_long and
        n_empty count the examples left out as too long or empty.  In a fresh run, few examples are
        all for training, unless the user gives --holdout."""
        o, s = self.options, self.state
        fits = [pair for pair in self.encoded if tokens_of(pair[1]) <= self.T]
        usable = [pair for pair in fits if self.is_usable(*pair)]
        n_long, n_empty = len(self.encoded) - len(fits), len(fits) - len(usable)
        self.need_usable(len(usable), n_long, n_empty)
        if not s.text_sha256 and "holdout" not in o.given and len(usable) < FEWEST_TO_HOLD_OUT:
            self.set_option("holdout", 0.0)
        held = [held_out(example, o.holdout) for example, _ in usable]
        if o.holdout and not any(held):      # hold out one
            hashes = [question_hash(example) for example, _ in usable]
            held[hashes.index(min(hashes))] = True
        if all(held):
            held = [False for _ in usable]
        train = [pair for pair, is_held in zip(usable, held) if not is_held]
        val = [pair for pair, is_held in zip(usable, held) if is_held]
        return train, val, n_long, n_empty

    def need_usable(self, n_usable, n_long, n_empty):
        """Rejects a file of which no example can be used, with the remedy for its fault."""
        faults, remedies = [], []
        if n_empty:
            faults.append(f"{n_empty} {'is' if n_empty == 1 else 'are'} empty")
            remedies.append("give each example a question and an answer")
        if n_long:
            is_longer = "is" if n_long == 1 else "are"
            faults.append(f"{n_long} {is_longer} longer than {self.T} tokens")
            cut = any(is_conversation(e) for e, _ in self.encoded) and not self.options.truncate
            remedies.append(f"shorten the texts{', add --truncate' if cut else ''}, or raise "
                            f"--row-len")
        need(n_usable, f"{self.path}: none of {counted(len(self.encoded), 'example')} can be used: "
             f"{', '.join(faults)}; {', and '.join(remedies)}")

    def other_examples(self, train, tokenizer):
        """Examples with which a run validates if it holds none out: [(example, its rows)].
        They are the first ones of the default data that fit into a row; these data are in random
        order.  The model may know their answers, and if it forgets them, their loss rises."""
        path, asked = beside_program(self.Options.data), {question_hash(e) for e, _ in train}
        found = []
        for _, entry in read_entries(path)[0] if os.path.exists(path) else ():
            if len(found) == ESTIMATE:
                break
            e = as_example(entry, self.answers)
            rows = self.rows_of(e, tokenizer)
            if tokens_of(rows) <= self.T and question_hash(e) not in asked:
                found.append((e, rows))
        return found if len(found) >= FEWEST else []

    # ---- rehearsal
    def rows_per_step(self):
        """The rows of new examples that a batch has anyway, and old ones besides"""
        self.n_new = super().rows_per_step()
        return self.n_new + rows_rehearsed(self.options.rehearse, self.n_new)

    def rehearses(self, sets):
        """Does a run rehearse if the user does not give --rehearse?"""
        return bool(sets)

    def find_old(self, start, source):
        """The OldExamples of the model that the run began with.  Here a fresh run decides whether
        it rehearses.     source: the State of that model"""
        o, s, sets = self.options, self.state, known_sets(self.state.learned)
        is_fresh, given = not s.text_sha256, "rehearse" in o.given
        samples = bool(s.own_answers) or is_fresh and given and o.rehearse > 0 and not sets
        old = OldExamples()
        if samples or sets and (is_fresh or s.rehearsed_sha256):
            excluded = {question_hash(e) for e, _ in self.encoded}
            if samples:
                s.own_answers = s.own_answers or self.sample_answers(start, source, excluded)
            old = of_own_answers(s.own_answers) if samples else old_examples(sets, excluded)
        digest = old.sha256 if old.n else ""
        if is_fresh:
            need(old.n or not (given and o.rehearse), "--rehearse: expected old examples "
                 f"that are not in {self.path}, found none; use --rehearse 0")
            if not old.n or not (given or self.rehearses(sets)):
                self.set_option("rehearse", 0.0)
            if o.rehearse and "lr" not in o.given:
                self.set_option("lr", self.rehearsing_lr)
            s.rehearsed_sha256 = digest
        need(digest == s.rehearsed_sha256, f"the examples that {self.out} rehearses have changed; "
             f"restore data/, or {NEW_RUN}")
        return old

    def sample_answers(self, start, source, excluded):
        """[[question, input, answer]] by the model that the run begins with"""
        need(source.template, "--rehearse: expected a chat model, which has answers to rehearse, "
             "found a base model; use --rehearse 0")
        questions = own_questions(excluded)
        prompts = [chat_ids(source.template, asked_in(e), source, start.tokenizer)
                   for e in questions]
        fits = [i for i, ids in enumerate(prompts) if len(ids) < start.cfg.seq_len]
        self.engine.ready(self.options)
        decoder = self.engine(start.cfg, start.flat, (), self.options).decoder()
        return answers_by(decoder, [questions[i] for i in fits], [prompts[i] for i in fits],
                          start.tokenizer, ends_of(source, start.tokenizer))

    def rows_to_rehearse(self, val, tokenizer, most):
        """[(old example, its row)]: up to `most` of them, in an order that the seed decides.
        Examples that are longer than a row are left out, and so are those of the validation."""
        found, validated = [], {question_hash(e) for e, _ in val}
        for e in self.old.shuffled(self.options.seed):
            [row] = self.rows_of(e, tokenizer, keys=["output"])
            if tokens_of([row]) <= self.T and question_hash(e) not in validated:
                found.append((e, row))
            if len(found) == most:
                break
        need(found, f"--rehearse: expected old examples of at most {self.T} tokens, found none; "
             f"raise --row-len, or use --rehearse 0")
        return found

    def right_answers(self, examples):
        """The numbers of these old examples that the model answers right, word for word, or None
        if a signal ends the questions"""
        rows = [self.rows_of(e, self.tokenizer, keys=["output"])[0] for e in examples]
        fits = [i for i, row in enumerate(rows) if tokens_of([row]) <= self.model.cfg.seq_len]
        if not fits:
            return []
        most = max(len(rows[i][1]) for i in fits)
        replies = greedy_answers(self.model.decoder(), [rows[i][0].tolist() for i in fits],
                                 self.tokenizer, ends_of(self.state, self.tokenizer), most,
                                 "old questions", self.caught)
        if replies is None:
            return None
        return [i for i, reply in zip(fits, replies) if is_right(reply, examples[i])]

    def keep_known(self):
        """Rehearses only what the model knows: the old examples that it answers right.  The others
        would teach it something new, at the expense of the rest.  Returns whether it was done."""
        s, n = self.state, len(self.recalled)
        print(f"asking {counted(n, 'old question')}, to rehearse those that the model answers "
              f"right", flush=True)
        known = self.right_answers(self.recalled)
        if known is None:
            return False
        if len(known) < FEWEST:
            known = [*range(n)]
        s.old_known = known
        self.data.batches.old.keep(known)
        self.batches.prepare(s.step * self.B, self.B)
        print(f"rehearsing {len(known):,} of {counted(n, 'old example')}, those that the model "
              f"answers right", flush=True)
        return True

    def losses_of(self, examples, most=sys.maxsize):
        """The loss of the answers in each row, or in the first `most`, (n,), nats per token"""
        found, micro, n = [], self.state.micro_batch, min(most, len(examples.rows))
        for b in with_progress(range(0, n, micro), "reading examples"):
            tokens, targets = examples.batch(slice(b, min(b + micro, n)))
            found.append(self.model.losses(tokens, targets[0]) / (targets[0] >= 0).sum(1))
        return np.concatenate(found)

    def begin(self):
        s, n = self.state, len(self.old.asked)
        is_known = s.own_answers or s.old_known          # `load` keeps what a resumed run knows
        if self.options.rehearse and not is_known and not self.keep_known():
            return False
        if super().begin() and n:
            print(f"asking {counted(n, 'old question')} that are not rehearsed", flush=True)
            right = self.right_answers(self.old.asked)
            if right is None:
                return False
            s.old_right = right
            print(f"old questions: {len(right):,} of {n:,} answered right, word for word",
                  flush=True)
        return True

    def final_validation(self):
        found, n, before = super().final_validation(), len(self.old.asked), self.state.old_right
        if n:
            print(f"\nasking the {counted(n, 'old question')} again", flush=True)
            now = self.right_answers(self.old.asked)
        if n and now is None:
            print("old questions: not all asked again, because the run was stopped", flush=True)
        elif n:
            kept = len({*now} & {*before})
            self.write(step=self.step, old_asked=n, old_right_before=len(before),
                       old_right=len(now), old_kept=kept)
            share = f" ({kept / len(before):.0%})" if before else ""
            print(f"old questions: {len(before):,} of {n:,} right before the run, {len(now):,} "
                  f"after it; {kept:,} of the {len(before):,} are still right{share}", flush=True)
        return found

    def load(self, cfg, tokenizer):
        """The ExampleSet of a file.  Examples that are empty or too long for a row are left out."""
        o, T, R = self.options, self.T, self.R
        train, val, n_long, n_empty = self.split()
        n, held = len(train), f"{len(val):,} held out"
        self.scope, self.holds_out = self.held_scope, bool(val)
        if not val:
            need(not o.keep_best, f"--keep-best: expected held-out examples, which show the best "
                 f"model, found none; hold some of the {counted(n, 'example')} out, for example "
                 f"with --holdout 0.2, or use --no-keep-best")
            held, val = self.instead_of_held_out(train, tokenizer)
        hint = ""
        if n_long and not o.truncate and any(is_conversation(e) for e, _ in self.encoded):
            hint = " (--truncate cuts them)"
        n_new, n_old = self.n_new, self.B - self.n_new       # rows of each step
        steps = o.steps or math.ceil(o.epochs * R * n / n_new)
        if not self.state.text_sha256:       # suit a short run, which may have a few steps only
            suited = {"warmup": max(1, steps // 10), "eval_every": max(5, steps // 4)}
            for name in suited.keys() - o.given:
                self.set_option(name, min(getattr(o, name), suited[name]))

        def copied(cuts, copies):
            """The training rows of all copies, each copy cut elsewhere.  If a cut makes a row too
            long, all rows of its example stay uncut."""
            for _ in with_progress(range(copies), "encoding copies, each cut elsewhere"):
                for example, whole in train:
                    rows = self.rows_of(example, tokenizer, cuts)
                    yield from rows if tokens_of(rows) <= T else whole

        learned, copies = [row for _, rows in train for row in rows], 1
        if o.cuts:                           # a copy per epoch, up to 16, each cut elsewhere
            copies = min(16, math.ceil(steps * n_new / R / n))
            learned = list(copied(o.cuts, copies))
        self.new_examples = batches = new = Examples(learned, T, cfg.n_mtp, o.seed, R, copies)
        rehearses = []
        if n_old:
            most = min(2 * steps * n_old, MOST_RECALLED)
            found = self.rows_to_rehearse(val, tokenizer, most)
            self.recalled, rows = [e for e, _ in found], [row for _, row in found]
            known = [rows[i] for i in self.state.old_known if i < len(rows)]     # if resumed
            batches = MixedBatches(new, Examples(known or rows, T, cfg.n_mtp, o.seed), n_old)
            rehearses = [("rehearses", f"{n_old} of {self.B} rows of each step, "
                                       f"up to {counted(len(rows), 'example')} of "
                                       f"{' and '.join(self.old.sets)}")]
        responses = Examples([row for _, rows in val for row in rows], T, cfg.n_mtp, o.seed, R)

        def n_bytes(part, keys):
            answers = [answered_in(example, key) for example, _ in part for key in keys]
            return sum(len(text.encode()) for answer in answers for text in words_of(answer))

        learned_bytes = n_bytes(train, self.answers) * copies
        tokens, targets = responses.batch(slice(0, None, R))     # first response to each question
        return ExampleSet(
            path=self.path, sha256=self.digest, tokenizer=tokenizer, batches=batches,
            validation=Validation(tokens, targets[0], n_bytes(val, self.answers[:1])),
            bytes_per_token=learned_bytes / (new.answers >= 0).sum(), steps=steps,
            table=[("examples", f"{self.path}, {n:,} for training, {held}"),
                  *([] if self.holds_out else [("validation", self.scope)]),
                  *rehearses, ("template", "ChatML" if self.state.template else "Alpaca's"),
                  *([("ignored fields", shown(self.ignored))] if self.ignored else []),
                  *([("cut", f"{counted(self.n_cut, 'conversation')}, to fit a row of {T} tokens")]
                    if o.truncate else []),
                  ("left out", f"{counted(n_long, 'example')} longer than a row of {T} tokens"
                               f"{hint}, {n_empty:,} empty")],
            held="a held-out" if self.holds_out else "a training",
            questions=[example for example, _ in (val if self.holds_out else train)],
            responses=responses)

    def instead_of_held_out(self, train, tokenizer):
        """(a text for the table, the examples to validate with) if no example is held out"""
        o, n = self.options, len(train)
        few = n < FEWEST_TO_HOLD_OUT and "holdout" not in o.given
        held = "none held out" + (f", as there are fewer than {FEWEST_TO_HOLD_OUT}" if few else "")
        others = self.other_examples(train, tokenizer)
        self.validates_first = bool(others)  # with the model that the run starts from
        self.scope = f"the {counted(n, 'training example')}, which says nothing about others"
        if others:
            self.scope = f"{len(others)} other examples of {self.Options.data}"
        return held, others or train

    def note_of_end(self, n, estimate):
        """A note if the examples are memorized and the model forgets, or else if it overfits.
        Other examples than held-out ones say nothing about the second.  If none is held out, all
        are meant to be learned, and a note says that they are not."""
        s, judged = self.state, self.holds_out and self.minimizes_bits
        if self.options.rehearse and self.minimizes_bits:    # the step's loss has old examples
            self.last_loss = float(self.losses_of(self.new_examples, ESTIMATE).mean())
        note = super().note_of_end(n, estimate) if judged else ""
        least = s.best + FORGOTTEN if n >= FEWEST else max(s.best + FORGOTTEN, RUINED * s.best)
        if self.last_loss > MEMORIZED and self.minimizes_bits and not self.holds_out:
            return (f"the model has not learned all answers yet: its loss is "
                    f"{self.last_loss:.2f}, and should be below {MEMORIZED}; use {self.longer()}"
                    f"{f', or --lr {4 * self.options.lr:g}' if self.options.rehearse else ''}")
        if self.last_loss > MEMORIZED or estimate <= least:
            return note
        learned, forgotten = self.overdone
        return (f"the model {learned} (loss {self.last_loss:.3f}) and forgets {forgotten}: the "
                f"validation on {self.scope} rose from {s.best:.2f} bits/byte at step "
                f"{s.best_step:,} to {estimate:.2f}; use a lower --lr, such as "
                f"{self.options.lr / 10:.1g}, {self.against_forgetting()}")

    def shorter(self):
        """The flag in force that makes the run shorter, in words"""
        return "fewer --steps" if self.options.steps else f"fewer {self.length_flag}"

    def longer(self):
        """The flag in force that makes the run longer, with twice its value"""
        o = self.options
        return f"--steps {2 * o.steps}" if o.steps else f"{self.length_flag} {2 * o.epochs:g}"

    @property
    def against_overfitting(self):
        return f"{self.shorter()} or more examples"

    def against_forgetting(self):
        more = "" if self.options.rehearse else ", or --rehearse 0.5"
        return f"{self.against_overfitting}{more}"

    def where_best_is(self):
        return super().where_best_is() if self.holds_out and self.minimizes_bits else ""

    def sample_text(self, n):
        """A held-out question, the greedy answer (temperature 0), and the beginning of the
        expected one."""
        data, i = self.data, self.state.step % len(self.data.questions)
        e, [asked, *_] = data.questions[i], self.rows_of(data.questions[i], data.tokenizer)[0]
        expected, *_ = words_of(answered_in(e, self.answers[0]))
        return (f"{data.held} question:\n> {e['instruction']} {e['input']}\n"
                f"the model's answer:\n{self.continuation(n, asked, temperature=0.0)}\n"
                f"the expected answer:\n{expected[:MOST_EXPECTED]}")

def sft_verb(add):
    default = "nanoeuler_chat.bin"
    add(partial(launch_any, SftRun, default), start_argument(SftRun), out(default), *RUN,
        settings=fields(SftOptions), shape=CONTEXT)
