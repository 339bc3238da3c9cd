"""Several programs a row: their columns in the interpreter, the machine code for sm_90, bits and launches on a GPU.

finalize_norm is what uses it. The interpreter reduces a row at once; only a GPU runs the exchange.
"""

import dataclasses

import machine_code
import pytest
import test_finalize_norm
import torch
from test_quant_out import FORMATS, assert_quantized, empty

import moetail
from moetail import Numerics, guards, reference, tuning
from moetail.ops import cluster_triton
from moetail.ops import finalize_norm_triton as fn
from moetail.ops.epilogue_triton import RowConfig
from moetail.ops.finalize_triton import Facts
from moetail.testing import assert_same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(6, 5120), (8, 7168), (10, 2048), (4, 2880)]


def arguments(T, K, H, **kwargs):
    """As finalize_norm's tests have them, but with rows that 16 bytes divide."""
    args, named = test_finalize_norm.arguments(T, K, H, **kwargs)
    return args, named | {"residual": named["residual"].clone(memory_format=torch.contiguous_format)}


def launch(args, named, config, *, zero_centred=False, quantized=None, outputs=None):
    """(h, residual') of the kernel with this config."""
    outputs = outputs or [torch.full_like(named["residual"], float("nan")) for _ in range(2)]
    quant = (None, None, None)
    if quantized is not None:
        quant = quantized.quant.name, quantized.values.view(torch.uint8), quantized.scales
    fn.launch(
        *args, None, None, 1.0, Numerics.TRTLLM, named["residual"], named["norm_weight"], named["eps"],
        named.get("post_norm_weight"), zero_centred, *outputs, *quant, config=config,
    )  # fmt: skip
    return outputs


def check_bits(args, named, got, **options):
    want = reference.finalize_norm(*args, **named, **options)
    assert_same_bits(got[1], want[1])
    assert_same_bits(got[0], want[0])


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("programs", "H", "sandwich"), [(8, 5120, False), (4, 96, True), (2, 1000, True)])
def test_each_program_has_its_columns(programs, H, sandwich, dtype):
    args, named = arguments(3, 4, H, dtype=dtype, sandwich=sandwich, absent=0.2)
    got = launch(args, named, RowConfig(1, 0, programs), zero_centred=True)
    check_bits(args, named, got, zero_centred=True)


@pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
def test_each_program_has_its_groups(quant):
    args, named = arguments(3, 4, 768)
    q = empty(quant, 3, 768, "cpu")
    got = launch(args, named, RowConfig(1, 0, 2), quantized=q)
    check_bits(args, named, got)
    assert_quantized(q, got[0])


FACTS = Facts(6, 5120, "fma", 1, "none", True, False, True)
STRIDES = fn._Strides(5120, 5120, 5120, 5120, 5120, 0)


def unit(pdl=True, dtype=BF16, quant=None, **strides):
    facts = dataclasses.replace(FACTS, PDL=pdl)
    return fn._cluster_unit(facts, dtype, dataclasses.replace(STRIDES, **strides), quant)


def test_who_may_have_several_programs_a_row():
    assert unit() == 8 and unit(quant="mxfp8") == 32 and unit(quant="fp8_group128") == 128
    assert unit(pdl=False) == 0  # before sm_90, and in the interpreter
    assert unit(dtype=F32) == 0  # a thread's 16 bytes are four elements
    assert unit(residual=5128) == unit(values=5128) == 0


def test_the_heuristic_takes_clusters_for_few_tokens():
    for K, H in SHAPES:
        few, many = (fn.heuristic(T, H, 2, 8) for T in (fn.CLUSTER_TOKENS, fn.CLUSTER_TOKENS + 1))
        assert few.programs > 1 == many.programs, (K, H)
        assert fn.heuristic(1, H, 2, 0) == fn.epilogue_triton.heuristic(fn.ROW_SHAPES, 1, H, 2)
        for config in fn.clustered(H, 8):
            assert H % (8 * config.programs) == 0 and H / config.programs <= 256 * config.warps <= 2048
    assert fn.heuristic(1, 2880, 2, 128).programs == fn.heuristic(1, 96, 2, 8).programs == 1


def test_every_config_has_what_config_for_answers(monkeypatch):
    cuda = torch.device("cuda", 0)
    tuned = {1: RowConfig(4, 0, 16), 2: RowConfig(2), 3: RowConfig(2, 0, 4)}
    monkeypatch.setattr(tuning, "tuned", lambda kind, device, shape, source, T: tuned.get(T))
    monkeypatch.setattr(tuning, "every_tuned", lambda *args: tuple(tuned.values()))
    for unit in (0, 8, 128):
        found = fn.every_config(cuda, 6, 5120, BF16, unit)
        answers = {fn.config_for.__wrapped__(cuda, T, 6, 5120, BF16, unit) for T in range(1, 600)}
        assert answers == set(found)
        assert all(config.programs == 1 for config in found) == (unit == 0)
        assert (tuned[1] in answers) == (unit == 8)  # 5120 / 16 columns are not groups of 128


