"""Rehearsal: sft and dpo also train on examples that the model has learned before, so that it
forgets fewer of them (Robins 1995, Catastrophic forgetting, rehearsal and pseudorehearsal).

A model was trained on known examples if its checkpoint stores the digest of a file in data/.  Some
of those examples are then rehearsed.  Any other chat model can rehearse its own answers to the
questions of data/instructions.json.  In both cases the run asks some old questions before its first
step and after its last one.  These questions are never rehearsed, so they show what was kept.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from bpe import need
from nanoeuler import generate_many, Reply, rng_of
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.checkpoint.bundled import beside_program
from nanoeuler_parts.files.printing import counted, with_progress
from nanoeuler_parts.tuning.examples import (
    answered_in, asked_in, content_of, held_out, question_hash, read_entries,
)
from nanoeuler_parts.tuning.formats import as_example, words_of

INSTRUCTIONS, ALL_INSTRUCTIONS = "data/instructions.json", "data/instruct_open.json.xz"
EVERYDAY = "data/everyday.py"            # generates conversations

# {file of examples or pairs: what a model knows whose last training was on this file}
# The pairs ask questions of the instructions.  The bundled model was last trained on all pairs, and
# before them on all instructions and on everyday conversations.
KNOWN = {INSTRUCTIONS: [INSTRUCTIONS], ALL_INSTRUCTIONS: [ALL_INSTRUCTIONS],
         "data/preferences_sample.jsonl": [INSTRUCTIONS],
         "data/prefs_open.jsonl.xz": [ALL_INSTRUCTIONS, EVERYDAY]}

ASKED = 200          # old questions, asked before and after a run
LONGEST_ASKED = 160  # characters of an answer that is compared
ROW = 64             # tokens; rows of a run have at least this length, which holds six of ten old
                     # examples.  Longer ones are rehearsed if the new examples are as long
SAMPLED, SAMPLED_ASKED = 256, 64     # answers of the model itself: to rehearse, and to compare
LONGEST_SAMPLED = 100        # tokens; a longer answer is not used
MOST_RECALLED = 1000         # old examples that are tried, to rehearse those answered right
AT_ONCE = 64         # replies that are decoded at a time

# ---- old examples
def known_sets(learned):
    """The sets of examples that a model was trained on.     learned: digests of its training data,
    SHA-256"""
    found = []
    for name, sets in KNOWN.items() if learned else ():
        path = beside_program(name)
        if os.path.exists(path) and content_of(path)[1] in learned:
            found += sets
    return list(dict.fromkeys(found))

def entries_of(name):
    """The entries of a set: of a file, or as data/everyday.py generates them"""
    path = beside_program(name)
    need(os.path.exists(path), f"{path}: No such file; it holds examples to rehearse; restore it, "
         f"or use --rehearse 0")
    if name != EVERYDAY:
        return [entry for _, entry in read_entries(path)[0]]
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "everyday.jsonl")
        subprocess.run([sys.executable, path, "--out", made], check=True, stdout=subprocess.DEVNULL)
        return [entry for _, entry in read_entries(made)[0]]

def is_short(example):
    """Can its answer be compared: one short answer to one question?"""
    asked, answer = asked_in(example), answered_in(example, "output")
    return len(asked) == len(answer) == 1 and len(answer[0][1]) <= LONGEST_ASKED

@dataclass
class OldExamples:
    """Examples that the model knows, each with the field `output`"""
    to_rehearse: list = field(default_factory=list)      # a list for each set
    asked: list = field(default_factory=list)    # whose questions are asked, and never rehearsed
    sets: list = field(default_factory=list)     # names of their files

    @property
    def sha256(self):
        """A resumed run must find the same examples."""
        text = json.dumps([self.to_rehearse, self.asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def n(self):
        return sum(map(len, self.to_rehearse))

    def shuffled(self, seed):
        """All examples to rehearse, in random order, of each set in turn until it is used up"""
        rng = np.random.default_rng(seed)
        orders = [[x[i] for i in rng.permutation(len(x))] for x in self.to_rehearse]
        return [e for turn in zip_longest(*orders) for e in turn if e is not None]

def old_examples(sets, excluded):
    """The OldExamples of known sets.  Held-out examples are left out, because the model was not
    trained on them.     excluded: hashes of questions that the run reads already"""
    old, asked = OldExamples(sets=sets), set()
    for name in sets:
        found = [as_example(entry, ["output"]) for entry in entries_of(name)]
        found = [e for e in found if not held_out(e) and question_hash(e) not in excluded]
        short = {question_hash(e): e for e in found if is_short(e)}
        chosen = [h for h in sorted(short) if h not in asked][:ASKED // len(sets)]
        old.asked += [short[h] for h in chosen]
        asked |= {*chosen}
        old.to_rehearse.append([e for e in found if is_short(e)])
    old.to_rehearse = [[e for e in x if question_hash(e) not in asked] for x in old.to_rehearse]
    return old

def own_questions(excluded):
    """Questions for a model whose training examples are unknown"""
    found = [as_example(entry, ["output"]) for entry in entries_of(INSTRUCTIONS)]
    return [{"instruction": e["instruction"], "input": e["input"]} for e in found
            if question_hash(e) not in excluded][:SAMPLED + SAMPLED_ASKED]

def of_own_answers(answers):
    """The OldExamples of [(question, its input, the model's own answer)]"""
    found = [dict(zip(("instruction", "input", "output"), x)) for x in answers]
    asked, others = found[:SAMPLED_ASKED], found[SAMPLED_ASKED:]
    return OldExamples([others], asked, ["the model's own answers"])

# ---- answers
def greedy_answers(decoder, prompts, tokenizer, ends, most, what="answers", stopped=()):
    """[Reply] to each prompt, ids, with the most probable token at each place
    ends: tokens that end an answer; most: its longest length in tokens; what: the name in lines of
    progress; stopped: true if the answers are not needed any more, and None is returned"""
    sampling = Sampling(temperature=0.0, tokens=most)
    reader = decoder.with_slots(min(AT_ONCE, len(prompts)), max(map(len, prompts)) + most)
    replies = (Reply(ids, sampling, rng_of(1), ends, tokenizer.vocab) for ids in prompts)
    found = {}
    for i, reply in with_progress(generate_many(reader, replies), what, len(prompts),
                                  "answer"):
        if stopped:
            return None
        found[i] = reply
    return [found[i] for i in range(len(prompts))]

def answers_by(decoder, questions, prompts, tokenizer, ends):
    """[[question, input, answer]] for the questions that the model answers within LONGEST_SAMPLED
    tokens.  Prints what this costs."""
    began = time.perf_counter()
    print(f"answering {counted(len(questions), 'question')} with the model itself, to rehearse its "
          f"answers", flush=True)
    replies = greedy_answers(decoder, prompts, tokenizer, ends, LONGEST_SAMPLED)
    found = [[e["instruction"], e["input"], reply.answer] for e, reply in zip(questions, replies)
             if reply.finish == "stop" and reply.answer.strip()]
    n_tokens = sum(len(reply.tokens) for reply in replies)
    print(f"sampled {n_tokens:,} tokens in {time.perf_counter() - began:.1f} s; "
          f"{counted(len(found), 'answer')} of at most {LONGEST_SAMPLED} tokens can be rehearsed\n",
          flush=True)
    return found

def is_right(reply, example):
    """Is it, after the model has ended it, the known answer, exactly?"""
    return reply.finish == "stop" and [reply.answer] == words_of(answered_in(example, "output"))

# ---- batches
class MixedBatches:
    """Batches of B rows, of which the last n_old are old examples.     new, old: Examples"""

    def __init__(self, new, old, n_old):
        self.new, self.old, self.n_old = new, old, n_old

    def pick(self, i, B):
        """The indices in new.rows and in old.rows of rows i to i + B of the run, one step"""
        step, n_new = i // B, B - self.n_old
        return self.new.pick(step * n_new, n_new), self.old.pick(step * self.n_old, self.n_old)

    def take(self, i, B):
        """tokens (B, T), targets (P, B, T): rows i to i + B of the run."""
        new, old = (x.batch(rows) for x, rows in zip((self.new, self.old), self.pick(i, B)))
        return np.concatenate((new[0], old[0])), np.concatenate((new[1], old[1]), axis=1)

    def n_read(self, i, B):
        return sum(int((x.rows[rows, :x.T] >= 0).sum())
                   for x, rows in zip((self.new, self.old), self.pick(i, B)))

def rows_rehearsed(share, n_new):
    """How many old rows a step has beside n_new new ones, so that they are this share of all rows
    share = n_old / (n_new + n_old)"""
    return max(1, round(n_new * share / (1 - share))) if share else 0
