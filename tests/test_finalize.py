"""finalize: every implementation against the reference on raw bits, its contract, and the public failures of its kind.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernel in the interpreter, the dispatcher's on a GPU.
B.., S..: the cases of bug_cases.md.
"""

import warnings

import pytest
import torch

import moetail
from moetail import Numerics, reference
from moetail.ops import finalize as op
from moetail.testing import assert_same_bits, finalize_inputs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ONE_ROUNDING_POSITIVE = Numerics("fma", rounding="one", zero="positive", scale="f32")


class Implementation:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def __call__(self, rows, row_map, weights, shared=None, *, numerics=Numerics.TRTLLM, **kwargs):
        if self.name != "interpreter":
            return moetail.finalize(rows, row_map, weights, shared, numerics=numerics, **kwargs)
        from moetail.ops import finalize_triton

        out = torch.full((row_map.shape[0], rows.shape[1]), float("nan"), dtype=rows.dtype)
        finalize_triton.launch(
            rows, row_map, weights, shared, kwargs.get("shared_gate"), kwargs.get("num_valid_rows"),
            kwargs.get("routed_scale", 1.0), self.resolve(numerics, rows, row_map, weights), out,
        )  # fmt: skip
        return out

    def resolve(self, numerics, rows, row_map, weights):
        device = "cpu" if self.name == "cpu" else "cuda"
        dtype = None if weights is None else weights.dtype
        return numerics.resolve(row_map.shape[0], row_map.shape[1], rows.shape[1], device, rows.dtype, dtype)

    def check(self, x, numerics, *, shared=True, gate=False, **kwargs):
        weights = x.weights_for(numerics)
        args = (x.rows, x.row_map, weights, x.shared if shared else None)
        kwargs |= {"shared_gate": x.shared_gate} if gate else {}
        got = self(*args, numerics=numerics, **kwargs)
        assert_same_bits(got, reference.finalize(*args, numerics=self.resolve(numerics, *args[:3]), **kwargs))
        return got


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param, "cuda" if request.param == "cuda" else "cpu")


NUMERICS = {
    "trtllm": Numerics.TRTLLM,
    "preweighted": Numerics.PREWEIGHTED,
    "transformers": Numerics.TRANSFORMERS,
    "flashinfer": Numerics.FLASHINFER,
    "single-rounding": Numerics.SINGLE_ROUNDING,
    "one-positive": ONE_ROUNDING_POSITIVE,
    "split-8": Numerics("round_f32", order="split(8)"),
}


@pytest.mark.parametrize("dtypes", [(BF16, F32), (BF16, BF16), (F16, F32), (F32, F32)], ids=str)
@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_bits(run, numerics, dtypes):
    """Odd everything: a padded row stride, absent slots, dead memory that is NaN."""
    x = finalize_inputs(5, 7, 75, dtype=dtypes[0], weights_dtype=dtypes[1], pad=5, absent=0.2, device=run.device)
    run.check(x, numerics)
    run.check(x, numerics, shared=False, routed_scale=2.5)
    if run.name != "interpreter":  # its exp is numpy's, not the GPU's
        run.check(x, numerics, gate=True, routed_scale=1.7)


@pytest.mark.parametrize("K", [1, 2, 3, 5, 6, 8, 9, 10, 12, 16])
def test_any_top_k(run, K):  # B25: not only powers of two
    x = finalize_inputs(3, K, 40, absent=0.1, device=run.device)
    for numerics in (Numerics.TRTLLM, Numerics.TRANSFORMERS, Numerics.FLASHINFER):
        run.check(x, numerics)


@pytest.mark.parametrize("K", [22, 33, 64])
def test_large_top_k(run, K):
    x = finalize_inputs(2, K, 40, device=run.device)
    run.check(x, Numerics.TRTLLM)
    run.check(x, Numerics.FLASHINFER)


@pytest.mark.parametrize("H", [1, 2, 7, 8, 31, 33, 96, 255, 257, 1025])
def test_any_hidden_size(run, H):  # B26, B28
    x = finalize_inputs(3, 5, H, device=run.device)
    run.check(x, Numerics.TRTLLM)
    if H > 1:
        run.check(x, Numerics.TRANSFORMERS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 6, 5120), (4, 8, 7168), (65, 10, 2048), (5, 8, 2880), (16, 8, 3584)], ids=str)
