"""Continuous batching: answers join and leave the decoder's slots between two steps.

One thread owns the decoder.  A step is
    1. who left, or has no time left, gives its slot back;
    2. who waits longest takes a free slot; what some slot has of its prompt already is not read
       again, but copied, or is there;
    3. every answer whose prompt is read draws its next token, by `next_tokens` of nanoeuler.py;
       beside them pieces of other prompts are read, so that no prompt stalls another's stream.

Each number of a row is summed in one order, which knows nothing of other rows, and each answer has
random numbers of its own: an answer is the same, to the bit, alone and beside any others.

Other threads call `submit`, `cancel`, `later` and `close`; news of a step goes to `tell`, which is
called once a step, in this thread, with [(answer, News)].
"""
import contextlib
import itertools
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
from numba import set_num_threads

import nanoeuler as ne

MOST_JOBS = 16               # explanations that may wait
PIECE_SECONDS = 0.1          # a prompt's piece may hold up the others' streams for so long
FEWEST_ROWS = 8              # of a piece
SCORED_ROWS = 64             # of a prompt, whose logits are all wanted
CACHE_BYTES = 1 << 30        # of keys and values, where --context does not say


def likeliest(p, k):
    """[(id, p)] of the k largest of p (V,), in their order; of equal ones the first"""
    top = np.flatnonzero(ne.of_the_largest(p, k)) if k else []
    return sorted(((int(i), float(p[i])) for i in top), key=lambda found: -found[1])


class Busy(Exception):
    """Too many wait already, or the server ends."""


@dataclass
class News:
    """What a step brought for an answer."""
    tokens: list = field(default_factory=list)           # ids
    said: bytes = b""                                    # of the text, what may be shown now
    drafted: list = field(default_factory=list)          # of this step: what had been guessed
    finish: str = ""                                     # "stop", "length", "timeout" or "error"
    problem: str = ""


@dataclass(eq=False)
class Answer:
    """A text that somebody asked for."""
    ids: list                                # the prompt's
    sampling: ne.Sampling
    rng: object
    end: int | None                          # the token that ends it
    vocab: list
    scored: bool = False                     # are log-probabilities of the prompt wanted?
    deadline: float = float("inf")           # of time.perf_counter
    owner: object = None                     # whom `tell` tells
    index: int = 0                           # among those of its owner
    reply: ne.Reply = None                   # once it has a slot
    scores: list = field(default_factory=list)           # (log-probability, likeliest) from ids[1]
    cached: int = 0                          # tokens of the prompt that were not read again
    arrived: float = 0.0
    first: float = 0.0                       # when its first token came
    left: bool = False                       # nobody waits for it any more


