"""`generate --file`: answers a file of prompts.  Called by the verb `generate`."""
import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict

from bpe import need, note, read_bytes, reading, UserError
from nanoeuler import Pace
from nanoeuler_parts.chat.messages import messages_in
from nanoeuler_parts.chat.speaker import Speaker
from nanoeuler_parts.chat.verbs import shown_logprobs
from nanoeuler_parts.checkpoint.file import sha256_of
from nanoeuler_parts.files.logs import append_whole, lock
from nanoeuler_parts.files.printing import counted, MOST_SILENT
from nanoeuler_parts.files.texts import parse_json, record_lines
from nanoeuler_parts.files.writing import naming, need_writable
from nanoeuler_parts.lora.files import digest_of

# Each line of the file is JSON: a text, {"prompt": text} or {"messages": [{"role": .., "content":
# ..}, ..]}.  An object may have further fields, which its answer keeps.  Blank lines are skipped.
# The whole file is read before anything is computed.  Answers are written in the order of the
# prompts, one per line.  A line is written as soon as all lines before it are written.
def prompts_in(path, speaker, truncate):
    """[(record, ids)] of the lines of a file: the JSON object and the prompt's token ids"""
    with reading(path, "name a JSON lines file with --file"):
        lines = record_lines(read_bytes(path))
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            record = {"prompt": record} if isinstance(record, str) else record
            need(isinstance(record, dict), f"expected a JSON string or object, found "
                 f"{type(record).__name__}")
            if "messages" in record:
                prompt = messages_in(record["messages"], "messages")
            else:
                prompt = record["prompt"]
                need(isinstance(prompt, str), f"expected a string as its prompt, found "
                     f"{prompt!r:.40}")
            found.append((record, speaker.shortened(speaker.ids_of(prompt), truncate)))
        except (ValueError, KeyError, TypeError, RecursionError) as e:     # and UserError
            said = (f"the field {e} is missing; add 'prompt' or 'messages'"
                    if isinstance(e, KeyError) else e)
            raise UserError(f"{path}, line {number}: {said}") from None
    need(found, f"{path}: expected one prompt per line, found none")
    return found

def beginning_of(record):
    """The bytes with which the answer line of a record begins, up to its first new value"""
    names = [*record, "answers"]
    new = next(name for name in names if name in ("answers", "key"))
    kept = {name: record[name] for name in names[:names.index(new)]}
    text = json.dumps({**kept, new: ""}, ensure_ascii=False).removesuffix('""}')
    return text.encode(errors="replace")

def answers_there(f, records, keys, out):
    """The number of answers to these records that an open file already holds.  Rejects a file
    with any other line.  An unfinished last answer is removed from the file.
    keys: one per answer, a hash of its prompt, the model and the settings"""
    f.seek(0)
    n = end = 0
    for line in f:
        found, whole = object_in(line), line.endswith(b"\n")
        is_next = n < len(keys) and (found or {}).get("key") == keys[n]
        cut_short = False
        if n < len(keys) and not whole:
            beginning = beginning_of(records[n])
            cut_short = line.startswith(beginning) or beginning.startswith(line)
        need(is_next or cut_short, f"{out}, line {n + 1} is not this model's answer to prompt "
             f"{n + 1} with these settings; choose another --out, or use --force to start over")
        if whole:
            n, end = n + 1, end + len(line)
    f.truncate(end)
    return n

def object_in(line):
    """The JSON object in a line, or None"""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None

def generate_file(path, file, out, decoder, batch, truncate, force, options, adapter=None):
    """`generate --file`: answers all prompts of a file.  A second start continues after the answers
    that `out` already holds."""
    need(0 < batch <= 1 << 16, f"--batch: expected 1 to {1 << 16}, found {batch}")
    need(os.path.realpath(out) not in map(os.path.realpath, (path, file)),
         f"{out} would replace an input file; choose another --out")
    if os.path.exists(out):                  # its answers are continued in place
        need(os.path.isfile(out), f"{out} is not a regular file; choose another --out")
        with open(out, "ab"):
            pass
    else:
        need_writable(out, "choose another --out")
    speaker = Speaker(file, decoder, options, adapter)
    records = prompts_in(path, speaker, truncate)
    settings = {k: v for k, v in asdict(options).items() if k != "speculate"}
    model = [sha256_of(file), *([digest_of(adapter)] if adapter else [])]
    base = json.dumps([*model, settings], sort_keys=True)
    keys = [hashlib.sha256(f"{base}{i}{json.dumps(record)}".encode()).hexdigest()[:16]
            for i, (record, _) in enumerate(records)]
    with open(out, "ab+") as f:
        need(lock(f), f"another run is writing {out}; wait for it, or choose another --out")
        with naming(out):
            if force:
                f.truncate(0)
            done = answers_there(f, [record for record, _ in records], keys, out)
        if done:
            rest = "generating the rest" if done < len(records) else "nothing is left to do"
            note(f"{out} already has {done:,} of {counted(len(records), 'answer')}; {rest}")
        waiting, pace, told = {}, Pace(), time.perf_counter()
        ids = [ids for _, ids in records[done:]]
        for number, replies in speaker.answers_to(ids, options, batch, pace, first=done):
            waiting[number] = replies
            while done in waiting:
                answer = {**records[done][0], "answers": [told_of(r) for r in waiting.pop(done)],
                          "key": keys[done]}
                with naming(out):
                    line = json.dumps(answer, ensure_ascii=False).encode(errors="replace")
                    append_whole(f.fileno(), line + b"\n")
                done += 1
            if time.perf_counter() - told > MOST_SILENT:
                told = time.perf_counter()
                print(f"{done:,} of {counted(len(records), 'answer')}, {pace}", file=sys.stderr,
                      flush=True)
        note(f"{counted(len(records), 'answer')} in {out}; {pace}")

def told_of(reply):
    """The fields of one answer in a line of the output"""
    told = {"text": reply.answer, "tokens": len(reply.tokens), "finish": reply.finish}
    return {**told, "logprobs": shown_logprobs(reply)} if reply.logprobs else told
