"""Shared experts as slots: the routing, the weights, the bits of a layer with them, and what it refuses."""

import re
from dataclasses import replace

import pytest
import torch
from ranks import Ranks

import moetail
from moetail import (
    GroupedMMExperts,
    MoELayer,
    Numerics,
    Router,
    SharedSlots,
    TailSpec,
    TritonExperts,
    guards,
    reference,
)
from moetail.plan import LayerFacts, Place, WorldFacts, plan_tails
from moetail.shared_slots import join_weights
from moetail.testing import assert_same_bits

E, K, H, INNER, LIMIT = 8, 3, 64, 48, 4.0
MAX_TOKENS = 40
BF16 = torch.bfloat16
ROUTER = Router(K, "sigmoid", renormalize=True, routed_scale=2.5)
CPU_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def plan_of(tp=1, slots=1, **facts):
    first = LayerFacts(**{"index": 0, "can_stop": True, "shared_slots": slots, **facts})
    second = LayerFacts(1, can_stop=True, shared_slots=slots, boundary_max_tokens=16)
    return plan_tails([first, second], WorldFacts(MAX_TOKENS, tp=tp))


PLANS = {Place.NEXT_LAYER: plan_of(tp=2), Place.MOE_LAYER: plan_of(), Place.EXPERTS: plan_of(can_stop=False)}


class Parts:
    """One rank's experts and a shared expert of n times their columns."""

    def __init__(self, device="cpu", rank=0, n=1, backend=GroupedMMExperts):
        g = torch.Generator().manual_seed(7)
        self.gate = torch.randn(H, E, generator=g).to(device)
        g.manual_seed(100 + rank)

        def numbers(*shape):
            return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(BF16).to(device)

        self.up, self.down = numbers(E, 2 * INNER, H), numbers(E, H, INNER)
        self.shared_up, self.shared_down = numbers(2 * n * INNER, H), numbers(H, n * INNER)
        self.routed = backend(self.up, self.down, limit=LIMIT)
        self.experts, self.slots = self.routed.with_shared(self.shared_up, self.shared_down, limit=LIMIT)

    def router(self, hidden):
        return moetail.route(hidden.float() @ self.gate, ROUTER)

    def layer(self, plan, tail=None, **options):
        options = {"experts": self.experts, "shared_slots": self.slots} | options
        return MoELayer(self.router, plan=plan, index=0, tail=tail, **options)

    def shared(self, hidden):
        gate, up = (hidden @ self.shared_up.T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        return inner @ self.shared_down.T

    def most(self, hidden, routed):
        """How far the roundings of two ways may be apart, for a routed part of this absolute sum.

        A rounding to bf16 moves a number by 2**-8 of itself at most, |silu(g)| <= |g| and |silu'| < 1.1: rounding
        gate, up, silu and product moves an element of the inner by 4.1 * 2**-8 * |gate| * |up|. Each row is rounded,
        each way, and then at most three sums. fp32 sums of 64 numbers are less than 1 % of that.
        """
        gate, up = (hidden.float() @ self.shared_up.float().T).abs().chunk(2, -1)
        shared = (gate * up) @ self.shared_down.float().abs().T
        return 2**-8 * 1.01 * (2 * (4.1 + 1) * shared + 2 * routed + 3 * (shared + routed))

    def without(self, hidden, numerics=Numerics.TRTLLM):
        """The same layer with its shared expert run by itself."""
        plan = plan_of(slots=0, has_shared_experts=True)
        layer = MoELayer(self.router, self.routed, (self.shared,), plan=plan, index=0, tail=TailSpec(numerics))
        return layer(hidden)

    def by_definition(self, hidden):
        """The bits: every row of the experts with its weight, routed sum and shared row rounded once."""
        weights, ids = self.router(hidden)
        slots = torch.arange(E, E + self.slots.count, device=ids.device, dtype=ids.dtype).expand(len(ids), -1)
        out = self.experts(hidden, torch.cat([ids, slots], 1), torch.cat([weights, torch.ones_like(slots)], 1))
        return reference.finalize(out.rows, out.row_map, out.weights), out


def hidden_of(T, device="cpu"):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(T + 1)).to(BF16).to(device)


