"""grouped_gemm: every implementation lies within the derived bound of an fp64 loop over slots, wherever rows lie.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernel in the interpreter, the dispatcher's on a GPU.
"""

import pytest
import torch

import moetail
from moetail import reference
from moetail.ops import grouped_gemm as op
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16


def oracle(x, weight, p, ids, *, gather=False, activation=None, limit=None, bias=None, unit=2**-24):
    """(fp64 value, bound on an implementation's distance from it) for the live rows, one slot at a time.

    Sum. A product of two bf16 has 16 significant bits: exact in fp32. Adding n = Kd numbers (and a bias) in fp32, in
    any order, every partial sum at most S = sum |a||b| + |bias|, each addition off by at most unit * S:
        |sum - exact| <= n * unit * S,   n = Kd + 1
    unit = 2**-24 where additions round to nearest (CPU, interpreter). Tensor cores cut off instead: an instruction
    brings 16 products and the accumulator to one exponent, keeping at least 24 bits of the largest, at most S: 17
    errors of 2**-23 * S for 16 products, so unit = 17/16 * 2**-23.
    SwiGLU. |silu'| < 1.1 and clamping moves no two numbers apart, so errors dg and du of gate and up become
        1.1 * dg * (|up| + du) + |silu(gate)| * du
    The exponential is off by |gate| + 2 units of 2**-24 at most, 1 + e, the division and the product by one each:
        (|gate| + 6) * 2**-24 * |silu(gate) * up|
    Rounding to bf16, 8 significant bits, to nearest: half a unit in the last place of the result (its own error
    included), 2**(e - 9) where it lies in [2**(e - 1), 2**e); among subnormals 2**-134.
    """
    live = (p.source >= 0).nonzero().flatten()
    S, K = p.source[live].long(), p.row_map.shape[1]
    a = x.double()[S // K if gather else live]
    experts = ids.reshape(-1)[S].long()
    b = weight[experts].double()  # [live, N, Kd]
    value = torch.einsum("rk,rnk->rn", a, b)
    size = torch.einsum("rk,rnk->rn", a.abs(), b.abs())
    if bias is not None:
        value, size = value + bias.double()[experts], size + bias.double()[experts].abs()
    error = (x.shape[1] + 1) * unit * size
    if activation == "swiglu":
        (gate, up), (dg, du) = value.chunk(2, -1), error.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        silu = gate / (1 + torch.exp(-gate))
        value = silu * up
        error = 1.1 * dg * (up.abs() + du) + silu.abs() * du + (gate.abs() + 6) * 2**-24 * value.abs()
    half_ulp = torch.exp2(torch.frexp(value.abs() + error).exponent.double() - 9).clamp(min=2**-134)
    return value, error + half_ulp


class Implementation:
    def __init__(self, name):
        self.name, self.device = name, "cuda" if name == "cuda" else "cpu"
        self.unit = 17 / 16 * 2**-23 if name == "cuda" else 2**-24

    def __call__(self, x, weight, p, *, gather=False, activation=None, limit=None, bias=None):
        if self.name != "interpreter" or p.source.numel() == 0:
            return moetail.grouped_gemm(x, weight, p, gather=gather, activation=activation, limit=limit, bias=bias)
        from moetail.ops import grouped_gemm_triton

        out = op._new(x, weight, p.source, activation).fill_(torch.nan)
        grouped_gemm_triton.launch(
            x, weight, bias, p.source, p.block_expert, *p.row_map.shape, p.block, gather, activation, limit, out
        )  # fmt: skip
        return out

    def check(self, x, weight, ids, *, block=16, expert_map=None, **kwargs):
        x, weight, ids = x.to(self.device), weight.to(self.device), ids.to(self.device)
        if kwargs.get("bias") is not None:
            kwargs["bias"] = kwargs["bias"].to(self.device)
        if expert_map is not None:
            expert_map = expert_map.to(self.device)
        p = moetail.permute(ids, weight.shape[0], block=block, expert_map=expert_map)
        if not kwargs.get("gather", False):
            x = permuted(x, p)
        got = self(x, weight, p, **kwargs)
        if expert_map is not None:
            ids = expert_map[ids.long()]
        value, bound = oracle(x, weight, p, ids, unit=self.unit, **kwargs)
        definition = reference.grouped_gemm(x, weight, p, **kwargs)
        assert (definition[p.source < 0] == 0).all()
        for rows in (got, definition):
            wrong = ~((rows[p.source >= 0].double() - value).abs() <= bound)  # a NaN is wrong
            assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outside the bound: {wrong.nonzero()[:4]}"
        return got, p


def permuted(slots, p):
    """One row a slot, in permuted order; what nobody may read is NaN."""
    return torch.where((p.source >= 0)[:, None], slots[p.source.clamp(min=0).long()], torch.nan)


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param)


