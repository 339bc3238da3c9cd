"""finalize_norm: every implementation against the reference on raw bits and against fp64, and its contract.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernel in the interpreter, the dispatcher's on a GPU.
B.., S..: the cases of bug_cases.md.
"""

import pytest
import torch

import moetail
from moetail import Numerics, reference
from moetail.ops import finalize as local
from moetail.testing import assert_same_bits, finalize_inputs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Implementation:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def __call__(self, rows, row_map, weights, shared=None, *, numerics=Numerics.TRTLLM, **kwargs):
        if self.name != "interpreter":
            return moetail.finalize_norm(rows, row_map, weights, shared, numerics=numerics, **kwargs)
        from moetail.ops import finalize_norm_triton

        h, residual = (torch.full_like(kwargs["residual"], float("nan")) for _ in range(2))
        finalize_norm_triton.launch(
            rows, row_map, weights, shared, kwargs.get("shared_gate"), kwargs.get("num_valid_rows"),
            kwargs.get("routed_scale", 1.0), self.resolve(numerics, rows, row_map, weights), kwargs["residual"],
            kwargs["norm_weight"], kwargs["eps"], kwargs.get("post_norm_weight"), kwargs.get("zero_centred", False), h,
            residual,
        )  # fmt: skip
        return h, residual

    def resolve(self, numerics, rows, row_map, weights):
        device = "cpu" if self.name == "cpu" else "cuda"
        dtype = None if weights is None else weights.dtype
        return numerics.resolve(row_map.shape[0], row_map.shape[1], rows.shape[1], device, rows.dtype, dtype)

    def check(self, rows, row_map, weights, shared, *, numerics=Numerics.TRTLLM, **kwargs):
        got = self(rows, row_map, weights, shared, numerics=numerics, **kwargs)
        concrete = self.resolve(numerics, rows, row_map, weights)
        want = reference.finalize_norm(rows, row_map, weights, shared, numerics=concrete, **kwargs)
        assert_same_bits(got[1], want[1])
        assert_same_bits(got[0], want[0])
        return got


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param, "cuda" if request.param == "cuda" else "cpu")


def arguments(T, K, H, *, dtype=BF16, device="cpu", norm_dtype=None, sandwich=False, gate=False, seed=0, **kwargs):
    """The four tensors of finalize, and the rest by name; `residual` is a window of something wider, NaN beside it."""
    x = finalize_inputs(T, K, H, dtype=dtype, device=device, seed=seed, **kwargs)
    g = torch.Generator().manual_seed(seed + 1)
    wide = torch.full((T, H + 8), float("nan"))
    wide[:, :H] = torch.randn(T, H, generator=g) * 4.0
    norms = [(torch.randn(H, generator=g) * 0.5 + 1.0).to(norm_dtype or dtype).to(device) for _ in range(2)]
    named = {"residual": wide.to(dtype).to(device)[:, :H], "norm_weight": norms[0], "eps": 1e-6}
    named |= {"post_norm_weight": norms[1]} if sandwich else {}
    named |= {"shared_gate": x.shared_gate} if gate else {}
    return (x.rows, x.row_map, x.weights, x.shared), named