@CPU_AND_GPU
def test_the_routing(device):
    weights, ids = torch.rand(5, K, device=device), torch.randint(E, (5, K), device=device)
    for dtype, float_dtype in ((torch.int32, torch.float32), (torch.int64, BF16)):
        given = weights.to(float_dtype), ids.to(dtype)
        w, i = SharedSlots.of(E, 2, torch.device(device))(*given)
        assert i.dtype == dtype and w.dtype == float_dtype and w.is_contiguous() and i.is_contiguous()
        assert_same_bits(i[:, :K], given[1])
        assert_same_bits(w[:, :K], given[0])
        assert i[:, K:].tolist() == [[E, E + 1]] * 5 and w[:, K:].tolist() == [[1.0, 1.0]] * 5
    w, i = SharedSlots.of(E, 1, torch.device(device))(weights[:0], ids[:0])
    assert w.shape == i.shape == (0, K + 1)


def test_a_shared_expert_is_cut_by_columns():
    """Each slot is an expert of I columns, and the rows of all add up to the whole one's."""
    parts, x = Parts(n=3), hidden_of(9)
    gate_up, down = join_weights(parts.up, parts.down, parts.shared_up, parts.shared_down)
    assert gate_up.shape == (E + 3, 2 * INNER, H) and down.shape == (E + 3, H, INNER)
    assert_same_bits(gate_up[:E], parts.up)
    assert_same_bits(down[:E], parts.down)
    for j in range(3):
        mine = slice(j * INNER, (j + 1) * INNER)
        assert_same_bits(gate_up[E + j, :INNER], parts.shared_up[: 3 * INNER][mine])
        assert_same_bits(gate_up[E + j, INNER:], parts.shared_up[3 * INNER :][mine])
        assert_same_bits(down[E + j], parts.shared_down[:, mine])
    ids = torch.arange(E, E + 3).expand(9, -1)
    out = parts.experts(x, ids, torch.ones(9, 3))
    assert ((out.finalize(None, TailSpec()).float() - parts.shared(x).float()).abs() <= parts.most(x, 0)).all()


@CPU_AND_GPU
@pytest.mark.parametrize("backend", [GroupedMMExperts, TritonExperts])
@pytest.mark.parametrize("n", [1, 2])
def test_a_layer_has_the_bits_of_its_definition(device, backend, n):
    parts, x = Parts(device, n=n, backend=backend), hidden_of(13, device)
    want, rows = parts.by_definition(x)
    for place in PLANS:
        plan = plan_of(2 if place is Place.NEXT_LAYER else 1, n, can_stop=place is not Place.EXPERTS)
        assert plan.place(0, 13) is place
        layer = parts.layer(plan)
        assert_same_bits(layer(x), want)
        if place is Place.NEXT_LAYER:
            out = layer.forward_unfinalized(x)
            assert out.shared is None and out.routed.row_map.shape == (13, K + n)
            assert_same_bits(out.complete(), want)
    routed = reference.finalize(rows.rows.float().abs(), rows.row_map[:, :K], rows.weights[:, :K])
    assert ((want.float() - parts.without(x).float()).abs() <= parts.most(x, routed)).all()


@CPU_AND_GPU
@pytest.mark.parametrize("numerics", [Numerics.TRTLLM, Numerics.SINGLE_ROUNDING], ids=lambda n: n.name)
def test_one_slot_is_single_rounding_of_the_row(device, numerics):
    """Whatever the layer's own numerics say of the add that it no longer has."""
    parts, x = Parts(device), hidden_of(33, device)
    out = parts.by_definition(x)[1]
    row = out.rows[out.row_map[:, K].long()]
    args = (out.rows, out.row_map[:, :K], out.weights[:, :K], row)
    got = parts.layer(plan_of(), TailSpec(numerics))(x)
    assert_same_bits(got, reference.finalize(*args, numerics=Numerics.SINGLE_ROUNDING))
    twice = reference.finalize(*args, numerics=Numerics.TRTLLM)
    differing = (got != twice).float().mean()
    assert 0.02 < differing < 0.5  # and so the two are told apart


