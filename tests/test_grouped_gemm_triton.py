"""grouped_gemm's CUDA kernel: one order of addition whatever the config, its machine code for sm_90, its launches."""

import machine_code
import pytest
import torch
from test_grouped_gemm import oracle

import moetail
from moetail import guards
from moetail.ops import grouped_gemm as op
from moetail.ops import grouped_gemm_triton as gt
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16

COMPILE = """
import json, re
from machine_code import WAIT, sm_90
from moetail.ops import grouped_gemm_triton as gt
kernel, results = gt._grouped_gemm_kernel, {}
def compile(name, config, facts, biased=False, unit="weight_stride_k"):
    constants = facts.options(config)
    launch = {k: constants.pop(k) for k in ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")}
    constants |= {unit: 1} | ({} if biased else {"bias": None})
    pointers = {n: "*bf16" for n in ("x", "weight", "bias", "out")} | {n: "*i32" for n in ("source", "block_expert")}
    pointers = {n: kind for n, kind in pointers.items() if n not in constants}
    strides = [n for n in ("x_stride", "weight_stride_e", "weight_stride_n", "weight_stride_k") if n not in constants]
    code = sm_90(kernel, pointers, constants, launch, strides)
    results[name] = dict(
        registers=code.registers, stack=code.stack, local=code.local, shared=code.shared, warps=config.warps,
        wgmma=sorted(set(re.findall(r"wgmma\\.mma_async\\S*m64n\\d+k(\\d+)\\.f32\\.bf16", code.ptx))),
        other_mma=code.count("mma.sync"), copies=code.count(r"cp\\.async\\.c[ag]"),
        narrow=code.count(r"cp\\.async\\.ca[^;]*, 0x[48],"), stages=config.stages, waits=code.count(WAIT),
        triggers=code.count("griddepcontrol.launch_dependents"), before_wait=code.before_wait)
H = 5120
for inner in (1152, 2304):
    first = gt.Facts(2 * inner, H, 6, True, True, True, True)
    second = gt.Facts(H, inner, 6, False, False, False, True)
    for config in gt.CONFIGS.values():
        compile(f"first I={inner} block={config.block}", config, first)
        compile(f"second I={inner} block={config.block}", config, second)
        if inner == 1152:
            compile(f"first transposed block={config.block}", config, first, unit="weight_stride_n")
            compile(f"second biased block={config.block}", config, second, biased=True)
            compile(f"first biased block={config.block}", config, first, biased=True)
for config in gt.CONFIGS.values():  # gpt-oss: no whole number of tiles
    compile(f"first cut block={config.block}", config, gt.Facts(2 * 2880, 2880, 4, True, True, True, True))
    compile(f"second cut block={config.block}", config, gt.Facts(2880, 2880, 4, False, False, False, True))
for i, config in enumerate(gt.CANDIDATES[3:]):
    compile(f"candidate {i} {config}", config, gt.Facts(2304, H, 6, True, True, True, True))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_registers_do_not_spill(compiled):
    assert len(compiled) == 12 + 9 + 6 + len(gt.CANDIDATES) - 3
    for name, code in compiled.items():
        assert code["stack"] == code["local"] == 0, name
        assert code["registers"] * 32 * code["warps"] <= 65536, name
        assert code["shared"] <= 227 * 1024, name


def test_tensor_cores(compiled):
    """All products by wgmma of one depth, k = 16: the order of addition of a step is that instruction's."""
    for name, code in compiled.items():
        assert (code["wgmma"], code["other_mma"]) == (["16"], 0), name


def test_loads_are_pipelined_and_wide(compiled):
    """Both operands go to shared memory by asynchronous copies of 16 bytes (8 where 16 rows are spread over 8 warps),
    `stages - 1` steps of them ahead of the loop and one inside."""
    for name, code in compiled.items():
        assert code["copies"] >= 2 * code["stages"], name
        assert code["narrow"] == 0 or ("block=16" in name and code["warps"] == 8), name


def test_pdl_rules(compiled):
    """One wait, one trigger, and no global memory touched before the wait."""
    for name, code in compiled.items():
        assert (code["waits"], code["triggers"], code["before_wait"]) == (1, 1, 0), name


def test_configs():
    assert tuple(gt.CONFIGS) == op.BLOCKS
    for block, config in gt.CONFIGS.items():
        assert gt.candidates(block)[0] == config and config.block == block
    assert sum(len(gt.candidates(block)) for block in op.BLOCKS) == len(gt.CANDIDATES)  # none is too large
    assert len(set(gt.CANDIDATES)) == len(gt.CANDIDATES)
    for config in gt.CANDIDATES:
        left = config.columns if config.weight_left else config.block
        assert left % 64 == 0 and config.warps % 4 == 0, config  # else not wgmma, whose order the bits are


