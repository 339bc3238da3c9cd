"""The CUDA kernel's configs and its machine code, which is compiled here for sm_90 without a GPU."""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, sys, re, subprocess, tempfile, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moetail.ops import finalize_triton as ft
results = {}
for K, H in ((6, 5120), (8, 7168), (10, 2048)):
    for config in sorted({ft._fitted(c, H, 2) for _, c in ft._CONFIGS}, key=str):
        facts = ft._Facts(K, H, "fma", 1, "none", True, False, True)
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
        assert code["vectors"] * 2 == (code["K"] + 1) * code["elements"], name


def test_the_product_is_one_fma(compiled):
    for name, code in compiled.items():
        assert code["fma"] == code["K"] * code["elements"], name