def test_model_shapes_on_a_gpu(shape):  # B26, B27
    run = Implementation("cuda", "cuda")
    x = finalize_inputs(*shape, pad=8, absent=0.1, device="cuda")
    for numerics in NUMERICS.values():
        run.check(x, numerics)


@pytest.mark.parametrize("shape", [(33, 6, 5120), (300, 8, 2048), (3, 8, 7168)], ids=str)
def test_model_shapes_on_a_cpu(shape):
    """Enough tokens for several threads."""
    x = finalize_inputs(*shape, absent=0.1)
    for numerics in NUMERICS.values():
        Implementation("cpu", "cpu").check(x, numerics)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_weights_of_each_dtype(run, dtype):  # B40: read as what they are, never as another dtype
    x = finalize_inputs(4, 6, 64, weights_dtype=dtype, device=run.device)
    run.check(x, Numerics.TRTLLM)
    run.check(x, Numerics.TRANSFORMERS)


def test_map_layouts(run):  # S8: a column-major map is a transposed view; int64 maps
    x = finalize_inputs(6, 4, 64, map_dtype=torch.int64, device=run.device)
    want = run(x.rows, x.row_map, x.weights, x.shared)
    columns = (x.row_map.t().contiguous().t(), x.weights.t().contiguous().t())
    assert columns[0].stride() == (1, 6)
    assert_same_bits(run(x.rows, *columns, x.shared), want)
    assert_same_bits(run(x.rows, x.row_map.int(), x.weights, x.shared), want)


def test_absent_slots_are_not_read(run):  # B16, B20, S3: -1, any other negative, R, beyond R
    x = finalize_inputs(5, 4, 48, device=run.device)
    rows = x.rows.clone()
    row_map = x.row_map.clone()
    for slot, value in enumerate((-1, -2, torch.iinfo(torch.int32).min, rows.shape[0])):
        rows[row_map[slot, slot].long()] = float("inf")
        row_map[slot, slot] = value
    weights = torch.where(row_map < 0, torch.full_like(x.weights, float("nan")), x.weights)
    got = run(rows, row_map, weights, x.shared)
    assert torch.isfinite(got).all()
    assert_same_bits(got, reference.finalize(rows, row_map, weights, x.shared))


def test_num_valid_rows(run):
    x = finalize_inputs(6, 4, 48, device=run.device)
    rows = x.rows.clone()
    rows[9:] = float("nan")
    for dtype in (torch.int32, torch.int64):
        limit = torch.tensor([9], dtype=dtype, device=run.device)
        got = run(rows, x.row_map, x.weights, x.shared, num_valid_rows=limit)
        assert torch.isfinite(got).all()
        assert_same_bits(got, reference.finalize(rows, x.row_map, x.weights, x.shared, num_valid_rows=limit))


def test_num_valid_rows_beyond_the_rows(run):
    """More valid rows claimed than there are: the map is still held to R."""
    x = finalize_inputs(6, 4, 48, absent=0.4, device=run.device)  # some slots are R and R + 1000
    limit = torch.tensor([10**6], device=run.device)
    got = run(x.rows, x.row_map, x.weights, x.shared, num_valid_rows=limit)
    assert_same_bits(got, reference.finalize(x.rows, x.row_map, x.weights, x.shared))


def test_nan_stays_nan(run):
    rows = torch.tensor([[0x7FFF]], dtype=torch.int32).to(torch.int16).view(BF16)
    rows = rows.expand(1, 8).contiguous().to(run.device)
    one = torch.ones(1, 1, device=run.device)
    assert torch.isnan(run(rows, torch.zeros(1, 1, dtype=torch.int32, device=run.device), one)).all()


def test_an_underflow_to_minus_zero_becomes_plus_zero(run):
    rows = torch.full((1, 8), -1e-7, dtype=F16, device=run.device)
    call = (rows, torch.zeros(1, 1, dtype=torch.int32, device=run.device), torch.full((1, 1), 1e-3, device=run.device))
    assert_same_bits(run(*call), torch.full_like(rows, -0.0))
    assert_same_bits(run(*call, numerics=Numerics("fma", zero="positive")), torch.full_like(rows, 0.0))


