"""Continuous batching: answers join and leave the decoder's slots between two steps.

One thread owns the decoder.  A step has three phases:
    1. An answer whose client has left, or whose time is over, releases its slot.
    2. Waiting answers take the free slots; the client with the fewest running answers comes first.
       If some slot holds the beginning of the prompt in its
       KV cache, and its prompt has the same owner, that beginning is reused or copied, not read
       again.  See `Answer.cache_owner`.
    3. Every answer whose prompt has been read samples its next token with `next_tokens` of
       nanoeuler.py.  The same step reads pieces of other prompts, so that a long prompt does not
       stall the streams of other answers.

Each number of a row is summed in one order, which is independent of the other rows.  Each answer
has its own random numbers.  So an answer is bit-identical whether it runs alone or in a batch.

models.py makes the engines.  Other threads call `submit`, `cancel`, `later` and `close`.  The
engine's thread calls `tell` with the news of each step, a list of (answer, News).
"""
import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
from numba import set_num_threads

import nanoeuler as ne
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.serve.log import log_fault

MOST_JOBS = 16               # maximum number of waiting explanations of one client
CLIENTS = 4                  # number of clients whose queues may be full
PATIENCE = 8                 # steps that a client without a running answer waits for a free slot
PIECE_SECONDS = 0.1          # target time of a step that reads pieces of prompts
FEWEST_ROWS = 8              # minimum of `Engine.rows`, rows of prompts per step
SCORED_ROWS = 64             # rows per step of a prompt whose log-probabilities are requested
CACHE_BYTES = 1 << 30        # size of the KV cache of all slots, if --context is not given
LONGEST_PAUSE = 0.02         # seconds, see Pieces
ENDING = "the server is shutting down"


def likeliest(p, k):
    """[(id, p)] of the k largest of p (V,), largest first; of equal ones, lower ids first"""
    top = np.flatnonzero(ne.largest_mask(p, k)) if k else []
    return sorted(((int(i), float(p[i])) for i in top), key=lambda found: -found[1])


class Busy(Exception):
    """Too many requests are waiting, or the server is shutting down."""


@dataclass
class News:
    """The result of one step for one answer."""
    tokens: list = field(default_factory=list)           # ids of the sampled tokens
    said: bytes = b""                                    # new text that may be shown now
    drafted: list = field(default_factory=list)          # draft tokens that this step read
    finish: str = ""                                     # "stop", "length", "timeout" or "error"
    problem: str = ""


@dataclass(eq=False)
class Answer:
    """A text that a client has requested, and the state of its generation."""
    ids: list                                # tokens of the prompt
    sampling: Sampling
    rng: object
    ends: tuple                              # the tokens that end the answer
    vocab: list
    scored: bool = False                     # are log-probabilities of the prompt requested?
    deadline: float = float("inf")           # on the clock of time.perf_counter
    owner: object = None                     # receives the News: app.py's queue
    client: str = ""                         # its address
    salt: str | None = ""                    # cache_salt; None: cache_prompt is false
    index: int = 0                           # number among the owner's answers
    constraint: object = None                # of JSON mode, see ne.Reply
    adapter: int | None = None               # see `LoraDecoder.use`; None: the decoder has none
    reply: ne.Reply = None                   # set when the answer gets a slot
    scores: list = field(default_factory=list)           # (log-probability, top k), ids[1] on
    cached: int = 0                          # prompt tokens reused from the KV cache
    arrived: float = 0.0
    first: float = 0.0                       # when its first token was sampled
    left: bool = False                       # has the client left?

    def cache_owner(self):
        """The owner of the prompt: answers with equal ones may share the keys and values of their
        prompts.  The number of tokens found in the KV cache, and the time of the answer, tell how
        much of a prompt is known.  With one cache for all, they would let a client guess the
        prompt of another one, token by token.  Keys and values also depend on the adapter."""
        return object() if self.salt is None else (self.client, self.salt, self.adapter)


