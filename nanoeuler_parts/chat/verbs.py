"""The verbs `chat` and `generate`."""
import sys
from dataclasses import fields

from bpe import need, note, printable
from nanoeuler import Decoder, for_terminal, n_params, rng_of
from nanoeuler_parts.chat.models import (
    AFTER_PROMPT, model_to_use, need_prompt_first, note_dropped,
)
from nanoeuler_parts.chat.sampling import ChatSampling, Sampling
from nanoeuler_parts.chat.speaker import Speaker
from nanoeuler_parts.chat.templates import is_alpaca, is_chatml, rewind_to
from nanoeuler_parts.checkpoint.bundled import shown_name
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.flags import ADAPTER, arg, as_text, file_name, FORCE, MODEL, TEXT

def prompt_text(prompt):
    """The prompt; for `-`, standard input without its last line end"""
    if prompt != "-":
        return prompt
    need(sys.stdin, "expected the prompt on standard input, but it is closed; give the prompt "
         "as an argument")
    if sys.stdin.isatty():
        note("reading the prompt from standard input; Ctrl-D ends it")
    return sys.stdin.read().removesuffix("\n")

def shown_logprobs(reply):
    """For each token: its text, its log-probability, and those of the most probable tokens"""
    def text(token):
        return reply.vocab[token].decode("utf-8", "backslashreplace")

    return [{"token": text(token), "logprob": round(logp, 4),
             "top": [[text(i), round(other, 4)] for i, other in top]}
            for token, (logp, top) in zip(reply.tokens, reply.logprobs)]

def print_template_note(template):
    """Tells a user who expects a continuation why a chat model answers the prompt instead."""
    name = "its own"
    if is_alpaca(template):
        name = "Alpaca's"
    elif is_chatml(template):
        name = "the ChatML"
    note(f"a chat model reads the prompt as a user's message, in {name} template, and "
         f"answers it")

TO_GENERATE = (
    arg("prompt", type=as_text, nargs="?", help=TEXT.options["help"]), MODEL,
    arg("--file", dest="prompts", type=file_name,
        help="JSON lines file of prompts: texts, or objects with prompt or messages"),
    arg("--out", type=file_name,
        help="JSON lines file for the replies to --file; a repeated call continues it"),
    arg("--batch", type=int, default=64, help="number of replies to --file generated at once"),
    arg("--truncate", action="store_true",
        help="drop the first tokens of prompts in --file that exceed the context"),
    ADAPTER, FORCE)

def generate_text(prompt, file=None, decoder=Decoder, prompts=None, out=None, batch=64,
                  truncate=False, force=False, adapter=None, **chosen):
    """`generate`: continues or answers one prompt, or every prompt of a file."""
    options = Sampling(**chosen).check()
    if options.json_schema:
        from nanoeuler_parts.chat.json_mode import read_schema
        options.json_schema = read_schema(options.json_schema)
    if prompts:                              # then the first argument is the checkpoint
        need(out, "expected a file for the answers; add --out answers.jsonl")
        need(not prompt or file is None,
             f"the prompts come from {prompts}; name a checkpoint alone, not {prompt} and {file}")
        from nanoeuler_parts.chat.prompts import generate_file
        file = model_to_use(prompt or file, place="")
        return generate_file(prompts, file, out, decoder, batch, truncate, force, options, adapter)
    need(prompt is not None, "name a prompt, or a file of prompts: --file prompts.jsonl")
    need(not out, "--out needs a file of prompts; add --file prompts.jsonl")
    need_prompt_first(prompt, file)
    file = model_to_use(file, AFTER_PROMPT)
    prompt = prompt_text(prompt)
    speaker = Speaker(file, decoder, options, adapter)
    if speaker.answers:
        print_template_note(speaker.template)
    else:
        ids = speaker.ids_of(prompt)
        note_dropped(len(ids), speaker.cfg.seq_len)      # once, however many replies there are
    for i in range(options.n):
        if options.n > 1:                    # in a pipe, too: replies may contain blank lines
            print(f"--- {i + 1} of {options.n}")
        speaker.rng = rng_of(options.seed, 0, i)
        speaker.said.clear()
        if not speaker.answers:
            print(for_terminal(prompt), end="", flush=True)      # first: reading may take a while
            rewound = rewind_to(speaker.decoder, ids)
        else:
            rewound = speaker.ids_to_read(prompt)
        n, most = speaker.reply(rewound), options.tokens
        if n < most and not (speaker.answers or options.stop or options.json_schema):
            note(f"the model ended the text with {speaker.state.eos} after {n:,} "
                 f"of {counted(most, 'token')}")
        for row in shown_logprobs(speaker.last):
            top = "  ".join(f"{text!r} {p:.2f}" for text, p in row["top"])
            print(f"{row['token']!r:<16} {row['logprob']:>7.2f}    {top}", file=sys.stderr)
        if sys.stderr and sys.stderr.isatty():
            note(f"{speaker.pace}")

def chat(file=None, decoder=Decoder, adapter=None, **chosen):
    """`chat`: a conversation at the terminal"""
    need(sys.stdin, "chat reads standard input, but it is closed; use generate")
    talking = ChatSampling(**chosen).check()
    file = model_to_use(file, place="")
    speaker = Speaker(file, decoder, talking, adapter)
    name = shown_name(file) + (f" with {adapter}" if adapter else "")
    print(f"{printable(name)}: {n_params(speaker.cfg):,} parameters, context "
          f"{speaker.cfg.seq_len} tokens, {'answers' if speaker.answers else 'continues'} what you "
          f"type.")
    from nanoeuler_parts.chat.ahead import compile_ahead
    from nanoeuler_parts.chat.terminal import Terminal
    Terminal(speaker, compile_ahead if decoder is Decoder else None).converse()

def chat_verb(add):
    add(chat, MODEL, ADAPTER, settings=fields(ChatSampling))

def generate_verb(add):
    add(generate_text, *TO_GENERATE, settings=fields(Sampling))