def test_a_gate_of_one_half(run):
    """sigmoid(0) is exact everywhere, so the interpreter's gate is tested too; it is a column of something wider."""
    x = finalize_inputs(9, 4, 64, device=run.device)
    gate = torch.randn(9, 5, device=run.device).to(BF16)
    gate[:, 3] = 0.0
    for numerics in (Numerics.TRTLLM, Numerics.SINGLE_ROUNDING):
        args = (x.rows, x.row_map, x.weights, x.shared)
        got = run(*args, shared_gate=gate[:, 3:4], numerics=numerics)
        assert_same_bits(got, reference.finalize(*args, shared_gate=gate[:, 3:4], numerics=numerics))


def test_every_slot_absent(run):  # B17, B23: the shared output exactly, or +0
    x = finalize_inputs(4, 4, 40, absent=1.0, device=run.device)
    assert_same_bits(run(x.rows, x.row_map, x.weights, x.shared), x.shared)
    assert_same_bits(run(x.rows, x.row_map, x.weights), torch.zeros_like(x.shared))


def test_one_slot_is_one_product(run):  # B15
    x = finalize_inputs(7, 1, 64, device=run.device)
    want = (x.rows[x.row_map[:, 0].long()].float() * x.weights).to(BF16)
    for _ in range(100 if run.name != "interpreter" else 3):
        assert_same_bits(run(x.rows, x.row_map, x.weights), want)


@pytest.mark.parametrize("T", [1, 32, 33, 300])
def test_a_token_has_the_same_bits_in_any_batch(run, T):  # B33, B34
    x = finalize_inputs(T, 6, 64, device=run.device)
    token = T // 2
    for numerics in (Numerics.TRTLLM, Numerics.TRANSFORMERS):
        alone = run(x.rows, x.row_map[token : token + 1], x.weights[token : token + 1], x.shared[token : token + 1],
                    numerics=numerics)  # fmt: skip
        assert_same_bits(run(x.rows, x.row_map, x.weights, x.shared, numerics=numerics)[token : token + 1], alone)


def test_the_scale_is_applied_once_and_never_to_shared(run):  # B42, B43
    rows = torch.ones(2, 8, dtype=BF16, device=run.device)
    row_map = torch.tensor([[0, 1]], device=run.device)
    weights = torch.tensor([[0.25, 0.75]], device=run.device)
    shared = torch.full((1, 8), 3.0, dtype=BF16, device=run.device)
    want = torch.full((1, 8), 5.5, dtype=BF16, device=run.device)
    assert_same_bits(run(rows, row_map, weights, shared, routed_scale=2.5), want)
    assert_same_bits(run(rows, row_map, weights * 2.5, shared), want)


def test_scale_rounding_points(run):
    """round_row rounds the sum before and after the scale; f32 does not: they must differ somewhere."""
    x = finalize_inputs(40, 6, 64, device=run.device)
    scaled = [run.check(x, Numerics("fma", scale=scale), routed_scale=1.7) for scale in ("round_row", "f32")]
    assert not torch.equal(*scaled)


