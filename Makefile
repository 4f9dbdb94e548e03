# Two commands set everything up: `make train` and `make test`.  PYTHON=/path/to/python makes .venv
# with that interpreter; PY=/path/to/python uses one as it is and installs nothing.
VENV   := .venv
PYTHON ?= python3
PY     ?= $(VENV)/bin/python
PIP    := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
OUT    ?= nanoeuler.bin
CHAT   ?= nanoeuler_chat.bin
DPO    ?= nanoeuler_dpo.bin
ARGS   ?=
# As an argument of make: a variable of this name in the environment may be for another program.
PORT   ?=
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
comma  := ,
GB     ?= 1

# Does a run go on with the checkpoint $(1), or begin anew?
resume  = $(if $(filter --force,$(ARGS)),,$(if $(wildcard $(1)),--resume))
IS_NEW := import sys; print(sys.version_info >= (3, 11))

# With PY given there is nothing to install.
ifeq ($(origin PY),file)
# A .venv whose Python is too old, or gone, would fail for ever: it is made again.
ifneq ($(wildcard $(VENV)),)
ifneq ($(shell $(VENV)/bin/python -c '$(IS_NEW)' 2>&1),True)
$(info $(VENV) has no Python 3.11 or newer: it is made again)
$(shell rm -rf $(VENV))
endif
endif
RUN_DEPS  := $(VENV)/run
TEST_DEPS := $(VENV)/test
SERVE_DEPS := $(VENV)/serve
BENCH_DEPS := $(VENV)/bench
DATA_DEPS := $(VENV)/data
RELEASE_DEPS := $(VENV)/release
GPU_DEPS := $(VENV)/gpu
GPU_BENCH_DEPS := $(VENV)/gpu-bench
endif

.PHONY: all train sft dpo chat serve pictures check test test-all smoke release-check gpu-test bench gpu-bench pipeline gpu-pipeline speedrun data data-books model release help clean

all: $(RUN_DEPS)  ## install and compile the kernels
	$(PY) nanoeuler.py compile

train: $(RUN_DEPS)  ## learn Shakespeare (3 minutes), or continue, or report that it is complete
	$(PY) nanoeuler.py train $(call resume,$(OUT)) --out $(OUT) $(ARGS)

sft: $(RUN_DEPS)  ## teach the model of `train` to answer (4 minutes); writes nanoeuler_chat.bin
	$(PY) nanoeuler.py sft $(OUT) $(call resume,$(CHAT)) --out $(CHAT) $(ARGS)

dpo: $(RUN_DEPS)  ## teach the model of `sft` to prefer good answers; writes nanoeuler_dpo.bin
	$(PY) nanoeuler.py dpo $(CHAT) $(call resume,$(DPO)) --out $(DPO) $(ARGS)

# The one that OUT= names, or the program's own choice: the newest in this folder, or the bundled one
MODEL ?= $(if $(filter file,$(origin OUT)),,$(OUT))

# Says how the choice of the program is changed.
HOW_TO_CHOOSE = $(if $(MODEL),,@echo "MODEL=bundled or MODEL=FILE chooses another model")

chat: $(RUN_DEPS)  ## talk to the newest model here, or to another: MODEL=FILE, MODEL=bundled
	$(HOW_TO_CHOOSE)
	$(PY) nanoeuler.py chat $(MODEL) $(ARGS)

serve: $(SERVE_DEPS)  ## the same in a browser, or from programs; PORT=9000 uses another port
	$(HOW_TO_CHOOSE)
	$(PY) nanoeuler.py serve $(MODEL)$(if $(filter command,$(origin PORT)), --port $(PORT)) $(ARGS)

pictures: $(RUN_DEPS)  ## draw the pictures of README, docs and the tour again
	$(PY) bench/make_pictures.py $(ARGS)

check: $(RUN_DEPS)  ## every gradient against finite differences
	$(PY) check.py $(ARGS)

# Bytecode is kept, whatever the environment says: tests start hundreds of processes, and each would
# compile a program of 330 kB, pytest's workers all tests.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# Threads of NumPy's products wait for each other, where each of two workers has two of them.
test test-all: export OPENBLAS_NUM_THREADS := 1

