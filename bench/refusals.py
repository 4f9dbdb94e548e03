"""Does a chat model say that it does not know?  Asks the 50 questions about things that do not
exist and the 50 answerable ones of refusal_prompts.jsonl, and counts the answers that refuse.

    python bench/refusals.py [MODEL] [--show]          (default: the bundled model)

data/everyday.py --exclude keeps these questions out of its conversations.  Replies are greedy.
"""
import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import nanoeuler as ne

PROMPTS = Path(__file__).with_name("refusal_prompts.jsonl")

# An answer refuses if it says that the model does not know, or that the thing does not exist
REFUSES = re.compile(
    r"\b(i|we) (do not|don't|don\u2019t) (know|think that there is)|\b(never|not) heard of|"
    r"\bi know (no|nothing|of no)\b|\bknow only (a few|simple)|\bcannot (know|say|tell|name)\b|"
    r"\bis no (such|[a-z]+ (called|that i know))|\bthere is no\b|\bdoes not exist|\bmade up\b|"
    r"\b(has|have) no (capital|king|color|colour|weight|taste|address|birthday|legs|number)\b|"
    r"\btells me nothing|\bland in stories|\bnot sure\b|\bbeyond me\b|\bnobody knows\b|"
    r"\btoo hard for me\b|\bdon't know\b|\bnever (met|read) the word", re.IGNORECASE)


def refuses(answer):
    return bool(REFUSES.search(answer))


def is_correct(answer, accept):
    """Does it hold one of these words?"""
    return not accept or any(re.search(rf"\b{re.escape(x)}", answer, re.IGNORECASE) for x in accept)


def prompts():
    with open(PROMPTS, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def measure(speaker):
    """[{id, exists, question, answer, refuses, correct}] of a Speaker; correct: of what exists"""
    asked = prompts()
    replies = speaker.generate([x["turns"][0] for x in asked], temperature=0.0, tokens=100)
    return [{"id": x["id"], "exists": x["exists"], "question": x["turns"][0], "answer": r.answer,
             "refuses": refuses(r.answer),
             "correct": x["exists"] and is_correct(r.answer, x["accept"])}
            for x, r in zip(asked, replies)]


def summary(found):
    there = [x for x in found if x["exists"]]
    others = [x for x in found if not x["exists"]]
    return {"refused": sum(x["refuses"] for x in others), "of": len(others),
            "answerable_refused": sum(x["refuses"] for x in there), "answerable": len(there),
            "answerable_correct": sum(x["correct"] and not x["refuses"] for x in there)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "data" / "model.bin"))
    parser.add_argument("--show", action="store_true", help="print all questions and answers")
    args = parser.parse_args(argv)
    found = measure(ne.load(args.model, weights="f32"))
    for x in found if args.show else ():
        print(f"{x['id']:>3} {'refuses' if x['refuses'] else '       '}  {x['question']}\n"
              f"             {x['answer']}")
    n = summary(found)
    print(f"things that do not exist: {n['refused']} of {n['of']} refused\n"
          f"answerable questions: {n['answerable_refused']} of {n['answerable']} refused, "
          f"{n['answerable_correct']} answered with an expected word")


if __name__ == "__main__":
    main()