def run(x, weight, ids, config, *, gather=True, activation=None, limit=None):
    """The rows of the slots, in slot order: [T * K, N]."""
    p = moetail.permute(ids, weight.shape[0], block=config.block)
    if not gather:
        x = x[p.source.clamp(min=0).long()]
    out = op._new(x, weight, p.source, activation).fill_(torch.nan)
    gt.launch(
        x, weight, None, p.source, p.block_expert, *ids.shape, config.block, gather, activation, limit, out, config
    )  # fmt: skip
    return out[p.row_map.flatten().long()]


def steps_that_cancel(T, E, N, device):
    """x [T, 3*64], weight [E, N, 3*64], and what `(big + small) - big` leaves of each sum of small integers.

    Inside a step of 64 every fp32 sum is exact in any order; between the steps it rounds to a multiple of big's unit in
    the last place, so that another order, a split or another BLOCK_K shows in the result.
    """
    g = torch.Generator().manual_seed(5)
    x, w = torch.randint(-3, 4, (T, 64), generator=g), torch.randint(-3, 4, (E, N, 64), generator=g)
    small_x, small_w = torch.randint(-9, 10, (T, 64), generator=g), torch.randint(-9, 10, (E, N, 64), generator=g)
    x3 = torch.cat([x, small_x, x], 1).float()
    w3 = torch.cat([w * 2.0**23, small_w.float(), w * -(2.0**23)], 2)
    step = torch.einsum("tsk,ensk->tens", x3.double().view(T, 3, 64), w3.double().view(E, N, 3, 64))
    left = (step[..., 0] + step[..., 1]).float() + step[..., 2].float()
    assert (left != step[..., 1].float()).float().mean() > 0.5
    return x3.to(BF16).to(device), w3.to(BF16).to(device), left.to(BF16).to(device)