class Turns:
    """A lock that threads get in the order in which they ask for it.  With threading.Lock, a thread
    could take it again and again while another one waits.

    The engines of several models hold it during a step, so only one of them computes.  On a CPU,
    the threads of two computations would spin for the same cores.  On a GPU, all work is in one
    stream, and the graph that one engine records would contain the work of another.  The
    preparation of a schema holds it during a piece, see `Pieces`."""

    def __init__(self):
        self.changed, self.queue = threading.Condition(), deque()

    def take(self, seconds=None):
        """Waits for the lock, for at most this long, and returns whether the thread got it."""
        mine = object()
        with self.changed:
            self.queue.append(mine)
            found = self.changed.wait_for(lambda: self.queue[0] is mine, seconds)
            if not found:
                self.queue.remove(mine)
        return found

    def leave(self):
        with self.changed:
            self.queue.popleft()
            self.changed.notify_all()

    def __enter__(self):
        self.take()

    def __exit__(self, *error):
        self.leave()


class Pieces:
    """Divides a computation in Python into pieces, which take turns with the steps of the engines:
    `next` ends a piece and begins another one.  Without turns, the engine's thread would wait for
    Python's lock (the GIL) many times per step, up to sys.getswitchinterval() each time.
    A piece waits for at most LONGEST_PAUSE seconds, so that long steps do not delay the computation
    for long.     turns: Turns"""

    def __init__(self, turns):
        self.turns, self.has_turn = turns, False

    def next(self):
        if self.has_turn:
            self.turns.leave()
        self.has_turn = False
        self.has_turn = self.turns.take(LONGEST_PAUSE)

    def __enter__(self):
        self.next()
        return self

    def __exit__(self, *error):
        if self.has_turn:
            self.turns.leave()


