"""finalize_mhc: a layer's end on several residual streams (hyper-connections), from expert rows to the next input.

    y        = finalize(rows, row_map, weights, shared, ..)                    rounded to the rows' dtype
    S'[t,j]  = post_mix[t,j] * y[t] + sum_i res_mix[t,i,j] * S[t,i]            post first, then i ascending, rounded
    c[t]     = sum_i pre_mix[t,i] * S'[t,i]                                    of the rounded S', i ascending, rounded
    h        = rms_norm(c, norm_weight)                                        of the rounded c, rounded
    quant_out = quantize(h)                                                    where it is given, of the rounded h

S are the hc streams `residual`. `res_mix` is [source i, target j]: a target sums over its first index. In fp32 each
product and each sum is rounded: no FMA, which costs a CPU an emulation and gives the same bits nowhere else either.
The definition is `moetail.reference.finalize_mhc`: the same bits from every implementation at every T.
Implementations, chosen by the dispatcher from the tensors' device: `finalize_mhc_triton.py` (CUDA, one kernel); on a
CPU finalize's own and then the reference.
Source: ours. The formulas are DeepSeek-V4.1's single-pass mHC; vLLM's kernels add in this order too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moetail import reference
from moetail.numerics import Numerics
from moetail.ops import finalize as local
from moetail.ops import quant_out as quantized
from moetail.ops.finalize_norm import OUTPUTS, _write, check_constants, check_number, check_weights
from moetail.quantization import Quantized

MAX_STREAMS = 8


def finalize_mhc(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    quant_out: Quantized | None = None,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finalize expert rows, mix them into the residual streams, collapse and norm: (h [T, H], residual' [T, hc, H]).

    Shape: `moetail.finalize`'s, with H <= 16384.
        residual      [T, hc, H]   the rows' dtype, 1 <= hc <= 8; inner stride 1, any other strides
        post_mix      [T, hc]      fp32: what each stream takes of the layer's output; inner stride 1
        res_mix       [T, hc, hc]  fp32: what target stream j takes of source stream i, at [t, i, j]; each token's
                                   matrix contiguous
        pre_mix       [T, hc]      fp32: what the next input takes of each new stream; inner stride 1
        norm_weight   [H]          bf16 | fp16 | fp32, contiguous: the RMSNorm weight of the next layer's input
        out           [T, H]       the rows' dtype; inner stride 1, row stride >= H: where h is written. May be `shared`
        residual_out  [T, hc, H]   the rows' dtype; inner stride 1, stream stride >= H, token stride >= hc of these:
                                   where residual' is written. May be `residual`; neither may overlap any other argument
        quant_out                  `moetail.finalize_norm`'s: where h quantized is written too

    The three mixes may be parts of one tensor: a token's stride is free. 1e-20 <= eps <= 1; the norm is
    `moetail.finalize_norm`'s. T == 0 returns empty results and launches nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched or written.
    Not checked: the values of row_map beyond absence (that would need a host sync), and those of the mixes.
    """
    local.check_settings(numerics, routed_scale)
    check_number("eps", eps)
    needed = {"rows": rows, "row_map": row_map, "residual": residual, "post_mix": post_mix, "res_mix": res_mix,
              "pre_mix": pre_mix, "norm_weight": norm_weight}  # fmt: skip
    optional = {"weights": weights, "shared": shared, "shared_gate": shared_gate, "num_valid_rows": num_valid_rows,
                "out": out, "residual_out": residual_out}  # fmt: skip
    check_constants(needed, optional)
    args = (rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, residual,
            post_mix, res_mix, pre_mix, norm_weight, eps)  # fmt: skip
    if out is None and residual_out is None and quant_out is None:
        return _op(*args)
    local._check_rank(rows, row_map)
    out = local._new_out(rows, row_map) if out is None else out
    residual_out = new_residual(residual) if residual_out is None else residual_out
    _op_out(*args, out, residual_out, *quantized.schema_args(quant_out))
    return out, residual_out


def new_residual(residual: torch.Tensor) -> torch.Tensor:
    """Contiguous, whatever residual's strides are."""
    return residual.new_empty(residual.shape)


def _cpu_into(*args):  # noqa: ANN002, ANN202
    """Write `out` and `residual_out`: the arguments are checked, `numerics` is concrete, T >= 1."""
    inputs, mhc, (out, residual_out, *quant) = args[:8], args[8:14], args[14:]
    y = local._new_out(*inputs[:2])
    local._cpu_into(*inputs, y)
    h, new = reference.mhc(y, *mhc)
    out.copy_(h)
    residual_out.copy_(new)
    quantized.write(h, *quant)


def _cuda_into(*args):  # noqa: ANN002, ANN202
    from moetail.ops import finalize_mhc_triton

    finalize_mhc_triton.launch(*args)


def _functional(into: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op that returns new tensors, on one device."""

    def finalize_mhc(*args):  # noqa: ANN002, ANN202
        outputs = _fake(*args)
        _write(into, *args, *outputs, None, None, None)
        return outputs

    return finalize_mhc


def _out_variant(into: Callable[..., None]) -> Callable[..., None]:
    """The op that writes the caller's tensors, on one device."""

    def finalize_mhc_out(*args):  # noqa: ANN002, ANN202
        _check(*args)
        _check_no_overlap(*args)
        _write(into, *args)

    return finalize_mhc_out


def _fake(*args):  # noqa: ANN002, ANN202
    rows, row_map, *_ = args
    local._check_rank(rows, row_map)
    out, residual_out = local._new_out(rows, row_map), new_residual(args[8])
    _check(*args, out, residual_out, None, None, None)
    return out, residual_out


def _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, *rest):  # noqa: ANN001, ANN002, ANN202
    mhc, (out, residual_out, *quant) = rest[:6], rest[6:]
    local._check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)
    check_mhc("rows", rows, row_map.shape[0], *mhc, residual_out)
    quantized.check(rows, row_map.shape[0], *quant)