test: $(TEST_DEPS)  ## everything that can be proved without a GPU
	$(PY) -m pytest $(PARALLEL) -m 'not slow' $(ARGS)

test-all: $(TEST_DEPS)  ## `test`, and slow tests that seldom find anything
	$(PY) -m pytest $(PARALLEL) $(ARGS)

smoke: $(TEST_DEPS)  ## for another Python: compile, ten steps, the tests of the ops
	$(PY) nanoeuler.py compile
	$(PY) nanoeuler.py train --steps 10 --force --out smoke.bin
	$(PY) -m pytest tests/test_ops.py $(ARGS)

release-check: $(TEST_DEPS)  ## do README and bench/results/ describe the present code?
	$(PY) -m pytest tests/release_check.py $(ARGS)

gpu-test: $(GPU_DEPS)  ## on a GPU: every kernel, the whole gradient, resume, equal bits
	$(PY) nanoeuler_cuda.py
	$(PY) nanoeuler_cuda.py g
	$(PY) -m pytest tests/test_gpu.py $(ARGS)

pipeline: $(RUN_DEPS)  ## text, tokenizer, pretraining, SFT, DPO, and a report (7 minutes)
	$(PY) bench/pipeline.py $(ARGS)

gpu-pipeline: $(GPU_DEPS)  ## the same on the GPU, with data/pretrain.txt
	$(PY) bench/pipeline.py --gpu --unseen 600 $(ARGS)

speedrun: $(GPU_DEPS)  ## on a GPU: train base for some minutes, and report the loss over time
	$(PY) bench/speedrun.py $(ARGS)

bench: $(BENCH_DEPS)  ## side by side with PyTorch, transformers, nanoGPT's demo, tiktoken (50 minutes)
	$(PY) bench/bench_cpu.py
	$(PY) bench/bench_bpe.py
	$(PY) bench/bench_llama.py
	$(PY) bench/nanogpt_demo.py --minutes 3 --out bench/out/nanogpt_demo.json

gpu-bench: $(GPU_BENCH_DEPS)  ## on a GPU: side by side with cuBLAS, SDPA, torch.compile (11 minutes)
	$(PY) bench/bench_gpu.py $(ARGS)

data: $(DATA_DEPS)  ## fetch and prepare the large corpora: classics, GB=1 of web pages, answers
	$(PY) data/get_gutenberg.py
	$(PY) data/get_web.py --gb $(GB)
	$(PY) data/prepare.py
	$(PY) data/get_alpaca.py
	$(PY) data/get_preferences.py

data-books: $(DATA_DEPS)  ## build data/books.txt, 200 MB of books and speeches, from pinned sources
	$(PY) data/get_books.py

# Exit code 3: the time of this part was up, and the same command continues.
model: $(GPU_DEPS)  ## rebuild the bundled model on a GPU, in parts of nine minutes; needs data/books.txt
	@$(PY) -c 'import os, sys; os.path.exists("data/books.txt") or sys.exit("data/books.txt: No such file; build it with make data-books")'
	@while :; do \
		$(PY) bench/make_model.py all --gpu --limit 9 $(ARGS); code=$$?; \
		test $$code -eq 3 || exit $$code; \
	done

release: $(RELEASE_DEPS)  ## pack the bundled model for others, with its card and checksums, in dist/
	$(PY) bench/release.py $(if $(filter file,$(origin MODEL)),,$(MODEL)) $(ARGS)

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | expand -t 14

clean:  ## remove caches, keep checkpoints and the environment
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .hypothesis .ruff_cache build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("$(PYTHON) is Python %d.%d, and NanoEuler needs 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/run: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/serve: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[serve,chat]'
	@touch $@

# The GPU program is tried on a GPU that is not there, where numba-cuda can be installed.
CUDA_WHERE_IT_IS := $(if $(filter Linux,$(shell uname -s)),$(comma)cuda)

$(VENV)/test: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[dev,torch$(CUDA_WHERE_IT_IS)]'
	@touch $@

$(VENV)/gpu: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[cuda,dev]'
	@touch $@

$(VENV)/gpu-bench: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[cuda,torch]'
	@touch $@

$(VENV)/data: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[data]'
	@touch $@

$(VENV)/release: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[gguf]'
	@touch $@

$(VENV)/bench: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[bench,torch]'
	@touch $@
