"""finalize_norm: a layer's end and the next layer's norm in one pass, from expert rows to the next input.

    y         = finalize(rows, row_map, weights, shared, ..)     rounded to the rows' dtype
    y         = rms_norm(y, post_norm_weight)                    where it is given (the sandwich), rounded
    residual' = residual + y                                     in fp32, rounded
    h         = rms_norm(residual', norm_weight)                 of the rounded residual', rounded
    quant_out = quantize(h)                                      where it is given, of the rounded h

The definition is `moetail.reference.finalize_norm`: the same bits from every implementation at every T.
`reference.rms_norm` says how the mean of squares is added: in integers, so that no order shows, in any config.
Implementations, chosen by the dispatcher from the tensors' device: `finalize_norm_triton.py` (CUDA),
`finalize_norm_cpu.py` (CPU, needs the `cpu` extra; without it the reference runs, and a warning says so).
Source: ours. The order of the steps is that of vLLM's and FlashInfer's fused_add_rms_norm and of Gemma's layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moetail import reference
from moetail.numerics import Numerics
from moetail.ops import finalize as local
from moetail.ops import quant_out as quantized
from moetail.quantization import Quantized

MAX_H = 16384
_LEAST_EPS, _LARGEST_EPS = 1e-20, 1.0


def finalize_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    quant_out: Quantized | None = None,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finalize expert rows, add the residual and apply the next layer's RMSNorm: (h, residual'), each [T, H].

    Shape: `moetail.finalize`'s, with H <= 16384.
        residual          [T, H]  the rows' dtype; inner stride 1, any row stride
        norm_weight       [H]     bf16 | fp16 | fp32, contiguous: the RMSNorm weight of the next layer's input
        post_norm_weight  [H]     bf16 | fp16 | fp32, contiguous: y is normed with it before the residual add
        out               [T, H]  the rows' dtype; inner stride 1, row stride >= H: where h is written. May be `shared`
        residual_out      [T, H]  the same: where residual' is written. May be `residual`; neither may overlap any other
                                  argument
        quant_out                 a `moetail.Quantized` of [T, H], which overlaps no argument: what the next GEMM reads.
                                  h quantized is written there too, as `reference.quantize(h, quant)`

    `eps` is that of both norms, 1e-20 <= eps <= 1. `zero_centred`: both weights are stored minus one (Gemma,
    Qwen3-Next). A norm is computed in fp32 and rounded once, after its weight; its result is within
    torch.testing.assert_close's defaults of torch.nn.functional.rms_norm, and has no overflow at any finite residual'.
    An fp16 residual' beyond 65504 is an infinity, and its row of h zeros and NaN, as in every fp16 model.
    T == 0 returns empty results and launches nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched or written.
    Not checked: the values of row_map beyond absence (that would need a host sync).
    """
    local.check_settings(numerics, routed_scale)
    check_number("eps", eps)
    if not isinstance(zero_centred, bool):
        raise ValueError(f"zero_centred must be True or False, got {zero_centred!r}")
    needed = {"rows": rows, "row_map": row_map, "residual": residual, "norm_weight": norm_weight}
    optional = {"weights": weights, "shared": shared, "shared_gate": shared_gate, "num_valid_rows": num_valid_rows,
                "post_norm_weight": post_norm_weight, "out": out, "residual_out": residual_out}  # fmt: skip
    check_constants(needed, optional)
    args = (rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, residual,
            norm_weight, eps, post_norm_weight, zero_centred)  # fmt: skip
    if out is None and residual_out is None and quant_out is None:
        return _op(*args)
    local._check_rank(rows, row_map)
    out = local._new_out(rows, row_map) if out is None else out
    residual_out = local._new_out(rows, row_map) if residual_out is None else residual_out
    _op_out(*args, out, residual_out, *quantized.schema_args(quant_out))
    return out, residual_out


def _cpu_into(*args):  # noqa: ANN002, ANN202
    """Write `out` and `residual_out`: the arguments are checked, `numerics` is concrete, T >= 1."""
    if local._cpu_kernel() is not None:
        from moetail.ops import finalize_norm_cpu

        finalize_norm_cpu.launch(*args[:15])
        quantized.write(args[13], *args[15:])
        return
    (rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, residual, norm_weight, eps,
     post_norm_weight, zero_centred, out, residual_out) = args[:15]  # fmt: skip
    h, new = reference.finalize_norm(
        rows, row_map, weights, shared, residual=residual, norm_weight=norm_weight, eps=eps,
        post_norm_weight=post_norm_weight, zero_centred=zero_centred, shared_gate=shared_gate,
        routed_scale=routed_scale, num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    out.copy_(h)
    residual_out.copy_(new)
    quantized.write(h, *args[15:])


def _cuda_into(*args):  # noqa: ANN002, ANN202
    from moetail.ops import finalize_norm_triton

    finalize_norm_triton.launch(*args)


def _functional(into: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op that returns new tensors, on one device."""

    def finalize_norm(*args):  # noqa: ANN002, ANN202
        outputs = _fake(*args)
        _write(into, *args, *outputs, None, None, None)
        return outputs

    return finalize_norm


def _out_variant(into: Callable[..., None]) -> Callable[..., None]:
    """The op that writes the caller's tensors, on one device."""

    def finalize_norm_out(*args):  # noqa: ANN002, ANN202
        _check(*args)
        _check_no_overlap(*args)
        _write(into, *args)

    return finalize_norm_out


def _write(into, rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, *rest):  # noqa: ANN001, ANN002, ANN202
    concrete = local._concrete(numerics, rows, row_map, weights)
    if row_map.shape[0] > 0:
        into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, concrete, *rest)


def _fake(*args):  # noqa: ANN002, ANN202
    rows, row_map, *_ = args
    local._check_rank(rows, row_map)
    out, residual_out = local._new_out(rows, row_map), local._new_out(rows, row_map)
    _check(*args, out, residual_out, None, None, None)
    return out, residual_out


def _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, residual, norm_weight,  # noqa: ANN001, ANN202
           eps, post_norm_weight, zero_centred, out, residual_out, *quant):  # fmt: skip # noqa: ANN001, ANN002
    local._check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)
    check_norm("rows", rows, row_map.shape[0], residual, norm_weight, eps, post_norm_weight, residual_out)
    quantized.check(rows, row_map.shape[0], *quant)