def test_another_layout_is_refused():
    ptx = ".reqnctapercluster 8 st.async st.async"
    cluster_triton.check(ptx, 2)
    for bad in (ptx.replace(".reqn", ".maxn"), ptx + " st.async"):
        with pytest.raises(RuntimeError, match="a clustered kernel must send 2 times in one cluster, "):
            cluster_triton.check(bad, 2)


COMPILE = """
import json, re
from machine_code import sm_90
from moetail.ops import finalize_norm_triton as fn
from moetail.ops.finalize_triton import Facts
results = {}
def add(name, K, H, config, *, sandwich=False, quant=None, norm="*bf16", aligned=True):
    options = fn._options(Facts(K, H, "fma", 1, "none", True, False, True), False, config, quant)
    constants = {n: options.pop(n) for n in list(options) if n.isupper()} | dict(gate=None, num_valid_rows=None)
    pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", residual="*bf16",
                    norm_weight=norm, post_norm_weight=norm, out="*bf16", residual_out="*bf16", values="*u8",
                    scales="*u8" if quant == "mxfp8" else "*fp32")
    absent = (["post_norm_weight"] if not sandwich else []) + (["values", "scales"] if quant is None else [])
    constants |= {n: pointers.pop(n) and None for n in absent}
    strides = [f"{n}_stride" for n in ("rows", "shared", "residual", "out", "residual_out", "values")]
    rows = [n for n in pointers if n.endswith(("out", "weight", "rows", "shared", "residual"))]
    unaligned = None if aligned else {n: pointers.pop(n) for n in rows}
    code = sm_90(fn._finalize_norm_kernel, pointers, constants, options, strides, unaligned)
    results[name] = dict(
        registers=code.registers, stack=code.stack, local=code.local, batches=code.load_batches, K=K,
        exchanges=4 if sandwich else 2, elements=constants["BLOCK"] // (32 * config.warps), quantized=quant is not None,
        read=(K + 3 + sandwich + (1 + sandwich) * (norm == "*fp32")) * constants["BLOCK"] // (32 * config.warps),
        vectors=code.vectors, sends=code.count("st.async"),
        clusters=re.findall(r"\\.reqnctapercluster (\\d+)", code.ptx),
        programs=config.programs, before_the_wait=code.before_wait, barriers=code.count(r"bar\\.sync"),
        fences=len(re.findall("MEMBAR", code.sass.split("STG.E")[0])),
        roots=re.findall(r"(?:sqrt|rsqrt|div|rcp)\\.[a-z.]*f32", code.ptx))
for K, H in ((6, 5120), (8, 7168), (10, 2048), (4, 2880)):
    for config in fn.clustered(H, 8):
        add(f"K={K} H={H} {config}", K, H, config)
config = fn.heuristic(1, 5120, 2, 8)
add("sandwich", 6, 5120, config, sandwich=True)
add("fp32 norm weights", 6, 5120, config, sandwich=True, norm="*fp32")
for quant in ("fp8_group128", "fp8_group128_ue8m0", "mxfp8"):
    add(quant, 6, 5120, config, quant=quant)
add("unaligned", 6, 5120, config, aligned=False)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def aligned(compiled):
    return [(name, code) for name, code in compiled.items() if name != "unaligned"]


def test_a_thread_sends_once_an_exchange(compiled):
    """One send in the code: each of 32 * warps threads then holds one run, and `check` says no to any other layout."""
    for name, code in aligned(compiled):
        assert code["sends"] == code["exchanges"] and code["clusters"] == [str(code["programs"])], name
    assert compiled["unaligned"]["sends"] != compiled["unaligned"]["exchanges"]


def test_registers_do_not_spill_and_loads_are_vectors(compiled):
    for name, code in aligned(compiled):
        assert code["stack"] == code["local"] == code["before_the_wait"] == 0, name
        assert code["vectors"] * 2 == code["read"], name
        if code["elements"] == 8:
            assert code["batches"] <= 2 + code["K"] // 2, f"{name}: {code['batches']}"


def test_no_barrier_and_no_fence_before_the_stores(compiled):
    """The exchange itself has none (Triton 3.9 ends a clustered kernel with both); scales cross warps once."""
    for name, code in aligned(compiled):
        assert code["barriers"] == code["quantized"], name
        assert code["fences"] == 0, name


def test_a_norm_has_one_root_a_thread(compiled):
    """Though every element of a row in registers has it by name."""
    for name, code in aligned(compiled):
        norm = ["sqrt.rn.f32", "div.rn.f32", "div.rn.f32"] * (code["exchanges"] // 2)
        assert sorted(code["roots"]) == sorted(norm) or code["quantized"], f"{name}: {code['roots']}"


def poisoned(T, K, H, seed, **kwargs):
    """With rows whose sums of squares are the least and the largest, and rows that are not finite."""
    args, named = arguments(T, K, H, device="cuda", seed=seed, **kwargs)
    if T >= 15:
        args[3][:6] = 0
        args[1][:6] = -1
        residual = named["residual"]
        residual[:6] = torch.tensor([0.0, 1.9921875, 2.0**-120, 1e38, 0.0, 0.0], device="cuda").to(BF16)[:, None]
        residual[4, H - 1], residual[5, 0] = float("inf"), float("nan")
        residual[6, : H // 2] *= 1e-6
    return args, named


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "H"), SHAPES)
def test_every_cluster_has_the_same_bits(K, H):
    for T in (1, 2, 15, 16, 17, 64):
        args, named = poisoned(T, K, H, seed=T, absent=0.1)
        for config in (*fn.clustered(H, 8), fn.clustered(H, 8)[0]):
            check_bits(args, named, launch(args, named, config))


@pytest.mark.gpu
def test_the_sandwich_has_the_same_bits():
    for T, H in ((1, 5120), (16, 7168), (17, 2048)):
        args, named = poisoned(T, 6, H, seed=T, sandwich=True)
        check_bits(args, named, launch(args, named, fn.clustered(H, 8)[0], zero_centred=True), zero_centred=True)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
def test_the_quantized_output_has_the_same_bits(quant):
    for T, H in ((1, 5120), (16, 7168), (17, 2048)):
        args, named = poisoned(T, 6, H, seed=T)
        q = empty(quant, T, H, "cuda")
        got = launch(args, named, fn.clustered(H, 128)[0], quantized=q)
        check_bits(args, named, got)
        assert_quantized(q, got[0])


@pytest.mark.gpu
def test_what_16_bytes_do_not_divide_has_one_program():
    args, named = arguments(4, 6, 2048, device="cuda")
    wide = torch.zeros(4 * 2048 + 1, device="cuda", dtype=BF16)
    shifted = wide[1:].view(4, 2048).copy_(named["residual"])
    named = named | {"residual": shifted}
    check_bits(args, named, moetail.finalize_norm(*args, **named))
    with pytest.raises(ValueError, match="config must have one program a row for these tensors, got "):
        launch(args, named, fn.clustered(2048, 8)[0])


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls = [
        arguments(T, 6, 5120, device="cuda") for T in (1, 2, 16, 17, fn.CLUSTER_TOKENS, fn.CLUSTER_TOKENS + 1, 300)
    ]
    args, named = arguments(5, 6, 5120, device="cuda", seed=1)
    moetail.finalize_norm(*args, **named)
    with guards.no_jit():
        for args, named in calls:
            check_bits(args, named, moetail.finalize_norm(*args, **named))


@pytest.mark.gpu
def test_graph_replays_equal_eager():
    args, named = arguments(16, 6, 5120, device="cuda", absent=0.1)
    want = moetail.finalize_norm(*args, **named)
    out, residual = torch.empty_like(want[0]), named["residual"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moetail.finalize_norm(*args, **named | {"residual": residual, "out": out, "residual_out": residual})
    for _ in range(100):
        out.fill_(float("nan"))
        residual.copy_(named["residual"])
        graph.replay()
        assert_same_bits(out, want[0])
        assert_same_bits(residual, want[1])


@pytest.mark.gpu
def test_a_chain_of_early_launches():
    """Each call's h and residual' are the next one's shared and residual, in place: 500 layers."""
    ends = []
    for config in (RowConfig(8), fn.clustered(5120, 8)[0]):
        args, named = arguments(16, 6, 5120, device="cuda")
        x, residual = args[3].clone(), named["residual"].clone()
        for _ in range(500):
            launch((*args[:3], x), named | {"residual": residual}, config, outputs=[x, residual])
        ends.append((x, residual))
    for one, other in zip(*ends, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
def test_clusters_of_two_streams_share_the_multiprocessors():
    args, named = arguments(64, 6, 5120, device="cuda")
    config = fn.clustered(5120, 8)[0]
    want = launch(args, named, config)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = [[torch.empty_like(w) for w in want] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(500):
        for stream, out in zip(streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                launch(args, named, config, outputs=out)
                for got, w in zip(out, want, strict=True):
                    wrong.add_((got.view(torch.int16) != w.view(torch.int16)).sum())
    torch.cuda.synchronize()
    assert int(wrong) == 0
    check_bits(args, named, want)


@pytest.mark.gpu
def test_a_slow_producer_is_waited_for():  # it triggers its dependents at once, and writes a millisecond later
    from test_finalize_triton import late_copy

    args, named = arguments(1, 6, 2048, device="cuda")
    want = moetail.finalize_norm(*args, **named)
    late = [args[0].contiguous(), named["residual"]]
    targets, wrong = [torch.empty_like(t) for t in late], torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(100):
        for target in targets:
            target.fill_(1e4)
        for source, target in zip(late, targets, strict=True) if i % 2 else zip(late[::-1], targets[::-1], strict=True):
            late_copy(source, target, microseconds=1000)
        got = moetail.finalize_norm(targets[0], *args[1:], **named | {"residual": targets[1]})
        for g, w in zip(got, want, strict=True):
            wrong += (g.view(torch.int16) != w.view(torch.int16)).sum()
    assert int(wrong) == 0