@pytest.mark.parametrize("config", gt.CANDIDATES, ids=str)
def test_one_order_of_addition(config):
    """Every config adds steps of 64 in rising order: bit for bit, in the interpreter."""
    x, w, want = steps_that_cancel(9, 3, 70, "cpu")
    ids = torch.arange(18).view(9, 2) % 3
    got = run(x, w, ids, config).view(9, 2, 70)
    assert_same_bits(got, torch.stack([want[t, ids[t]] for t in range(9)]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(device, activation):
    x, w, _ = steps_that_cancel(33, 5, 128, device)
    x *= 2**-6  # exact, and within the exponential's range
    ids = (torch.arange(66).view(33, 2) % 5).to(device)
    want = run(x, w, ids, gt.CANDIDATES[0], activation=activation)
    for config in gt.CANDIDATES:
        assert_same_bits(run(x, w, ids, config, activation=activation), want)
        for t in (0, 32):
            alone = run(x[t : t + 1], w, ids[t : t + 1], config, activation=activation)
            assert_same_bits(alone, want[2 * t : 2 * t + 2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_block_with_few_rows_has_the_bits_of_a_full_one(device):
    """A block of 128 with at most 32 or 64 rows multiplies no more than those: every count on both sides of that."""
    counts = (1, 32, 33, 64, 65, 128, 129, 160, 161, 192, 193)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).view(-1, 1).to(device)
    x, w, _ = steps_that_cancel(sum(counts), len(counts), 64, device)
    want = run(x, w, ids, gt.CANDIDATES[0])
    for config in gt.candidates(128)[: 1 if device == "cpu" else None]:
        assert_same_bits(run(x, w, ids, config), want)


@pytest.mark.parametrize("config", list(gt.CONFIGS.values()), ids=str)
def test_dead_rows_are_not_written(config):
    """Neither padding nor what lies past the end; and a block without an expert stops at once, whatever its rows."""
    x, w, _ = steps_that_cancel(9, 3, 70, "cpu")
    p = moetail.permute(torch.arange(18).view(9, 2) % 2, 3, block=config.block)
    for block_expert in (p.block_expert, torch.full_like(p.block_expert, -1)):
        out = torch.full((p.source.numel(), 70), 7.0, dtype=BF16)
        gt.launch(x, w, None, p.source, block_expert, 9, 2, config.block, True, None, None, out, config)
        written = (out != 7).any(1)
        assert torch.equal(written, (p.source >= 0) & (block_expert[0] >= 0))


def choices(T, K=6, E=64, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(T, E, generator=g, device="cuda").argsort(dim=1)[:, :K].int()


def expert_inputs(T, E=64, inner=192, H=1024, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x, up, down = (torch.randn(*s, generator=g, device="cuda").to(BF16) for s in
                   ((T, H), (E, 2 * inner, H), (E, H, inner)))  # fmt: skip
    return x, up * H**-0.5, down * inner**-0.5


def both(x, up, down, ids):
    """The rows of the slots, in slot order, with the block that `block_for` gives."""
    E = up.shape[0]
    p = moetail.permute(ids, E, block=moetail.block_for(*ids.shape, E))
    h = moetail.grouped_gemm(x, up, p, gather=True, activation="swiglu", limit=10.0)
    return moetail.grouped_gemm(h, down, p)[p.row_map.flatten().long()]


@pytest.mark.gpu
def test_random_numbers_have_the_same_bits_under_every_config():
    """Down to the tensor cores' order inside a step: both sides of wgmma, every width."""
    x, up, down = expert_inputs(300)
    ids = choices(300)
    want = run(x, up, ids, gt.CANDIDATES[0], activation="swiglu", limit=10.0)
    second = run(want, down, ids, gt.CANDIDATES[0], gather=False)
    for config in gt.CANDIDATES:
        assert_same_bits(run(x, up, ids, config, activation="swiglu", limit=10.0), want)
        assert_same_bits(run(want, down, ids, config, gather=False), second)


@pytest.mark.gpu
def test_a_token_has_the_same_bits_at_every_t():
    x, up, down = expert_inputs(3000)
    ids = choices(3000)
    want = both(x, up, down, ids)
    blocks = set()
    for T in (1, 7, 100, 200, 700):
        blocks.add(moetail.block_for(T, 6, 64))
        assert_same_bits(both(x[:T], up, down, ids[:T]), want[: T * 6])
    assert blocks == set(op.BLOCKS)


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    x, up, down = expert_inputs(5000)
    both(x[:5], up, down, choices(5))
    calls = {T: choices(T) for T in (1, 2, 3, 15, 16, 17, 100, 700, 5000)}
    rows = torch.zeros(1, device="cuda")
    with guards.no_jit():
        for T, ids in calls.items():
            rows += both(x[:T], up, down, ids)[0, 0]
    assert rows.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 1024])
def test_graph_replays_on_changed_inputs(T):
    x, up, down = expert_inputs(T)
    ids = choices(T)
    both(x, up, down, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both(x, up, down, ids)
    for seed in range(1, 20):
        ids.copy_(choices(T, seed=seed))
        x.copy_(expert_inputs(T, seed=seed)[0])
        got.fill_(torch.nan)
        graph.replay()
        assert_same_bits(got, both(x, up, down, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 300])
def test_every_run_is_the_same_behind_its_producers(T):
    """permute, both GEMMs and finalize in a row, each started early: 300 rounds, one answer."""
    x, up, down = expert_inputs(T)
    ids, weights = choices(T), torch.rand(T, 6, device="cuda")
    p0 = moetail.permute(ids, 64, block=16)

    def layer():
        fresh = x + 0
        p = moetail.permute(ids + 0, 64, block=16)
        h = moetail.grouped_gemm(fresh, up, p, gather=True, activation="swiglu")
        return moetail.finalize(moetail.grouped_gemm(h, down, p), p.row_map, weights)

    want, wrong = layer(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        wrong += (layer().view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0 and want.isfinite().all() and p0.row_map.max() >= 0


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 3000])
def test_large_shapes(T):
    """DeepSeek-V4.1's expert, 48 of them, within the derived bound; weights behind 2**31 bytes of memory."""
    x, up, down = expert_inputs(T, E=48, inner=1152, H=5120)
    ids = choices(T, E=48)
    p = moetail.permute(ids, 48, block=moetail.block_for(T, 6, 48))
    h = moetail.grouped_gemm(x, up, p, gather=True, activation="swiglu", limit=10.0)
    rows = moetail.grouped_gemm(h, down, p)
    live = (p.source >= 0).nonzero().flatten()
    for some in live[:: max(1, len(live) // 6)].tolist():  # one row at a time: the oracle gathers weights
        slot = p.source[some : some + 1]
        one = moetail.Permutation(ids[:1], slot, p.block_expert, p.counts, p.offsets, p.num_rows, 1)
        for got, a, w, kwargs in (
            (h, x, up, {"gather": True, "activation": "swiglu", "limit": 10.0}),
            (rows, h[some : some + 1], down, {}),
        ):
            if kwargs:
                a = x[slot.long() // 6]
                kwargs = kwargs | {"gather": False}
            value, bound = oracle(a, w, one, ids, unit=17 / 16 * 2**-23, **kwargs)
            assert ((got[some].double() - value[0]).abs() <= bound[0]).all()


@pytest.mark.gpu
def test_weights_past_two_to_the_31_elements():
    E, N, Kd = 1024, 2048, 1088
    assert E * N * Kd > 2**31
    w = torch.zeros(E, N, Kd, device="cuda", dtype=BF16)
    x = torch.randn(4, Kd, device="cuda").to(BF16)
    ids = torch.tensor([[1023, 0], [1022, 5], [1000, 1], [963, 2]], device="cuda")
    w[ids.flatten()] = torch.randn(8, N, Kd, device="cuda").to(BF16)
    p = moetail.permute(ids, E, block=16)
    got = moetail.grouped_gemm(x, w, p, gather=True)[p.source >= 0]  # zeros where an offset wraps
    value, bound = oracle(x, w, p, ids, gather=True, unit=17 / 16 * 2**-23)
    assert ((got.double() - value).abs() <= bound).all()
