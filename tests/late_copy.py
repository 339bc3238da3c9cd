"""A producer for tests of programmatic dependent launch: it starts its dependents long before it has written."""

import triton
import triton.language as tl


@triton.jit
def late_copy_kernel(source, target, count, nanoseconds, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < nanoseconds:
        pass
    for first in range(tl.program_id(0) * BLOCK, count, BLOCK * tl.num_programs(0)):
        i = first + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)
