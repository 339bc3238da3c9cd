"""mhc_mixes: every implementation against fp64 and the reference, a token alone and in batches, and its contract.

The facts sheet's worked examples are in test_hyper_connections.py.
"""

import machine_code
import pytest
import torch

import moetail
from moetail import guards, reference

BF16 = torch.bfloat16
EPS = {"rms_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20}


def run_on(name, *args, **eps):
    if name != "interpreter":
        return moetail.mhc_mixes(*args, **eps)
    from moetail.ops import mhc_mixes_triton

    T, hc, _ = args[0].shape
    out = torch.full((T, hc * (hc + 2)), float("nan"))
    mhc_mixes_triton.launch(*args, *eps.values(), out)
    return out[:, :hc], out[:, hc : 2 * hc], out[:, 2 * hc :].unflatten(1, (hc, hc))


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def name(request):
    return request.param


def arguments(T, hc, H, device="cpu", seed=0):
    """Streams of very different sizes, a window of something wider."""
    g, rows = torch.Generator().manual_seed(seed), hc * (hc + 2)
    wide = torch.full((T, hc + 1, H), float("nan"))
    wide[:, :hc] = torch.randn(T, hc, H, generator=g) * torch.exp2(torch.randint(-8, 8, (T, 1, 1), generator=g).float())
    return (
        wide.to(BF16).to(device)[:, :hc],
        torch.randn(rows, hc * H, generator=g).to(device) * (hc * H) ** -0.5,
        torch.randn(rows, generator=g).to(device) * 0.3,
        (torch.rand(3, generator=g) + 0.5).to(device),
    )


def oracle(streams, fn, base, scale, rms_eps, hc_eps, iterations):
    """fp64, token by token."""
    parts = []
    for S in streams.double():
        f, hc = S.reshape(-1), len(S)
        m = fn.double() @ f / torch.sqrt((f * f).mean() + rms_eps)
        s, b = scale.double(), base.double()
        comb = (m[2 * hc :] * s[2] + b[2 * hc :]).view(hc, hc).exp()
        comb = comb / comb.sum(1, keepdim=True) + hc_eps
        for step in range(2 * iterations - 1):
            comb = comb / (comb.sum(step % 2, keepdim=True) + hc_eps)
        pre, post = (torch.sigmoid(m[i * hc : (i + 1) * hc] * s[i] + b[i * hc : (i + 1) * hc]) for i in (0, 1))
        parts.append((pre + hc_eps, 2 * post, comb))
    return [torch.stack(part) for part in zip(*parts, strict=True)]


CASES = {
    "hc-4": (3, 4, 640, EPS),
    "the-model's": (2, 4, 5120, EPS),
    "hc-2": (17, 2, 96, EPS),
    "hc-3": (4, 3, 257, EPS),
    "hc-1": (2, 1, 40, EPS),
    "hc-5": (2, 5, 8, EPS),
    "one-iteration": (3, 4, 64, EPS | {"iterations": 1}),
    "large-eps": (3, 3, 64, EPS | {"hc_eps": 0.1, "iterations": 3, "rms_eps": 1.0}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(name, case):
    """fp32 sums of 20480 products: torch's defaults against fp64."""
    *dims, eps = case
    args = arguments(*dims, device="cuda" if name == "cuda" else "cpu")
    for got, want in zip(run_on(name, *args, **eps), oracle(*args, **eps), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1.3e-6, atol=1e-5)


def test_the_product_keeps_fp32(name):
    """fn in one bf16 number would be off by 1e-3 and more here, in two by 1e-5."""
    streams, fn, base, scale = arguments(4, 4, 1024, device="cuda" if name == "cuda" else "cpu")
    fn[0] += 64 * fn[1]
    pre = run_on(name, streams, fn, base, scale * 1e-2, **EPS)[0]
    torch.testing.assert_close(pre.double(), oracle(streams, fn, base, scale * 1e-2, **EPS)[0], rtol=0, atol=1e-6)


def test_a_token_has_the_same_bits_in_every_batch(name):
    """On a CPU the order of torch's matrix product may follow T: there it is a tolerance."""
    args = arguments(35, 4, 1024, device="cuda" if name == "cuda" else "cpu")
    exact = {"rtol": 1.3e-6, "atol": 1e-6} if name == "cpu" else {"rtol": 0, "atol": 0}
    whole = run_on(name, *args, **EPS)
    for first, end in ((0, 1), (16, 33), (34, 35)):
        for got, want in zip(run_on(name, args[0][first:end], *args[1:], **EPS), whole, strict=True):
            torch.testing.assert_close(got, want[first:end], **exact)


def test_no_tokens():
    assert [tuple(part.shape) for part in moetail.mhc_mixes(*arguments(0, 3, 8), **EPS)] == [(0, 3), (0, 3), (0, 3, 3)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"streams": torch.zeros(3, 8, dtype=BF16)}, "streams must have three dimensions"),
        ({"streams": torch.zeros(3, 9, 8, dtype=BF16)}, "streams must have 1 <= hc <= 8 streams, got 9"),
        ({"streams": torch.zeros(3, 4, 8)}, "streams must be bfloat16"),
        ({"streams": torch.zeros(3, 8, 4, dtype=BF16).transpose(1, 2)}, "streams must be contiguous within a token"),
        ({"streams": None}, "streams must be a tensor"),
        ({"fn": torch.zeros(24, 31)}, "fn must have shape"),
        ({"fn": torch.zeros(24, 32, dtype=BF16)}, "fn must be float32"),
        ({"fn": torch.zeros(32, 24).T}, "fn must be contiguous"),
        ({"base": torch.zeros(23)}, "base must have shape"),
        ({"scale": torch.zeros(4)}, "scale must have shape"),
        ({"rms_eps": 0.0}, "rms_eps must be between"),
        ({"hc_eps": 2.0}, "hc_eps must be between"),
        ({"iterations": 0}, "iterations must be from 1"),
        ({"iterations": 2.0}, "iterations must be an int"),
        ({"base": torch.zeros(24, requires_grad=True)}, "base must not require gradients"),
    ],
)
def test_refused(change, says):
    named = dict(zip(("streams", "fn", "base", "scale"), arguments(3, 4, 8), strict=True))
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.mhc_mixes(**{**named, **EPS, **change})


