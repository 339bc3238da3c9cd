"""finalize_mhc: every implementation against the reference on raw bits and against fp64, and its contract.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernel in the interpreter, the dispatcher's on a GPU.
B..: the cases of bug_cases.md.
"""

import pytest
import torch

import moetail
from moetail import Numerics, reference
from moetail.testing import assert_same_bits, finalize_inputs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Implementation:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def __call__(self, rows, row_map, weights, shared=None, *, numerics=Numerics.TRTLLM, **kwargs):
        if self.name != "interpreter":
            return moetail.finalize_mhc(rows, row_map, weights, shared, numerics=numerics, **kwargs)
        from moetail.ops import finalize_mhc_triton

        residual = kwargs["residual"]
        h = torch.full((residual.shape[0], residual.shape[2]), float("nan"), dtype=rows.dtype)
        new = kwargs.get("residual_out", torch.full(residual.shape, float("nan"), dtype=rows.dtype))
        finalize_mhc_triton.launch(
            rows, row_map, weights, shared, kwargs.get("shared_gate"), kwargs.get("num_valid_rows"),
            kwargs.get("routed_scale", 1.0), self.resolve(numerics, rows, row_map, weights), residual,
            kwargs["post_mix"], kwargs["res_mix"], kwargs["pre_mix"], kwargs["norm_weight"], kwargs["eps"], h, new,
        )  # fmt: skip
        return h, new

    def resolve(self, numerics, rows, row_map, weights):
        device = "cpu" if self.name == "cpu" else "cuda"
        dtype = None if weights is None else weights.dtype
        return numerics.resolve(row_map.shape[0], row_map.shape[1], rows.shape[1], device, rows.dtype, dtype)

    def check(self, rows, row_map, weights, shared, *, numerics=Numerics.TRTLLM, **kwargs):
        concrete = self.resolve(numerics, rows, row_map, weights)
        want = reference.finalize_mhc(rows, row_map, weights, shared, numerics=concrete, **kwargs)
        got = self(rows, row_map, weights, shared, numerics=numerics, **kwargs)
        assert_same_bits(got[1], want[1])
        assert_same_bits(got[0], want[0])
        return got


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param, "cuda" if request.param == "cuda" else "cpu")


def streams_of(T, hc, H, *, dtype=BF16, norm_dtype=None, device="cpu", seed=0):
    """The arguments that finalize has not. The streams are a window of something wider, NaN beside it; the mixes are
    parts of one tensor, as a model computes them; comb is not symmetric."""
    g = torch.Generator().manual_seed(seed + 1)
    wide = torch.full((T, hc, H + 8), float("nan"))
    wide[:, :, :H] = torch.randn(T, hc, H, generator=g) * torch.exp2(torch.randint(-3, 4, (T, hc, 1), generator=g))
    mixes = torch.full((T, hc * (hc + 2) + 1), float("nan"))
    mixes[:, :-1] = torch.rand(T, hc * (hc + 2), generator=g) * 2.0 - 0.5
    mixes = mixes.to(device)
    return {
        "residual": wide.to(dtype).to(device)[:, :, :H],
        "pre_mix": mixes[:, :hc],
        "post_mix": mixes[:, hc : 2 * hc],
        "res_mix": mixes[:, 2 * hc : -1].unflatten(1, (hc, hc)),
        "norm_weight": (torch.randn(H, generator=g) * 0.5 + 1.0).to(norm_dtype or dtype).to(device),
        "eps": 1e-20,
    }


def arguments(T, K, H, hc, *, dtype=BF16, device="cpu", norm_dtype=None, gate=False, seed=0, **kwargs):
    """The four tensors of finalize, and the rest by name."""
    x = finalize_inputs(T, K, H, dtype=dtype, device=device, seed=seed, **kwargs)
    named = streams_of(T, hc, H, dtype=dtype, norm_dtype=norm_dtype, device=device, seed=seed)
    named |= {"shared_gate": x.shared_gate} if gate else {}
    return (x.rows, x.row_map, x.weights, x.shared), named


