"""permute's CUDA kernels: how slots are dealt out, their machine code for sm_90, and on a GPU their launches."""

import machine_code
import pytest
import torch

import moetail
from moetail import guards, reference
from moetail.ops import permute_triton
from moetail.testing import assert_same_bits

TENSORS = ("row_map", "source", "block_expert", "counts", "offsets", "num_rows")

COMPILE = """
import json
from machine_code import WAIT, sm_90
from moetail.ops import permute_triton as pt
results = {}
for E, K, block, mapped in ((384, 6, 64, False), (64, 8, 1, False), (1024, 8, 256, True), (1, 1, 16, False)):
    for kernel, alone in ((pt._place_kernel, True), (pt._place_kernel, False), (pt._count_kernel, None)):
        pointers = dict.fromkeys(
            ("ids", "histogram", "row_map", "source", "block_expert", "counts", "offsets", "num_rows"), "*i32")
        constants = pt.options(E, K, block, pdl=True) | {"ALONE": alone}
        options = {k: constants.pop(k) for k in ("num_warps", "launch_pdl")}
        if mapped:
            pointers["expert_map"] = "*i32"
        else:
            constants["expert_map"] = None
        code = sm_90(kernel, pointers, constants, options)
        results[f"E={E} block={block} {kernel.fn.__name__} alone={alone}"] = dict(
            stack=code.stack, local=code.local, global_atomics=code.count(r"(?:atom|red)(?:\\.\\w+)*\\.global"),
            waits=code.count(WAIT), triggers=code.count("griddepcontrol.launch_dependents"),
            before_wait=code.before_wait)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_registers_do_not_spill(compiled):
    assert len(compiled) == 12
    for name, code in compiled.items():
        assert code["stack"] == code["local"] == 0, name


def test_no_order_from_atomics(compiled):
    for name, code in compiled.items():
        assert code["global_atomics"] == 0, name


def test_pdl_rules(compiled):
    """One wait, one trigger, and no global memory touched before the wait."""
    for name, code in compiled.items():
        assert (code["waits"], code["triggers"], code["before_wait"]) == (1, 1, 0), name


@pytest.mark.parametrize("slots", [1, 127, 128, 512, 513, 6144, 16384, 16385, 65536, 2**30])
def test_every_slot_is_in_one_program(slots):
    for config in permute_triton.CANDIDATES:
        count, each = permute_triton.programs(slots, config)
        chunks = -(-slots // permute_triton.CHUNK)
        assert 1 <= count <= config.programs
        assert (count - 1) * each < chunks <= count * each  # the last program has work, and none is left over
        assert (count == 1) == (chunks <= config.one_launch)


def choices(T, K=6, E=384, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(T, E, generator=g, device="cuda").argsort(dim=1)[:, :K].int()


def check(got, ids, E=384, block=64):
    want = reference.permute(ids, E, block=block)
    for name in TENSORS:
        assert_same_bits(getattr(got, name), getattr(want, name))


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls = [choices(T) for T in (1, 2, 3, 15, 16, 17, 100, 1000, 4096, 20000)]
    moetail.permute(choices(5), 384, block=64)
    with guards.no_jit():
        for ids in calls:
            moetail.permute(ids, 384, block=64)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 85, 86, 1000, 2730, 2731, 8192, 50000])
def test_many_tokens(T):
    for E, block in ((384, 64), (64, 1), (1024, 16)):
        ids = choices(T, E=E)
        check(moetail.permute(ids, E, block=block), ids, E, block)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 1024])
def test_graph_replays_on_changed_inputs(T):
    ids = choices(T)
    moetail.permute(ids, 384, block=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moetail.permute(ids, 384, block=64)
    for seed in range(1, 50):
        ids.copy_(choices(T, seed=seed))
        for name in TENSORS:
            getattr(got, name).fill_(-77)
        graph.replay()
        check(got, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 1024])
def test_every_run_is_the_same_behind_route(T):
    """route, permute and finalize in a row, each started early: 1000 rounds, one answer."""
    g = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(T, 384, generator=g, device="cuda")
    hidden = torch.randn(T, 256, generator=g, device="cuda").bfloat16()

    def layer():
        weights, ids = moetail.route(logits, moetail.Router.DEEPSEEK_V4)
        p = moetail.permute(ids, 384, block=16)
        rows = torch.where((p.source >= 0)[:, None], hidden[p.source.clamp(min=0) // 6], torch.nan)
        return moetail.finalize(rows, p.row_map, weights)

    want, wrong = layer(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (layer().view(torch.int16) != want.view(torch.int16)).sum()
    assert int(wrong) == 0
    slots = torch.arange(T, device="cuda")[:, None].expand(T, 6)
    weights, _ = reference.route(logits, moetail.Router.DEEPSEEK_V4)
    assert_same_bits(want, reference.finalize(hidden, slots, weights))