def test_opcheck_and_one_graph():
    args = arguments(3, 4, 8)
    torch.library.opcheck(torch.ops.moetail.mhc_mixes.default, (args[0].clone(), *args[1:], 1e-20, 1e-6, 20))
    compiled = torch.compile(lambda s: moetail.mhc_mixes(s, *args[1:], **EPS), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(args[0]), reference.mhc_mixes(*args, **EPS), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


COMPILE = r"""
import json, re
from machine_code import sm_90
from moetail.ops import mhc_mixes_triton as m
results = {}
def look(name, kernel, pointers, options, aligned=()):
    constants = {n: options.pop(n) for n in list(options) if n.isupper()}
    code = sm_90(kernel, pointers, constants, options, aligned)
    loop = re.search(r"(\$L__BB0_\d+):.*bra\s+\1;", code.ptx, re.S)
    results[name] = dict(loop_barriers=None if loop is None else loop[0].count("bar.sync"),
                         local=code.local, stack=code.stack, registers=code.registers, wait=code.before_wait,
                         mma=code.count(r"mma\.sync"), vectors=code.vectors)
look("sums", m._sums_kernel, dict(streams="*bf16", fn="*fp32", sums="*fp32", squares="*fp32"),
     m._sums_options(4, 5120, 32, True), ["stride"])
look("mixes", m._mixes_kernel, dict.fromkeys(("sums", "squares", "base", "scale", "out"), "*fp32"),
     m._mixes_options(4, 5120, 32, 80, True))
print(json.dumps(results))
"""


def test_machine_code():
    """Tensor cores, loads in vectors, nothing read above the wait; the Sinkhorn loop has no barrier between warps."""
    code = machine_code.run(COMPILE)
    for name, kernel in code.items():
        assert kernel["local"] == kernel["stack"] == kernel["wait"] == 0, name
        assert kernel["registers"] <= 128, name
    assert code["sums"]["mma"] > 0 and code["sums"]["vectors"] > 0
    assert code["mixes"]["loop_barriers"] == 0


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls = [arguments(T, 4, 5120, device="cuda") for T in (5, 1, 2, 16, 17, 32, 700)]
    moetail.mhc_mixes(*calls[0], **EPS)
    with guards.no_jit("error"):
        for args in calls:
            moetail.mhc_mixes(*args, **EPS)