class Engine:
    """Runs answers in the slots of a decoder.
    make: returns the decoder.  The engine's thread calls it, and alone runs the decoder.
    queue: maximum number of answers of one client that may wait for a slot
    threads: 0: Numba's default
    turns: shared with the engines of other models     stats: metrics.Stats
    """

    def __init__(self, make, stats, queue=256, threads=0, turns=None):
        self.make, self.stats, self.most, self.threads = make, stats, queue, threads
        self.turns = turns or Turns()
        self.changed = threading.Condition()
        self.waiting, self.jobs = deque(), {}            # {client: its jobs}, the next one first
        self.draining = self.closing = False             # accept no new answers; end the thread
        self.active, self.free, self.used = {}, [], {}   # {slot: Answer}; slots; {slot: last use}
        self.owners = {}                     # {slot: the owner of its prompt}
        self.served, self.kept_waiting = {}, 0           # {client: when it last got a slot}; steps
        self.clock, self.rows = itertools.count(), 64
        self.pace, self.reader, self.tell = ne.Pace(), None, lambda news: None
        self.news = []                                   # (answer, News) for the next `tell`
        self.ready = Future()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    # ---- called by other threads
    def start(self):
        """Starts the thread, waits until it has made the decoder, and returns the decoder."""
        self.thread.start()
        return self.ready.result()

    def submit(self, answers):
        """Puts all of the answers into the queue, or raises Busy."""
        with self.changed:
            if self.draining:
                raise Busy(ENDING)
            self.need_room(answers)
            now = time.perf_counter()
            for answer in answers:
                answer.arrived = now
            self.waiting += answers
            self.changed.notify()

    def need_room(self, answers):
        """Raises Busy if the queue has no room for the answers of a request."""
        own = sum(a.client == b.client for a in self.waiting for b in answers[:1])
        for n, most, whose in ((own, self.most, "one client"),
                               (len(self.waiting), CLIENTS * self.most, "all clients")):
            if n + len(answers) > most + len(self.free):
                raise Busy(f"the queue has no room for {counted(len(answers), 'answer')}: {n} are "
                           f"waiting, the limit is {most} of {whose}; try again later")

    def cancel(self, answers):
        with self.changed:
            for answer in answers:
                answer.left = True
            self.changed.notify()

    def later(self, function, client=""):
        """Returns a Future for the result of function(), a generator.  The engine's thread resumes
        the generator between steps until it ends, so a long job does not delay a step for long.
        The clients have their jobs done in turns, as in workers.Worker."""
        future = Future()
        with self.changed:
            if (self.closing or len(self.jobs.get(client, ())) >= MOST_JOBS
                    or sum(map(len, self.jobs.values())) >= CLIENTS * MOST_JOBS):
                raise Busy("too many explanations are waiting; try again later")
            self.jobs.setdefault(client, deque()).append((function(), future))
            self.changed.notify()
        return future

    def close(self):
        """Ends the thread after its current step.  Incomplete answers get an error.  Returns at
        once; `ended` waits for the thread."""
        with self.changed:
            self.draining = self.closing = True
            self.changed.notify()

    def ended(self, seconds):
        """Waits up to `seconds` for the thread to end, and returns whether it has ended."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def unfinished(self):
        """The number of answers that are being written or wait for a slot"""
        return len(self.active) + len(self.waiting)

    # ---- called by the engine's thread
    def run(self):
        try:
            if self.threads:
                set_num_threads(self.threads)            # Numba's setting is per thread
            with self.turns:
                self.reader = self.make()
            self.free = list(range(len(self.reader.held_ids)))
            self.used = dict.fromkeys(self.free, -1)
            self.ready.set_result(self.reader)
        except BaseException as e:
            self.ready.set_exception(e)
            return
        while self.wait():
            try:
                with self.turns:
                    self.step()
            except ne.UserError as e:
                self.fail(str(e))
            except Exception:                            # a bug must not end the server
                log_fault()
                self.fail("internal error; see the server's log")
        with self.changed:
            for _, future in itertools.chain(*self.jobs.values()):
                future.cancel()
            answers = [*self.active.values(), *self.waiting]
        problem = "the server ended before this answer was complete"
        self.news += [(answer, News(finish="error", problem=problem)) for answer in answers]
        self.report()

    def wait(self):
        """Waits until there is something to do.  Returns False if the thread must end."""
        with self.changed:
            while not (self.closing or self.waiting or self.active or self.jobs):
                self.changed.wait()
            return not self.closing

    def fail(self, problem):
        """Ends all active answers with an error, and empties their slots.  News from before the
        error is still delivered."""
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
        self.make_room()
        self.admit()
        self.score_prompts()
        pieces = self.pieces()
        ready = [a for a in self.active.values()
                 if len(a.reply.pending) == 1 or pieces.get(a) == len(a.reply.pending)]
        unread = {a: n for a, n in pieces.items() if n < len(a.reply.pending)}
        for answer in [a for a in ready if a.reply.finish]:
            ready.remove(answer)             # only log-probabilities of the prompt were requested
            self.end(answer, answer.reply.finish)
        self.speak(ready, unread)
        self.report()
        if self.jobs:
            self.explain()

    def explain(self):
        """Resumes the first job of the client whose turn it is, until its next yield.  After its
        last job, this client is the last.  The client may leave at any moment, which cancels the
        Future."""
        with self.changed:
            client = next(iter(self.jobs))
            job, future = self.jobs[client][0]
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
            jobs = self.jobs.pop(client)
            jobs.popleft()
            if jobs:
                self.jobs[client] = jobs

    def drop(self):
        """Removes answers whose client has left or whose deadline has passed.  Only the latter get
        News."""
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

    def running(self):
        """{client: the number of its answers that have a slot}"""
        return Counter(answer.client for answer in self.active.values())

    def make_room(self):
        """Preempts an answer if a client without a slot has waited PATIENCE steps while another one
        has several.  So one client cannot keep all slots from the others.  The client with the most
        running answers loses the one with the fewest tokens.  This answer returns to the queue.
        Later, the tokens of its slot are read again, with the same bits."""
        running = self.running()
        with self.changed:
            waits = not self.free and any(a.client not in running for a in self.waiting)
        victims = [a for a in self.active.values() if running[a.client] > 1 and not a.scored]
        self.kept_waiting = self.kept_waiting + 1 if waits and victims else 0
        if self.kept_waiting > PATIENCE:
            held = self.reader.held_ids
            answer = min(victims, key=lambda a: (-running[a.client], len(held[a.reply.slot])))
            answer.reply.pending[:0] = held[answer.reply.slot]
            answer.reply.drafts = []
            self.release(answer.reply.slot)
            with self.changed:
                self.waiting.appendleft(answer)
            self.kept_waiting = 0

    def next_answer(self):
        """The waiting answer that gets the next slot: the first one of the client with the fewest
        running answers, among those of the client that has waited longest for its turn."""
        running, first = self.running(), {}
        for answer in self.waiting:
            first.setdefault(answer.client, answer)
        self.served = {client: n for client, n in self.served.items()
                       if client in first or client in running}
        return min(first.values(),
                   key=lambda a: (running[a.client], self.served.get(a.client, -1)))

    def admit(self):
        """Gives the free slots to waiting answers."""
        while True:
            with self.changed:
                if not (self.free and self.waiting):
                    return
                answer = self.next_answer()
                self.waiting.remove(answer)
                self.served[answer.client] = next(self.clock)
                owner = answer.cache_owner()
                source, slot, held = self.best_slot(answer, owner)
                self.free.remove(slot)
                self.owners[slot] = owner
                self.active[slot] = answer               # from now on, `fail` includes it
            if source == slot:
                held = self.reader.truncate(held, slot)
            else:
                held = self.reader.copy(source, slot, held)
            if not held and answer.adapter is not None:
                self.reader.use(answer.adapter, slot)
            if answer.reply:                 # it was preempted
                del answer.reply.pending[:held]
                answer.reply.slot = slot
                continue
            answer.cached = held
            answer.reply = ne.Reply(answer.ids[held:], answer.sampling, answer.rng, answer.ends,
                                    answer.vocab, answer.ids[:held], answer.constraint)
            answer.reply.slot = slot
            answer.scored = answer.scored and len(answer.ids) > 1
            if answer.reply.finish and not answer.scored:            # max_tokens is 0
                self.end(answer, answer.reply.finish)
            self.stats.count("prompt_tokens", len(answer.ids))
            self.stats.count("cached_tokens", held)

    def best_slot(self, answer, owner):
        """Returns (source, slot, n): `source` holds the longest beginning of the prompt, n tokens,
        among the slots whose prompts have this owner, and `slot` is free.  If such a source is
        free, slot is the source.  Otherwise slot is the free slot that has been unused for the
        longest time.  n excludes the prompt's last token, because its logits are needed.  A prompt
        that is scored is read completely: n = 0."""
        ids = answer.reply.pending if answer.reply else answer.ids

        def held(slot):
            n = 0
            if self.owners.get(slot) != owner:
                return n
            for known, token in zip(self.reader.held_ids[slot], ids[:-1]):
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
        """{answer: number of prompt tokens to read in this step}, if the prompt is not read yet.
        The answer that arrived first gets half of the rows.  The other rows go to the prompts with
        the fewest unread tokens first."""
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
        """Reads a piece of each prompt whose log-probabilities are requested, with the logits of
        all rows.  `speak` reads the prompt's last token."""
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
        """Samples a token of each answer, or several if draft tokens are accepted.
        unread: {answer: n}, for prompts of which the same step reads n tokens but not the end"""
        if not (answers or unread):
            return
        began, reading = time.perf_counter(), sum(unread.values())
        reading += sum(len(a.reply.pending) - 1 for a in answers)
        drafts = [a.reply.drafts for a in answers]       # `next_tokens` replaces them
        offered, accepted = sum(self.pace.offered), sum(self.pace.accepted)
        also = [ne.Part(a.reply.slot, a.reply.pending[:n], 0) for a, n in unread.items()]
        if answers:
            sampled = ne.next_tokens(self.reader, [a.reply for a in answers], self.pace, also)
        else:
            sampled = []
            self.reader.read(also)
        for answer, n in unread.items():
            del answer.reply.pending[:n]
        self.suit(reading, time.perf_counter() - began, len(answers))
        self.stats.count("drafts_offered", sum(self.pace.offered) - offered)
        self.stats.count("drafts_accepted", sum(self.pace.accepted) - accepted)
        now = time.perf_counter()
        for answer, tokens, drafted in zip(answers, sampled, drafts):
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
        """Adapts `rows`, the number of prompt rows per step, so that a step takes PIECE_SECONDS.
        reading: prompt rows of the last step     speaking: answers that sampled in it
        A step of few rows spends most of its time on reading the weights.  Its time does not
        predict the time of a larger step, so it is ignored."""
        if reading >= FEWEST_ROWS:
            wanted = PIECE_SECONDS * (reading + speaking) / max(seconds, 1e-6)
            self.rows = int(min(ne.MOST_ROWS, max(FEWEST_ROWS, (self.rows + wanted) / 2)))
