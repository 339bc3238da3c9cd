"""moetail: the tail of a Mixture-of-Experts layer, as one kernel, with the same bits."""

from moetail import reference
from moetail.comm.all_reduce import all_reduce
from moetail.comm.all_reduce_mhc import all_reduce_mhc
from moetail.comm.all_reduce_norm import all_reduce_norm
from moetail.comm.finalize_all_reduce import finalize_all_reduce
from moetail.comm.finalize_all_reduce_mhc import finalize_all_reduce_mhc
from moetail.comm.finalize_all_reduce_norm import finalize_all_reduce_norm
from moetail.comm.finalize_reduce_scatter import finalize_reduce_scatter
from moetail.comm.workspace import Workspace
from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.experts import GroupedMMExperts, TritonExperts
from moetail.layer import MoELayer
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize
from moetail.ops.finalize_mhc import finalize_mhc
from moetail.ops.finalize_norm import finalize_norm
from moetail.ops.grouped_gemm import block_for, grouped_gemm
from moetail.ops.mhc import mhc
from moetail.ops.mhc_collapse import mhc_collapse
from moetail.ops.mhc_mixes import mhc_mixes
from moetail.ops.permute import permute
from moetail.ops.route import route
from moetail.plan import plan_tails
from moetail.quantization import Quant, Quantized
from moetail.routing import Permutation, Router
from moetail.shared_slots import SharedSlots

__version__ = "0.1.0"
__all__ = [
    "GroupedMMExperts",
    "MoELayer",
    "MoEOutput",
    "Numerics",
    "Permutation",
    "Quant",
    "Quantized",
    "Router",
    "SharedSlots",
    "TailSpec",
    "TritonExperts",
    "UnfinalizedMoEOutput",
    "Workspace",
    "all_reduce",
    "all_reduce_mhc",
    "all_reduce_norm",
    "block_for",
    "finalize",
    "finalize_all_reduce",
    "finalize_all_reduce_mhc",
    "finalize_all_reduce_norm",
    "finalize_mhc",
    "finalize_norm",
    "finalize_reduce_scatter",
    "grouped_gemm",
    "mhc",
    "mhc_collapse",
    "mhc_mixes",
    "permute",
    "plan_tails",
    "reference",
    "route",
]


def __getattr__(name: str) -> object:
    """`moetail.transformers`: the integration, imported at its first use, so that the core never imports it."""
    if name == "transformers":
        from moetail.integrations import transformers

        return transformers
    raise AttributeError(f"module 'moetail' has no attribute {name!r}")
