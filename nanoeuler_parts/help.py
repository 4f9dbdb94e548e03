"""How --help shows the flags of a verb: in groups, the common ones first, with an example.

`--help` shows COMMON and counts the others.  `--help-all` shows all of them.
"""

# (title, flags in this group).  A flag that is in no group comes first, as what a verb reads and
# writes.
GROUPS = [
    ("data", "--data --field --newlines --holdout --row-len --truncate --ignore --cuts "
             "--questions --choices --context --stride --show-wrong"),
    ("length of a run", "--minutes --steps --epochs --eval-every --save-every --keep-best "
                        "--log-to"),
    ("optimizer", "--batch --lr --floor --warmup --cooldown --weight-decay --beta1 --beta2 --clip "
                  "--optimizer --muon-lr --momentum --newton-schulz --embedding-lr"),
    ("loss", "--mtp-weight --mtp-until --mtp-from --rehearse --beta --nll"),
    ("LoRA", "--lora --lora-alpha --lora-targets"),
    ("shape of a new model", "--n-embd --n-head --n-kv-head --head-dim --n-layer --n-hidden "
                             "--seq-len --vocab-size --n-mtp --tie-embeddings --qkv-bias --qk-norm "
                             "--window"),
    ("sampling", "--tokens --temperature --top-k --top-p --min-p --presence-penalty "
                 "--frequency-penalty --repeat-penalty --repeat-last-n --stop --logprobs "
                 "--speculate --n --json-schema --thinking --system"),
    ("machine", "--threads --dtype --weights --micro-batch --matmul --recompute --gpus")]
GROUP_OF = {flag: title for title, flags in GROUPS for flag in flags.split()}

MOST_SHOWN = 14              # flags; of a verb with more, --help shows COMMON
COMMON = frozenset(
    "--help --help-all --data --init --out --resume --force --minutes --steps --epochs --batch "
    "--lr --lora --rehearse --seq-len --vocab-size --tokens --temperature --top-p --stop --n "
    "--system --file --adapter --questions --json --host --port --gpus --threads".split())
SELDOM = {"train": {"--lora"}}               # {verb: flags that are common in others only}

# {verb of either program: what to type after the program}
EXAMPLES = {
    "train": "train --data mine.txt --minutes 10 --out mine.bin",
    "sft": "sft mine.bin --data questions.jsonl --out chat.bin --epochs 60",
    "dpo": "dpo chat.bin --data pairs.jsonl --out better.bin --epochs 60 --nll 1",
    "chat": "chat bundled --temperature 0",
    "generate": 'generate "Once upon a time" mine.bin --tokens 100 --n 3',
    "lens": 'lens "To be, or not to" mine.bin',
    "eval": "eval mine.bin --data other.txt",
    "serve": "serve bundled --port 8000",
    "plot": "plot mine.jsonl other.jsonl",
    "list": "list",
    "info": "info mine.bin",
    "quantize": "quantize chat.bin small.bin",
    "export": "export chat.bin --gguf chat.gguf",
    "import": "import Qwen/Qwen3-0.6B qwen.bin",
    "compile": "compile",
    "t": "t --data mine.txt --minutes 10 --out mine.bin",
    "tr": "tr --out mine.bin",
    "s": "s mine.bin --data questions.jsonl --out chat.bin --epochs 60",
    "d": "d chat.bin --data pairs.jsonl --out better.bin --epochs 60 --nll 1",
    "c": "c chat.bin",
    "i": 'i "Once upon a time" mine.bin --tokens 100 --n 3',
    "g": "g",
    "test": "test --only matmul",
    "ladder": "ladder",
    "doctor": "doctor"}
