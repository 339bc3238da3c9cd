"""The CUDA kernel: its machine code, compiled here for sm_90 without a GPU, and on a GPU its launches."""

import machine_code
import pytest
import torch

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits, finalize_inputs

BF16 = torch.bfloat16

COMPILE = """
import json
from machine_code import sm_90
from moetail.ops import finalize_triton as ft
pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", out="*bf16")
results = {}
for K, H in ((6, 5120), (8, 7168), (10, 2048)):
    for config in sorted({ft._fitted(c, H, 2) for _, c in ft._CONFIGS}, key=str):
        constants = vars(ft.Facts(K, H, "fma", 1, "none", True, False, True)) | dict(
            BLOCK=config.block, COLUMNS_FIRST=config.columns_first, gate=None, num_valid_rows=None)
        options = dict(num_warps=config.warps, enable_fp_fusion=False, launch_pdl=True)
        code = sm_90(ft._finalize_kernel, pointers, constants, options, ("rows_stride", "shared_stride", "out_stride"))
        results[f"K={K} H={H} {config.block}x{config.warps}"] = dict(
            registers=code.registers, stack=code.stack, local=code.local, vectors=code.vectors,
            fma=code.count("fma.rn.f32"), elements=config.block // (32 * config.warps), K=K)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_registers_do_not_spill(compiled):
    for name, code in compiled.items():
        assert code["stack"] == code["local"] == 0, name
        assert code["registers"] <= 128, f"{name}: {code['registers']} registers"


def test_loads_are_vectors(compiled):
    """Every element of the K rows and of shared comes in a vector: two bf16 a register, two or four of those a load."""
    for name, code in compiled.items():
        if code["elements"] > 2:  # two elements a thread are one register
            assert code["vectors"] * 2 == (code["K"] + 1) * code["elements"], name
    assert any(code["elements"] == 8 for code in compiled.values())


def test_the_product_is_one_fma(compiled):
    for name, code in compiled.items():
        assert code["fma"] == code["K"] * code["elements"], name


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():  # B54
    calls = {T: finalize_inputs(T, 6, 1024, device="cuda") for T in (1, 2, 3, 15, 16, 17, 100, 700, 4096, 20000)}
    x = finalize_inputs(5, 6, 1024, device="cuda", seed=1)
    moetail.finalize(x.rows, x.row_map, x.weights, x.shared)
    with guards.no_jit():
        for x in calls.values():
            moetail.finalize(x.rows, x.row_map, x.weights, x.shared)


@pytest.mark.gpu
def test_graph_replays_equal_eager():  # B35
    x = finalize_inputs(33, 6, 5120, absent=0.1, device="cuda")
    want = moetail.finalize(x.rows, x.row_map, x.weights, x.shared)
    out = torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moetail.finalize(x.rows, x.row_map, x.weights, x.shared, out=out)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, want)
        assert_same_bits(moetail.finalize(x.rows, x.row_map, x.weights, x.shared), want)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [7168, 4096])
def test_rows_past_two_to_the_31_elements(H):  # B01, B03, B04
    T, K = 64, 8
    R = 2**31 // H + 4096
    rows = torch.zeros(R, H, dtype=BF16, device="cuda")
    g = torch.Generator(device="cuda").manual_seed(0)
    row_map = torch.randint(R - 2048, R, (T, K), generator=g, device="cuda")  # behind the wrap
    row_map[::2] = torch.randint(0, 2048, (T // 2, K), generator=g, device="cuda")
    row_map[5] = -1
    live = row_map[row_map >= 0].unique()
    rows[live] = torch.randn(live.numel(), H, generator=g, device="cuda").to(BF16)
    weights, shared = torch.rand(T, K, device="cuda"), torch.randn(T, H, device="cuda").to(BF16)
    assert_same_bits(
        moetail.finalize(rows, row_map.int(), weights, shared), reference.finalize(rows, row_map, weights, shared)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16384])
def test_a_slow_producer_is_waited_for(T):  # B47: it triggers its dependents at once, and writes 2 ms later
    x = finalize_inputs(T, 6, 256, device="cuda")
    rows = x.rows.contiguous()
    want = moetail.finalize(rows, x.row_map, x.weights, x.shared)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    target, out = torch.empty_like(rows), torch.empty_like(want)
    for _ in range(1000):
        target.fill_(1e4)
        late_copy(rows, target, microseconds=2000)
        moetail.finalize(target, x.row_map, x.weights, x.shared, out=out)
        wrong += (out.view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0


def late_copy(source, target, microseconds):
    """source to target, by a kernel that lets its dependents start and then idles."""
    import triton
    from late_copy import late_copy_kernel

    programs = min(64, triton.cdiv(source.numel(), 1024))
    late_copy_kernel[(programs,)](source, target, source.numel(), microseconds * 1000, BLOCK=1024)
