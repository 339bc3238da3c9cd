"""The CUDA kernel: its machine code, compiled here for sm_90 without a GPU, and on a GPU its launches."""

import json
import os
import subprocess
import sys

import pytest
import torch

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits, finalize_inputs

BF16 = torch.bfloat16

COMPILE = """
import json, sys, re, subprocess, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moetail.ops import finalize_triton as ft
results = {}
for K, H in ((6, 5120), (8, 7168), (10, 2048)):
    for config in sorted({ft._fitted(c, H, 2) for _, c in ft._CONFIGS}, key=str):
        facts = ft.Facts(K, H, "fma", 1, "none", True, False, True)
        constants = dict(vars(facts), BLOCK=config.block, COLUMNS_FIRST=config.columns_first)
        types = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", out="*bf16", R="i32",
                     rows_stride="i32", map_stride_t="i32", map_stride_k="i32", weights_stride_t="i32",
                     weights_stride_k="i32", shared_stride="i32", gate_stride="i32", out_stride="i32", scale="fp32")
        names = ft._finalize_kernel.arg_names
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in
                   ("rows", "row_map", "weights", "shared", "out", "rows_stride", "shared_stride", "out_stride")}
        constants |= dict(gate=None, num_valid_rows=None)
        signature = {n: types.get(n, "constexpr") for n in names}
        constants = {(names.index(k),): v for k, v in constants.items()}
        source = ASTSource(ft._finalize_kernel, signature, constants, aligned)
        options = dict(num_warps=config.warps, enable_fp_fusion=False, launch_pdl=True)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = kernel.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(kernel.asm["cubin"]); cubin.flush()
            usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name],
                                   capture_output=True, text=True, check=True).stdout
        results[f"K={K} H={H} {config.block}x{config.warps}"] = dict(
            registers=int(re.search(r"REG:(\\d+)", usage)[1]), stack=int(re.search(r"STACK:(\\d+)", usage)[1]),
            local=int(re.search(r"LOCAL:(\\d+)", usage)[1]),
            vectors=len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.v4\\.b32", ptx)) * 4
            + len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.v2\\.b32", ptx)) * 2,
            fma=ptx.count("fma.rn.f32"), elements=config.block // (32 * config.warps), K=K)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


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
