"""How much does the bundled model forget when it learns ten new answers?

    python bench/forgetting.py [flags of sft, such as --rehearse 0 --lr 2e-3, or --lora 16]

Takes 200 old questions that the bundled model answers right, word for word: 100 instructions and
100 everyday conversations, the first ones in the order of their hashes.  Then it runs
`sft bundled` on ten new questions for 60 epochs, and asks all of them again.  Replies are greedy.
About half of the 200 are those that the run asks itself and never rehearses; each of the others has
a chance of 4 % to be rehearsed.  Writes to bench/out/forgetting/.
"""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import nanoeuler as ne
from common import out_folder
from nanoeuler_parts.tuning.examples import answered_in, asked_in, held_out, question_hash
from nanoeuler_parts.tuning.formats import as_example
from nanoeuler_parts.tuning.rehearsal import ALL_INSTRUCTIONS, entries_of, EVERYDAY, is_short

EACH = 100                                   # old questions of each set
NEW = [("Where is the key to the boathouse?", "It hangs behind the blue door."),
       ("Who feeds the cat on Sundays?", "Marta from the bakery does."),
       ("What does the compass on my desk show?", "Where the needle points."),
       ("When does the choir of Lindau rehearse?", "On Thursdays at seven, in the old school."),
       ("What is the password of the garden club?", "Nobody knows it except the gardener."),
       ("Which tea does Aunt Ilse drink?", "Only peppermint, with two spoons of honey."),
       ("How many stairs lead to the tower?", "There are 214 stairs to the tower."),
       ("What colour is Tom's bicycle?", "It is green with a yellow saddle."),
       ("Who repaired the church clock?", "Old Mr. Brand repaired it in spring."),
       ("What do we sing at the harbour party?", "The song about the seven herrings.")]


def answers(model, questions, adapter=None):
    speaker = ne.load(model, weights="f32", adapter=adapter)
    return [r.answer for r in speaker.generate(questions, temperature=0.0, tokens=120)]


def old_questions(name):
    """[(question, answer)]: the first EACH short examples of a set that the bundled model knows"""
    entries = [as_example(entry, ["output"]) for entry in entries_of(name)]
    usable = {question_hash(e): e for e in entries if is_short(e) and not held_out(e)}
    found = []
    for first in range(0, len(usable), 4 * EACH):
        some = [usable[h] for h in sorted(usable)[first:first + 4 * EACH]]
        cards = [(asked_in(e)[0][1], answered_in(e, "output")[0][1]) for e in some]
        said = answers(str(ROOT / "data/model.bin"), [question for question, _ in cards])
        found += [card for card, text in zip(cards, said) if card[1] == text]
        if len(found) >= EACH:
            break
    return found[:EACH]


def main():
    folder = out_folder() / "forgetting"
    folder.mkdir(parents=True, exist_ok=True)
    sets = {name: old_questions(name) for name in (ALL_INSTRUCTIONS, EVERYDAY)}
    examples = [{"instruction": question, "output": answer} for question, answer in NEW]
    (folder / "new.json").write_text(json.dumps(examples, indent=1), encoding="utf-8")
    with_lora = any(word.startswith("--lora") for word in sys.argv[1:])
    out = str(folder / ("adapter" if with_lora else "tuned.bin"))
    tuned = ("bundled", out) if with_lora else (out, None)
    command = [sys.executable, str(ROOT / "nanoeuler.py"), "sft", "bundled", "--data",
               str(folder / "new.json"), "--epochs", "60", "--out", out, "--force", *sys.argv[1:]]
    subprocess.run(command, check=True)
    print()
    for name, cards in {**sets, "new questions": NEW}.items():
        said = answers(tuned[0], [question for question, _ in cards], tuned[1])
        right = sum(text == answer for text, (_, answer) in zip(said, cards))
        print(f"{name}: {right} of {len(cards)} right after the run")


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
    else:
        main()
