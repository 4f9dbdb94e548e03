"""Times on a GPU of drawing a token: of the kernel, and of a whole step.

    python bench/bench_gpu_sampling.py

First us of the kernel `choose`, 20 launches in a graph, for lines of random logits.  Their standard
deviation is 2.5, with one logit of 14 in each line, as if the model knew what follows; or it is
0.05, and all tokens are about equally likely.  The tokens are compared with those of the CPU.

Then ms per step of the shape of Llama 3.2 1B with V = 128,256, in bfloat16, over a context of 256
that begins with one token.  The weights are random, and the gain of the last norm decides how much
the logits differ: with 8, few tokens are likely, and with 3 many.
"""
import pathlib
import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from bench_gpu_decode import decode_ms
from common import shapes

import nanoeuler as ne
import nanoeuler_cuda as nc
from nanoeuler_parts.decode.sampling import choose_kernel, DRAW_FIELDS, room_for_list, THREADS
from nanoeuler_parts.decode.table import AT_ONCE, COUNTS, N_WANTED
from nanoeuler_parts.gpu.launches import Graph, gpu, launch

PLAIN = ne.SampleRequest(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5)
REQUESTS = {"greedy": PLAIN._replace(temperature=0.0), "plain": PLAIN,
            "top-p .9": PLAIN._replace(top_p=0.9), "top-k 40": PLAIN._replace(top_k=40),
            "both": PLAIN._replace(top_p=0.9, top_k=40), "min-p .05": PLAIN._replace(min_p=0.05)}


def kernel_us(z, V, request, uniforms):
    """us of the kernel for logits z (lines, V + 8), and whether its tokens are the CPU's"""
    lines, rows = len(z), np.zeros((5, AT_ONCE), np.int32)
    rows[COUNTS, N_WANTED] = lines
    draws = np.full((2, ne.MOST_ROWS, DRAW_FIELDS), np.nan)
    draws[0, :lines] = [request._replace(uniform=u) for u in uniforms]
    ids, latest = nc.new((2, ne.MOST_ROWS), np.int32), nc.new(AT_ONCE, np.int32)
    odds, listed = (nc.new((lines, room_for_list(V)), t) for t in (np.float64, np.uint64))
    out, rows, draws = map(nc.to_device, (z, rows, draws))
    kernel, graph, times = choose_kernel(nc.kernel_path() == "wgmma"), Graph(), []

    def twenty():
        for _ in range(20):
            launch(kernel, ids, latest, odds, listed, out, draws, rows, V, grid=lines,
                   block=THREADS)
    for _ in range(7):
        gpu.stream.synchronize()
        began = time.perf_counter()
        graph(twenty)
        gpu.stream.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / 20)
    expected = [ne.sample(line[:V], SimpleNamespace(random=lambda u=u: u), request)
                for line, u in zip(z[:8], uniforms)]
    same = nc.to_host(ids)[0, :len(expected)].tolist() == expected
    return statistics.median(times[2:]), same


def main():
    nc.open_device()
    rng = np.random.default_rng(1)
    for V in 32_768, 128_256:
        for sigma in 2.5, 0.05:
            for lines in 1, 64:
                z = rng.normal(size=(lines, V + 8)).astype(np.float32) * np.float32(sigma)
                if sigma > 1:
                    z[np.arange(lines), rng.integers(0, V, lines)] = 14
                said = []
                for name, request in REQUESTS.items():
                    us, same = kernel_us(z, V, request, rng.random(lines))
                    said.append(f"{name} {us:.1f}" + ("" if same else " WRONG"))
                print(f"V {V}, sigma {sigma}, lines {lines}, us: " + ", ".join(said), flush=True)
    cfg = ne.replace(shapes()["llama-3.2-1b"], seq_len=256, n_mtp=1, vocab_size=128_256)
    flat = ne.init_params(cfg, 1)
    for gain in 8.0, 3.0:
        ne.views(flat, ne.param_table(cfg)).final_norm[...] = gain
        for texts in 1, 8:
            decoder = nc.make_decoder(cfg, flat, "bf16", slots=texts)
            said = [f"{name} {decode_ms(decoder, texts, 256, REQUESTS[name]):.3f}"
                    for name in ("greedy", "top-p .9", "top-k 40", "plain")]
            print(f"llama-3.2-1b, gain {gain:.0f}, texts {texts}, ms: " + ", ".join(said),
                  flush=True)
            del decoder


if __name__ == "__main__":
    main()
