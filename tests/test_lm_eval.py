"""EleutherAI's evaluation harness on the server: log-likelihoods beside those of transformers."""
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
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""
DOCS = [{"question": f"To be, or not to {word}", "choices": [" be", " go", " sleep, or not"],
         "answer": i % 3} for i, word in enumerate("be go see know find take make".split())]


def scores(folder, model, arguments, name):
    """[log-likelihood of each choice of each document], by the harness in a process of its own"""
    out = folder / name
    said = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments,
         "--tasks", "little", "--include_path", folder, "--output_path", out, "--log_samples",
         "--batch_size", "2"], capture_output=True, encoding="utf-8", timeout=280, cwd=folder)
    assert said.returncode == 0, said.stderr[-2000:]
    lines = next(out.rglob("samples_little*.jsonl")).read_text(encoding="utf-8").splitlines()
    found = sorted(map(json.loads, lines), key=lambda doc: doc["doc_id"])
    return [[(float(r[0][0]), str(r[0][1]) == "True") for r in doc["resps"]] for doc in found]


def test_log_likelihoods_are_those_of_transformers(tmp_path, tokenizer):
    """Of the exported model, on the harness's own requests, to 1e-3"""
    needs("lm_eval")
    file = write(tmp_path / "little.bin", CFG, tokenizer)
    run("export", file, tmp_path / "hf")
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in DOCS),
                                         encoding="utf-8")
    (tmp_path / "little.yaml").write_text(TASK.format(path=tmp_path / "docs.jsonl"),
                                          encoding="utf-8")
    hf = tmp_path / "hf"
    want = scores(tmp_path, "hf", f"pretrained={hf},dtype=float32", "theirs")
    with serving(str(file)) as (address, _):
        got = scores(tmp_path, "local-completions",
                     f"model=little,base_url={address}/v1/completions,tokenizer={hf},"
                     f"tokenizer_backend=huggingface,num_concurrent=2,max_length={CFG.seq_len}",
                     "ours")
    assert len(got) == len(DOCS) and len(got[0]) == 3
    for ours, theirs in zip(got, want, strict=True):
        for (a, greedy), (b, theirs_greedy) in zip(ours, theirs, strict=True):
            assert abs(a - b) < 1e-3 and greedy == theirs_greedy