CASES = {
    "plain": ({"T": 3, "K": 6, "H": 5120}, {}),
    "sandwich": ({"T": 2, "K": 8, "H": 2880, "sandwich": True, "absent": 0.2}, {}),
    "zero-centred": ({"T": 4, "K": 5, "H": 257, "pad": 7}, {"zero_centred": True}),
    "zero-centred-sandwich": ({"T": 4, "K": 3, "H": 96, "sandwich": True, "absent": 0.3}, {"zero_centred": True}),
    "scaled": ({"T": 5, "K": 7, "H": 255, "pad": 1, "absent": 0.1}, {"routed_scale": 2.5}),
    "fp16": ({"T": 4, "K": 7, "H": 257, "dtype": F16, "pad": 3, "absent": 0.2}, {}),
    "fp16-sandwich": ({"T": 2, "K": 6, "H": 2880, "dtype": F16, "sandwich": True}, {"zero_centred": True}),
    "fp32": ({"T": 3, "K": 9, "H": 255, "dtype": F32, "absent": 0.2}, {}),
    "fp32-norm-weights": ({"T": 3, "K": 4, "H": 96, "norm_dtype": F32, "sandwich": True}, {"zero_centred": True}),
    "one-rounding": ({"T": 3, "K": 6, "H": 96}, {"numerics": Numerics.SINGLE_ROUNDING, "routed_scale": 1.7}),
    "transformers": ({"T": 3, "K": 6, "H": 288, "weights_dtype": BF16}, {"numerics": Numerics.TRANSFORMERS}),
    "flashinfer": ({"T": 3, "K": 9, "H": 96}, {"numerics": Numerics.FLASHINFER}),
    "widest": ({"T": 1, "K": 2, "H": 16384}, {}),
    "one-column": ({"T": 3, "K": 2, "H": 1}, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits(run, case):
    inputs, options = case
    args, named = arguments(**inputs, device=run.device)
    h, residual = run.check(*args, **named, **options)
    assert torch.isfinite(h).all() and torch.isfinite(residual).all()
    run.check(*args[:3], None, **named, **options)


def oracle(rows, row_map, weights, shared, *, residual, norm_weight, eps, post_norm_weight=None, zero_centred=False,
           routed_scale=1.0):  # fmt: skip
    """Token by token in fp64, rounded where the tensors of a model are; shares no code with the package."""

    def norm(row, weight):
        factor = weight.double() + (1.0 if zero_centred else 0.0)
        return torch.nn.functional.rms_norm(row.double(), row.shape, factor, eps).to(rows.dtype)

    hs, residuals = [], []
    for t in range(row_map.shape[0]):
        slots = [k for k in range(row_map.shape[1]) if 0 <= row_map[t, k] < rows.shape[0]]
        y = torch.zeros(rows.shape[1], dtype=torch.float64)
        for k in slots:
            y += weights[t, k].double() * rows[row_map[t, k]].double()
        y = (y.to(rows.dtype).double() * routed_scale).to(rows.dtype) + shared[t]
        if post_norm_weight is not None:
            y = norm(y, post_norm_weight)
        residuals.append((residual[t].double() + y.double()).to(rows.dtype))
        hs.append(norm(residuals[-1], norm_weight))
    return torch.stack(hs), torch.stack(residuals)


@pytest.mark.parametrize("name", ["plain", "sandwich", "zero-centred-sandwich", "scaled", "fp16", "fp32"])
def test_against_fp64(name):
    inputs, options = CASES[name]
    args, named = arguments(**inputs)
    for got, want in zip(moetail.finalize_norm(*args, **named, **options), oracle(*args, **named, **options),
                         strict=True):  # fmt: skip
        torch.testing.assert_close(got, want)


def nothing_routed(x, **kwargs):
    """The arguments whose residual' is x (no slot is there, y is +0)."""
    T, H = x.shape
    named = {"residual": x, "norm_weight": torch.linspace(-2.0, 2.0, H, device=x.device).to(x.dtype), "eps": 1e-6}
    absent = torch.full((T, 1), -1, dtype=torch.int32, device=x.device)
    return (x.new_zeros(1, H), absent, torch.ones(T, 1, device=x.device), None), named | kwargs


def rows_of(*fills, H=96):
    return torch.stack([torch.full((H,), float(f)) if isinstance(f, (int, float)) else f for f in fills])


OUTLIER = torch.cat([torch.full((95,), 2.0**-9 * 1.01), torch.tensor([2.0**14 - 8])])
VALUES = {
    "bf16-zeros-and-extremes": (rows_of(0.0, 3.0e38, -3.3e38, 1.2e-38, 2.0**-37, 2.0**-36, 2.0**64, 1e-4), BF16),
    "bf16-subnormals": (rows_of(1e-38, -1e-40), BF16),
    "bf16-outlier": (rows_of(OUTLIER, OUTLIER.flip(0), 1e-30 * OUTLIER, 1e30 * OUTLIER), BF16),
    "fp16-extremes": (rows_of(0.0, 65504.0, 6e-8, 2.0**-14, OUTLIER), F16),
    "fp32-extremes": (rows_of(0.0, 3.4e38, 1e-45, 1e-38, torch.rand(96) * 1e38, OUTLIER), F32),
}


@pytest.mark.parametrize(("x", "dtype"), VALUES.values(), ids=VALUES)
def test_every_finite_residual_has_a_finite_norm(run, x, dtype):
    """Squares that fp32 does not hold, against fp64."""
    if run.name == "interpreter" and x.abs().max() < 1.1e-38:
        run = Implementation("cpu", "cpu")  # Triton 3.9's interpreter reads subnormal bf16 wrongly
    args, named = nothing_routed(x.to(dtype).to(run.device))
    h, residual = run.check(*args, **named)
    assert_same_bits(residual, named["residual"] + 0.0)
    want = torch.nn.functional.rms_norm(residual.double(), (96,), named["norm_weight"].double(), 1e-6)
    torch.testing.assert_close(h, want.to(dtype))


def test_eps_at_the_ends_of_its_range(run):
    x = torch.cat([rows_of(0.0, 1e-10, 2.0**-40, 1e-30, 5.0), torch.randn(3, 96) * 1e-9]).to(BF16).to(run.device)
    for eps in (1e-20, 1e-12, 1.0):
        args, named = nothing_routed(x, eps=eps)
        h, residual = run.check(*args, **named)
        want = torch.nn.functional.rms_norm(residual.double(), (96,), named["norm_weight"].double(), eps)
        torch.testing.assert_close(h, want.to(BF16))


def test_infinities_and_nans_stay_in_their_row(run):
    x = torch.randn(4, 96).to(BF16)
    x[1, 5], x[2, 7] = float("inf"), torch.tensor(-1, dtype=torch.int16).view(BF16)  # a NaN whose sign is set
    args, named = nothing_routed(x.to(run.device))
    h, _ = run.check(*args, **named)
    assert torch.isfinite(h[0]).all() and torch.isfinite(h[3]).all() and torch.isnan(h[2]).all()
    assert torch.isnan(h[1, 5]) and (h[1, torch.arange(96) != 5] == 0).all()


def test_signed_zeros(run):
    """An underflow makes y -0, so residual' is -0 where residual is; h has the sign of -0 times its weight."""
    rows = torch.full((1, 8), -1e-30, dtype=BF16, device=run.device)
    weight = torch.tensor([1.0, -1.0, 2.0, -2.0] * 2, dtype=BF16, device=run.device)
    residual = torch.tensor([[-0.0, -0.0, 0.0, 0.0, -0.0, -0.0, 1.0, -1.0]], dtype=BF16, device=run.device)
    one = torch.full((1, 1), 1e-30, device=run.device)
    zero = torch.zeros(1, 1, dtype=torch.int32, device=run.device)
    h, new = run.check(rows, zero, one, None, residual=residual, norm_weight=weight, eps=1e-6)
    assert_same_bits(new, residual)
    assert torch.signbit(h[0, :6]).tolist() == [True, False, False, True, True, False]


def test_one_rounding_after_the_weight(run):
    """Not transformers' two: they must differ somewhere, and F.rms_norm in fp32 is what we equal."""
    args, named = nothing_routed(torch.randn(64, 96).to(BF16).to(run.device))
    h, residual = run.check(*args, **named)
    x, weight = residual.float(), named["norm_weight"]
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert not torch.equal(h, (x * inverse).to(BF16) * weight)
    assert (h != (x * inverse * weight.float()).to(BF16)).float().mean() < 1e-3


def test_the_norm_sees_the_whole_sum(run):  # B45: norm(routed + shared + residual), once
    args, named = arguments(4, 6, 96, device=run.device)
    h, new = run.check(*args, **named)
    y = reference.finalize(*args)
    assert_same_bits(new, y + named["residual"])
    assert_same_bits(h, reference.rms_norm(y + named["residual"], named["norm_weight"], 1e-6))


def test_absent_slots_are_not_read(run):  # B16, B20, S3
    args, named = arguments(5, 4, 96, device=run.device)
    row_map = args[1].clone()
    for slot, value in enumerate((-1, -2, torch.iinfo(torch.int32).min, args[0].shape[0])):
        args[0][row_map[slot, slot].long()] = float("inf")
        row_map[slot, slot] = value
    h, _ = run.check(args[0], row_map, args[2], args[3], **named)
    assert torch.isfinite(h).all()
    limit = torch.tensor([9], device=run.device)
    args[0][9:] = float("nan")
    h, _ = run.check(*args, **named, num_valid_rows=limit)
    assert torch.isfinite(h[(args[1] < 9).all(1)]).all()


def test_map_layouts(run):  # S8
    args, named = arguments(6, 4, 96, map_dtype=torch.int64, device=run.device)
    want = run.check(*args, **named)
    got = run(args[0], args[1].t().contiguous().t(), args[2].t().contiguous().t(), args[3], **named)
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


def test_gate(run):  # S6
    args, named = arguments(7, 4, 96, device=run.device, gate=True)
    if run.name == "interpreter":  # its exp is numpy's, not the GPU's: sigmoid(0) is exact everywhere
        named["shared_gate"] = torch.zeros_like(named["shared_gate"])
    run.check(*args, **named)
    run.check(*args, **named, numerics=Numerics.SINGLE_ROUNDING, routed_scale=2.5)


@pytest.mark.parametrize("T", [1, 33, 300])
def test_a_token_has_the_same_bits_in_any_batch(run, T):  # B33, B34
    (rows, row_map, weights, shared), named = arguments(T, 6, 96, sandwich=True, device=run.device)
    t = slice(T // 2, T // 2 + 1)
    alone = run(rows, row_map[t], weights[t], shared[t], **named | {"residual": named["residual"][t]})
    for got, want in zip(run(rows, row_map, weights, shared, **named), alone, strict=True):
        assert_same_bits(got[t], want)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(33, 6, 5120), (300, 8, 2048), (7, 8, 7168)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_model_shapes(device, shape, dtype):  # B26, B27, B32
    args, named = arguments(*shape, dtype=dtype, absent=0.1, pad=8, device=device, sandwich=shape[0] == 33)
    Implementation(device, device).check(*args, **named)


@pytest.mark.gpu
def test_many_tokens_on_a_gpu():
    args, named = arguments(8192, 6, 5120, absent=0.05, device="cuda")
    Implementation("cuda", "cuda").check(*args, **named)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_place_and_guarded(device):  # B23, B28: h over shared, residual' over residual; guard rows, guard columns
    args, named = arguments(4, 5, 255, device=device)
    want = moetail.finalize_norm(*args, **named)
    arenas = [torch.full((6, 264), float("nan"), dtype=BF16, device=device) for _ in range(2)]
    windows = [arena[1:5, :255] for arena in arenas]
    for out, residual_out in ((args[3], None), (None, named["residual"]), windows, (args[3], named["residual"])):
        shared, residual = args[3].clone(), named["residual"].clone()
        out = shared if out is args[3] else out
        residual_out = residual if residual_out is named["residual"] else residual_out
        got = moetail.finalize_norm(*args[:3], shared, **named | {"residual": residual}, out=out,
                                    residual_out=residual_out)  # fmt: skip
        assert out is None or got[0] is out
        assert residual_out is None or got[1] is residual_out
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
    for arena in arenas:
        assert torch.isnan(arena[0]).all() and torch.isnan(arena[5]).all() and torch.isnan(arena[:, 255:]).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens(device):  # B09, B10
    (rows, row_map, weights, shared), named = arguments(3, 4, 96, device=device)
    none = named | {"residual": named["residual"][:0]}
    for h in moetail.finalize_norm(rows, row_map[:0], weights[:0], shared[:0], **none):
        assert h.shape == (0, 96) and h.dtype == BF16 and h.device.type == device
    empty = torch.empty(0, 96, dtype=BF16, device=device)
    got = moetail.finalize_norm(rows, row_map[:0], weights[:0], None, **none, out=empty)
    assert got[0] is empty and got[1].shape == (0, 96)


BAD = {
    "rows-dtype": ("rows", lambda a: {"rows": a["rows"].int()}),
    "rows-rank": ("rows", lambda a: {"rows": a["rows"][0]}),
    "rows-none": ("rows", lambda a: {"rows": None}),
    "rows-too-wide": ("rows", lambda a: {n: torch.zeros(4, 16385) for n in ("rows", "shared", "residual")}),
    "map-floats": ("row_map", lambda a: {"row_map": a["row_map"].float()}),
    "weights-missing": ("weights", lambda a: {"weights": None}),
    "residual-missing": ("residual", lambda a: {"residual": None}),
    "residual-shape": ("residual", lambda a: {"residual": a["residual"][:3]}),
    "residual-dtype": ("residual", lambda a: {"residual": a["residual"].float()}),
    "residual-stride": ("residual", lambda a: {"residual": a["residual"].t().contiguous().t()}),
    "residual-device": ("residual", lambda a: {"residual": a["residual"].to("meta")}),
    "norm-missing": ("norm_weight", lambda a: {"norm_weight": None}),
    "norm-shape": ("norm_weight", lambda a: {"norm_weight": a["norm_weight"][None]}),
    "norm-dtype": ("norm_weight", lambda a: {"norm_weight": a["norm_weight"].double()}),
    "norm-stride": ("norm_weight", lambda a: {"norm_weight": torch.ones(128)[::2]}),
    "norm-gradient": ("norm_weight", lambda a: {"norm_weight": torch.ones(64, requires_grad=True)}),
    "post-norm-shape": ("post_norm_weight", lambda a: {"post_norm_weight": torch.ones(63)}),
    "post-norm-device": ("post_norm_weight", lambda a: {"post_norm_weight": torch.ones(64, device="meta")}),
    "eps-zero": ("eps", lambda a: {"eps": 0.0}),
    "eps-negative": ("eps", lambda a: {"eps": -1e-6}),
    "eps-nan": ("eps", lambda a: {"eps": float("nan")}),
    "eps-large": ("eps", lambda a: {"eps": 1.5}),
    "eps-none": ("eps", lambda a: {"eps": None}),
    "zero-centred-int": ("zero_centred", lambda a: {"zero_centred": 1}),
    "scale-too-large": ("routed_scale", lambda a: {"routed_scale": 1e300}),
    "numerics-a-string": ("numerics", lambda a: {"numerics": "TRTLLM"}),
    "out-shape": ("out", lambda a: {"out": torch.empty(4, 63, dtype=BF16)}),
    "out-is-residual": ("out", lambda a: {"out": a["residual"]}),
    "out-overlaps-rows": ("out", lambda a: {"out": a["rows"][:4]}),
    "out-is-residual-out": ("out", lambda a: dict.fromkeys(("out", "residual_out"), torch.empty(4, 64, dtype=BF16))),
    "residual-out-dtype": ("residual_out", lambda a: {"residual_out": torch.empty(4, 64)}),
    "residual-out-is-shared": ("residual_out", lambda a: {"residual_out": a["shared"]}),
    "residual-out-overlaps-residual": ("residual_out", lambda a: {"residual": a["buffer"][:4],
                                                                  "residual_out": a["buffer"][1:]}),
    "residual-out-overlaps-the-norm": ("residual_out", lambda a: {"norm_weight": a["buffer"][0],
                                                                  "residual_out": a["buffer"][:4]}),
    "residual-out-is-one-row": ("residual_out", lambda a: {"residual_out": a["buffer"][:1].expand(4, 64)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD)
def test_bad_input(name, change):
    tensors, named = arguments(4, 3, 64)
    args = dict(zip(("rows", "row_map", "weights", "shared"), tensors, strict=True)) | named
    args |= change(args | {"buffer": torch.randn(5, 64).to(BF16)})
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    with pytest.raises(ValueError, match=f"^{name} "):
        moetail.finalize_norm(**args)
    for key, value in before.items():
        assert_same_bits(args[key], value)


def op_arguments(T=4):
    """Dims and dtypes all differ, so that a fake or a schema that mixes two of them fails."""
    (rows, row_map, weights, shared), named = arguments(T, 3, 40, norm_dtype=F32, sandwich=True)
    gate, valid = torch.randn(T, 1).to(F16), torch.tensor([9])
    return (rows, row_map, weights, shared, gate, valid, 1.5, Numerics.TRTLLM.spec, named["residual"],
            named["norm_weight"], 1e-5, named["post_norm_weight"].to(BF16), True)  # fmt: skip


def test_opcheck():
    args = op_arguments()
    outputs = torch.empty(4, 40, dtype=BF16), torch.empty(4, 48, dtype=BF16)[:, :40]
    torch.library.opcheck(torch.ops.moetail.finalize_norm.default, args)
    torch.library.opcheck(torch.ops.moetail.finalize_norm_out.default, (*args, *outputs, None, None, None))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    """Two layers, the residual in place, as engines have it."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layers(rows, row_map, weights, shared, residual, norm_weight):
        first, residual = moetail.finalize_norm(rows, row_map, weights, shared, residual=residual, eps=1e-6,
                                                norm_weight=norm_weight, residual_out=residual)  # fmt: skip
        second, new = moetail.finalize_norm(rows, row_map, weights, first, residual=residual, eps=1e-6,
                                            norm_weight=norm_weight, zero_centred=True)  # fmt: skip
        return first, second, residual * 2, new

    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    for T in (3, 5, 17, 64):
        args, named = arguments(T, 4, 64, device=device)
        residuals = [named["residual"].contiguous() for _ in range(2)]
        want = layers(*args, residuals[0], named["norm_weight"])
        for g, w in zip(compiled(*args, residuals[1], named["norm_weight"]), want, strict=True):
            assert_same_bits(g, w)
        assert_same_bits(residuals[1], residuals[0])
    with_op = [g for g in counter.graphs if any("finalize_norm" in str(node.target) for node in g.graph.nodes)]
    assert len(with_op) == 1


def test_without_numba_the_reference_runs(monkeypatch):
    monkeypatch.setattr(local, "_cpu_kernel", lambda: None)
    args, named = arguments(3, 4, 96)
    out = torch.empty(3, 96, dtype=BF16)
    got = moetail.finalize_norm(*args, **named, out=out, residual_out=named["residual"].clone())
    assert got[0] is out
    for g, w in zip(got, reference.finalize_norm(*args, **named), strict=True):
        assert_same_bits(g, w)