CASES = {
    "hc-4": ({"T": 3, "K": 6, "H": 5120, "hc": 4}, {}),
    "hc-1": ({"T": 5, "K": 4, "H": 96, "hc": 1, "absent": 0.2}, {}),
    "hc-2": ({"T": 4, "K": 5, "H": 257, "hc": 2, "pad": 7}, {"eps": 1e-6}),
    "hc-3": ({"T": 4, "K": 3, "H": 255, "hc": 3, "pad": 1}, {"routed_scale": 2.5}),
    "hc-8": ({"T": 3, "K": 2, "H": 72, "hc": 8, "absent": 0.3}, {"eps": 1.0}),
    "fp16": ({"T": 4, "K": 7, "H": 257, "hc": 4, "dtype": F16, "pad": 3, "absent": 0.2}, {}),
    "fp32": ({"T": 3, "K": 9, "H": 255, "hc": 3, "dtype": F32, "absent": 0.2}, {}),
    "fp32-norm-weight": ({"T": 3, "K": 4, "H": 96, "hc": 2, "norm_dtype": F32}, {}),
    "one-rounding": ({"T": 3, "K": 6, "H": 96, "hc": 4}, {"numerics": Numerics.SINGLE_ROUNDING, "routed_scale": 1.7}),
    "flashinfer": ({"T": 3, "K": 9, "H": 96, "hc": 4}, {"numerics": Numerics.FLASHINFER}),
    "transformers": ({"T": 3, "K": 6, "H": 288, "hc": 4, "weights_dtype": BF16}, {"numerics": Numerics.TRANSFORMERS}),
    "one-column": ({"T": 3, "K": 2, "H": 1, "hc": 4}, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits(run, case):
    inputs, options = case
    args, named = arguments(**inputs, device=run.device)
    h, residual = run.check(*args, **named | options)
    assert torch.isfinite(h).all() and torch.isfinite(residual).all()
    run.check(*args[:3], None, **named | options)


def oracle(rows, row_map, weights, shared, *, residual, post_mix, res_mix, pre_mix, norm_weight, eps,
           routed_scale=1.0):  # fmt: skip
    """Token by token and stream by stream in fp64, rounded where the tensors of a model are; shares no code."""
    hs, news = [], []
    for t in range(row_map.shape[0]):
        y = torch.zeros(rows.shape[1], dtype=torch.float64)
        for k in range(row_map.shape[1]):
            if 0 <= row_map[t, k] < rows.shape[0]:
                y += weights[t, k].double() * rows[row_map[t, k]].double()
        y = (y.to(rows.dtype).double() * routed_scale).to(rows.dtype) + shared[t]
        hc = residual.shape[1]
        new = []
        for target in range(hc):
            total = post_mix[t, target].double() * y.double()
            for source in range(hc):
                total = total + res_mix[t, source, target].double() * residual[t, source].double()
            new.append(total.to(rows.dtype))
        collapsed = sum(pre_mix[t, i].double() * new[i].double() for i in range(hc)).to(rows.dtype)
        normed = torch.nn.functional.rms_norm(collapsed.double(), collapsed.shape, norm_weight.double(), eps)
        hs.append(normed.to(rows.dtype))
        news.append(torch.stack(new))
    return torch.stack(hs), torch.stack(news)


def close(got, want):
    """Two roundings apart at most: what is rounded before a sum may differ by one, and cancellation magnifies it."""
    limit = 2.0**-7 if got.dtype == BF16 else 2.0**-10 if got.dtype == F16 else 2.0**-20
    assert (got.double() - want.double()).abs().max() <= limit * want.double().abs().max()


@pytest.mark.parametrize("name", ["hc-4", "hc-1", "hc-2", "hc-3", "hc-8", "fp16", "fp32"])
def test_against_fp64(name):  # B44: a transposed comb
    inputs, options = CASES[name]
    args, named = arguments(**inputs)
    named |= options
    want = oracle(*args, **named)
    got = moetail.finalize_mhc(*args, **named)
    torch.testing.assert_close(got[1], want[1])
    close(got[0], want[0])
    if inputs["hc"] > 1:
        other = moetail.finalize_mhc(*args, **named | {"res_mix": named["res_mix"].mT.contiguous()})
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other[1], want[1])


def given(device, y, **named):
    """finalize's arguments whose result is y [T, H] (one slot of weight 1)."""
    y = torch.tensor(y, device=device).to(BF16)
    T, H = y.shape
    tensors = {n: torch.tensor(v, device=device) for n, v in named.items()}
    tensors["residual"] = tensors["residual"].to(BF16)
    norm = {"norm_weight": torch.ones(H, dtype=BF16, device=device), "eps": 1e-20}
    return (y, torch.arange(T, device=device)[:, None], torch.ones(T, 1, device=device)), tensors | norm


def test_worked_example_a(run):
    """Two boundaries of shared/research/deepseek_v41.md, hc 2: after layer 0's attention and after its FFN. The mixes
    are given to seven digits."""
    args, named = given(
        run.device,
        [[0.5, 1.0], [-1.0, 0.25]],
        residual=[[[1.5, -0.75], [1.5, -0.75]], [[2.015625, 0.271484375], [2.0625, 0.359375]]],
        post_mix=[[1.0209399, 1.1102300], [1.3812103, 0.8867472]],
        res_mix=[[[0.1579147, 0.8420844], [0.8420843, 0.1579146]], [[0.6930531, 0.3069459], [0.3069460, 0.6930531]]],
        pre_mix=[[0.6957898, 0.5538483], [0.6060205, 0.7252705]],
    )
    h, new = run.check(*args, None, **named)
    assert new.tolist() == [
        [[2.015625, 0.271484375], [2.0625, 0.359375]],
        [[0.6484375, 0.64453125], [1.1640625, 0.5546875]],
    ]
    assert h.tolist() == [[1.3984375, 0.212890625], [1.1875, 0.765625]]


def test_worked_example_b(run):  # B44
    """hc 3 of shared/research/deepseek_v41.md: only one of its results has comb the right way round."""
    args, named = given(
        run.device,
        [[0.5, -1.0]],
        residual=[[[1.0, 0.0], [0.0, 2.0], [-1.0, 4.0]]],
        post_mix=[[1.0, 0.5, 2.0]],
        res_mix=[[[0.095852, 0.452073, 0.452074], [0.680440, 0.159780, 0.159779], [0.223707, 0.388146, 0.388146]]],
        pre_mix=[[1.0, 0.0, 0.0]],
    )
    _, new = run.check(*args, None, **named)
    assert new.tolist() == [[[0.373046875, 1.2578125], [0.314453125, 1.375], [1.0625, -0.1279296875]]]
    named["res_mix"] = named["res_mix"].mT.contiguous()
    _, new = run.check(*args, None, **named)
    assert new.tolist() == [[[0.1435546875, 1.7109375], [0.76953125, 0.458984375], [0.8359375, 0.328125]]]


def test_the_order_of_the_sums(run):
    """2**24 + 1 is no fp32: post * y comes first, then the sources from 0 on; each product is rounded on its own."""
    big, more, T = 2.0**24, 1.0 + 2.0**-12, 4
    y = torch.tensor([1.0, big, 1.0, -1.0 - 2.0**-11])[:, None].expand(T, 8).contiguous()
    streams = torch.tensor([[big, -big], [1.0, -big], [1.0, big], [more, 0.0]])[:, :, None].expand(T, 2, 8)
    mix = torch.ones(T, 2, 2)
    mix[3] = more
    named = {"residual": streams.contiguous(), "post_mix": torch.ones(T, 2), "res_mix": mix}
    named |= {"pre_mix": torch.ones(T, 2), "norm_weight": torch.ones(8)}
    named = {k: v.to(run.device) for k, v in named.items()} | {"eps": 1e-6}
    slots, ones = torch.arange(T, device=run.device)[:, None], torch.ones(T, 1, device=run.device)
    _, new = run.check(y.to(run.device), slots, ones, None, **named)
    assert new[:, 0, 0].tolist() == [0.0, 0.0, big + 2.0, 0.0]  # an FMA would leave 2**-24 in the last


def test_signed_zeros(run):
    """A sum begins with its first product, never with +0."""
    args, named = given(
        run.device,
        [[-0.0] * 8], residual=[[[-0.0] * 8] * 3], post_mix=[[1.0, 1.0, -1.0]], res_mix=[[[1.0] * 3] * 3],
        pre_mix=[[1.0, 1.0, -1.0]],
    )  # fmt: skip
    args = (args[0] - 1e-30, args[1], args[2] * 1e-30)  # finalize starts from +0: -0 is an underflow
    h, new = run.check(*args, None, **named)
    assert torch.signbit(new[0, :, 0]).tolist() == [True, True, False]
    assert torch.signbit(h).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of 0 * infinity in the interpreter
def test_no_product_is_left_out(run):
    """A source of weight 0 still poisons with infinity and NaN, as everywhere; other tokens and columns stay clean."""
    args, named = arguments(3, 4, 96, 4, device=run.device)
    named["residual"] = named["residual"].clone()
    named["residual"][1, 2, 5] = float("inf")
    named["res_mix"] = named["res_mix"].clone()
    named["res_mix"][1, 2] = 0.0
    h, new = run(*args, **named)
    assert torch.isnan(new[1, :, 5]).all() and torch.isnan(new).sum() == 4
    assert torch.isnan(h[1]).all() and torch.isfinite(h[[0, 2]]).all()


def test_layouts(run):
    """Streams-first memory, mixes of their own, and a map of int64 by columns: the same bits."""
    args, named = arguments(6, 4, 96, 3, map_dtype=torch.int64, device=run.device)
    want = run.check(*args, **named)
    other = {k: v.contiguous() for k, v in named.items() if k.endswith("mix")}
    other["residual"] = named["residual"].transpose(0, 1).contiguous().transpose(0, 1)
    columns = [t.t().contiguous().t() for t in args[1:3]]
    for got, same in zip(run(args[0], *columns, args[3], **named | other), want, strict=True):
        assert_same_bits(got, same)


def test_gate_and_valid_rows(run):
    args, named = arguments(7, 4, 96, 2, device=run.device, gate=True)
    if run.name == "interpreter":  # its exp is numpy's, not the GPU's: sigmoid(0) is exact everywhere
        named["shared_gate"] = torch.zeros_like(named["shared_gate"])
    run.check(*args, **named, num_valid_rows=torch.tensor([20], device=run.device))


def alone_and_together(run, T):
    (rows, row_map, weights, shared), named = arguments(T, 6, 96, 4, device=run.device)
    t = slice(T // 2, T // 2 + 1)
    one = {k: v[t] if k == "residual" or k.endswith("mix") else v for k, v in named.items()}
    alone = run(rows, row_map[t], weights[t], shared[t], **one)
    for got, want in zip(run(rows, row_map, weights, shared, **named), alone, strict=True):
        assert_same_bits(got[t], want)


def test_a_token_has_the_same_bits_in_any_batch(run):  # B33, B34
    for T in (1, 33):
        alone_and_together(run, T)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_token_has_the_same_bits_among_many(device):  # another config on a GPU
    alone_and_together(Implementation(device, device), 300)


def test_in_place(run):
    """Every old stream is read for every new one, whatever was written before."""
    for hc in (2, 4, 8):
        args, named = arguments(3, 4, 600, hc, device=run.device)
        want = run.check(*args, **named)
        residual = named["residual"].clone()
        got = run(*args, **named | {"residual": residual, "residual_out": residual})
        assert got[1] is residual
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_written_and_guarded(device):  # B23, B28: h over shared or in a window; guard rows, streams and columns
    args, named = arguments(4, 5, 255, 3, device=device)
    want = moetail.finalize_mhc(*args, **named)
    arena = torch.full((6, 5, 264), float("nan"), dtype=BF16, device=device)
    h_window, window = arena[1:5, 0, :255], arena[1:5, 1:4, :255]
    for out, residual_out in ((args[3], None), (None, window), (h_window, window)):
        arena.fill_(float("nan"))
        shared = args[3].clone()
        out = shared if out is args[3] else out
        got = moetail.finalize_mhc(*args[:3], shared, **named, out=out, residual_out=residual_out)
        assert out is None or got[0] is out
        assert residual_out is None or got[1] is residual_out
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)
    assert torch.isnan(arena[[0, 5]]).all() and torch.isnan(arena[:, 4]).all() and torch.isnan(arena[..., 255:]).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(33, 6, 5120, 4), (300, 8, 2048, 4), (7, 8, 7168, 4)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_model_shapes(device, shape, dtype):
    args, named = arguments(*shape, dtype=dtype, absent=0.1, pad=8, device=device)
    Implementation(device, device).check(*args, **named)


@pytest.mark.gpu
def test_many_tokens_on_a_gpu():
    args, named = arguments(4096, 6, 5120, 4, absent=0.05, device="cuda")
    Implementation("cuda", "cuda").check(*args, **named)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens(device):  # B09, B10
    (rows, row_map, weights, shared), named = arguments(3, 4, 96, 4, device=device)
    none = {k: v[:0] if k == "residual" or k.endswith("mix") else v for k, v in named.items()}
    h, new = moetail.finalize_mhc(rows, row_map[:0], weights[:0], shared[:0], **none)
    assert h.shape == (0, 96) and new.shape == (0, 4, 96)
    assert h.dtype == new.dtype == BF16 and h.device.type == new.device.type == device
    empty = torch.empty(0, 96, dtype=BF16, device=device)
    got = moetail.finalize_mhc(rows, row_map[:0], weights[:0], None, **none, out=empty)
    assert got[0] is empty and got[1].shape == (0, 4, 96)


BAD = {
    "rows-dtype": ("rows", lambda a: {"rows": a["rows"].int()}),
    "rows-none": ("rows", lambda a: {"rows": None}),
    "rows-too-wide": ("rows", lambda a: {"rows": torch.zeros(4, 16385), "shared": None}),
    "map-floats": ("row_map", lambda a: {"row_map": a["row_map"].float()}),
    "residual-missing": ("residual", lambda a: {"residual": None}),
    "residual-flat": ("residual", lambda a: {"residual": a["residual"][:, 0]}),
    "residual-tokens": ("residual", lambda a: {"residual": a["residual"][:3]}),
    "residual-dtype": ("residual", lambda a: {"residual": a["residual"].float()}),
    "residual-stride": ("residual", lambda a: {"residual": a["residual"].mT.contiguous().mT}),
    "residual-device": ("residual", lambda a: {"residual": a["residual"].to("meta")}),
    "residual-no-streams": ("residual", lambda a: {"residual": a["residual"][:, :0]}),
    "residual-nine-streams": ("residual", lambda a: {"residual": torch.zeros(4, 9, 64, dtype=BF16)}),
    "post-missing": ("post_mix", lambda a: {"post_mix": None}),
    "post-trailing-one": ("post_mix", lambda a: {"post_mix": a["post_mix"][:, :, None]}),
    "post-dtype": ("post_mix", lambda a: {"post_mix": a["post_mix"].to(BF16)}),
    "post-stride": ("post_mix", lambda a: {"post_mix": a["post_mix"].t().contiguous().t()}),
    "comb-missing": ("res_mix", lambda a: {"res_mix": None}),
    "comb-shape": ("res_mix", lambda a: {"res_mix": a["res_mix"][:, :2]}),
    "comb-dtype": ("res_mix", lambda a: {"res_mix": a["res_mix"].double()}),
    "comb-a-transposed-view": ("res_mix", lambda a: {"res_mix": a["res_mix"].mT}),
    "pre-missing": ("pre_mix", lambda a: {"pre_mix": None}),
    "pre-shape": ("pre_mix", lambda a: {"pre_mix": a["pre_mix"][:, :2]}),
    "pre-dtype": ("pre_mix", lambda a: {"pre_mix": a["pre_mix"].half()}),
    "pre-device": ("pre_mix", lambda a: {"pre_mix": a["pre_mix"].to("meta")}),
    "pre-gradient": ("pre_mix", lambda a: {"pre_mix": a["pre_mix"].clone().requires_grad_()}),
    "norm-missing": ("norm_weight", lambda a: {"norm_weight": None}),
    "norm-shape": ("norm_weight", lambda a: {"norm_weight": a["norm_weight"][None]}),
    "norm-stride": ("norm_weight", lambda a: {"norm_weight": torch.ones(128)[::2]}),
    "eps-small": ("eps", lambda a: {"eps": 1e-21}),
    "eps-large": ("eps", lambda a: {"eps": 1.5}),
    "eps-none": ("eps", lambda a: {"eps": None}),
    "scale-too-large": ("routed_scale", lambda a: {"routed_scale": 1e300}),
    "numerics-a-string": ("numerics", lambda a: {"numerics": "TRTLLM"}),
    "out-shape": ("out", lambda a: {"out": torch.empty(4, 63, dtype=BF16)}),
    "out-is-a-stream": ("out", lambda a: {"out": a["residual"][:, 2]}),
    "out-is-a-new-stream": ("out", lambda a: {"out": a["buffer"][:, 1], "residual_out": a["buffer"]}),
    "residual-out-shape": ("residual_out", lambda a: {"residual_out": a["buffer"][:3]}),
    "residual-out-dtype": ("residual_out", lambda a: {"residual_out": a["buffer"].float()}),
    "residual-out-holds-shared": ("residual_out", lambda a: {"shared": a["buffer"][:, 1], "residual_out": a["buffer"]}),
    "residual-out-overlaps-residual": ("residual_out", lambda a: {"residual": a["longer"][:4],
                                                                  "residual_out": a["longer"][1:]}),
    "residual-out-swaps-streams": ("residual_out", lambda a: {"residual": a["wide"][:, :3],
                                                              "residual_out": a["wide"][:, 1:]}),
    "residual-out-is-one-stream": ("residual_out", lambda a: {"residual_out": a["buffer"][:, :1].expand(4, 3, 64)}),
    "residual-out-is-one-token": ("residual_out", lambda a: {"residual_out": a["buffer"][:1].expand(4, 3, 64)}),
    "residual-out-streams-first": ("residual_out", lambda a: {"residual_out": a["buffer"].view(3, 4, 64).mT.mT
                                                              .transpose(0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD)
def test_bad_input(name, change):
    tensors, named = arguments(4, 3, 64, 3)
    args = dict(zip(("rows", "row_map", "weights", "shared"), tensors, strict=True)) | named
    spare = {"buffer": (4, 3, 64), "longer": (5, 3, 64), "wide": (4, 4, 64)}
    args |= change(args | {n: torch.randn(shape).to(BF16) for n, shape in spare.items()})
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    with pytest.raises(ValueError, match=f"^{name} "):
        moetail.finalize_mhc(**args)
    for key, value in before.items():
        assert_same_bits(args[key].detach(), value.detach())


def test_opcheck():
    """Dims and dtypes all differ, so that a fake or a schema that mixes two of them fails."""
    (rows, row_map, weights, shared), named = arguments(4, 5, 40, 3, norm_dtype=F32)
    mhc = [named[n].clone() for n in ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight")]
    args = (rows, row_map, weights, shared, torch.randn(4, 1).to(F16), torch.tensor([9]), 1.5, Numerics.TRTLLM.spec,
            *mhc, 1e-5)  # fmt: skip
    outputs = torch.empty(4, 40, dtype=BF16), torch.empty(4, 3, 48, dtype=BF16)[:, :, :40]
    torch.library.opcheck(torch.ops.moetail.finalize_mhc.default, args)
    torch.library.opcheck(torch.ops.moetail.finalize_mhc_out.default, (*args, *outputs, None, None, None))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    """Two layers, the streams in place, as engines have it."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layers(rows, row_map, weights, shared, residual, mixes):
        first, residual = moetail.finalize_mhc(rows, row_map, weights, shared, residual=residual,
                                               residual_out=residual, **mixes)  # fmt: skip
        second, new = moetail.finalize_mhc(rows, row_map, weights, first, residual=residual, **mixes)
        return first, second, residual * 2, new

    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    for T in (3, 5, 17, 64):
        args, named = arguments(T, 4, 64, 4, device=device)
        residuals = [named["residual"].contiguous() for _ in range(2)]
        mixes = {k: v for k, v in named.items() if k != "residual"}
        want = layers(*args, residuals[0], mixes)
        for g, w in zip(compiled(*args, residuals[1], mixes), want, strict=True):
            assert_same_bits(g, w)
        assert_same_bits(residuals[1], residuals[0])
    with_op = [g for g in counter.graphs if any("finalize_mhc" in str(node.target) for node in g.graph.nodes)]
    assert len(with_op) == 1