def check_norm(
    name: str, rows: torch.Tensor, T: int, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    post_norm_weight: torch.Tensor | None, residual_out: torch.Tensor,
) -> None:  # fmt: skip
    """What a norm of T tokens behind `rows` [.., H], the argument `name`, needs. Raises: ValueError."""
    check_weights(name, rows, eps, ("norm_weight", norm_weight), ("post_norm_weight", post_norm_weight))
    for which, tensor in (("residual", residual), ("residual_out", residual_out)):
        local._check_rows_like(which, tensor, rows, T)
        if tensor.device != rows.device:
            raise ValueError(f"{which} must be on the device of {name}, {rows.device}, got {tensor.device}")


def check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_constants(needed: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> None:
    """Tensors of an op without gradients. Raises: ValueError for one that is none, or that wants gradients."""
    local.check_tensors(*((n, t, True) for n, t in needed.items()), *((n, t, False) for n, t in optional.items()))
    if torch.is_grad_enabled():
        for name, value in (needed | optional).items():
            if value is not None and value.requires_grad:
                raise ValueError(f"{name} must not require gradients, got a tensor that does: use torch.no_grad()")


def check_weights(name: str, rows: torch.Tensor, eps: float, *weights: tuple[str, torch.Tensor | None]) -> None:
    """What an RMSNorm of the rows of `rows`, the argument `name`, needs. Raises: ValueError."""
    H = rows.shape[1]
    if H > MAX_H:
        raise ValueError(f"{name} must have H <= {MAX_H} columns, got {H}: one program holds a token's whole row")
    if not _LEAST_EPS <= eps <= _LARGEST_EPS:
        raise ValueError(f"eps must be between {_LEAST_EPS} and {_LARGEST_EPS}, got {eps!r}")
    for which, weight in weights:
        if weight is None:
            continue
        if weight.shape != (H,):
            raise ValueError(f"{which} must have shape {(H,)}, got {tuple(weight.shape)}")
        if weight.dtype not in local._FLOATS:
            raise ValueError(f"{which} must be float32, bfloat16 or float16, got {weight.dtype}")
        if not weight.is_contiguous():
            raise ValueError(f"{which} must be contiguous, got strides {weight.stride()}")
        if weight.device != rows.device:
            raise ValueError(f"{which} must be on the device of {name}, {rows.device}, got {weight.device}")


def _check_no_overlap(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, residual,  # noqa: ANN001, ANN202
                      norm_weight, eps, post_norm_weight, zero_centred, *outputs):  # fmt: skip # noqa: ANN001, ANN002
    out, residual_out, _, values, scales = outputs
    inputs = (*local._inputs(rows, row_map, weights, shared_gate, num_valid_rows), ("norm_weight", norm_weight),
              ("post_norm_weight", post_norm_weight))  # fmt: skip
    local._check_no_overlap(out, shared, (*inputs, ("residual", residual), ("residual_out", residual_out)))
    local._check_no_overlap(residual_out, residual, (*inputs, ("shared", shared)), ("residual_out", "residual"))
    written = (("out", out), ("residual_out", residual_out))
    quantized.check_no_overlap(values, scales, (*inputs, *written, ("shared", shared), ("residual", residual)))


_ARGS = f"{local._ARGS}, Tensor residual, Tensor norm_weight, float eps, Tensor? post_norm_weight, bool zero_centred"
OUTPUTS = f"Tensor(a!) out, Tensor(b!) residual_out, {quantized.QUANT_ARGS}"
torch.library.define("moetail::finalize_norm", f"({_ARGS}) -> (Tensor, Tensor)")
torch.library.define("moetail::finalize_norm_out", f"({_ARGS}, {OUTPUTS}) -> ()")
for _device, _into in (("CPU", _cpu_into), ("CUDA", _cuda_into)):
    torch.library.impl("moetail::finalize_norm", _device)(_functional(_into))
    torch.library.impl("moetail::finalize_norm_out", _device)(_out_variant(_into))
torch.library.register_fake("moetail::finalize_norm")(_fake)
torch.library.register_fake("moetail::finalize_norm_out")(_check)
_op = torch.ops.moetail.finalize_norm.default
_op_out = torch.ops.moetail.finalize_norm_out.default
