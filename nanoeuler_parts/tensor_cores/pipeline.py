"""The pipeline of Hopper's kernels: a ring of buffers that the copy engine fills while others are
read.
"""
import functools

from nanoeuler_parts.gpu.launches import inlined
from nanoeuler_parts.gpu.numbers import u32
from nanoeuler_parts.tensor_cores.ptx import DeviceFunctions, MBARRIER_BYTES

# A ring has a few stages, which are buffers in shared memory.  Slices, or pairs of tiles, flow
# through it.  They are numbered 0, 1, 2, .., and number n is in stage n % stages.  In this ring of
# three stages, time runs downwards:
#
#     stage 0           stage 1           stage 2
#     0 is copied
#     0 is multiplied   1 is copied
#     3 is copied       1 is multiplied   2 is copied
#     3 is multiplied   4 is copied       2 is multiplied
#     6 is copied       4 is multiplied   5 is copied       ...
#
# Each stage has an mbarrier, `full`.  At the end of "is copied", a phase of it completes: the
# thread that requested the copy has arrived, and all bytes that it announced have landed.
#
# If the warps that request copies are not those that multiply, each stage has a second mbarrier,
# `empty`.  At the end of "is multiplied", a phase of it completes: all warps that read the stage
# have arrived.  At first, all stages are empty: the producer waits for the parity before phase 0,
# and this wait returns at once.
#
# Each time that a stage is used again, the parity changes.
class Pipeline(DeviceFunctions):
    """The places of a ring

    barrier(barriers, stage)    returns the address of the mbarrier of a stage
    advance(stage, parity)      returns the next stage, and the parity of its next phase
    stage_of(n), parity_of(n)   return the same for number n"""

@functools.cache
def pipeline_of(stages):
    """Returns the Pipeline of a ring with this number of stages."""
    @inlined
    def barrier(barriers, stage):
        return barriers + u32(MBARRIER_BYTES * stage)

    @inlined
    def advance(stage, parity):
        stage += u32(1)
        if stage == u32(stages):
            stage, parity = u32(0), parity ^ u32(1)
        return stage, parity

    @inlined
    def stage_of(n):
        return n % stages

    @inlined
    def parity_of(n):
        return n // stages % 2
    return Pipeline(barrier=barrier, advance=advance, stage_of=stage_of, parity_of=parity_of)
