"""The CUDA kernel: its machine code, compiled here for sm_90 without a GPU, and on a GPU its launches."""

import machine_code
import pytest
import torch

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits, finalize_inputs

BF16 = torch.bfloat16

COMPILE = """
import json, re
from machine_code import sm_90
from moetail.ops import finalize_norm_triton as fn
from moetail.ops.finalize_triton import Facts
strides = [f"{n}_stride" for n in ("rows", "shared", "residual", "out", "residual_out")]
results = {}
for K, H, sandwich in ((6, 5120, False), (6, 5120, True), (8, 7168, False), (10, 2048, False), (8, 2880, False),
                       (8, 16384, False)):
    for config in fn.epilogue_triton.every_config(fn.ROW_SHAPES, H, 2):
        options = fn._options(Facts(K, H, "fma", 1, "none", True, False, True), False, config)
        constants = {n: options.pop(n) for n in list(options) if n.isupper()} | dict(
            gate=None, num_valid_rows=None, values=None, scales=None)
        pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", residual="*bf16",
                        norm_weight="*bf16", post_norm_weight="*bf16", out="*bf16", residual_out="*bf16")
        if not sandwich:
            constants["post_norm_weight"] = None
            del pointers["post_norm_weight"]
        code = sm_90(fn._finalize_norm_kernel, pointers, constants, options, strides)
        results[f"K={K} H={H} sandwich={sandwich} warps={config.warps}"] = dict(
            registers=code.registers, stack=code.stack, local=code.local, threads=32 * config.warps,
            batches=code.load_batches,
            vectors=code.vectors, fma=code.count("fma.rn.f32"), elements=constants["BLOCK"] // (32 * config.warps), K=K,
            H=H, sandwich=sandwich, roots=re.findall(r"(?:sqrt|rsqrt|div|rcp)\\.[a-z.]*f32", code.ptx),
            doubles=code.count(r"\\.f64"), before_the_wait=code.before_wait)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_registers_do_not_spill(compiled):
    for name, code in compiled.items():
        assert code["stack"] == code["local"] == 0, name
        assert code["registers"] * code["threads"] <= 65536, f"{name}: {code['registers']} registers"


def test_loads_are_vectors(compiled):
    """The K rows, shared, residual and the norms' weights come in vectors, each element once."""
    for name, code in compiled.items():
        assert code["vectors"] * 2 == (code["K"] + 3 + code["sandwich"]) * code["elements"], name


def test_few_tokens_wait_for_memory_few_times(compiled):
    """A thread of 8 elements has several rows in flight: left to ptxas, each waits for the one before."""
    for name, code in compiled.items():
        if code["elements"] == 8:  # not H 16384, where a thread has 16 and all its registers
            assert code["batches"] <= 2 + code["K"] // 2, f"{name}: {code['batches']}"


def test_the_product_is_one_fma_and_the_norm_has_none(compiled):
    """For each element of a thread, but those that LLVM proves to lie beyond H."""
    for name, code in compiled.items():
        assert code["fma"] % code["K"] == 0, name
        assert code["H"] / code["threads"] <= code["fma"] // code["K"] <= code["elements"], name


def test_the_roots_are_correctly_rounded(compiled):
    """Never the approximate rsqrt; and no fp64, which is slow on most GPUs."""
    for name, code in compiled.items():
        norms = 1 + code["sandwich"]
        assert sorted(code["roots"]) == sorted(["sqrt.rn.f32", "div.rn.f32", "div.rn.f32"] * norms), name
        assert code["doubles"] == 0, name


def test_nothing_is_read_before_the_wait(compiled):  # B47
    for name, code in compiled.items():
        assert code["before_the_wait"] == 0, name


def arguments(T, K, H, *, seed=0, **kwargs):
    x = finalize_inputs(T, K, H, device="cuda", seed=seed, **kwargs)
    g = torch.Generator("cuda").manual_seed(seed)
    residual = torch.randn(T, H, generator=g, device="cuda").to(BF16)
    weight = torch.randn(H, generator=g, device="cuda").to(BF16)
    return (x.rows, x.row_map, x.weights, x.shared), {"residual": residual, "norm_weight": weight, "eps": 1e-6}


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():  # B54
    calls = [arguments(T, 6, 1024) for T in (1, 2, 3, 15, 16, 17, 100, 255, 256, 700, 4096, 20000)]
    args, kwargs = arguments(5, 6, 1024, seed=1)
    moetail.finalize_norm(*args, **kwargs)
    with guards.no_jit():
        for args, kwargs in calls:
            moetail.finalize_norm(*args, **kwargs)


@pytest.mark.gpu
def test_every_config_has_the_same_bits():
    from moetail.ops import finalize_norm_triton as fn

    for T, H in ((1, 5120), (7, 2880), (300, 257)):
        (rows, row_map, weights, shared), kwargs = arguments(T, 6, H, absent=0.1)
        want = reference.finalize_norm(rows, row_map, weights, shared, **kwargs)
        for warps in (1, 2, 4, 8, 16, 32):
            got = torch.full_like(shared, float("nan")), torch.full_like(shared, float("nan"))
            fn.launch(
                rows, row_map, weights, shared, None, None, 1.0, moetail.Numerics.TRTLLM, kwargs["residual"],
                kwargs["norm_weight"], kwargs["eps"], None, False, *got, config=fn.RowConfig(warps),
            )  # fmt: skip
            assert_same_bits(got[0], want[0])
            assert_same_bits(got[1], want[1])


@pytest.mark.gpu
def test_graph_replays_equal_eager():  # B35
    args, kwargs = arguments(33, 6, 5120, absent=0.1)
    want = moetail.finalize_norm(*args, **kwargs)
    out, residual = torch.empty_like(want[0]), kwargs["residual"].clone()
    in_place = kwargs | {"residual": residual, "out": out, "residual_out": residual}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moetail.finalize_norm(*args, **in_place)
    for _ in range(100):
        out.fill_(float("nan"))
        residual.copy_(kwargs["residual"])
        graph.replay()
        assert_same_bits(out, want[0])
        assert_same_bits(residual, want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 4096])
def test_a_slow_producer_is_waited_for(T):  # B47: it triggers its dependents at once, and writes 2 ms later
    from test_finalize_triton import late_copy

    args, kwargs = arguments(T, 6, 256)
    want = moetail.finalize_norm(*args, **kwargs)
    late = [args[0].contiguous(), kwargs["residual"]]
    targets, wrong = [torch.empty_like(t) for t in late], torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(200):
        for target in targets:
            target.fill_(1e4)
        for source, target in zip(late, targets, strict=True) if i % 2 else zip(late[::-1], targets[::-1], strict=True):
            late_copy(source, target, microseconds=1000)
        got = moetail.finalize_norm(targets[0], *args[1:], **kwargs | {"residual": targets[1]})
        for g, w in zip(got, want, strict=True):
            wrong += (g.view(torch.int16) != w.view(torch.int16)).sum()
    assert int(wrong) == 0
