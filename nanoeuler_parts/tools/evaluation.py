"""The verb `eval`: measures a model by the perplexity of texts and by its answers to questions."""
import argparse
import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import signal
import time
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from bpe import need, printable, reading, UserError
from nanoeuler import act_shapes, Decoder, Model, n_params, Pace, setting, windows
from nanoeuler_parts.chat.models import model_to_use
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.chat.speaker import Speaker
from nanoeuler_parts.chat.verbs import print_template_note
from nanoeuler_parts.checkpoint.bundled import model_path, shown_name
from nanoeuler_parts.checkpoint.file import begins_as_checkpoint, read_checkpoint, sha256_of
from nanoeuler_parts.files.corpora import (
    END, files_in, is_corpus, marker_of, stream_of, with_begins,
)
from nanoeuler_parts.files.printing import counted, MOST_SILENT, with_progress
from nanoeuler_parts.files.texts import read_text
from nanoeuler_parts.files.writing import need_another, refuse_overwrite, replacing
from nanoeuler_parts.flags import ADAPTER, arg, file_name, FORCE, MODEL
from nanoeuler_parts.lora.files import adapter_for, digest_of, merge_into
from nanoeuler_parts.machine.threads import most_memory
from nanoeuler_parts.tuning.examples import (
    answered_in, asked_in, at, columns_of, is_conversation, read_entries, renamed,
)
from nanoeuler_parts.tuning.formats import (
    ANSWER, as_example, CONVERSATION, need_advised, NOT_TRAINED, QUESTION,
)
from nanoeuler_parts.tuning.rewards import read_for, Rewards

@dataclass
class EvalOptions(Sampling):
    """How a model is measured: windows of texts, and the sampling of replies"""
    temperature: float = setting(0.0, 0, 100, "sampling temperature, a divisor of the logits; 0: "
                                 "always the most probable token")
    n: int = setting(1, 1, 1)                # a question has one reply, without log-probabilities
    logprobs: int = setting(0, 0, 0)
    context: int | None = setting(None, 0, 1 << 17, "length of a window of text, in tokens; 0: the "
                                  "model's context")
    stride: int | None = setting(None, 0, 1 << 17, "distance of the beginnings of two windows, in "
                                 "tokens; 0: half of --context")
    batch: int | None = setting(None, 0, 1 << 16, "number of sequences computed at once; 0: 64 "
                                "replies, or as many windows or choices as 512 MiB hold")
    dtype: str = setting("f32", 0, 0, "precision of texts and choices: f32 or bf16; replies have "
                         "--weights")
    show_wrong: int = setting(3, 0, 1 << 40, "largest number of wrong answers to print; 0: none")
    truncate: bool = setting(False, 0, 0, "drop the first tokens of prompts that exceed the "
                             "context")
    field: list = field(default_factory=list, metadata={
        "help": "for --data, NAME: the field or column with a document in .jsonl and .parquet, by "
                "default text; several names with commas: the first one found.  For "
                "--questions, NAME=COLUMN: the column that holds a field, as in "
                "instruction=question; may be given several times",
        "metavar": "NAME"})
    newlines: str = setting("", 0, 0, "unix: convert Windows line ends (CR LF) to LF and remove a "
                            "byte order mark; empty: keep the text as it is")

    def check(self):
        need(self.newlines in ("", "unix"), f"--newlines: expected unix, found "
             f"{self.newlines}")
        need(len([name for name in self.field if "=" not in name]) < 2, f"--field is given as "
             f"{' and '.join(self.field):.80}, expected one name of a text's field; join names "
             f"with commas")
        self.columns()
        return super().check()

    def text_field(self):
        return next((name for name in self.field if "=" not in name), "text")

    def columns(self):
        """{NAME: COLUMN} of the questions"""
        chosen = [name for name in self.field if "=" in name]
        return columns_of(chosen, ["output"], own=OWN_FIELDS)