@CPU_AND_GPU
def test_signed_zeros_infinities_and_absent_slots(device):
    """The last slot against `shared`, on rows that are made to show it: raw bits, with slots that have no row."""
    g = torch.Generator().manual_seed(3)
    rows = torch.randn(60, 32, generator=g) * 2.0 ** torch.randint(-20, 20, (60, 32), generator=g)
    rows[torch.rand(60, 32, generator=g) < 0.2] = -0.0
    rows[7, 3], rows[8, 5] = float("inf"), float("nan")
    rows = rows.to(BF16)
    row_map = torch.arange(60).view(15, 4)[:, torch.tensor([2, 0, 1, 3])].clone()
    row_map[:, :3][torch.rand(15, 3, generator=g) < 0.4] = -1
    row_map[4, :3] = -1  # nothing but the shared slot
    weights = torch.rand(15, 4, generator=g)
    weights[:, 3] = 1.0
    rows, row_map, weights = rows.to(device), row_map.to(device), weights.to(device)
    got = moetail.finalize(rows, row_map, weights)
    shared = rows[row_map[:, 3]]
    want = reference.finalize(rows, row_map[:, :3], weights[:, :3], shared, numerics=Numerics.SINGLE_ROUNDING)
    assert_same_bits(got, want)


@CPU_AND_GPU
def test_no_tokens(device):
    parts = Parts(device)
    for plan in PLANS.values():
        assert parts.layer(plan)(hidden_of(0, device)).shape == (0, H)


def test_experts_that_need_several_launches():
    parts, x = Parts(), hidden_of(30)
    plan = plan_of(experts_max_tokens=8)
    assert plan.place(0, 30) is Place.EXPERTS
    assert_same_bits(parts.layer(plan)(x), parts.by_definition(x)[0])


def every_place(group):
    """On one rank: each place's output, and this rank's part."""
    W = group.size()
    parts = Parts(rank=group.rank())
    workspace = moetail.Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=torch.device("cpu"))
    results = []
    for T in (1, 16, 0, 33):
        x = hidden_of(T)
        plans = (plan_of(W), plan_of(W, experts_max_tokens=4), plan_of(W, can_stop=False))
        outs = [parts.layer(plan, TailSpec(workspace=workspace))(x) for plan in plans]
        results.append((outs, parts.by_definition(x)[0]))
    workspace.destroy()
    return results


def test_tensor_parallel():
    """Each rank has its columns of the shared expert, and rounds its part once."""
    with Ranks(2) as ranks:
        for of_rank in zip(*ranks.run(every_place), strict=True):
            want = reference.all_reduce([part for _, part in of_rank])
            for outs, _ in of_rank:
                for out in outs:
                    assert_same_bits(out, want)


