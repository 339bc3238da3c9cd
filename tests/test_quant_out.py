"""`quant_out` of the six ops that end in a norm: the bits of the op's own h, quantized; and what it refuses."""

import json

import machine_code
import pytest
import test_all_reduce_mhc
import test_finalize_mhc
import test_finalize_norm
import torch
from ranks import Ranks

import moetail
from moetail import Numerics, Quant, Quantized, Workspace, guards, reference
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
FORMATS = [Quant.FP8_GROUP128, Quant.FP8_GROUP128_UE8M0, Quant.MXFP8]
by_name = pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
H, MAX_TOKENS = 256, 32


def empty(quant, T, H, device, column_major=False):
    """Poisoned, so that nothing unwritten passes; the values a window of something wider."""
    values = torch.full((T, H + 16), 0x55, dtype=torch.uint8, device=device)[:, :H].view(torch.float8_e4m3fn)
    scales = torch.full((T, H // quant.group), 0x55, device=device).to(quant.scale_dtype)
    return Quantized(quant, values, scales.t().contiguous().t() if column_major else scales)


def assert_quantized(got, h):
    values, scales = reference.quantize(h, got.quant)
    assert_same_bits(got.values.view(torch.uint8), values.view(torch.uint8))
    assert_same_bits(got.scales, scales)


def norm_inputs(T, K=3, H=H, device="cpu", **kwargs):
    return test_finalize_norm.arguments(T, K, H, device=device, **kwargs)


def mhc_inputs(T, K=3, H=H, device="cpu", **kwargs):
    args, named = test_finalize_mhc.arguments(T, K, H, 4, device=device, **kwargs)
    return args, named | {"eps": 1e-6}


LOCAL = {"finalize_norm": norm_inputs, "finalize_mhc": mhc_inputs}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@by_name
@pytest.mark.parametrize("name", LOCAL)
def test_the_quantized_output_is_the_output_quantized(name, quant, device):
    """And h and residual' are what they are without it."""
    for T, width, dtype, column_major in ((5, 384, BF16, False), (1, 5120, BF16, True), (3, 128, torch.float16, False)):
        args, named = LOCAL[name](T, H=width, device=device, dtype=dtype)
        want = getattr(moetail, name)(*args, **named)
        q = empty(quant, T, width, device, column_major)
        got = getattr(moetail, name)(*args, **named, quant_out=q)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs)
        assert_quantized(q, got[0])


@by_name
def test_finalize_norms_kernel_in_the_interpreter(quant):
    from moetail.ops import finalize_norm_triton

    (rows, row_map, weights, shared), named = norm_inputs(3)
    h, new = torch.empty_like(shared), torch.empty_like(shared)
    q = empty(quant, 3, H, "cpu", column_major=True)
    finalize_norm_triton.launch(
        rows, row_map, weights, shared, None, None, 1.0, Numerics.TRTLLM, named["residual"], named["norm_weight"], 1e-6,
        None, False, h, new, quant.name, q.values.view(torch.uint8), q.scales,
    )  # fmt: skip
    want = reference.finalize_norm(rows, row_map, weights, shared, **named)
    assert_same_bits(h, want[0])
    assert_quantized(q, h)


@by_name
def test_finalize_mhcs_kernel_in_the_interpreter(quant):
    from moetail.ops import finalize_mhc_triton

    (rows, row_map, weights, shared), named = mhc_inputs(3)
    mhc = [named[n] for n in ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight", "eps")]
    h, new, q = torch.empty_like(shared), torch.empty_like(named["residual"]), empty(quant, 3, H, "cpu")
    finalize_mhc_triton.launch(
        rows, row_map, weights, shared, None, None, 1.0, Numerics.TRTLLM, *mhc, h, new, quant.name,
        q.values.view(torch.uint8), q.scales,
    )  # fmt: skip
    assert_same_bits(h, reference.finalize_mhc(rows, row_map, weights, shared, **named)[0])
    assert_quantized(q, h)


@devices
def test_no_tokens(device):
    for name, inputs in LOCAL.items():
        (rows, row_map, weights, _), named = inputs(2, device=device)
        per_token = ("residual", "post_mix", "res_mix", "pre_mix")
        none = {n: v[:0] if n in per_token else v for n, v in named.items()}
        q = Quantized.empty(Quant.MXFP8, 0, H, device)
        h, _ = getattr(moetail, name)(rows, row_map[:0], weights[:0], None, **none, quant_out=q)
        assert h.shape == (0, H)


def test_without_numba(monkeypatch):
    monkeypatch.setattr(moetail.ops.finalize, "_cpu_kernel", lambda: None)
    args, named = norm_inputs(3)
    q = empty(Quant.FP8_GROUP128, 3, H, "cpu")
    assert_quantized(q, moetail.finalize_norm(*args, **named, quant_out=q)[0])


def collective_inputs(rank, T, device="cpu"):
    """What the four collectives take, without their workspace: by name, (positional, by name). A rank's own inputs."""
    _, norm = norm_inputs(T, device=device, seed=10 * T)
    _, mhc = mhc_inputs(T, device=device, seed=10 * T)
    rank_args, _ = norm_inputs(T, device=device, seed=10 * T + rank)
    x = rank_args[3].contiguous()
    return {
        "all_reduce_norm": ((x,), norm), "all_reduce_mhc": ((x,), mhc),
        "finalize_all_reduce_norm": (rank_args, norm), "finalize_all_reduce_mhc": (rank_args, mhc),
    }  # fmt: skip


COLLECTIVES = ("all_reduce_norm", "all_reduce_mhc", "finalize_all_reduce_norm", "finalize_all_reduce_mhc")


def run_collectives(workspace, rank, T, quant, device="cpu"):
    """(h without quant_out, h with it, what was quantized) of each."""
    results = {}
    for name, (args, named) in collective_inputs(rank, T, device).items():
        q, op = empty(quant, T, H, device), getattr(moetail, name)
        plain = op(*args, **named, workspace=workspace)[0]
        results[name] = plain, op(*args, **named, workspace=workspace, quant_out=q)[0], q
    return results


def check_collectives(results):
    assert list(results) == list(COLLECTIVES)
    for plain, h, q in results.values():
        assert_same_bits(h, plain)
        assert_quantized(q, h)


@by_name
def test_one_rank(quant):
    check_collectives(run_collectives(Workspace(None, MAX_TOKENS, H, device=torch.device("cpu")), 0, 5, quant))


def on_ranks(group):
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=torch.device("cpu"))
    for T, quant in ((3, Quant.FP8_GROUP128), (0, Quant.MXFP8), (32, Quant.MXFP8)):
        check_collectives(run_collectives(workspace, group.rank(), T, quant))


def test_gloo_ranks():
    with Ranks(2) as ranks:
        ranks.run(on_ranks)


def column(tensor, stride):
    return tensor.new_empty(tensor.shape[0] * stride).as_strided(tensor.shape, (stride, 1))


def broken(q, **change):
    return Quantized(**{"quant": q.quant, "values": q.values, "scales": q.scales, **change})


BAD = {
    "no-quantized": (lambda q, a: Quant.MXFP8, "must be a moetail.Quantized or None, got Quant"),
    "values-bf16": (lambda q, a: broken(q, values=q.values.to(BF16)), "must have torch.float8_e4m3fn values"),
    "values-none": (lambda q, a: broken(q, values=None), "must have torch.float8_e4m3fn values .* got NoneType"),
    "scales-of-another-format": (lambda q, a: broken(q, quant=Quant.MXFP8), "must have torch.uint8 scales for mxfp8"),
    "scales-of-another-group": (lambda q, a: broken(q, scales=q.scales[:, :1]), "must have scales of shape"),
    "values-shape": (lambda q, a: broken(q, values=q.values[:3]), "must have values of shape"),
    "values-device": (lambda q, a: broken(q, values=q.values.to("meta")), "must have its values on cpu, got meta"),
    "values-stride": (lambda q, a: broken(q, values=q.values.view(torch.uint8).t().contiguous().t().view(
        torch.float8_e4m3fn)), "must have values of inner stride 1"),
    "values-one-row": (lambda q, a: broken(q, values=q.values[:1].expand(4, H)), "must have values that lie apart"),
    "scales-one-column": (lambda q, a: broken(q, scales=q.scales[:, :1].expand(4, 2)),
                          "must have scales that lie apart"),
    "values-over-residual": (lambda q, a: broken(q, values=a["residual"].view(torch.float8_e4m3fn)[:, :H]),
                             "must not overlap residual"),
    "scales-over-the-norm": (lambda q, a: broken(q, scales=a["norm_weight"].view(torch.float32)[:8].view(4, 2)),
                             "must not overlap norm_weight"),
    "values-over-scales": (lambda q, a: broken(q, values=q.values.view(torch.uint8).contiguous().view(
        torch.float8_e4m3fn), scales=None), "must have torch.float32 scales"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["finalize_norm", "finalize_mhc", *COLLECTIVES])
def test_refused(name, change, says):
    alone = {"workspace": Workspace(None, MAX_TOKENS, H, device=torch.device("cpu"))}
    args, named = LOCAL[name](4) if name in LOCAL else collective_inputs(0, 4)[name]
    named = named | ({} if name in LOCAL else alone)
    if "residual" in says and named["residual"].dim() == 3:
        named["residual"] = named["residual"].contiguous()
        change = lambda q, a: broken(q, values=a["residual"].view(torch.float8_e4m3fn)[:, 1, :H])  # noqa: E731
    named["out"] = torch.zeros(4, H, dtype=BF16)
    q = change(Quantized.empty(Quant.FP8_GROUP128, 4, H, "cpu"), named)
    with pytest.raises(ValueError, match=rf"^quant_out {says}"):
        getattr(moetail, name)(*args, **named, quant_out=q)
    assert not named["out"].any()  # nothing was written


@pytest.mark.parametrize("name", ["finalize_norm", "all_reduce_norm"])
def test_the_parts_of_it_and_the_other_outputs_lie_apart(name):
    args, named = LOCAL[name](4) if name in LOCAL else collective_inputs(0, 4)[name]
    named |= {} if name in LOCAL else {"workspace": Workspace(None, MAX_TOKENS, H, device=torch.device("cpu"))}
    memory = torch.zeros(4, 2 * H, dtype=torch.uint8)
    values = memory[:, :H].view(torch.float8_e4m3fn)
    scales = memory[:, H:].view(torch.float32)
    out = memory.view(BF16)
    for other, q in (("out", Quantized(Quant.FP8_GROUP128, values, torch.empty(4, 2))),
                     ("scales", Quantized(Quant.MXFP8, values, memory[:, :8]))):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^quant_out must not overlap {other}"):
            getattr(moetail, name)(*args, **named, out=out if other == "out" else None, quant_out=q)
    # Side by side in rows of one buffer: no overlap.
    q = Quantized(Quant.FP8_GROUP128, values, scales[:, :2])
    assert_quantized(q, getattr(moetail, name)(*args, **named, quant_out=q)[0])


def test_a_width_that_is_no_multiple_of_a_group():
    args, named = norm_inputs(4, H=160)
    q = Quantized(Quant.FP8_GROUP128, torch.empty(4, 160).to(torch.float8_e4m3fn), torch.empty(4, 1))
    with pytest.raises(ValueError, match=r"^quant_out must have H % 128 == 0 columns for fp8_group128, got H=160"):
        moetail.finalize_norm(*args, **named, quant_out=q)
    q = Quantized.empty(Quant.MXFP8, 4, 160, "cpu")
    assert_quantized(q, moetail.finalize_norm(*args, **named, quant_out=q)[0])


def op_tail(T, quant):
    q = empty(quant, T, H, "cpu")
    return quant.name, q.values.view(torch.uint8), q.scales


@pytest.mark.parametrize("name", [*LOCAL, *COLLECTIVES])
@pytest.mark.parametrize("quant", [Quant.FP8_GROUP128, Quant.MXFP8], ids=lambda quant: quant.name)
def test_opcheck(name, quant):
    """And what the op itself refuses: the public function of one rank calls another."""
    (args, norm), (_, mhc) = norm_inputs(4, norm_dtype=torch.float32), mhc_inputs(4)
    inputs = (*args, None, None, 1.5, Numerics.TRTLLM.spec)
    norm = (norm["residual"], norm["norm_weight"], 1e-5, None, False)
    mhc = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in test_all_reduce_mhc.ordered(mhc))
    control = Workspace(None, MAX_TOKENS, H, device=torch.device("cpu")).control
    place = (control, "", 0, 1, MAX_TOKENS, False)
    h, new, streams = (torch.empty(4, *shape, dtype=BF16) for shape in ((H,), (H,), (4, H)))
    first = (args[3],) if name.startswith("all_reduce") else inputs
    rest = (*(mhc if name.endswith("mhc") else norm), *(() if name in LOCAL else place))
    outputs = h, streams if name.endswith("mhc") else new
    op = getattr(torch.ops.moetail, name + ("_out" if name in LOCAL else "")).default
    tail = op_tail(4, quant)
    torch.library.opcheck(op, (*first, *rest, *outputs, *tail))
    for bad in ((*tail[:2], tail[2][:, :1]), (tail[0], h.view(torch.uint8)[:, :H], tail[2])):
        with pytest.raises(ValueError, match="^quant_out must"):
            op(*first, *rest, *outputs, *bad)


@devices
def test_fullgraph_compile_makes_the_buffers_inside(device):
    """As an engine's model does: buffers made in the graph, and no recompilation with T."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(rows, row_map, weights, shared, residual, norm_weight):
        q = Quantized.empty(Quant.MXFP8, row_map.shape[0], rows.shape[1], rows.device)
        h, residual = moetail.finalize_norm(
            rows, row_map, weights, shared, residual=residual, norm_weight=norm_weight, eps=1e-6, quant_out=q
        )
        return h, residual, q.values, q.scales

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for T in (5, 7, 17):
        args, named = norm_inputs(T, device=device)
        h, _, values, scales = compiled(*args, named["residual"], named["norm_weight"])
        assert_same_bits(h, moetail.finalize_norm(*args, **named)[0])
        assert_quantized(Quantized(Quant.MXFP8, values, scales), h)
    with_op = [g for g in counter.graphs if any("finalize_norm" in str(node.target) for node in g.graph.nodes)]
    assert len(with_op) == 1


COMPILE = """
import json
from machine_code import sm_90
from moetail.ops import finalize_norm_triton as fn
from moetail.ops.finalize_triton import Facts
strides = [f"{n}_stride" for n in ("rows", "shared", "residual", "out", "residual_out", "values")]
results = {}
for quant in ("fp8_group128", "fp8_group128_ue8m0", "mxfp8"):
    for config in fn.epilogue_triton.every_config(fn.ROW_SHAPES, 5120, 2):
        options = fn._options(Facts(6, 5120, "fma", 1, "none", True, False, True), False, config, quant)
        constants = {n: options.pop(n) for n in list(options) if n.isupper()} | dict(
            gate=None, num_valid_rows=None, post_norm_weight=None)
        pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", residual="*bf16",
                        norm_weight="*bf16", out="*bf16", residual_out="*bf16", values="*u8",
                        scales="*u8" if quant == "mxfp8" else "*fp32")
        code = sm_90(fn._finalize_norm_kernel, pointers, constants, options, strides)
        results[f"{quant} warps={config.warps}"] = dict(
            registers=code.registers, stack=code.stack, local=code.local, threads=32 * config.warps,
            elements=constants["BLOCK"] // (32 * config.warps), shared=code.shared,
            converted=2 * code.count(r"cvt.rn.satfinite.e4m3x2.f32"), bytes=code.count(r"st.global.b8"),
            vectors=code.count(r"st.global.v[24].b32"), before_the_wait=code.before_wait)
