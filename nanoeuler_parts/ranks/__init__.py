"""Training on several GPUs, one process per GPU.

    sockets.py     messages between the processes on the host, and their heartbeats
    engine.py      the engine of one rank: its share of the batch, its shard of the parameters, NCCL
    processes.py   starts the processes, and runs one of them

Each process is a rank.  It holds the whole model and computes the gradient of its share of the
batch.  It owns one shard of the parameters, and only it has the moments of this shard.  A step then
has three parts (ZeRO-1: Rajbhandari et al. 2020):

    sum_gradients        A reduce-scatter.  A rank receives the gradients of its shard from all
                         ranks and adds them in the order of the ranks, in whatever order they
                         arrive.
    update_shard         |g|^2 is the sum of the squares of all shards, added in that order on every
                         rank.  Each rank takes the AdamW step of its own shard.  It alone keeps the
                         float32 parameters of this shard up to date.
    gather_parameters    An all-gather.  Every rank sends its new parameters to all others, in the
                         format that matrix products read.

So a run on several GPUs has the same bits each time, but other bits with another number of ranks.
NCCL transfers data between GPUs (engine.Links).  Sockets transfer values in host memory
(sockets.Ranks): losses, the length of a run with --minutes, requests to stop, and the news that a
rank is lost.
"""
