"""The torch definition of every op: what the bits must be, on any device, slowly.

Each function takes the arguments of the op of the same name, a collective's those of every rank. The rounding points
are written out, one `.to()` each.
"""

from moetail.reference.collectives import (
    all_reduce,
    all_reduce_mhc,
    all_reduce_norm,
    finalize_all_reduce,
    finalize_all_reduce_mhc,
    finalize_all_reduce_norm,
    finalize_reduce_scatter,
)
from moetail.reference.experts import gemm_rows, grouped_gemm, permute, route
from moetail.reference.fp8 import quantize
from moetail.reference.norms import finalize_norm, rms_norm
from moetail.reference.rows import finalize, fma
from moetail.reference.streams import finalize_mhc, mhc, mhc_collapse, mhc_mixes, sinkhorn

__all__ = [
    "all_reduce",
    "all_reduce_mhc",
    "all_reduce_norm",
    "finalize",
    "finalize_all_reduce",
    "finalize_all_reduce_mhc",
    "finalize_all_reduce_norm",
    "finalize_mhc",
    "finalize_norm",
    "finalize_reduce_scatter",
    "fma",
    "gemm_rows",
    "grouped_gemm",
    "mhc",
    "mhc_collapse",
    "mhc_mixes",
    "permute",
    "quantize",
    "rms_norm",
    "route",
    "sinkhorn",
]