class Engine:
    """Runs answers in the slots of a decoder.
    make: gives the decoder, called in the engine's thread, which is the only one that computes"""

    def __init__(self, make, stats, queue=256, threads=0):
        self.make, self.stats, self.most, self.threads = make, stats, queue, threads
        self.changed = threading.Condition()
        self.waiting, self.jobs = deque(), deque()
        self.draining = self.closing = False             # nothing new begins; nothing goes on
        self.active, self.free, self.used = {}, [], {}   # slot -> Answer; slots; slot -> when
        self.clock, self.rows = itertools.count(), 64
        self.pace, self.reader, self.tell = ne.Pace(), None, lambda news: None
        self.news = []                                   # (answer, News) that were not told yet
        self.ready = Future()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    # ---- other threads
    def start(self):
        """Returns the decoder, as soon as it is there."""
        self.thread.start()
        return self.ready.result()

    def submit(self, answers):
        """All of them, or Busy."""
        with self.changed:
            if self.draining:
                raise Busy("the server is about to end")
            if len(self.waiting) + len(answers) > self.most + len(self.free):
                raise Busy(f"{len(self.waiting)} answers wait already, and at most {self.most} may")
            now = time.perf_counter()
            for answer in answers:
                answer.arrived = now
            self.waiting += answers
            self.changed.notify()

    def cancel(self, answers):
        with self.changed:
            for answer in answers:
                answer.left = True
            self.changed.notify()

    def later(self, function):
        """A Future of what function() returns, a generator: the engine's thread goes on with it
        between two steps, so that what takes long holds nobody up for long."""
        future = Future()
        with self.changed:
            if self.closing or len(self.jobs) >= MOST_JOBS:
                raise Busy("too many explanations wait already")
            self.jobs.append((function(), future))
            self.changed.notify()
        return future

    def close(self):
        """Ends the thread after its current step.  Answers that are not complete get an error.
        Returns at once: see `ended`."""
        with self.changed:
            self.draining = self.closing = True
            self.changed.notify()

    def ended(self, seconds):
        """Whether the thread has ended, after waiting for it for so long."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def unfinished(self):
        """The number of answers that are being written or wait for a slot"""
        return len(self.active) + len(self.waiting)

    # ---- the engine's thread
    def run(self):
        try:
            if self.threads:
                set_num_threads(self.threads)            # Numba keeps a number for each thread
            self.reader = self.make()
            self.free = list(range(len(self.reader.texts)))
            self.used = dict.fromkeys(self.free, -1)
            self.ready.set_result(self.reader)
        except BaseException as e:
            self.ready.set_exception(e)
            return
        while self.wait():
            try:
                self.step()
            except ne.UserError as e:
                self.fail(str(e))
            except Exception:                            # a fault of ours: it must not end serving
                traceback.print_exc()
                self.fail("an internal error; the server's log has more")
        with self.changed:
            for _, future in self.jobs:
                future.cancel()
            answers = [*self.active.values(), *self.waiting]
        problem = "the server ended before this answer was complete"
        self.news += [(answer, News(finish="error", problem=problem)) for answer in answers]
        self.report()

    def wait(self):
        """Until there is something to do; False: it is to end"""
        with self.changed:
            while not (self.closing or self.waiting or self.active or self.jobs):
                self.changed.wait()
            return not self.closing

    def fail(self, problem):
        """Whoever was in that step learns it; slots begin anew.  Whose news came before the fault
        learn those."""
        for slot, answer in [*self.active.items()]:
            self.news.append((answer, News(finish="error", problem=problem)))
            self.reader.truncate(0, slot)
            self.release(slot)
        self.report()

    def report(self):
        news, self.news = self.news, []
        if news:
            self.tell(news)

    def release(self, slot):
        del self.active[slot]
        self.used[slot] = next(self.clock)
        with self.changed:
            self.free.append(slot)

    def step(self):
        self.drop()
        self.admit()
        self.score_prompts()
        pieces = self.pieces()
        ready = [a for a in self.active.values()
                 if len(a.reply.pending) == 1 or pieces.get(a) == len(a.reply.pending)]
        unread = {a: n for a, n in pieces.items() if n < len(a.reply.pending)}
        for answer in [a for a in ready if a.reply.finish]:
            ready.remove(answer)             # its prompt was scored, and no token is wanted
            self.end(answer, answer.reply.finish)
        self.speak(ready, unread)
        self.report()
        if self.jobs:
            self.explain()

    def explain(self):
        """Goes on with the job that came first.  Who asked may leave at any moment."""
        job, future = self.jobs[0]
        with contextlib.suppress(InvalidStateError):     # it was cancelled just now
            try:
                if not future.cancelled():
                    next(job)
                    return
            except StopIteration as done:
                future.set_result(done.value)
            except Exception as e:
                future.set_exception(e)
        with self.changed:
            self.jobs.popleft()

    def drop(self):
        """Who left is told nothing; whose time is over learns that."""
        now = time.perf_counter()
        with self.changed:
            gone = [a for a in self.waiting if a.left or now > a.deadline]
            for answer in gone:
                self.waiting.remove(answer)
        for slot, answer in [*self.active.items()]:
            if answer.left or now > answer.deadline:
                self.release(slot)
                gone.append(answer)
        self.news += [(answer, News(finish="timeout")) for answer in gone if not answer.left]

    def admit(self):
        """Free slots take those that wait, in their order."""
        while True:
            with self.changed:
                if not (self.free and self.waiting):
                    return
                answer = self.waiting.popleft()
                source, slot, held = self.best_slot(answer)
                self.free.remove(slot)
                self.active[slot] = answer               # from here on a fault is told to it
            if source == slot:
                self.reader.truncate(held, slot)
            else:
                self.reader.copy(source, slot, held)
            answer.cached = held
            answer.reply = ne.Reply(answer.ids[held:], answer.sampling, answer.rng, answer.end,
                                    answer.vocab)
            answer.reply.slot = slot
            answer.scored = answer.scored and len(answer.ids) > 1
            if answer.reply.finish and not answer.scored:            # no token is wanted of it
                self.end(answer, answer.reply.finish)
            self.stats.count("prompt_tokens", len(answer.ids))
            self.stats.count("cached_tokens", held)

    def best_slot(self, answer):
        """(the slot that holds most of the tokens with which the prompt begins, a free one, how
        many they are).  Both are the same slot if it is free; else the one that was used longest
        ago.  The last token is always read: its logits are wanted."""
        def held(slot):
            n = 0
            for known, token in zip(self.reader.texts[slot], answer.ids[:-1]):
                if known != token:
                    break
                n += 1
            return n

        oldest = min(self.free, key=self.used.get)
        if answer.scored:
            return oldest, oldest, 0
        lengths = {slot: held(slot) for slot in self.used}
        most = max(lengths.values())
        free = [slot for slot in self.free if lengths[slot] == most]
        if free:
            slot = min(free, key=self.used.get)
            return slot, slot, most
        return max(lengths, key=lengths.get), oldest, most

    def end(self, answer, finish):
        self.release(answer.reply.slot)
        self.news.append((answer, News(finish=finish)))

    def pieces(self):
        """{answer: how many tokens of its prompt are read in this step}, of those that have some to
        read.  Half of the rows are for the one that came first, the rest for those that need
        least."""
        reading = [a for a in self.active.values() if len(a.reply.pending) > 1 and not a.scored]
        left = self.rows if len(reading) < len(self.active) else ne.MOST_ROWS
        found = dict.fromkeys(reading, 0)

        def take(answer, most):
            n = min(most, len(answer.reply.pending) - found[answer])
            found[answer] += n
            return n

        if reading:
            left -= take(min(reading, key=lambda a: a.arrived), (left + 1) // 2)
        for answer in sorted(reading, key=lambda a: len(a.reply.pending)):
            left -= take(answer, left)
        return {answer: n for answer, n in found.items() if n}

    def score_prompts(self):
        """Reads a piece of each prompt whose log-probabilities are wanted, all but the last token;
        with the logits of all rows."""
        for answer in [a for a in self.active.values() if a.scored]:
            pending = answer.reply.pending
            n = min(SCORED_ROWS, len(pending) - 1)
            logits = self.reader.read([ne.Part(answer.reply.slot, pending[:n], n)])
            for z, token in zip(logits, pending[1:n + 1]):
                p = ne.log_softmax(z)
                answer.scores.append((float(p[token]), likeliest(p, answer.sampling.logprobs)))
            del pending[:n]
            answer.scored = len(pending) > 1

    def speak(self, answers, unread):
        """A token, or with drafts some, of each answer.
        unread: {answer: n}, of whose prompts n tokens are read beside, not to their ends"""
        if not (answers or unread):
            return
        began, reading = time.perf_counter(), sum(unread.values())
        reading += sum(len(a.reply.pending) - 1 for a in answers)
        drafts = [a.reply.drafts for a in answers]       # `next_tokens` makes others
        offered, accepted = sum(self.pace.offered), sum(self.pace.accepted)
        also = [ne.Part(a.reply.slot, a.reply.pending[:n], 0) for a, n in unread.items()]
        if answers:
            drawn = ne.next_tokens(self.reader, [a.reply for a in answers], self.pace, also)
        else:
            drawn = []
            self.reader.read(also)
        for answer, n in unread.items():
            del answer.reply.pending[:n]
        self.suit(reading, time.perf_counter() - began, len(answers))
        self.stats.count("drafts_offered", sum(self.pace.offered) - offered)
        self.stats.count("drafts_accepted", sum(self.pace.accepted) - accepted)
        now = time.perf_counter()
        for answer, tokens, drafted in zip(answers, drawn, drafts):
            if not answer.first:
                answer.first = now
                self.stats.observe("first", now - answer.arrived)
            self.stats.count("tokens", len(tokens))
            self.news.append((answer, News(tokens, answer.reply.news(), drafted,
                                           answer.reply.finish)))
            if answer.reply.finish:
                self.release(answer.reply.slot)
                if (n := len(answer.reply.tokens)) > 1:
                    self.stats.observe("token", (now - answer.first) / (n - 1))

    def suit(self, reading, seconds, speaking):
        """How many rows of prompts a step reads beside those who speak: what takes PIECE_SECONDS.
        Of a few rows most of the time is that of reading the weights, and says nothing of more."""
        if reading >= FEWEST_ROWS:
            wanted = PIECE_SECONDS * (reading + speaking) / max(seconds, 1e-6)
            self.rows = int(min(ne.MOST_ROWS, max(FEWEST_ROWS, (self.rows + wanted) / 2)))
