"""LoRA: fine-tuning by two thin matrices beside each matrix of the layers, which stay as they are.

Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models.  For y = x W^T, with W (N, K),
A (r, K) and B (N, r), r much smaller than N and K, an adapted model computes

    y = x W^T + s (x A^T) B^T,      s = alpha / r

Only A and B are learned.  B starts at zero, so the first step begins with the model itself.  W
needs neither gradients nor moments, and stays in memory as its file stores it: float32, bfloat16 or
int8.

    adapter.py     the table of A and B: names, shapes, initial values
    base.py        the frozen matrices in memory, as a file stores them
    kernels.py     the forward and backward pass of a layer, compiled
    model.py       LoraModel, which takes the place of `Model` in a run
    decoder.py     LoraDecoder: an adapter for each slot
    files.py       adapters as files, in PEFT's format
"""