# ==== Texts ====
# A window of T tokens predicts the T tokens after each of them.  Window i begins at token i * S, S
# being the stride, and scores the tokens that no earlier window scored: the first window scores T
# tokens, each later one S.  So every token but the first of the text is scored once.  A scored
# token has at least T - S tokens before it in its window (except in the first window).  A file of
# documents is one text, as in training (files/corpora.py).  The tokens that begin or end its
# documents are read, but not scored.
class Text(NamedTuple):
    domain: str
    tokens: np.ndarray         # ids of the whole text, int32
    n: int                     # tokens to score: neither the first one, nor those around documents
    n_bytes: int               # of these tokens
    sha256: str

class Score(NamedTuple):
    tokens: int                # the number of scored tokens
    n_bytes: int               # the bytes that they spell
    nats: float                # their summed cross-entropy

def texts_to_measure(names, field, newlines):
    """Yields (domain, text, byte that ends a document) of each file.  A file is a domain of its
    own, but a folder in a folder is one domain.  A plain text has no such byte."""
    for name in names:
        if not is_corpus([name]) and not newlines:
            yield name, read_text(name), b""
            continue
        for path, shown in sorted(files_in(name)):
            text = b"".join(stream_of(path, os.path.isdir(name), field, newlines))
            if text:
                first = pathlib.Path(shown).parts[0]
                yield os.path.join(name, first) if os.path.isdir(name) else path, text, END

def read_texts(names, options, tokenizer, end):
    """The Texts of these names.  In a folder, files of less than two tokens are left out.
    end: id of the token that ends a document"""
    texts = []
    for domain, text, mark in texts_to_measure(names, options.text_field(), options.newlines):
        tokens, n_bytes = tokenizer.encode_whole(text), len(text)
        if mark:
            n_bytes -= text.count(mark)
            tokens[tokens == marker_of(tokenizer, end)] = end
            tokens = with_begins(tokens, end, tokenizer.begins, first=False)
        n = int(np.count_nonzero(~np.isin(tokens[1:], (end, *tokenizer.begins))))
        if not n and domain not in names:    # from a folder or a pattern
            continue
        need(n, f"{domain}: expected 2 tokens or more, as the first one has no prediction, found "
             f"{np.count_nonzero(tokens != end)}; name a longer text with --data")
        if not tokenizer.begins:             # else the first token is not of the text
            n_bytes -= len(tokenizer.vocab[tokens[0]])
        texts.append(Text(domain, tokens, n, n_bytes, hashlib.sha256(text).hexdigest()))
    need(texts or not names, f"{', '.join(names)}: expected a text of 2 tokens or more, found "
         f"none; name others with --data")
    return texts