def distinct(T, K, E, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(T, E, generator=g).argsort(dim=1)[:, :K].int()


def numbers(*shape, scale=1.0, seed=1):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def inputs(T, K, E, N, Kd, gather):
    return numbers(T if gather else T * K, Kd), numbers(E, N, Kd, scale=Kd**-0.5, seed=2), distinct(T, K, E)


FIRST, SECOND = {"gather": True, "activation": "swiglu"}, {}
# T, K, E, N, Kd, what the op is asked for
CASES = {
    "first": (11, 3, 7, 256, 192, FIRST),
    "second": (11, 3, 7, 192, 128, SECOND),
    "first-block-64": (50, 2, 3, 128, 128, FIRST | {"block": 64}),
    "second-block-64": (50, 2, 3, 128, 64, SECOND | {"block": 64}),
    "first-block-128": (80, 2, 2, 256, 64, FIRST | {"block": 128}),
    "second-block-128": (80, 2, 2, 256, 64, SECOND | {"block": 128}),
    "one-token": (1, 6, 40, 128, 64, FIRST),
    "one-token-second": (1, 6, 40, 64, 64, SECOND),
    "no-tokens": (0, 2, 5, 64, 64, FIRST),
    "no-tokens-second": (0, 2, 5, 64, 64, SECOND),
    "one-expert": (20, 1, 1, 64, 64, FIRST),
    "top-1": (20, 1, 6, 64, 128, FIRST),
    "empty-experts": (3, 2, 30, 64, 64, FIRST),
    "columns-not-a-tile": (11, 3, 7, 2 * 104, 64, FIRST),
    "columns-not-a-tile-second": (11, 3, 7, 200, 64, SECOND),
    "columns-not-a-tile-block-128": (11, 3, 3, 2 * 88, 64, FIRST | {"block": 128}),
    "two-groups-of-blocks": (30, 3, 11, 2 * 150, 64, FIRST | {"block": 64}),  # 13 blocks of rows, the last 5 a group
    "two-groups-of-blocks-second": (30, 3, 11, 300, 64, SECOND | {"block": 64}),
    "a-step-cut-short": (11, 3, 7, 64, 104, FIRST),
    "less-than-a-step": (11, 3, 7, 64, 24, SECOND),
    "no-activation-but-gather": (11, 3, 7, 64, 64, {"gather": True}),
    "activation-without-gather": (11, 3, 7, 64, 64, {"activation": "swiglu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_within_the_derived_bound(run, case):
    *shape, kwargs = CASES[case]
    got, p = run.check(*inputs(*shape, kwargs.get("gather", False)), **kwargs)
    N = shape[3] // (2 if kwargs.get("activation") else 1)
    assert got.shape == (p.source.shape[0], N) and got.dtype == BF16


def test_all_tokens_to_one_expert(run):
    x, w, _ = inputs(40, 2, 5, 64, 64, gather=True)
    run.check(x, w, torch.full((40, 2), 3), **FIRST)
    run.check(x, w, torch.full((40, 2), 4, dtype=torch.int32), block=64, **FIRST)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_bias(run, dtype):
    x, w, ids = inputs(11, 3, 7, 112, 64, gather=True)
    bias = numbers(7, 112, seed=3).to(dtype)
    if dtype == torch.float32:
        bias = torch.randn(7, 130, generator=torch.Generator().manual_seed(3))[:, :112]
    for block in (16, 64):
        run.check(x, w, ids, block=block, bias=bias, **FIRST)
        run.check(x, w, ids, block=block, bias=bias, gather=True)


def test_clamped_swiglu(run):
    """The gate from above only, up on both sides; numbers far outside the limit, and a NaN that must stay one."""
    x, w, ids = inputs(11, 3, 7, 128, 64, gather=True)
    got, _ = run.check(x * 20, w, ids, limit=10.0, **FIRST)
    plain, p = run.check(x * 20, w, ids, **FIRST)
    live = p.source >= 0
    assert got[live].abs().max() <= 100 < plain[live].abs().max()
    x, w, ids = x.to(run.device), w.to(run.device), ids.to(run.device)
    bias = torch.zeros(7, 128, device=run.device)
    bias[2, 5] = bias[2, 64 + 6] = torch.nan  # one gate, another column's up
    got = run(x, w, moetail.permute(ids, 7, block=16), limit=10.0, bias=bias, **FIRST)[live].isnan()
    theirs = ids.flatten()[p.source[live]] == 2
    assert theirs.any() and torch.equal(got.any(1), theirs) and got[theirs].sum(1).eq(2).all()
    assert got[theirs][:, 5:7].all()


def test_padded_strides(run):
    x, w, ids = inputs(11, 3, 7, 128, 64, gather=True)
    wide_x = torch.full((11, 80), torch.nan, dtype=BF16)
    wide_w = torch.full((7, 136, 72), torch.nan, dtype=BF16)
    wide_x[:, :64], wide_w[:, :128, :64] = x, w
    device = run.device
    got, p = run.check(wide_x.to(device)[:, :64], wide_w.to(device)[:, :128, :64], ids, **FIRST)
    same = run(x.to(device), w.to(device), p, **FIRST)
    live = p.source >= 0
    assert_same_bits(got[live], same[live])


def test_transposed_weight_without_a_copy(run):
    """[E, Kd, N] in memory: the same bits."""
    x, w, ids = inputs(11, 3, 7, 128, 104, gather=True)
    transposed = w.transpose(1, 2).contiguous().to(run.device).transpose(1, 2)
    assert transposed.stride(1) == 1
    for block in (16, 64):
        p = moetail.permute(ids.to(run.device), 7, block=block)
        got, want = (run(x.to(run.device), weight, p, **FIRST) for weight in (transposed, w.to(run.device)))
        live = p.source >= 0
        if run.name == "cpu":
            torch.testing.assert_close(got[live], want[live])  # torch's fp32 matmul has an order of its own
        else:
            assert_same_bits(got[live], want[live])


def test_absent_experts(run):
    """A map that keeps 3 of 7 experts: only their slots have rows, and a token without any is never read."""
    x, w, ids = inputs(11, 3, 7, 64, 64, gather=True)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 1])
    alone = (expert_map[ids.long()] < 0).all(1)
    assert alone.any() and not alone.all()
    x[alone] = torch.nan
    run.check(x, w[:3], ids, expert_map=expert_map, **FIRST)
    run.check(x, w[:3], torch.zeros(11, 3, dtype=torch.int32), expert_map=expert_map, **FIRST)  # none is here


@pytest.mark.parametrize("block", [16, 64, 128])
def test_dead_rows_do_not_leak(run, block):
    """Padding rows of the second GEMM's input are NaN (whatever the first left there), and so are idle experts."""
    x, w, ids = inputs(11, 3, 7, 64, 64, gather=False)
    ids = torch.where(ids == 5, 6, ids)
    w[5] = torch.nan
    p = moetail.permute(ids.to(run.device), 7, block=block)
    assert (p.source < 0).any()
    got = run(permuted(x.to(run.device), p), w.to(run.device), p)
    assert got[p.source >= 0].isfinite().all()


def test_the_two_gemms_of_an_expert(run):
    """The second reads what the first left, dead rows included, and finalize reads its rows."""
    T, K, E, H, inner = 13, 3, 7, 64, 48
    x, up, ids = (t.to(run.device) for t in inputs(T, K, E, 2 * inner, H, gather=True))
    down = numbers(E, H, inner, scale=inner**-0.5, seed=4).to(run.device)
    p = moetail.permute(ids, E, block=16)
    h = run(x, up, p, **FIRST)
    rows = run(h, down, p)
    weights = torch.rand(T, K, device=run.device)
    y = moetail.finalize(rows, p.row_map, weights)
    assert y.isfinite().all()
    clean = torch.where((p.source >= 0)[:, None], h, 0)
    value, bound = oracle(clean, down, p, ids, unit=run.unit)
    assert ((rows[p.source >= 0].double() - value).abs() <= bound).all()


def test_block_for():
    """DeepSeek-V4.1's 384 experts at top 6, Mixtral's 8 at top 2: rising with T, and always one that has a schedule."""
    assert [op.block_for(T, 6, 384) for T in (0, 1, 64, 682, 683, 2730, 2731, 100000)] == [16] * 4 + [64] * 2 + [
        128
    ] * 2
    assert [op.block_for(T, 2, 8) for T in (1, 42, 43, 170, 171)] == [16, 16, 64, 64, 128]


IDS = torch.tensor([[0, 1], [1, 2], [0, 2]])
P = reference.permute(IDS, 3, block=16)
X, W, B = torch.zeros(3, 8, dtype=BF16), torch.zeros(3, 6, 8, dtype=BF16), torch.zeros(3, 6)
G = {"gather": True}
BAD = {
    "x-list": ("x", ([[0.0]], W, P), G),
    "x-grad": ("x", (X.clone().requires_grad_(), W, P), G),
    "x-dtype": ("x", (X.float(), W, P), G),
    "x-vector": ("x", (X[0], W, P), G),
    "x-columns": ("x", (X[:, :7], W, P), G),
    "x-tokens": ("x", (X[:2], W, P), G),
    "x-rows": ("x", (X, W, P), {}),
    "x-stride": ("x", (torch.zeros(8, 3, dtype=BF16).t(), W, P), G),
    "weight-none": ("weight", (X, None, P), G),
    "weight-dtype": ("weight", (X, W.half(), P), G),
    "weight-matrix": ("weight", (X, W[0], P), G),
    "weight-experts": ("weight", (X, W[:2], P), G),
    "weight-empty": ("weight", (X, W[:, :0], P), G),
    "weight-strides": ("weight", (X, torch.zeros(3, 12, 16, dtype=BF16)[:, ::2, ::2], P), G),
    "weight-odd": ("weight", (X, W[:, :5], P), G | {"activation": "swiglu"}),
    "weight-device": ("weight", (X, W.to("meta"), P), G),
    "permutation": ("permutation", (X, W, IDS), G),
    "activation": ("activation", (X, W, P), G | {"activation": "gelu"}),
    "activation-number": ("activation", (X, W, P), G | {"activation": 1}),
    "gather-text": ("gather", (X, W, P), {"gather": "yes"}),
    "gather-tensor": ("gather", (X, W, P), {"gather": IDS}),
    "limit-text": ("limit", (X, W, P), G | {"activation": "swiglu", "limit": "10"}),
    "limit-tensor": ("limit", (X, W, P), G | {"activation": "swiglu", "limit": B}),
    "limit-alone": ("limit", (X, W, P), G | {"limit": 10.0}),
    "limit-0": ("limit", (X, W, P), G | {"activation": "swiglu", "limit": 0.0}),
    "limit-nan": ("limit", (X, W, P), G | {"activation": "swiglu", "limit": float("nan")}),
    "bias-list": ("bias", (X, W, P), G | {"bias": [0.0]}),
    "bias-dtype": ("bias", (X, W, P), G | {"bias": B.double()}),
    "bias-shape": ("bias", (X, W, P), G | {"bias": B[:, :5]}),
    "bias-stride": ("bias", (X, W, P), G | {"bias": torch.zeros(6, 3).t()}),
    "bias-device": ("bias", (X, W, P), G | {"bias": B.to("meta")}),
}


@pytest.mark.parametrize(("name", "value"), [("T", -1), ("T", "8"), ("K", 0), ("K", 1.5), ("E", 0), ("E", None)])
def test_bad_block_for(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number from . on, got "):
        moetail.block_for(**({"T": 8, "K": 2, "E": 4} | {name: value}))


@pytest.mark.parametrize(("name", "args", "kwargs"), BAD.values(), ids=BAD)
def test_bad_input(name, args, kwargs):
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        moetail.grouped_gemm(*args, **kwargs)


def test_an_expert_past_two_to_the_31_elements():
    huge = torch.empty(1, 2**16, 2**15 + 8, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match="^weight must have an expert within"):
        op._check(X, huge, None, P.source, P.block_expert, 16, True, None, None)


@pytest.mark.gpu
def test_a_block_without_a_schedule():
    p = moetail.permute(IDS.cuda(), 3, block=32)
    with pytest.raises(ValueError, match="^permutation must have block 16, 64 or 128 on CUDA, got block 32"):
        moetail.grouped_gemm(X.cuda(), W.cuda(), p, gather=True)


def test_opcheck():
    p = moetail.permute(distinct(5, 2, 3), 3, block=4)
    parts = (p.source, p.block_expert, 5, 2, 4)
    x, w = numbers(5, 24), numbers(3, 16, 24)
    torch.library.opcheck(op._op, (x, w, torch.zeros(3, 16), *parts, True, "swiglu", 7.0))
    torch.library.opcheck(op._op, (numbers(p.source.numel(), 24), w, None, *parts, False, None, None))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    w = numbers(16, 64, 32).to(device)

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def rows(x, ids):
        return moetail.grouped_gemm(x, w, moetail.permute(ids, 16, block=16), **FIRST) * 1

    for T in (30, 35, 47):
        x, ids = numbers(T, 32).to(device), distinct(T, 4, 16).to(device)
        p = moetail.permute(ids, 16, block=16)
        live = p.source >= 0
        assert_same_bits(rows(x, ids)[live], moetail.grouped_gemm(x, w, p, **FIRST)[live])
    assert counter.frame_count == 1
