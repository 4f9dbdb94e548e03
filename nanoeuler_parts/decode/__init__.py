"""The fast decoder of nanoeuler_cuda.py, on tensor cores.

A decoder holds several texts, each in a slot of its KV cache, and appends tokens to them.  A row is
one token that enters the model: (token, slot, position in the slot).  A step takes up to 64 rows
through all layers, in five kernels per layer, recorded as a CUDA graph:

    take         x = wte[token]                              one block per row
    in each layer:
    qkv          RMSNorm, q, k, v, biases, RoPE;             one block per 8 pairs (i, i + D / 2)
                 k and v go to the cache
    norm_and_rotate    only with norms of q and k: the norms, and then RoPE
    attend       attention over one split of the context,    one block per split, row and
                 keys_per_split(D) keys                      group of query heads
    proj         merges the splits, x += W att               one block per 8 columns of x
    gate_up      RMSNorm, gate and up, SwiGLU                one block per 16 columns, or several
    add_product  x += W swiglu                               one block per 8 columns of x
    after the last layer:
    logits       RMSNorm and head, for the rows whose        one block per 32 tokens
                 logits are requested
    choose       samples a token from a line of logits       one block per line

From MERGE_FROM rows, `merge` and a second `add_product` take the place of proj.

Read nanoeuler_cuda.py first, and at least ptx.py of tensor_cores/.  Then read these modules in this
order:

    table.py       the table that tells the kernels of a step what its rows are; take
    attend.py      attend, and the merging of splits
    products.py    qkv, proj, gate_up, add_product, logits: products of a few rows with a matrix
    norms.py       norm_and_rotate
    sampling.py    choose
    prompts.py     a long beginning of a slot is read at once instead, with the kernels of training
    steps.py       RowSteps: the steps as graphs, and what passes between host and device
    decoder.py     RowsDecoder, which nanoeuler_cuda.py makes if a GPU and a model allow it

A step of a few rows takes as long as reading the weights from memory, and its kernels take a few
microseconds each.  Four rules hold for all of these kernels:

Types     Matrices are bfloat16, all other numbers of the model float32.
Order     The order of a row's sums depends only on its position in its text, not on the rows that
          share the step.  So a text gives the same bits alone, in a batch and with drafts.  Kernels
          for a few rows and for many are compiled separately.  `fma` forces the compiler to fuse a
          product and a sum, and `fmul_rn` forbids it, so both kernels round alike.
Indices   In a few microseconds, a warp has time for some hundred instructions.  Numba computes
          indices in 64 bits, checks their sign and rounds quotients down.  Here all indices are
          u32, which saves half of the instructions.
Overlap   On Hopper, a kernel starts while the previous one computes, and requests data that does
          not depend on it.  `take_turn` waits for the previous kernel, and lets the next one start.
          On other GPUs, kernels do not overlap.

Words of these modules:

    slot       the KV cache of one text
    row        one token of a step; also its row of x and of other activations
    group      GROUP = 8 rows, which one `mma` multiplies
    table      (5, 64) int32, the argument `rows` of kernels: tokens, slots, positions and counts
    wanted     the rows whose logits are requested
    line       one row of logits, followed by the row of x that gave them
    split      a part of a context, the keys that one block of `attend` takes
    prompt     a beginning of a slot of more than 64 tokens
    ahead      a step that is queued before the host has read the tokens of the step before it
    hopper     whether kernels use Hopper's copy engine and overlap
"""