def window_of(cfg, options):
    """(T, S): length and distance of the windows"""
    T = options.context or cfg.seq_len
    need(T <= cfg.seq_len, f"--context: expected at most the model's context, {cfg.seq_len}, found "
         f"{T}")
    S = options.stride or max(1, T // 2)
    need(S <= T, f"--stride: expected at most --context, {T}, found {S}: tokens between two "
         f"windows would not be scored")
    return T, S

def scored_windows(tokens, starts, T, S, marks):
    """tokens, targets (B, T) of the windows that begin at `starts`, a range.  A target is -1 if an
    earlier window scores it, or if it is one of `marks`, ids that begin or end a document."""
    x, [y] = windows(tokens, starts, T, P=1)
    y[np.array(starts) > 0, :T - S] = -1
    y[np.isin(y, marks)] = -1
    return x, y

def score_text(model, text, T, S, marks, options):
    """The Score of a text"""
    n, nats = len(text.tokens) - 1, []       # n tokens have a prediction
    T = min(T, n)
    starts = range(0, n - T + S, S)
    B = batch_size(model.cfg, T, options)
    parts = [starts[i:i + B] for i in range(0, len(starts), B)]
    for part in with_progress(parts, text.domain):
        nats += model.losses(*scored_windows(text.tokens, part, T, S, marks)).tolist()
    total = math.fsum(nats)                  # independent of the batches
    need(total < 700 * n, f"{text.domain}: the mean loss is {total / n:g} nats per token, expected "
         f"less than 700; {TOO_LARGE}")
    return Score(text.n, text.n_bytes, total)

TOO_LARGE = "the model's weights are too large: use another checkpoint"
MEMORY = 1 << 29             # bytes of activations

def batch_size(cfg, T, options):
    """Sequences of T tokens per forward pass.  By default, their activations take up to MEMORY."""
    if options.batch:
        return options.batch
    one, there = replace(cfg, n_mtp=1), most_memory()    # only head 0 is computed
    size = 4 * sum(map(math.prod, act_shapes(one, T)))
    need(size <= there, f"a sequence of {T:,} tokens needs {size / 2**30:,.1f} GiB of memory, this "
         f"machine or container has {there / 2**30:,.1f} GiB; choose a smaller --context")
    return max(1, min(64, MEMORY // size))

def figures_of(scores):
    tokens, n_bytes, nats = map(sum, zip(*scores))
    return {"tokens": tokens, "bytes": n_bytes, "nats": nats, "nats_per_token": nats / tokens,
            "perplexity": math.exp(nats / tokens), "bits_per_byte": nats / math.log(2) / n_bytes}

def measure_texts(model, texts, T, S, marks, options):
    """Prints a row per domain, and returns all figures."""
    began = time.perf_counter()
    print(f"windows of {counted(T, 'token')}, stride {S}, {model.device()}", flush=True)
    scores, digests = {}, {}
    for text in texts:
        score = score_text(model, text, T, S, marks, options)
        scores.setdefault(text.domain, []).append(score)
        digests.setdefault(text.domain, []).append(text.sha256)
    seconds = time.perf_counter() - began
    domains = {domain: figures_of(found) | {"sha256": digests[domain]}
               for domain, found in scores.items()}
    total = figures_of(sum(scores.values(), []))
    print_columns(["text", "tokens", "bytes", "bits/byte", "perplexity", "nats/token"], [
        [name, f"{x['tokens']:,}", f"{x['bytes']:,}", f"{x['bits_per_byte']:.4f}",
         f"{x['perplexity']:,.4f}", f"{x['nats_per_token']:.4f}"]
        for name, x in [*domains.items(), ("total", total)]])
    rate = total["tokens"] / seconds
    print(f"{seconds:,.1f} s, {rate:,.0f} tokens per second")
    return {"context": T, "stride": S, "device": model.device(), "seconds": seconds,
            "tokens_per_second": rate, "domains": domains, "total": total}

# ==== Questions ====
# A question is open or has choices.  The model replies to an open question, and the reply is
# compared with the accepted answers.  Of several choices, the model takes the one with the largest
# log-likelihood after the prompt, as lm_eval computes it (output_type multiple_choice).
QUESTIONS = ("with --questions, name a file with questions such as {\"question\": ..., "
             "\"answer\": ...}, or in a form that sft reads: JSON, JSON lines or a table")
CORRECT = "correct this question"
OWN_FIELDS = "question", "answer", "choices", "match", "domain"      # which sft does not read
MATCHES = "exact", "contains", "regex"

class Question(NamedTuple):
    place: str                 # file and line, for messages
    record: dict               # the JSON object
    prompt: str | list         # a text, or messages [(role, text)]
    choices: list              # texts; [] for an open question
    answers: list              # accepted texts, or [index of the right choice]
    match: str                 # one of MATCHES
    domain: str

def texts_in(value, name):
    """The texts of a field: a text, or a list of texts"""
    texts = value if isinstance(value, list) else [value]
    need(texts and all(isinstance(text, str) and text for text in texts),
         f"{name} is {value!r:.40}, expected a text or a list of texts")
    return texts

def prompt_and_answer(fields):
    """(prompt, answer) of a question with the field answer, or of an example in any form of sft, of
    which the last answer is asked for"""
    e = {name: x for name, x in fields.items() if x is not None and name not in OWN_FIELDS}
    if fields.get("question") is not None:
        e.setdefault("prompt", fields["question"])
    answer, key = fields.get("answer"), "output"
    if answer is not None:                   # a list or an index, too: only the question is read
        [key], listed = ANSWER, any(isinstance(e.get(name), list | dict)
                                    for name in (*QUESTION, *CONVERSATION))
        e[key] = [{"role": "assistant", "content": "?"}] if listed else "?"
    need_advised(key in e or e.keys() & {"output", "completion", *CONVERSATION}, f"the field "
                 f"answer is missing, found {', '.join(map(str, fields)) or 'none':.80}; write the "
                 f"answer as answer, output or completion, or as the last message")
    e = as_example(e, [key], NOT_TRAINED)
    messages = [*asked_in(e), *answered_in(e, key)]
    last = max(i for i, (role, _) in enumerate(messages) if role == "assistant")
    prompt = messages[:last] if is_conversation(e) else messages[0][1]
    return prompt, messages[last][1] if answer is None else answer

def right_choice(answer, choices):
    """The index of the right choice, which the file gives as an index or as a text"""
    if answer in choices:
        return choices.index(answer)
    need(type(answer) is int and 0 <= answer < len(choices), f"answer is {answer!r:.40}, expected "
         f"the text of a choice, or its index from 0 to {len(choices) - 1}")
    return answer

def question_in(place, record, columns={}):
    """The Question of a JSON object.  columns: those of `EvalOptions`"""
    need(isinstance(record, dict), f"expected an object, found {type(record).__name__}")
    fields = renamed(record, columns)
    prompt, answer = prompt_and_answer(fields)
    domain, match = fields.get("domain", ""), fields.get("match", MATCHES[0])
    need(isinstance(domain, str), f"domain is {domain!r:.40}, expected a text")
    need(match in MATCHES, f"match is {match!r:.40}, expected exact, contains or regex")
    choices = []
    if "choices" in fields:
        need(isinstance(prompt, str), "expected a prompt beside choices, found messages")
        choices = texts_in(fields["choices"], "choices")
        need(len(choices) > 1, "expected two choices or more, found one")
        answers = [right_choice(answer, choices)]
    else:
        answers = texts_in(answer, "answer")
        for pattern in answers if match == "regex" else ():
            try:
                re.compile(pattern)
            except re.error as e:
                raise UserError(f"answer is {pattern!r:.40}, expected a regular expression "
                                f"({e})") from None
    return Question(place, record, prompt, choices, answers, match, domain)

def read_questions(path, columns={}):
    """[Question] of a file, and its SHA-256"""
    entries, digest = read_entries(path, QUESTIONS)
    questions = []
    for name, entry in entries:
        place = f"{path}, {name}"
        with at(place, CORRECT):
            questions.append(question_in(place, entry, columns))
    need(questions, f"{path}: expected questions, found none; {QUESTIONS}")
    return questions, digest

def read_rewarded(path, rewards, columns={}):
    """[Question] of a file as `rl` reads it, and its SHA-256.  Their records are examples."""
    chosen = [f"{name}={column}" for name, column in columns.items()]
    examples, digest, _ = read_for(rewards.name, path, chosen, NOT_TRAINED)
    prompts = [asked_in(e) if is_conversation(e) else asked_in(e)[0][1] for e in examples]
    return [Question(f"{path}, question {i}", e, prompt, [], [], "", "")
            for i, (e, prompt) in enumerate(zip(examples, prompts), 1)], digest

# ---- choices
def choice_ids(tokenizer, prompt, choice, first):
    """(ids of the context, ids of the continuation), as `TemplateLM.loglikelihood` of lm_eval
    splits them: a space precedes the choice, and blanks at the end of the prompt belong to the
    continuation.  The ids of the continuation are those of the whole text, after as many as the
    context has.  first: id of the token that stands for an empty prompt, or None"""
    text, context = f"{prompt} {choice}", prompt.rstrip()
    if not context:
        need(first is not None, "the prompt is empty, and the model has no token that begins or "
             "ends a text; add a prompt")
        return [first], tokenizer.encode(text).tolist()
    ids = tokenizer.encode_whole(context).tolist()
    return ids, tokenizer.encode_whole(text).tolist()[len(ids):]

def choice_rows(questions, c):
    """[(ids, n)] of all choices of all questions: the last n ids are those of the choice.  A row
    that exceeds the context is cut from the left."""
    specials, state, rows = c.tokenizer.specials, c.state, []
    first = specials.get(state.bos, specials.get(state.eos))
    for q in questions:
        for choice in q.choices:
            with reading(q.place, CORRECT):
                before, ids = choice_ids(c.tokenizer, q.prompt, choice, first)
                need(0 < len(ids) <= c.cfg.seq_len, f"expected choices of 1 to {c.cfg.seq_len} "
                     f"tokens, found {len(ids)}: {choice!r:.40}")
                rows.append(([*before, *ids][-c.cfg.seq_len - 1:], len(ids)))
    return rows

def padded(rows, T):
    """tokens, targets (B, T) of some rows.  Only the tokens of a choice are targets."""
    x, y = np.zeros((len(rows), T), np.int32), np.full((len(rows), T), -1, np.int32)
    for i, (ids, n) in enumerate(rows):
        end = len(ids) - 1
        x[i, :end] = ids[:-1]
        y[i, end - n:end] = ids[-n:]
    return x, y

def log_likelihoods(model, rows, options):
    """log p(choice | context) of each row, in nats"""
    T, found = max(len(ids) for ids, _ in rows) - 1, [0.0] * len(rows)
    B = batch_size(model.cfg, T, options)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))     # batches of equal lengths
    for part in with_progress([order[i:i + B] for i in range(0, len(rows), B)], "choices"):
        losses = model.losses(*padded([rows[i] for i in part], T))
        for i, nats in zip(part, losses.tolist()):
            found[i] = -nats
    need(all(map(math.isfinite, found)), f"found a log-likelihood that is not finite; {TOO_LARGE}")
    return found

def choose(model, questions, c, options):
    """The result of each of these questions, which have choices.  `correct_norm` divides each
    log-likelihood by the number of characters of the choice: acc_norm of lm_eval."""
    all_found, results = iter(log_likelihoods(model, choice_rows(questions, c), options)), []
    for q in questions:
        found = [next(all_found) for _ in q.choices]
        best = int(np.argmax(found))
        best_norm = int(np.argmax([p / len(text) for p, text in zip(found, q.choices)]))
        results.append({"reply": q.choices[best], "correct": [best] == q.answers,
                        "correct_norm": [best_norm] == q.answers, "log_likelihoods": found})
    return results

# ---- replies
PATIENCE = 10                # seconds of computation for one reply

@contextlib.contextmanager
def patience(place):
    """Ends a block after PATIENCE with a UserError.  Some patterns, such as (a+)+$, take
    exponential time.  Windows has no such timer."""
    def end(number, frame):
        raise UserError(f"{place}: the regular expression takes more than {PATIENCE} s for one "
                        f"reply; simplify it, for example without nested repetitions")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

def is_accepted(reply, q):
    """Is the reply one of the accepted answers?  `exact` and `contains` ignore the case of letters,
    and `exact` also ignores white space at both ends."""
    if q.match == "regex":
        with patience(q.place):
            return any(re.search(pattern, reply) for pattern in q.answers)
    said, answers = reply.casefold(), [text.casefold() for text in q.answers]
    if q.match == "contains":
        return any(text in said for text in answers)
    return said.strip() in [text.strip() for text in answers]

def is_correct(reply, q):
    return {"correct": is_accepted(reply, q)}

def reply_to(speaker, questions, options, judge=is_correct):
    """The result of each of these questions, which are open.  judge: (reply, Question) -> figures
    """
    ids, told, results = [], time.perf_counter(), {}
    for q in questions:
        with reading(q.place, CORRECT):
            ids.append(speaker.shortened(speaker.ids_of(q.prompt), options.truncate))
    if speaker.answers:
        print_template_note(speaker.template)
    pace = Pace()
    for i, [reply] in speaker.answers_to(ids, options, options.batch or 64, pace):
        results[i] = {"reply": reply.answer, **judge(reply.answer, questions[i])}
        if time.perf_counter() - told > MOST_SILENT:
            told = time.perf_counter()
            print(f"{len(results):,} of {counted(len(ids), 'reply')}, {pace}", flush=True)
    return [results[i] for i in range(len(ids))]

# ---- accuracy
def wilson(k, n, z=1.959964):
    """95 % confidence interval of a probability after k successes in n trials (Wilson 1927)
    (k + z^2 / 2 -+ z sqrt(k (n - k) / n + z^2 / 4)) / (n + z^2)"""
    middle, half = k + z * z / 2, z * math.sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))

