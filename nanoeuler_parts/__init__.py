"""Everything that NanoEuler needs besides the model, its training loop and its decoders.

The programs stand on these:
    machine/       vectors in LLVM, bfloat16, threads, compiled kernels on disk
    files/         safetensors, atomic writes, logs and locks, texts, settings, printed lines
    tokenizers/    splitting patterns of other models, SentencePiece
    gpu/           GPU: launches, graphs, and numbers in kernels

These stand on nanoeuler.py, each on those above it:
    checkpoint/    checkpoints with moments, bfloat16 and int8; the bundled model
    flags.py       flags that verbs share
    kernels.py     the kernels that are compiled in advance
    lora/          LoRA: frozen weights, adapters, the training of adapters
    chat/          conversations: templates, sampling, the terminal, JSON mode, choice of a model
    runs/          training runs: settings, data, schedule, length, log, checkpoints, --resume
    tuning/        sft, dpo, rl, and the examples that they read
    interchange/   Hugging Face, GGUF, int8
    tools/         lens, eval, plot, list, info; the verbs of nanoeuler_cuda.py
    serve/         the HTTP server and its pages
    cli.py         the table of verbs, and the command line

And these on nanoeuler_cuda.py:
    gpu_memory.py  GPU: how much memory a model needs, and which micro-batches fit
    gpu_lora.py    GPU: LoRA
    tensor_cores/  GPU: products and attention on tensor cores
    decode/        GPU: the decoder on tensor cores
    ranks/         several GPUs that train one model
    selftests/     GPU: every kernel and a whole gradient, compared with the CPU's

To understand the model, read nanoeuler.py and nanoeuler_cuda.py; section 3 of the latter lists the
functions of gpu/numbers.py.  Modules import from above, and the list UPWARD in tests/test_layout.py
has the few functions that import from below when they are called.
"""
__version__ = "0.1.0"        # that of nanoeuler.py, which compares them
