"""How many JSON schemas of a folder JSON mode accepts, and whether its replies fit them.

    python bench/bench_schemas.py FOLDER [--walks 2] [--every 1] [--replies 0]

FOLDER contains JSON files of one schema each, in any subfolders, such as the folder data of the
public collection guidance-ai/jsonschemabench.  Only schemas that the package jsonschema calls valid
count.  A walk writes random bytes of those that the automaton allows; its text must fit the schema.
--replies N also lets the bundled model write N replies, spread evenly over the accepted schemas, at
temperature 1; a reply that the model ended must fit its schema.  Exits with 1 if one does not."""
import argparse
import json
import pathlib
import random
import re
import sys
import warnings
from collections import Counter

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from bpe import UserError
from nanoeuler_parts.chat.json_frames import after_byte
from nanoeuler_parts.chat.json_mode import compiled

KEPT = r"keyword \w+|pattern: [^\"]{0,40}|oneOf|steps|\$ref is|no value|has [\d,]+ characters"


def written(start, rng, most=1500):
    """The text of a random walk, or None if it is longer than `most` bytes"""
    state, text = (start,), b""
    while state and len(text) < most:
        allowed = [byte for byte in range(256) if after_byte(state, byte) is not None]
        assert allowed, text
        ending = [byte for byte in allowed if byte in b'"]},:']
        byte = rng.choice(ending if ending and rng.random() < 0.4 else allowed)
        state, text = after_byte(state, byte), text + bytes([byte])
    return text if state == () else None


def fits(kind, schema, text):
    """Does a text fit a schema?  None if the package jsonschema cannot tell."""
    try:
        return kind(schema).is_valid(json.loads(text))
    except Exception:                        # of jsonschema, or a pattern that Python cannot read
        return None


def replies(schemas, n, counts):
    """Lets the bundled model reply n times.  Yields (path, text) of each reply that does not fit.
    schemas: (path, validator, schema) of the accepted ones"""
    import nanoeuler
    model = nanoeuler.load(str(HERE.parent / "data/model.bin"), temperature=1.0)
    for i in range(n):
        path, kind, schema = schemas[i * len(schemas) // n]
        [reply] = model.generate(["Write an example."], tokens=400, seed=1 + i,
                                 json_schema=json.dumps(schema, ensure_ascii=False))
        counts["replies"] += 1
        if reply.finish == "length":
            continue
        counts["of them ended"] += 1
        found = fits(kind, schema, reply.answer)
        counts["ended, not checked"] += found is None
        counts["ended, and do not fit"] += found is False
        if found is False:
            yield path, reply.answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="a folder of JSON schemas")
    parser.add_argument("--walks", type=int, default=2, help="random texts for each schema")
    parser.add_argument("--every", type=int, default=1, help="take one of this many schemas")
    parser.add_argument("--replies", type=int, default=0, help="replies of the bundled model")
    args = parser.parse_args()
    import jsonschema
    warnings.simplefilter("ignore")          # of sets in patterns
    rng, counts, reasons, accepted = random.Random(1), Counter(), Counter(), []
    for path in sorted(args.folder.rglob("*.json"))[::args.every]:
        schema = json.loads(path.read_text(encoding="utf-8"))
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except Exception:                    # of the schema or of a pattern in it
            continue
        counts["valid"] += 1
        try:
            start, _ = compiled(json.dumps(schema, ensure_ascii=False))
        except UserError as e:
            found = re.search(KEPT, str(e))
            reasons[found[0] if found else str(e)[:80]] += 1
            continue
        counts["accepted"] += 1
        accepted.append((path, kind, schema))
        for _ in range(args.walks):
            text = written(start, rng)
            if text is None:
                continue
            counts["texts"] += 1
            found = fits(kind, schema, text)
            counts["of them not checked"] += found is None
            counts["texts that do not fit"] += found is False
            if found is False:
                print(path, text)
    for path, text in replies(accepted, args.replies, counts) if args.replies else ():
        print(path, text)
    for name, n in counts.items():
        print(f"{n:>7,} {name}")
    for name, n in reasons.most_common(30):
        print(f"{n:>7,} rejected: {name}")
    return int(counts["texts that do not fit"] + counts["ended, and do not fit"] > 0)


if __name__ == "__main__":
    sys.exit(main())