def accuracy_of(results):
    n, correct = len(results), sum(x["correct"] for x in results)
    normed = [x["correct_norm"] for x in results if "correct_norm" in x]
    found = {"n": n, "correct": correct, "accuracy": correct / n, "interval": wilson(correct, n)}
    return found | ({"acc_norm": sum(normed) / len(normed)} if normed else {})

def print_accuracies(rows):
    """A line for each (name, figures of `accuracy_of`)"""
    print_columns(["questions", "n", "correct", "accuracy", "95 % interval", "acc_norm"], [
        [name, f"{x['n']:,}", f"{x['correct']:,}", f"{x['accuracy']:.4f}",
         "{:.4f} to {:.4f}".format(*x["interval"]),
         f"{x['acc_norm']:.4f}" if "acc_norm" in x else "-"] for name, x in rows])

def print_wrong(questions, results, most):
    """Prints up to `most` wrong answers, and how many more there are."""
    wrong = [(q, x["reply"]) for q, x in zip(questions, results) if not x["correct"]]
    for q, reply in wrong[:most]:
        asked = q.prompt if isinstance(q.prompt, str) else q.prompt[-1][1]
        right = [q.choices[i] for i in q.answers] if q.choices else q.answers
        print(f"wrong: {printable(asked):.90}\n    expected {' or '.join(map(repr, right)):.80}\n"
              f"    found    {reply!r:.80}")
    if 0 < most < len(wrong):
        print(f"{counted(len(wrong) - most, 'more wrong answer')}; to print all, add --show-wrong "
              f"{len(wrong)}")