def test_gate_is_the_models_own_expression(run):  # S6: Qwen2's sigmoid(gate) * shared, in the rows' dtype
    if run.name == "interpreter":
        run = Implementation("cpu", "cpu")
    x = finalize_inputs(50, 4, 64, device=run.device)
    routed = run(x.rows, x.row_map, x.weights, numerics=Numerics.TRANSFORMERS)
    got = run(x.rows, x.row_map, x.weights, x.shared, shared_gate=x.shared_gate, numerics=Numerics.TRANSFORMERS)
    assert_same_bits(got, routed + torch.sigmoid(x.shared_gate) * x.shared)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gate_of_every_logit(device, dtype):
    """All 65,536 values of a 16-bit logit, against torch.sigmoid on the same device."""
    logits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)[:, None].to(device)
    rows, nothing = torch.zeros(1, 8, dtype=dtype, device=device), torch.full((2**16, 1), -1, device=device)
    shared = torch.full((2**16, 8), 3.0, dtype=dtype, device=device)
    got = moetail.finalize(rows, nothing, torch.ones(2**16, 1, device=device), shared, shared_gate=logits)
    assert_same_bits(got, torch.sigmoid(logits) * shared + 0.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens(device):  # B09, B10: nothing launched, and the next call works
    x = finalize_inputs(3, 4, 64, device=device)
    for shared in (x.shared[:0], None):
        got = moetail.finalize(x.rows, x.row_map[:0], x.weights[:0], shared)
        assert got.shape == (0, 64) and got.dtype == BF16 and got.device.type == device
    assert_same_bits(moetail.finalize(x.rows, x.row_map, x.weights), reference.finalize(x.rows, x.row_map, x.weights))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_out_is_written_whole_and_nothing_else_is(device):  # B23, B26, B28: guard rows, guard columns
    x = finalize_inputs(4, 5, 96, device=device)
    arena = torch.full((6, 104), float("nan"), dtype=BF16, device=device)
    out = arena[1:5, :96]
    got = moetail.finalize(x.rows, x.row_map, x.weights, x.shared, out=out)
    assert got is out
    assert_same_bits(out, reference.finalize(x.rows, x.row_map, x.weights, x.shared))
    assert torch.isnan(arena[0]).all() and torch.isnan(arena[5]).all() and torch.isnan(arena[:, 96:]).all()
    shared = x.shared.clone()
    moetail.finalize(x.rows, x.row_map, x.weights, shared, out=shared)  # in place
    assert_same_bits(shared, out)


def test_padded_hidden(run):  # B29: 2688 columns in rows of 2816, the pad NaN
    x = finalize_inputs(2, 6, 2688, pad=128, device=run.device)
    assert x.rows.stride(0) == 2816
    assert torch.isfinite(run.check(x, Numerics.TRTLLM)).all()


def two_views():
    buffer = torch.randn(5, 64).to(BF16)
    return buffer[:4], buffer[1:]


BAD = {
    "rows-rank": ("rows", lambda a: a | {"rows": a["rows"][0]}),
    "rows-dtype": ("rows", lambda a: a | {"rows": a["rows"].int()}),
    "rows-stride": ("rows", lambda a: a | {"rows": a["rows"].t().contiguous().t()}),
    "rows-no-columns": ("rows", lambda a: a | {"rows": a["rows"][:, :0], "shared": None}),
    "map-rank": ("row_map", lambda a: a | {"row_map": a["row_map"][0]}),
    "map-floats": ("row_map", lambda a: a | {"row_map": a["row_map"].float()}),
    "map-K": ("row_map", lambda a: a | {"row_map": a["row_map"].repeat(1, 22), "weights": a["weights"].repeat(1, 22)}),
    "map-no-slots": ("row_map", lambda a: a | {"row_map": a["row_map"][:, :0], "weights": a["weights"][:, :0]}),
    "weights-missing": ("weights", lambda a: a | {"weights": None}),
    "weights-extra": ("weights", lambda a: a | {"numerics": Numerics.PREWEIGHTED}),
    "weights-dtype": ("weights", lambda a: a | {"weights": a["weights"].double()}),
    "weights-shape": ("weights", lambda a: a | {"weights": a["weights"][:, :2]}),
    "weights-flat": ("weights", lambda a: a | {"weights": a["weights"].reshape(-1)}),
    "shared-shape": ("shared", lambda a: a | {"shared": a["shared"][:1]}),
    "shared-dtype": ("shared", lambda a: a | {"shared": a["shared"].float()}),
    "gate-without-shared": ("shared_gate", lambda a: a | {"shared": None, "shared_gate": torch.zeros(4, 1)}),
    "gate-shape": ("shared_gate", lambda a: a | {"shared_gate": torch.zeros(4)}),
    "gate-dtype": ("shared_gate", lambda a: a | {"shared_gate": torch.zeros(4, 1, dtype=torch.int32)}),
    "valid-rows-dtype": ("num_valid_rows", lambda a: a | {"num_valid_rows": torch.tensor([1.0])}),
    "valid-rows-count": ("num_valid_rows", lambda a: a | {"num_valid_rows": torch.tensor([1, 2])}),
    "device": ("shared", lambda a: a | {"shared": a["shared"].to("meta")}),
    "out-shape": ("out", lambda a: a | {"out": torch.empty(4, 63, dtype=BF16)}),
    "out-dtype": ("out", lambda a: a | {"out": torch.empty(4, 64)}),
    "out-overlaps-rows": ("out", lambda a: a | {"out": a["rows"][:4]}),
    "out-overlaps-shared": ("out", lambda a: {**a, **dict(zip(("shared", "out"), two_views(), strict=True))}),
    "out-is-one-row": ("out", lambda a: a | {"out": torch.empty(1, 64, dtype=BF16).expand(4, 64)}),
    "numerics-a-string": ("numerics", lambda a: a | {"numerics": "TRTLLM"}),
    "rows-none": ("rows", lambda a: a | {"rows": None}),
    "weights-a-list": ("weights", lambda a: a | {"weights": [1.0]}),
    "scale-a-string": ("routed_scale", lambda a: a | {"routed_scale": "2"}),
    "scale-too-large": ("routed_scale", lambda a: a | {"routed_scale": 1e300}),
    "map-K-65": ("row_map", lambda a: a | {"row_map": a["row_map"][:, :1].repeat(1, 65),
                                           "weights": a["weights"][:, :1].repeat(1, 65)}),
    "transformers-K": ("numerics",
                       lambda a: a | {"row_map": a["row_map"].repeat(1, 6), "numerics": Numerics.TRANSFORMERS,
                                                 "weights": a["weights"].repeat(1, 6)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD)
def test_bad_input(name, change):
    x = finalize_inputs(4, 3, 64)
    args = change({"rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared})
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    with pytest.raises(ValueError, match=f"^{name} "):
        moetail.finalize(**args)
    for key, value in before.items():
        assert_same_bits(args[key], value)


def test_out_beside_rows_in_one_buffer():
    x = finalize_inputs(4, 3, 64)
    buffer = torch.zeros(x.rows.shape[0], 128, dtype=BF16)
    buffer[:, :64] = x.rows
    moetail.finalize(buffer[:, :64], x.row_map, x.weights, x.shared, out=buffer[:4, 64:])
    assert_same_bits(buffer[:4, 64:], reference.finalize(x.rows, x.row_map, x.weights, x.shared))


def test_the_op_takes_a_preset_by_name():
    x = finalize_inputs(600, 8, 512, dtype=F32)
    args = (x.rows, x.row_map, x.weights, x.shared)
    got = torch.ops.moetail.finalize(*args, None, None, 1.0, "FLASHINFER")
    assert_same_bits(got, moetail.finalize(*args, numerics=Numerics.FLASHINFER))
    with pytest.raises(ValueError, match="^numerics must be one of"):
        torch.ops.moetail.finalize(*args, None, None, 1.0, "a/b")


def test_opcheck():
    """Dims and dtypes all differ, so that a fake or a schema that mixes two of them fails."""
    x = finalize_inputs(4, 3, 40, weights_dtype=F32)
    tail = (1.5, Numerics.TRTLLM.spec)
    args = (x.rows, x.row_map, x.weights, x.shared, x.shared_gate.to(F16), torch.tensor([9]), *tail)
    torch.library.opcheck(torch.ops.moetail.finalize.default, args)
    torch.library.opcheck(torch.ops.moetail.finalize_out.default, (*args, torch.empty_like(x.shared)))
    rows, weights = x.rows.nan_to_num().requires_grad_(), x.weights.requires_grad_()
    torch.library.opcheck(torch.ops.moetail.finalize.default, (rows, x.row_map, weights, None, None, None, *tail))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def tail(rows, row_map, weights, shared):
        return moetail.finalize(rows, row_map, weights, shared, routed_scale=2.0) * 2

    for T in (3, 5, 17, 64):
        x = finalize_inputs(T, 4, 64, device=device)
        want = moetail.finalize(x.rows, x.row_map, x.weights, x.shared, routed_scale=2.0) * 2
        assert_same_bits(tail(x.rows, x.row_map, x.weights, x.shared), want)
    with_op = [g for g in counter.graphs if any("finalize" in str(node.target) for node in g.graph.nodes)]
    assert len(with_op) == 1


def test_without_numba_the_reference_runs_and_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    op._cpu_kernel.cache_clear()
    try:
        x = finalize_inputs(4, 3, 64)
        with pytest.warns(RuntimeWarning, match=r"moetail\[cpu\]"):
            got = moetail.finalize(x.rows, x.row_map, x.weights, x.shared)
        assert_same_bits(got, reference.finalize(x.rows, x.row_map, x.weights, x.shared))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once, not at every call
            moetail.finalize(x.rows, x.row_map, x.weights, x.shared)
    finally:
        op._cpu_kernel.cache_clear()
