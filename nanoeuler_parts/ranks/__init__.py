"""Training on several GPUs, one process per GPU.

    sockets.py     the processes of a run, and their signs of life
    engine.py      one engine of all GPUs: shares of the batch, parts of the parameters, NCCL
    processes.py   starts the processes, and runs one of them

Each process is a rank.  It holds the whole model and computes the gradient of its share of the
batch.  A step then has three parts (ZeRO-1: Rajbhandari et al. 2020):

    sum_gradients       A rank owns a part of the parameters.  It receives this part of all
                        gradients and adds them in the order of the ranks, in whatever order they
                        arrive.
    update_part         |g| is the sum of the squares of all parts, added in that order on every
                        rank.  Each rank takes the AdamW step of its own part: no other rank has
                        the moments of this part, or keeps its float32 parameters up to date.
    share_parameters    Every rank sends its new parameters, as products read them, to all others.

So the bits of a run depend on the number of its ranks and on nothing else.  NCCL moves what is on
the GPUs (engine.Links).  Sockets move what is on the host (sockets.Ranks): losses, the length of a
run by the clock, requests to stop, and the news that a rank is gone.
"""