# ==== The verb ====
def print_columns(head, rows):
    """Prints rows of texts in columns; all but the first are aligned on the right."""
    rows = [[printable(text) for text in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        print(f"{first:<{widths[0]}}", *(f"{x:>{n}}" for x, n in zip(others, widths[1:])), sep="  ")

def answer_all(questions, model, speaker, c, options):
    """The result of each question, in their order.  speaker: returns the Speaker"""
    with_choices = [q for q in questions if q.choices]
    others = [q for q in questions if not q.choices]
    chosen = iter(choose(model, with_choices, c, options) if with_choices else ())
    replied = iter(reply_to(speaker(), others, options) if others else ())
    return [next(chosen if q.choices else replied) for q in questions]

def measure_answers(questions, results, show_wrong):
    """Prints a row per domain and some wrong answers, and returns all figures."""
    domains, rows = {}, []
    for q, x in zip(questions, results):
        domains.setdefault(q.domain, []).append(x)
    found = {domain: accuracy_of(x) for domain, x in domains.items()}
    total = accuracy_of(results)
    if [*domains] != [""]:
        rows = [(domain or "(no domain)", x) for domain, x in found.items()]
    print_accuracies([*rows, ("total", total)])
    print_wrong(questions, results, show_wrong)
    return {"domains": found, "total": total,
            "results": [{"question": q.record, **x} for q, x in zip(questions, results)]}

def measure_rewards(questions, speaker, options, rewards):
    """Prints the mean reward of the replies, and returns all figures.  A reward that fails is
    None."""
    results = reply_to(speaker, questions, options, lambda reply, q: {
        "reward": rewards(q.record, reply)})
    rewards.need_one([x["reward"] for x in results])
    results = [{**x, "reward": None if math.isnan(x["reward"]) else x["reward"]} for x in results]
    known = [x["reward"] for x in results if x["reward"] is not None]
    mean, failed = sum(known) / len(known), len(results) - len(known)
    said = f", {counted(failed, 'reward')} failed" if failed else ""
    print(f"mean reward {mean:.4f} on {len(known):,} of {counted(len(results), 'question')}{said}")
    return {"reward": {"name": rewards.name, "sha256": rewards.sha256, "mean": mean,
                       "n": len(known), "failed": failed},
            "results": [{"question": q.record, **x} for q, x in zip(questions, results)]}

def need_new_report(report, sources, force):
    """Rejects a file for the figures that cannot be written, before anything is measured."""
    for source in sources:
        need_another(report, source)
    refuse_overwrite(report, force)

def evaluate(file=None, decoder=Decoder, engine=Model, settings=EvalOptions, data=(),
             questions=None, reward=None, report=None, force=False, adapter=None, **chosen):
    """`eval`: measures a model on texts, on questions, or on both."""
    options = settings(**chosen).check()
    need(data or questions, "expected texts or questions; name them with --data or --questions")
    need(questions or not reward, "--reward: expected --questions beside it, found none; name a "
         "file of questions")
    rewards = Rewards(reward) if reward else None
    file = model_to_use(file, place="")
    for name in map(model_path, data):
        need(not (os.path.isfile(name) and begins_as_checkpoint(name)),
             f"{shown_name(name)} is a checkpoint, expected a text; name the checkpoint before "
             f"--data")
    if report:
        need_new_report(report, [file, *data, *filter(None, [questions, reward])], force)
    asked, digest = [], ""
    if rewards:
        asked, digest = read_rewarded(questions, rewards, options.columns())
    elif questions:
        asked, digest = read_questions(questions, options.columns())
    speaker = cache(partial(Speaker, file, decoder, options, adapter))
    if data or any(q.choices for q in asked):
        c = read_checkpoint(file, moments=False)
        if adapter:
            c = merge_into(c, adapter_for(adapter, c.cfg, file))
    else:                                    # a large file takes long to read: once is enough
        c = speaker()
    T, S = window_of(c.cfg, options)
    end = c.tokenizer.specials.get(c.state.eos, -1)      # a text never contains it
    texts, model = read_texts(data, options, c.tokenizer, end), None
    name = shown_name(file) + (f" with {adapter}" if adapter else "")
    print(f"{printable(name)}: {counted(n_params(c.cfg), 'parameter')}", flush=True)
    if texts or any(q.choices for q in asked):
        engine.ready(options)
        model = engine(c.cfg, c.flat, options=options)
    found = {"model": shown_name(file), "settings": asdict(options)}
    if adapter:
        found["adapter"] = {"folder": adapter, "sha256": digest_of(adapter)}
    if texts:
        found["texts"] = measure_texts(model, texts, T, S, (end, *c.tokenizer.begins), options)
    if asked:
        began = time.perf_counter()
        if rewards:
            measured = measure_rewards(asked, speaker(), options, rewards)
        else:
            results = answer_all(asked, model, speaker, c, options)
            measured = measure_answers(asked, results, options.show_wrong)
        found["questions"] = {"file": questions, "sha256": digest,
                              "seconds": time.perf_counter() - began, **measured}
    if report:
        found["sha256"] = sha256_of(file)
        text = json.dumps(found, indent=1, ensure_ascii=False)
        with replacing(report, "choose another --json") as temporary:
            pathlib.Path(temporary).write_bytes(text.encode(errors="replace"))
        print(f"wrote {printable(report)}")

EVAL_ARGUMENTS = (
    MODEL, ADAPTER,
    arg("--data", nargs="+", action="extend", type=file_name, metavar="TEXT",
        default=argparse.SUPPRESS, help="texts to measure: files, folders or patterns, as in "
        "train; may be given several times"),
    arg("--questions", type=file_name, help="file of questions, with answers or choices: JSON "
        "lines, JSON, CSV or Parquet, also compressed (.gz, .xz, .bz2, .zst)"),
    arg("--reward", type=file_name, help="judge the answers to --questions by a reward of rl "
        "instead: exact, contains, regex, length, or a Python file with the function "
        "reward(example, answer)"),
    arg("--json", dest="report", type=file_name, help="JSON file to write, with all figures"),
    FORCE)

def eval_verb(add):
    add(evaluate, *EVAL_ARGUMENTS, settings=fields(EvalOptions))