BAD = {
    "count must be 1 or more": lambda p: SharedSlots.of(E, 0, torch.device("cpu")),
    "count must be 1 or": lambda p: SharedSlots.of(E, 1.5, torch.device("cpu")),
    "num_experts must be 1 or more": lambda p: SharedSlots.of(0, 1, torch.device("cpu")),
    "limit must be the routed experts' 4.0": lambda p: p.routed.with_shared(p.shared_up, p.shared_down, limit=None),
    "shared_gate_up must have shape (96, 64)": lambda p: p.routed.with_shared(
        p.shared_up[:-2], p.shared_down, limit=LIMIT
    ),
    "shared_down must have shape (64, 48)": lambda p: p.routed.with_shared(
        p.shared_up, p.shared_down[:, 8:], limit=LIMIT
    ),
    "gate_up_bias must be None": lambda p: replace(p.routed, gate_up_bias=p.up[:, :, 0]).with_shared(
        p.shared_up, p.shared_down, limit=LIMIT
    ),
    "down_bias must be None": lambda p: replace(p.routed, down_bias=p.down[:, :, 0]).with_shared(
        p.shared_up, p.shared_down, limit=LIMIT
    ),
    "expert_map must be None": lambda p: replace(p.routed, expert_map=torch.arange(E)).with_shared(
        p.shared_up, p.shared_down, limit=LIMIT
    ),
    "experts must be 8 and 1 shared ones": lambda p: p.layer(plan_of(), experts=p.routed),
    "shared_experts must be empty": lambda p: p.layer(plan_of(), shared_experts=(p.shared,)),
    "shared_gate must be None": lambda p: p.layer(plan_of(), shared_gate=p.shared),
    "tail must have routed_scale 1": lambda p: p.layer(plan_of(), TailSpec(routed_scale=2.0)),
    "shared_slots must be as many as the plan has for the layer, 2": lambda p: p.layer(plan_of(slots=2)),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input(sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}.*, got "):
        BAD[sentence](Parts())


def test_no_add_writes_an_out():
    parts, x = Parts(), hidden_of(5)
    with pytest.raises(ValueError, match="^out must be None where no add of shared experts writes it, got a tensor"):
        parts.layer(plan_of(can_stop=False))(x, out=torch.empty_like(x))


OF_8 = SharedSlots.of(E, 2, torch.device("cpu"))
WEIGHTS, IDS = torch.zeros(5, K), torch.zeros(5, K, dtype=torch.int32)
BAD_ROUTING = {
    "weights must be [T, K], got shape (15,)": (WEIGHTS.flatten(), IDS),
    "ids must be [T, K], got shape (1, 5, 3)": (WEIGHTS, IDS[None]),
    "weights must have ids' shape (5, 3), got (5, 2)": (WEIGHTS[:, :2], IDS),
    "weights must be of a floating-point dtype, got torch.int32": (IDS, IDS),
    "ids must be int32 or int64, got torch.float32": (WEIGHTS, WEIGHTS),
    "ids must be int32 or int64, got torch.int8": (WEIGHTS, IDS.to(torch.int8)),
    "weights must be on the slots' device cpu, got meta": (WEIGHTS.to("meta"), IDS),
    "ids must be on the slots' device cpu, got meta": (WEIGHTS, IDS.to("meta")),
}


@pytest.mark.parametrize("sentence", BAD_ROUTING)
def test_bad_routing(sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        OF_8(*BAD_ROUTING[sentence])


BAD_WEIGHTS = {
    "gate_up_proj must be [E, 2*I, H], got shape (96, 64)": lambda p: (p.up[0], p.down, p.shared_up, p.shared_down),
    "down_proj must be [E, H, I], got shape (64, 48)": lambda p: (p.up, p.down[0], p.shared_up, p.shared_down),
    "shared_gate_up must be [2*n*I, H], got shape (1, 96, 64)": lambda p: (
        p.up, p.down, p.shared_up[None], p.shared_down),
    "shared_down must be [H, n*I], got shape (3072,)": lambda p: (p.up, p.down, p.shared_up, p.shared_down.flatten()),
    "gate_up_proj must be [E, 2*I, H], got shape (8, 95, 64), 2*I=95": lambda p: (
        p.up[:, 1:], p.down, p.shared_up, p.shared_down),
    "gate_up_proj must be [E, 2*I, H], got shape (8, 0, 64), 2*I=0": lambda p: (
        p.up[:, :0], p.down, p.shared_up, p.shared_down),
    "down_proj must have shape (8, 64, 48), got (7, 64, 48)": lambda p: (
        p.up, p.down[1:], p.shared_up, p.shared_down),
    "down_proj must have shape (8, 64, 48), got (8, 48, 64)": lambda p: (
        p.up, p.down.transpose(1, 2), p.shared_up, p.shared_down),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD_WEIGHTS)
def test_bad_weights(sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        join_weights(*BAD_WEIGHTS[sentence](Parts()))


def test_formats_that_differ():
    p = Parts()
    for up, down, name in (
        (p.shared_up.half(), p.shared_down, "shared_gate_up"),
        (p.shared_up.to("meta"), p.shared_down, "shared_gate_up"),
        (p.shared_up[:0], p.shared_down[:, :0], "shared_gate_up"),
        (p.shared_up, p.shared_down.float(), "shared_down"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} must .*, got "):
            join_weights(p.up, p.down, up, down)


def test_a_plan_with_slots_needs_a_layer_with_them():
    parts = Parts()
    with pytest.raises(ValueError, match="^shared_slots must be as many as the plan has for the layer, 1, got 0"):
        MoELayer(parts.router, parts.routed, (parts.shared,), plan=plan_of(), index=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [GroupedMMExperts, TritonExperts])
def test_a_captured_layer_on_a_gpu(backend):
    """No host sync, and a replay that reads other tokens has their bits."""
    parts, x, other = Parts("cuda", backend=backend), hidden_of(13, "cuda"), hidden_of(13, "cuda").flip(0)
    layer = parts.layer(plan_of())
    want = [layer(x), layer(other)]
    with guards.no_jit("error"), guards.no_host_sync("error"):
        layer(x)
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = layer(held)
    for source, expected in zip((x, other), want, strict=True):
        held.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected)
