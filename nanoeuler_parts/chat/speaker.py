"""Speaker: a model with its decoder and its conversation, for the terminal and for Python."""
import codecs
from dataclasses import replace

from bpe import need, note
from nanoeuler import (
    Decoder, for_terminal, generate_many, next_tokens, NO_TOKEN, Pace, Reply, rng_of,
)
from nanoeuler_parts.chat.models import model_to_use, note_dropped
from nanoeuler_parts.chat.sampling import Sampling
from nanoeuler_parts.chat.templates import chat_ids, ends_of, is_alpaca, rewind_to, TEMPLATES
from nanoeuler_parts.checkpoint.file import open_checkpoint, params_in
from nanoeuler_parts.files.settings import need_setting
from nanoeuler_parts.lora.files import adapted_params, adapter_for, state_with
from nanoeuler_parts.machine.threads import fewer_threads

def adapted(c, adapter, decoder, weights):
    """A decoder of an open checkpoint with an AdapterFile.  On a CPU, matrices that are int8 in the
    file and in memory stay as they are, because rounding the merged ones would undo most of a small
    change."""
    if decoder is Decoder and weights == "int8" == c.matrices:
        from nanoeuler_parts.lora.base import base_of_file
        from nanoeuler_parts.lora.decoder import LoraDecoder
        LoraDecoder.ready()
        return LoraDecoder(base_of_file(c), [adapter[:2]])
    return decoder(c.cfg, adapted_params(c, adapter), weights)