def check_mhc(
    name: str, rows: torch.Tensor, T: int, residual: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor,
    pre_mix: torch.Tensor, norm_weight: torch.Tensor, eps: float, residual_out: torch.Tensor,
) -> None:  # fmt: skip
    """What the streams of T tokens behind `rows` [.., H], the argument `name`, need. Raises: ValueError."""
    H = rows.shape[1]
    check_weights(name, rows, eps, ("norm_weight", norm_weight))
    if residual.dim() != 3:
        raise ValueError(f"residual must have three dimensions [T, hc, H], got shape {tuple(residual.shape)}")
    hc = residual.shape[1]
    if not 1 <= hc <= MAX_STREAMS:
        raise ValueError(f"residual must have 1 <= hc <= {MAX_STREAMS} streams, got {hc}")
    for which, tensor in (("residual", residual), ("residual_out", residual_out)):
        if tensor.shape != (T, hc, H):
            raise ValueError(f"{which} must have shape {(T, hc, H)}, got {tuple(tensor.shape)}")
        if tensor.dtype != rows.dtype:
            raise ValueError(f"{which} must have the dtype of {name}, {rows.dtype}, got {tensor.dtype}")
        if H > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{which} must have inner stride 1, got strides {tensor.stride()}")
    for which, mix, shape in (("post_mix", post_mix, (T, hc)), ("res_mix", res_mix, (T, hc, hc)),
                              ("pre_mix", pre_mix, (T, hc))):  # fmt: skip
        if mix.shape != shape:
            raise ValueError(f"{which} must have shape {shape}, got {tuple(mix.shape)}")
        if mix.dtype != torch.float32:
            raise ValueError(f"{which} must be float32, got {mix.dtype}")
        if T > 0 and not mix[0].is_contiguous():
            raise ValueError(f"{which} must be contiguous within a token, got strides {mix.stride()}")
    for which, tensor in (("residual", residual), ("post_mix", post_mix), ("res_mix", res_mix), ("pre_mix", pre_mix),
                          ("residual_out", residual_out)):  # fmt: skip
        if tensor.device != rows.device:
            raise ValueError(f"{which} must be on the device of {name}, {rows.device}, got {tensor.device}")


def check_residual_out(
    residual_out: torch.Tensor, residual: torch.Tensor, others: tuple[tuple[str, torch.Tensor | None], ...]
) -> None:
    """`residual_out` may be `residual`, element for element; nothing else that is read may share memory with it."""
    T, hc, H = residual_out.shape
    token, stream, _ = residual_out.stride()
    if (hc > 1 and stream < H) or (T > 1 and token < H + (hc - 1) * stream):
        raise ValueError(f"residual_out must have streams that lie apart, got strides {residual_out.stride()}")
    in_place = (residual_out.data_ptr(), residual_out.stride()) == (residual.data_ptr(), residual.stride())
    for other, tensor in (*others, ("residual", None if in_place else residual)):
        if tensor is not None and local._overlap(residual_out, tensor):
            raise ValueError(f"residual_out must not overlap {other}, got a view of its memory")


def _check_no_overlap(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, residual,  # noqa: ANN001, ANN202
                      post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out, _, values, scales):  # fmt: skip # noqa: ANN001
    inputs = (*local._inputs(rows, row_map, weights, shared_gate, num_valid_rows), ("post_mix", post_mix),
              ("res_mix", res_mix), ("pre_mix", pre_mix), ("norm_weight", norm_weight))  # fmt: skip
    local._check_no_overlap(out, shared, (*inputs, ("residual", residual), ("residual_out", residual_out)))
    check_residual_out(residual_out, residual, (*inputs, ("shared", shared)))
    written = (("out", out), ("residual_out", residual_out))
    quantized.check_no_overlap(values, scales, (*inputs, *written, ("shared", shared), ("residual", residual)))


MHC_ARGS = "Tensor residual, Tensor post_mix, Tensor res_mix, Tensor pre_mix, Tensor norm_weight, float eps"
_ARGS = f"{local._ARGS}, {MHC_ARGS}"
torch.library.define("moetail::finalize_mhc", f"({_ARGS}) -> (Tensor, Tensor)")
torch.library.define("moetail::finalize_mhc_out", f"({_ARGS}, {OUTPUTS}) -> ()")
for _device, _into in (("CPU", _cpu_into), ("CUDA", _cuda_into)):
    torch.library.impl("moetail::finalize_mhc", _device)(_functional(_into))
    torch.library.impl("moetail::finalize_mhc_out", _device)(_out_variant(_into))
torch.library.register_fake("moetail::finalize_mhc")(_fake)
torch.library.register_fake("moetail::finalize_mhc_out")(_check)
_op = torch.ops.moetail.finalize_mhc.default
_op_out = torch.ops.moetail.finalize_mhc_out.default
