"""Everything that NanoEuler needs besides the model, its training and the chat.

    machine/       vectors in LLVM, bfloat16, threads, compiled kernels on disk
    files/         safetensors, atomic writes, logs and locks, training texts and token files
    interchange/   Hugging Face, GGUF, int8, third-party chat templates
    serve/         the HTTP server and its pages
    tuning/        sft, dpo, and the examples that they read
    tools/         answers to a file of prompts, the lens, loss curves, the facts of a checkpoint
    tokenizers/    splitting patterns of other models, SentencePiece
    gpu/           GPU: launches, graphs, and numbers in kernels
    tensor_cores/  GPU: products, attention and decoding on tensor cores
    ranks/         several GPUs that train one model

nanoeuler.py and nanoeuler_cuda.py are the programs.  They import these modules.  To understand the
model, read the programs; section 3 of nanoeuler_cuda.py lists the functions of gpu/numbers.py.
"""
__version__ = "0.1.0"        # that of nanoeuler.py, which compares them