# ---- at a terminal, and from Python
class Speaker:
    """A model with its decoder and its conversation, for `chat` and `generate`.  A chat model
    answers the prompt, a base model continues it."""

    def __init__(self, file, decoder, options, adapter=None):
        """adapter: folder of a LoRA adapter for the model in the file; None or "": none"""
        need_setting(options.template in TEMPLATES, "template",
                     f"expected alpaca or chatml, found {options.template}")
        c = open_checkpoint(file)
        decoder.ready()
        own = c.state.weights if c.state.weights in decoder.formats else ""
        weights, state = options.weights or own, c.state
        if adapter:
            found = adapter_for(adapter, c.cfg, file)
            self.decoder, state = adapted(c, found, decoder, weights), state_with(c.state, found)
        else:
            self.decoder = decoder(c.cfg, params_in(c), weights)
        self.options, self.cfg, self.tokenizer = options, c.cfg, c.tokenizer
        self.begin(state)
        self.constraint(options)             # reports an error in a JSON schema

    def begin(self, state):
        """Sets the State, with its template and the tokens that end an answer, and begins an empty
        conversation."""
        self.state, options = state, self.options
        self.template = options.template or state.template
        self.answers = state.kind == "chat" or options.template != ""
        self.end = self.tokenizer.specials.get(state.eos)
        self.ends = ends_of(state, self.tokenizer)
        self.rng = rng_of(options.seed)
        self._system = []                    # ("system", text), or nothing
        self.dropped = []                    # the oldest messages, if the context is too short
        self.said = []                       # (role, text), user and assistant in turn
        self.last, self.pace = None, None    # the latest Reply, and its Pace
        self.prompt = []                     # the ids that the latest Reply continues
        self.sampled = {}                    # {answer: ids}, for `chat_ids`

    def with_decoder(self, decoder, state):
        """A Speaker of the same model with another decoder, such as one with an adapter, and its
        State"""
        other = object.__new__(type(self))
        other.options, other.cfg, other.tokenizer = self.options, self.cfg, self.tokenizer
        other.decoder = decoder
        other.begin(state)
        return other

    def forget(self):
        self.decoder.truncate(0)
        self.last, self.prompt = None, []
        self.dropped.clear()
        self.said.clear()
        self.sampled.clear()

    @property
    def asked_state(self):
        """The State that chat templates get: with options.thinking, if it is set"""
        return replace(self.state, thinking=self.options.thinking or self.state.thinking)

    @property
    def system(self):
        """The text of the system message, which begins the conversation; "": there is none"""
        return "".join(text for _, text in self._system)

    @system.setter
    def system(self, text):
        need(self.answers, "expected a chat model: a base model continues a text, and has no "
             "messages; use a chat model")
        need(not text or self.template_reads_system(text), "the model's chat template leaves out "
             "system messages; put the text into a question")
        self._system = [("system", text)] if text else []

    def template_reads_system(self, text):
        """Does a prompt change with its system message?  Some templates leave it out."""
        first, second = (chat_ids(self.template, [("system", content), ("user", "Hello")],
                                  self.asked_state, self.tokenizer)
                         for content in (text, f"{text} Go."))
        return first != second

    @property
    def messages(self):
        """The whole conversation, [(role, text)]"""
        return [*self._system, *self.dropped, *self.said]

    def ids_to_read(self, question):
        """The ids that the decoder has to read before it answers this question: for a chat model,
        see `ids_to_answer`; for a base model, those of the question"""
        if not self.answers:
            if not self.last:
                ids = self.ids_of(question)
                note_dropped(len(ids), self.cfg.seq_len)
                return ids
            ids = self.tokenizer.encode_after(question).tolist()
            need(ids, NO_TOKEN)
            return [*self.last.pending, *ids]    # the last token sampled is not read yet
        return self.ids_to_answer([*self.said, ("user", question)])

    def ids_to_regenerate(self):
        """The ids that the decoder has to read before it answers the last question again.  The
        last answer is dropped."""
        if not self.answers:
            need(self.prompt, "expected a text to continue, found none; type a text first")
            return rewind_to(self.decoder, self.prompt)
        said = self.said[:-1] if self.said[-1:] and self.said[-1][0] == "assistant" else self.said
        need(said, "expected a question to answer again, found none; ask a question first")
        return self.ids_to_answer(said)

    def ids_to_answer(self, said):
        """The ids of the system message, these messages and the beginning of the answer, without
        the part that is in the KV cache.  The oldest exchanges are dropped until the answer has
        room: options.tokens, but at most half of the context."""
        T, whole = self.cfg.seq_len, said
        room = T - min(self.options.tokens, T // 2)
        while True:
            messages = [*self._system, *said]
            ids = chat_ids(self.template, messages, self.asked_state, self.tokenizer,
                           self.sampled)
            questions = [i for i, (role, _) in enumerate(said) if role == "user" and i > 0]
            if len(ids) <= room or not questions:
                break
            said = said[questions[0]:]       # drop the first question and its answer
        dropped = whole[:len(whole) - len(said)]
        if dropped and not is_alpaca(self.template):     # which holds one question anyway
            note(f"the oldest messages are dropped: the conversation does not fit into the "
                 f"context of {T} tokens")
        note_dropped(len(ids), T)
        self.dropped += dropped              # last: an error above changes nothing
        self.said = [*said, ("assistant", "")]
        return rewind_to(self.decoder, ids)

    def constraint(self, options, alive=lambda: None):
        """The tokens that JSON mode allows, or None if it is off.  alive: called between pieces of
        the preparation, some milliseconds each.  An error that it raises ends the preparation."""
        if not options.json_schema:
            return None
        from nanoeuler_parts.chat.json_mode import constraint
        return constraint(options.json_schema, self.tokenizer, self.end, alive)

    def new_reply(self, ids, options, rng, held=()):
        return Reply(ids, options, rng, self.ends, self.tokenizer.vocab, held,
                     self.constraint(options))

    def pieces(self, reply, pace, reader=None):
        """Yields the text of a reply as it is sampled, in whole characters.  reader: the decoder of
        a text outside of the conversation, with a KV cache of its own"""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while not reply.finish:
            next_tokens(reader or self.decoder, [reply], pace)
            if piece := decode(reply.news(), bool(reply.finish)):
                yield piece

    def answer_pieces(self, ids):
        """Yields the text of the reply to these ids, which are from `ids_to_read`.  A chat model's
        reply is also stored in the conversation."""
        held, answer = [*self.decoder.tokens], ""
        self.prompt = [*held, *ids]
        self.last, self.pace = self.new_reply(ids, self.options, self.rng, held), Pace()
        try:
            for piece in self.pieces(self.last, self.pace):
                answer += piece
                if self.answers:             # stored now, as Ctrl-C may end the reply here
                    self.said[-1] = "assistant", answer
                yield piece
        except BaseException:                # within a step: the cache may hold its tokens or not
            self.last.pending = rewind_to(self.decoder, [*self.prompt, *self.last.tokens])
            raise
        finally:
            self.keep_ids(answer, self.last.tokens)

    def reply(self, ids):
        """Prints the reply as it is sampled.  Returns its number of tokens."""
        for piece in self.answer_pieces(ids):
            print(for_terminal(piece), end="", flush=True)
        print()
        return len(self.last.tokens)

    # The Python API: replies are returned, not printed
    def say(self, question):
        """The answer to the next question of the conversation; from a base model, a continuation"""
        return "".join(self.answer_pieces(self.ids_to_read(question)))

    def regenerate(self):
        """Another answer to the last question, or another continuation, with the next random
        numbers"""
        return "".join(self.answer_pieces(self.ids_to_regenerate()))

    def ids_of(self, prompt):
        """The ids of a prompt without the conversation: a text, or messages as in `messages_in`"""
        if isinstance(prompt, str) and not self.answers:
            ids = self.tokenizer.encode_whole(prompt)
        else:
            need(self.answers, "expected a text, found messages: a base model continues a text; "
                 "use a chat model")
            messages = [("user", prompt)] if isinstance(prompt, str) else prompt
            ids = chat_ids(self.template, messages, self.asked_state, self.tokenizer)
        need(len(ids), NO_TOKEN)
        return [int(i) for i in ids]

    def shortened(self, ids, truncate):
        """The ids of a prompt, which must fit into the context.  With truncate, a longer prompt is
        cut from the left, and the answer gets room."""
        T = self.cfg.seq_len
        if truncate and len(ids) > T:
            return ids[len(ids) - (T - min(self.options.tokens, T // 2)):]
        need(len(ids) <= T, f"the prompt has {len(ids):,} tokens, the context {T:,}; shorten it, "
             f"or use --truncate to cut it from the left")
        return ids

    def settings_of_one(self, sampling):
        """The settings of this speaker, with those that a single call overrides"""
        fixed = sorted({"weights", "template"} & sampling.keys())
        need(not fixed, f"{' and '.join(fixed)}: set once for all calls; pass it to nanoeuler.load")
        return replace(self.options, **sampling).check()

    def stream(self, prompt, **sampling):
        """Yields the reply to one prompt, as text while it is sampled, without the conversation."""
        options = self.settings_of_one(sampling)
        need(options.n == 1, f"stream yields one reply, but n is {options.n}; use generate")
        ids = self.shortened(self.ids_of(prompt), False)
        reader = self.decoder.with_slots(1, len(ids) + options.tokens)
        yield from self.pieces(self.new_reply(ids, options, rng_of(options.seed)), Pace(), reader)

    def generate(self, prompts, batch=64, truncate=False, **sampling):
        """[Reply], one for each prompt, or [[Reply, ...]] with n for each if n > 1.  Up to `batch`
        replies are sampled at a time.  Reply.answer is the text of one."""
        need(not isinstance(prompts, str), "generate: expected a list of prompts, found one text; "
             "put it into a list, or use stream")
        options = self.settings_of_one(sampling)
        ids = [self.shortened(self.ids_of(prompt), truncate) for prompt in prompts]
        found = {i: replies for i, replies in self.answers_to(ids, options, batch, Pace())}
        replies = [found[i] for i in range(len(ids))]
        return replies if options.n > 1 else [reply for [reply] in replies]

    def answers_to(self, prompts, options, batch, pace, first=0):
        """Yields (number of a prompt, its n replies) as soon as all n are complete
        prompts: ids of each; first: number of the first prompt"""
        if not prompts:
            return
        n, longest = options.n, max(map(len, prompts))
        reader = self.decoder.with_slots(min(batch, n * len(prompts)), longest + options.tokens)
        replies = (self.new_reply(ids, options, rng_of(options.seed, first + i, j))
                   for i, ids in enumerate(prompts) for j in range(n))
        waiting = {}
        for number, reply in generate_many(reader, replies, pace):
            answers = waiting.setdefault(number // n, {})
            answers[number % n] = reply
            if len(answers) == n:
                del waiting[number // n]
                yield first + number // n, [answers[j] for j in range(n)]

    def keep_ids(self, answer, sampled):
        """Keeps the sampled ids of an answer, which the KV cache holds, for the next question.
        An answer with a special token is not kept: its text is encoded again, and there the name of
        the special token becomes ordinary tokens."""
        special = set(sampled) & set(self.tokenizer.specials.values())
        whole = self.tokenizer.spell(sampled).decode("utf-8", "replace") == answer
        if answer and whole and not special:             # Ctrl-C may end it within a character
            self.sampled[answer] = sampled

def load(file=None, decoder=Decoder, adapter=None, **sampling):
    """A Speaker of a checkpoint, for use from Python; by default, `model_to_use` picks one:

        model = nanoeuler.load("nanoeuler_chat.bin", weights="int8")
        for reply in model.generate(["What is a cat?", "What is a dog?"], tokens=50):
            print(reply.answer)
        print(*model.stream("Tell me of the sea.", temperature=0), sep="")
        print(model.say("Hello!"), model.say("What was the first thing I said?"))

    adapter: folder of a LoRA adapter for this model

    Your own Numba functions keep Numba's settings and cache.  One exception: a process has a single
    LLVM code generator, and here it has optimization level 1, unless NUMBA_OPT is set.  If your
    functions need level 3, import Numba and compile one of them before you import nanoeuler.
    Numba's number of threads is lowered to the physical cores, and to the processors that the
    container may use, if it is larger."""
    fewer_threads()
    return Speaker(model_to_use(file), decoder, Sampling(**sampling).check(), adapter)
