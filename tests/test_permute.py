"""permute: every implementation equals the definition exactly, the definition equals plain loops, and rows come back.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernels in the interpreter, the dispatcher's on a GPU.
"""

import time

import pytest
import torch

import moetail
from moetail import Permutation, reference
from moetail.ops import permute as op
from moetail.routing import row_bound
from moetail.testing import assert_same_bits

TENSORS = ("row_map", "source", "block_expert", "counts", "offsets", "num_rows")


def by_loops(topk_ids, num_experts, block, expert_map):
    """The independent definition, in Python lists."""
    T, K = topk_ids.shape
    slots = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(topk_ids.flatten().tolist()):
        if expert_map is not None:
            expert = expert_map[expert].item() if 0 <= expert < len(expert_map) else -1
        if 0 <= expert < num_experts:
            slots[expert].append(slot)
    source, block_expert, offsets, row_map = [], [], [], [-1] * (T * K)
    for expert, mine in enumerate(slots):
        for slot in mine:
            row_map[slot] = len(source)
            source.append(slot)
        while len(source) % block:
            source.append(-1)
        block_expert += [expert] * (len(source) // block - len(block_expert))
        offsets.append(len(source))
    R, used = row_bound(T * K, num_experts, block), len(source)
    source += [-1] * (R - used)
    block_expert += [-1] * (R // block - len(block_expert))
    counts = [len(mine) for mine in slots]
    lists = ([row_map[t * K : t * K + K] for t in range(T)], source, block_expert, counts, offsets, [used])
    tensors = [torch.tensor(values, dtype=torch.int32) for values in lists]
    return Permutation(tensors[0].view(T, K), *tensors[1:], block)


class Implementation:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def __call__(self, topk_ids, num_experts, *, block=1, expert_map=None):
        if self.name != "interpreter" or topk_ids.shape[0] == 0:
            return moetail.permute(topk_ids, num_experts, block=block, expert_map=expert_map)
        from moetail.ops import permute_triton

        out = [tensor.fill_(-77) for tensor in op._new(topk_ids, num_experts, block)]
        permute_triton.launch(topk_ids, expert_map, num_experts, block, *out)
        return Permutation(*out, block)

    def check(self, topk_ids, num_experts, *, block=1, expert_map=None):
        on = [None if x is None else x.to(self.device) for x in (topk_ids, expert_map)]
        got = self(on[0], num_experts, block=block, expert_map=on[1])
        want = by_loops(topk_ids, num_experts, block, expert_map)
        definition = reference.permute(on[0], num_experts, block=block, expert_map=on[1])
        for name in TENSORS:
            assert_same_bits(getattr(got, name).cpu(), getattr(want, name))
            assert_same_bits(getattr(definition, name).cpu(), getattr(want, name))
        assert got.block == definition.block == block
        return got


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param, "cuda" if request.param == "cuda" else "cpu")


def distinct(T, K, E, seed=0):
    """What a router gives: K different experts a token."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(T, E, generator=g).argsort(dim=1)[:, :K].int()


# T, K, E, block
CASES = {
    "one-token": (1, 6, 384, 64),
    "one-slot": (1, 1, 1, 1),
    "one-expert": (77, 1, 1, 16),
    "top-1": (50, 1, 7, 4),
    "a-chunk": (16, 8, 64, 16),
    "a-chunk-and-one": (43, 3, 60, 1),
    "four-chunks": (64, 8, 64, 32),
    "one-more-than-one-launch-takes": (171, 3, 60, 16),
    "many-programs": (300, 8, 128, 64),
    "1024-experts": (40, 8, 1024, 16),
    "1024-experts-two-launches": (90, 8, 1024, 2),
    "block-256": (5, 2, 3, 256),
    "K-32": (20, 32, 100, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_random_choices(run, case):
    T, K, E, block = CASES[case]
    run.check(distinct(T, K, E), E, block=block)


def test_several_chunks_a_program(run, monkeypatch):
    """As from 16385 slots on."""
    if run.name != "cuda":
        from moetail.ops import permute_triton

        three = permute_triton.PermuteConfig(4, 3)
        monkeypatch.setattr(permute_triton, "HEURISTIC", three)
        assert permute_triton.programs(150 * 8, three) == (3, 4)
    run.check(distinct(150 if run.name != "cuda" else 5000, 8, 60), 60, block=16)


def test_uneven_choices(run):
    """All to one expert, to the last one, most experts empty, the same expert twice for a token."""
    run.check(torch.full((70, 4), 3), 9, block=16)
    run.check(torch.full((170, 4), 8, dtype=torch.int32), 9, block=16)
    run.check(torch.arange(80).view(20, 4) % 2 * 50 + 5, 64, block=8)
    run.check(torch.tensor([[2, 2, 2], [0, 2, 0]]), 3, block=2)


def test_counts_that_fill_their_blocks(run):
    """No padding row at all, and one short of a block."""
    run.check(torch.arange(64).view(16, 4) % 4, 4, block=16)
    run.check(torch.arange(60).view(15, 4) % 4, 4, block=16)


def test_absent_slots(run):
    """Ids outside [0, E) get no row; so do all of them."""
    ids = torch.tensor([[0, -1, 5], [7, 3, -(2**31)], [2**31 - 1, 4, 4], [-1, -1, 9]])
    run.check(ids, 5, block=2)
    run.check(ids.int(), 5)
    run.check(torch.full((200, 3), -1), 5, block=2)


def test_wide_ids_are_not_cut_to_32_bits(run):
    run.check(torch.tensor([[2**32 + 1, 1], [-(2**32), 2**63 - 1]]), 4)
    expert_map = torch.tensor([3, 2, 2**32, -1])
    run.check(torch.tensor([[2**32 + 1, 1], [2, 0]]), 4, expert_map=expert_map)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_expert_map(run, dtype):
    """Each of three ranks holds a third of the experts, in an order of its own; every slot is on one rank."""
    E, ids = 30, distinct(60, 6, 30)
    owner = torch.randperm(E, generator=torch.Generator().manual_seed(1)) % 3
    seen = torch.zeros(60, 6, dtype=torch.int32)
    for rank in range(3):
        expert_map = torch.full((E,), -1, dtype=dtype)
        mine = (owner == rank).nonzero().flatten().flip(0)
        expert_map[mine] = torch.arange(len(mine), dtype=dtype)
        got = run.check(ids, len(mine), block=8, expert_map=expert_map)
        seen += (got.row_map.cpu() >= 0).int()
    assert (seen == 1).all()
    ids = torch.tensor([[0, 3, -1], [2, 1, -3]])  # outside the map on both sides, where Python counts from its end
    run.check(ids, 2, expert_map=torch.tensor([-1, 0, 1], dtype=dtype))


@pytest.mark.parametrize("block", [1, 64])
def test_no_tokens(run, block):
    got = run.check(torch.empty(0, 4, dtype=torch.int32), 5, block=block)
    assert got.row_map.shape == (0, 4) and got.source.numel() == 0 and got.offsets.tolist() == [0] * 5


def test_layouts_of_the_ids(run):
    ids = distinct(60, 4, 30)
    run.check(ids.t().contiguous().t(), 30, block=4)
    wide = torch.full((60, 9), 29)
    wide[:, 2:6] = ids
    run.check(wide[:, 2:6], 30, block=4)


@pytest.mark.parametrize("block", [1, 16])
def test_rows_come_back(run, block):
    """Gather by `source`, then finalize by `row_map`: the slots' own sum, whatever padding rows hold."""
    T, K, E, H = 40, 4, 12, 64
    ids = distinct(T, K, E)
    ids[::5, 1] = -1
    got = run(ids.to(run.device), E, block=block)
    hidden = torch.randn(T * K, H, device=run.device).bfloat16()  # one row a slot
    rows = torch.where((got.source >= 0)[:, None], hidden[got.source.clamp(min=0)], torch.nan)
    weights = torch.rand(T, K, device=run.device)
    y = moetail.finalize(rows, got.row_map, weights)
    slots = torch.arange(T * K, device=run.device).view(T, K)
    assert_same_bits(y, reference.finalize(hidden, torch.where(ids.to(run.device) >= 0, slots, -1), weights))
    experts = got.block_expert.repeat_interleave(block)
    live = got.source >= 0
    assert_same_bits(ids.to(run.device).flatten()[got.source[live].long()], experts[live])


def test_offsets_are_grouped_mms(run):
    E, H = 6, 16
    got = run(distinct(20, 2, E).to(run.device), E)
    x = torch.randn(20, H, device=run.device).bfloat16()
    w = torch.randn(E, H, H, device=run.device).bfloat16()
    rows = torch.nn.functional.grouped_mm(x[got.source // 2], w, offs=got.offsets)
    want = torch.stack([row @ w[e] for row, e in zip(x[got.source // 2], got.block_expert.tolist(), strict=True)])
    torch.testing.assert_close(rows, want)


def test_speed_on_a_cpu():
    ids = distinct(4096, 8, 64)
    moetail.permute(ids, 64, block=64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        moetail.permute(ids, 64, block=64)
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3


IDS, MAP = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
BAD = {
    "ids-list": ("topk_ids", ([[0]], 4), {}),
    "ids-vector": ("topk_ids", (IDS[0], 4), {}),
    "ids-dtype": ("topk_ids", (IDS.short(), 4), {}),
    "ids-no-slots": ("topk_ids", (IDS[:, :0], 4), {}),
    "ids-33-slots": ("topk_ids", (IDS[:, :1].repeat(1, 33), 4), {}),
    "ids-too-many": ("topk_ids", (torch.empty(2**27, 16, dtype=torch.int32, device="meta"), 4), {}),
    "experts-0": ("num_experts", (IDS, 0), {}),
    "experts-1025": ("num_experts", (IDS, 1025), {}),
    "experts-text": ("num_experts", (IDS, "4"), {}),
    "experts-float": ("num_experts", (IDS, 4.0), {}),
    "experts-true": ("num_experts", (IDS, True), {}),
    "experts-huge": ("num_experts", (IDS, 2**70), {}),
    "block-none": ("block", (IDS, 4), {"block": None}),
    "block-tensor": ("block", (IDS, 4), {"block": IDS}),
    "block-0": ("block", (IDS, 4), {"block": 0}),
    "block-24": ("block", (IDS, 4), {"block": 24}),
    "block-512": ("block", (IDS, 4), {"block": 512}),
    "map-list": ("expert_map", (IDS, 4), {"expert_map": [0]}),
    "map-dtype": ("expert_map", (IDS, 4), {"expert_map": MAP.float()}),
    "map-shape": ("expert_map", (IDS, 4), {"expert_map": MAP[None]}),
    "map-empty": ("expert_map", (IDS, 4), {"expert_map": MAP[:0]}),
    "map-stride": ("expert_map", (IDS, 4), {"expert_map": MAP[::2]}),
    "map-device": ("expert_map", (IDS, 4), {"expert_map": MAP.to("meta")}),
}


@pytest.mark.parametrize(("name", "args", "kwargs"), BAD.values(), ids=BAD)
def test_bad_input(name, args, kwargs):
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        moetail.permute(*args, **kwargs)


def test_opcheck():
    ids = distinct(5, 3, 7)
    torch.library.opcheck(torch.ops.moetail.permute.default, (ids.long(), None, 7, 4))
    torch.library.opcheck(torch.ops.moetail.permute.default, (ids, torch.arange(9), 6, 1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def tokens(ids):
        p = moetail.permute(ids, 64, block=16)
        return p.source // 4, p.row_map + 1

    for T in (30, 35, 47, 64):  # min(E, T*K) and its bounds are facts of T: more slots than experts in all
        ids = distinct(T, 4, 64).to(device)
        got, p = tokens(ids), moetail.permute(ids, 64, block=16)
        assert_same_bits(got[0], p.source // 4)
        assert_same_bits(got[1], p.row_map + 1)
    assert len([g for g in counter.graphs if any("permute" in str(node.target) for node in g.graph.nodes)]) == 1
