"""EleutherAI's evaluation harness, beside the server, transformers and the verb `eval`."""
import json
import subprocess
import sys

import pytest
from helpers import needs, run
from models import write
from servers import CFG, serving

pytestmark = pytest.mark.interop
needs("starlette")

TASK = """
task: little
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
DOCS = [{"question": f"To be, or not to {word}", "choices": [" be", " go", " sleep, or not"],
         "answer": i % 3} for i, word in enumerate("be go see know find take make".split())]
# a prompt that ends in blanks, choices of many lengths, a prompt that exceeds the context
DOCS += [{"question": "To be, or not:  ", "choices": ["be", "not to be", "\n"], "answer": 1},
         {"question": "12 + 345 is", "choices": ["357", " a large number", "é"], "answer": 0},
         {"question": "To be, or not to be. " * 30, "choices": ["That", "is", "the question"],
          "answer": 2}]


def samples(folder, model, arguments, name):
    """The harness's record of each document, in order, by a process of its own"""
    out = folder / name
    said = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments,
         "--tasks", "little", "--include_path", folder, "--output_path", out, "--log_samples",
         "--batch_size", "2"], capture_output=True, encoding="utf-8", timeout=280, cwd=folder)
    assert said.returncode == 0, said.stderr[-2000:]
    lines = next(out.rglob("samples_little*.jsonl")).read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda doc: doc["doc_id"])


def scores(found):
    """[(log-likelihood, whether it is the most probable text) of each choice] of each document"""
    return [[(float(r[0][0]), str(r[0][1]) == "True") for r in doc["resps"]] for doc in found]


@pytest.fixture(scope="module")
def harness(tmp_path_factory, tokenizer):
    """(folder with little.bin, its export hf and docs.jsonl; the samples of transformers)"""
    needs("lm_eval")
    folder = tmp_path_factory.mktemp("harness")
    run("export", write(folder / "little.bin", CFG, tokenizer), folder / "hf")
    (folder / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in DOCS),
                                       encoding="utf-8")
    (folder / "little.yaml").write_text(TASK.format(path=folder / "docs.jsonl"), encoding="utf-8")
    return folder, samples(folder, "hf", f"pretrained={folder / 'hf'},dtype=float32", "theirs")


def test_log_likelihoods_are_those_of_transformers(harness):
    """Of the exported model, on the harness's own requests, to 1e-3"""
    folder, theirs = harness
    with serving(str(folder / "little.bin")) as (address, _):
        ours = samples(folder, "local-completions",
                       f"model=little,base_url={address}/v1/completions,tokenizer={folder / 'hf'},"
                       f"tokenizer_backend=huggingface,num_concurrent=2,max_length={CFG.seq_len}",
                       "ours")
    got, want = scores(ours)[:-1], scores(theirs)[:-1]   # its client cuts a long prompt elsewhere
    assert len(got) == len(DOCS) - 1 and len(got[0]) == 3
    for ours, theirs in zip(got, want, strict=True):
        for (a, greedy), (b, theirs_greedy) in zip(ours, theirs, strict=True):
            assert abs(a - b) < 1e-3 and greedy == theirs_greedy


def test_eval_is_the_harness_on_the_same_choices(harness):
    """Each log-likelihood to 1e-3, and acc and acc_norm of each document"""
    folder, theirs = harness
    run("eval", folder / "little.bin", "--questions", folder / "docs.jsonl", "--json",
        folder / "eval.json")
    found = json.loads((folder / "eval.json").read_text(encoding="utf-8"))["questions"]
    for ours, doc, want in zip(found["results"], theirs, scores(theirs), strict=True):
        for a, (b, _) in zip(ours["log_likelihoods"], want, strict=True):
            assert abs(a - b) < 1e-3
        assert (ours["correct"], ours["correct_norm"]) == (doc["acc"] == 1, doc["acc_norm"] == 1)
    for ours, name in ("accuracy", "acc"), ("acc_norm", "acc_norm"):
        assert found["total"][ours] == sum(doc[name] for doc in theirs) / len(theirs)
    assert 0 < found["total"]["correct"] < len(DOCS)
