"""The CUDA kernel: its machine code, compiled here for sm_90 without a GPU, and on a GPU its launches."""

import machine_code
import pytest
import torch
from test_finalize_mhc import arguments

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits

COMPILE = """
import json, re
from machine_code import sm_90
from moetail.ops import finalize_mhc_triton as fm
from moetail.ops.finalize_triton import Facts
kernel, results = fm._finalize_mhc_kernel, {}
strides = [n for n in kernel.arg_names if n in ("rows_stride", "shared_stride", "out_stride")
           or n.startswith(("residual_stride", "residual_out_stride"))]
pointers = dict.fromkeys(("rows", "shared", "residual", "norm_weight", "out", "residual_out"), "*bf16")
unaligned = dict(row_map="*i32") | dict.fromkeys(("weights", "post_mix", "res_mix", "pre_mix"), "*fp32")
def elements(access, ptx):
    return sum(len(re.findall(rf"{access}\\.global(?:\\.\\w+)*\\.v{n}\\.b32", ptx)) * n for n in (2, 4)) * 2
for K, H, HC in ((6, 5120, 4), (8, 7168, 4), (8, 2048, 2)):
    for config in fm.epilogue_triton.every_config(fm.ROW_SHAPES, H, 2):
        options = fm._options(Facts(K, H, "fma", 1, "none", True, False, True), HC, config)
        constants = {n: options.pop(n) for n in list(options) if n.isupper()} | dict(
            gate=None, num_valid_rows=None, values=None, scales=None)
        code = sm_90(kernel, pointers, constants, options, strides, unaligned)
        results[f"K={K} H={H} HC={HC} warps={config.warps}"] = dict(
            registers=code.registers, stack=code.stack, local=code.local, threads=32 * config.warps, K=K, H=H, HC=HC,
            elements=constants["BLOCK"] // (32 * config.warps), loaded=elements("ld", code.ptx),
            stored=elements("st", code.ptx), fma=code.count("fma.rn.f32"), doubles=code.count(r"\\.f64"),
            loads_after_a_store=len(re.findall(
                r"ld\\.global(?:\\.\\w+)*\\.v", code.ptx[code.ptx.index("st.global"):])),
            before_the_wait=code.before_wait)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_registers_do_not_spill(compiled):
    for name, code in compiled.items():
        assert code["stack"] == code["local"] == 0, name
        assert code["registers"] <= 128 and code["registers"] * code["threads"] <= 65536, f"{name}: {code}"


def test_each_element_is_loaded_and_stored_once_in_vectors(compiled):
    """The K rows, shared, the streams and the norm's weight; h and the streams. All loads lie before all stores, so
    that the streams may be written in place."""
    for name, code in compiled.items():
        assert code["loaded"] == (code["K"] + 2 + code["HC"]) * code["elements"], name
        assert code["stored"] == (1 + code["HC"]) * code["elements"], name
        assert code["loads_after_a_store"] == 0, name


def test_finalize_has_the_only_fma(compiled):
    """The streams' products are rounded on their own; no fp64."""
    for name, code in compiled.items():
        assert code["fma"] % code["K"] == 0 and code["doubles"] == 0, name
        assert code["H"] / code["threads"] <= code["fma"] // code["K"] <= code["elements"], name


def test_nothing_is_read_before_the_wait(compiled):  # B47
    for name, code in compiled.items():
        assert code["before_the_wait"] == 0, name


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():  # B54
    calls = [arguments(T, 6, 1024, 4, device="cuda") for T in (1, 2, 3, 15, 16, 17, 100, 255, 256, 700, 4096)]
    args, kwargs = arguments(5, 6, 1024, 4, device="cuda", seed=1)
    moetail.finalize_mhc(*args, **kwargs)
    with guards.no_jit():
        for args, kwargs in calls:
            moetail.finalize_mhc(*args, **kwargs)


@pytest.mark.gpu
def test_every_config_has_the_same_bits():
    from moetail.ops import finalize_mhc_triton as fm

    for T, H, hc in ((1, 5120, 4), (7, 2880, 3), (300, 257, 8)):
        args, kwargs = arguments(T, 6, H, hc, absent=0.1, device="cuda")
        want = reference.finalize_mhc(*args, **kwargs)
        mhc = [kwargs[n] for n in ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight", "eps")]
        for warps in (1, 2, 4, 8, 16, 32):
            got = tuple(torch.full_like(w, float("nan")) for w in want)
            config = fm.RowConfig(warps)
            fm.launch(*args, None, None, 1.0, moetail.Numerics.TRTLLM, *mhc, *got, config=config)
            for g, w in zip(got, want, strict=True):
                assert_same_bits(g, w)


@pytest.mark.gpu
def test_graph_replays_equal_eager():  # B35
    args, kwargs = arguments(33, 6, 5120, 4, absent=0.1, device="cuda")
    want = moetail.finalize_mhc(*args, **kwargs)
    out, residual = torch.empty_like(want[0]), kwargs["residual"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moetail.finalize_mhc(*args, **kwargs | {"residual": residual, "out": out, "residual_out": residual})
    for _ in range(100):
        out.fill_(float("nan"))
        residual.copy_(kwargs["residual"])
        graph.replay()
        assert_same_bits(out, want[0])
        assert_same_bits(residual, want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["rows", "residual", "post_mix", "res_mix", "pre_mix"])
def test_a_slow_producer_is_waited_for(late):  # B47: it triggers its dependents at once, and writes 1 ms later
    from test_finalize_triton import late_copy

    (rows, *rest), kwargs = arguments(3, 6, 256, 4, device="cuda")
    rows, kwargs = rows.contiguous(), {k: v.contiguous() if isinstance(v, torch.Tensor) else v
                                       for k, v in kwargs.items()}  # fmt: skip
    want = moetail.finalize_mhc(rows, *rest, **kwargs)
    source = (kwargs | {"rows": rows})[late]
    target, wrong = torch.empty_like(source), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        target.fill_(1e4)
        late_copy(source, target, microseconds=1000)
        changed = {"rows": rows, **kwargs, late: target}
        got = moetail.finalize_mhc(changed.pop("rows"), *rest, **changed)
        for g, w in zip(got, want, strict=True):
            wrong += (g.view(torch.int16) != w.view(torch.int16)).sum()
    assert int(wrong) == 0