print(json.dumps(results))
"""


def test_machine_code():
    """One conversion for two elements, no spill, values in vectors: a byte is stored for a scale of MXFP8 only."""
    for name, code in machine_code.run(COMPILE).items():
        said = f"{name}: {json.dumps(code)}"
        assert code["stack"] == code["local"] == code["before_the_wait"] == 0, said
        assert code["registers"] * code["threads"] <= 65536, said
        assert code["converted"] == code["elements"], said
        assert code["bytes"] <= (code["elements"] // 8 if "mxfp8" in name else 0), said


@pytest.mark.gpu
@by_name
def test_every_config_and_graph_replays(quant):
    from moetail.ops import finalize_norm_triton as fn

    for T, width in ((1, 7168), (300, 384)):
        (rows, row_map, weights, shared), named = norm_inputs(T, 6, width, device="cuda")
        want = reference.finalize_norm(rows, row_map, weights, shared, **named)[0]
        for warps in (1, 4, 8, 16, 32):
            q, h, new = empty(quant, T, width, "cuda"), torch.empty_like(shared), torch.empty_like(shared)
            fn.launch(rows, row_map, weights, shared, None, None, 1.0, Numerics.TRTLLM, named["residual"],
                      named["norm_weight"], 1e-6, None, False, h, new, quant.name, q.values.view(torch.uint8), q.scales,
                      config=fn.RowConfig(warps))  # fmt: skip
            assert_same_bits(h, want)
            assert_quantized(q, h)
    args, named = norm_inputs(17, 6, 5120, device="cuda")
    q = empty(quant, 17, 5120, "cuda")
    moetail.finalize_norm(*args, **named, quant_out=q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, _ = moetail.finalize_norm(*args, **named, quant_out=q)
    for _ in range(20):
        for part in (h, q.values.view(torch.uint8), q.scales):
            part.zero_()
        graph.replay()
        assert_quantized(q, h)
        assert bool(h.any())


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOCAL)
def test_no_compilation_for_any_t_after_the_first(name):
    op, calls = getattr(moetail, name), [LOCAL[name](T, device="cuda") for T in (1, 2, 16, 17, 255, 256, 700, 4096)]
    buffers = [Quantized.empty(Quant.FP8_GROUP128, args[1].shape[0], H, "cuda") for args, _ in calls]
    args, named = LOCAL[name](5, device="cuda")
    op(*args, **named, quant_out=Quantized.empty(Quant.FP8_GROUP128, 5, H, "cuda"))
    with guards.no_jit():
        for (args, named), q in zip(calls, buffers, strict=True):
            op(*args, **named, quant_out=q)


@pytest.mark.gpu
@by_name
@pytest.mark.parametrize("name", COLLECTIVES)
def test_virtual_ranks(name, quant):
    W = 2
    workspaces = Workspace.virtual(W, MAX_TOKENS, H, timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in range(W)]
    for T in (0, 1, 32, 5):  # the empty call loads the kernel before a rank may poll
        inputs = [collective_inputs(r, T, "cuda")[name] for r in range(W)]
        buffers, got = [empty(quant, T, H, "cuda") for _ in range(W)], []
        torch.cuda.synchronize()
        for r, (args, named) in enumerate(inputs):
            with torch.cuda.stream(streams[r]):
                got.append(getattr(moetail, name)(*args, **named, workspace=workspaces[r], quant_out=buffers[r])[0])
        torch.cuda.synchronize()
        for h, q in zip(got, buffers, strict=True):
            assert_same_bits(h, got[0])
            assert_quantized(q, h)
    assert h.isfinite().all()


@pytest.mark.gpu
@by_name
@pytest.mark.parametrize("name", COLLECTIVES)
def test_after_a_fault_nothing_looks_good(name, quant):
    """Rank 1 never comes: h is NaN, every scale NaN (0xFF), every value 0x7F."""
    workspaces = Workspace.virtual(2, MAX_TOKENS, H, timeout_s=0.2)  # rank 1's memory is written to
    args, named = collective_inputs(0, 4, "cuda")[name]
    q = empty(quant, 4, H, "cuda")
    h, _ = getattr(moetail, name)(*args, **named, workspace=workspaces[0], quant_out=q)
    torch.cuda.synchronize()
    assert h.isnan().all()
    assert (q.scales == 0xFF).all() if quant is Quant.MXFP8 else q.scales.isnan().all()
    assert (q.values.view(torch.uint8) == 0x7F).all()
