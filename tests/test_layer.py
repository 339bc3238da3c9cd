"""MoELayer: the same bits in every place of the plan, on one rank and on several, and what it refuses."""

import pytest
import torch
from ranks import Ranks

from moetail import MoEOutput, Numerics, UnfinalizedMoEOutput, Workspace, reference
from moetail.contract import TailSpec, completed
from moetail.layer import MoELayer
from moetail.plan import LayerFacts, Place, WorldFacts, plan_tails
from moetail.testing import assert_same_bits

H, INNER, E, K = 64, 32, 8, 3
MAX_TOKENS = 40


class Parts:
    """A router, experts and shared experts with random weights; `rank`'s own, as tensor parallelism would cut them."""

    def __init__(self, rank=0):
        g = torch.Generator().manual_seed(7)
        self.gate = torch.randn(H, E, generator=g)
        g.manual_seed(100 + rank)
        self.up = torch.randn(E, H, INNER, generator=g).bfloat16() * 0.2
        self.down = torch.randn(E, INNER, H, generator=g).bfloat16() * 0.2
        self.mlps = [torch.randn(H, H, generator=g).bfloat16() * 0.2 for _ in range(2)]
        self.gate_logits = torch.randn(H, 1, generator=g).bfloat16()
        self.launches = []

    def router(self, hidden):
        weights, ids = torch.topk((hidden.float() @ self.gate).softmax(-1), K)
        return weights, ids

    def experts(self, hidden, topk_ids, topk_weights):
        """Sorted by expert, with two padding rows that nobody may read."""
        self.launches.append(hidden.shape[0])
        order = topk_ids.reshape(-1).argsort(stable=True)
        row_map = torch.empty_like(order)
        row_map[order] = torch.arange(order.numel())
        x = hidden[order // K]
        rows = torch.full((order.numel() + 2, H), float("nan"), dtype=hidden.dtype)
        for e in range(E):
            mine = topk_ids.reshape(-1)[order] == e
            rows[:-2][mine] = torch.relu(x[mine] @ self.up[e]) @ self.down[e]
        return UnfinalizedMoEOutput(rows, row_map.view_as(topk_ids), topk_weights)

    def shared(self, count):
        return tuple(lambda hidden, w=w: hidden @ w for w in self.mlps[:count])

    def layer(self, plan, tail=None, shared=1, gated=False):
        gate = (lambda hidden: hidden @ self.gate_logits) if gated else None
        return MoELayer(
            self.router, self.experts, self.shared(shared), plan=plan, index=0, tail=tail or TailSpec(),
            shared_gate=gate,
        )  # fmt: skip

    def by_hand(self, hidden, shared=1, gated=False, numerics=Numerics.TRTLLM, scale=1.0):
        """This rank's finished part: what the layer returns on one rank."""
        weights, ids = self.router(hidden)
        routed = self.experts(hidden, ids, weights)
        added = None
        for mlp in self.shared(shared):
            added = mlp(hidden) if added is None else added + mlp(hidden)
        if gated:
            added = torch.sigmoid(hidden @ self.gate_logits) * added
        return reference.finalize(routed.rows, routed.row_map, weights, added, routed_scale=scale, numerics=numerics)


def plan_of(tp=1, boundary=16, **facts):
    """Two layers: calls of up to `boundary` tokens may go into the second."""
    first = LayerFacts(**{"index": 0, "can_stop": True, "has_shared_experts": True, **facts})
    second = LayerFacts(1, can_stop=True, has_shared_experts=True, boundary_max_tokens=boundary)
    return plan_tails([first, second], WorldFacts(MAX_TOKENS, tp=tp))


def hidden_of(T):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(T)).bfloat16()


PLANS = {
    Place.NEXT_LAYER: plan_of(tp=2),
    Place.MOE_LAYER: plan_of(),
    Place.EXPERTS: plan_of(can_stop=False),
}


@pytest.mark.parametrize("place", PLANS, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "kind", [{}, {"shared": 2}, {"gated": True}, {"scale": 2.5}], ids=["plain", "two-shared", "gated", "scaled"]
)
def test_the_same_bits_in_every_place(place, kind):
    parts, x = Parts(), hidden_of(11)
    scale = kind.get("scale", 1.0)
    layer = parts.layer(
        PLANS[place], TailSpec(routed_scale=scale), shared=kind.get("shared", 1), gated=kind.get("gated", False)
    )
    assert PLANS[place].place(0, 11) is place
    assert_same_bits(layer(x), parts.by_hand(x, **kind))
    if place is Place.NEXT_LAYER:
        out = layer.forward_unfinalized(x)
        assert isinstance(out, MoEOutput)
        assert_same_bits(completed(out), layer(x))


def test_without_shared_experts():
    parts, x = Parts(), hidden_of(5)
    layer = parts.layer(plan_of(has_shared_experts=False), shared=0)
    assert layer.plan.place(0, 5) is Place.EXPERTS
    assert_same_bits(layer(x), parts.by_hand(x, shared=0))


def test_experts_that_need_several_launches():
    parts, x = Parts(), hidden_of(30)
    layer = parts.layer(plan_of(experts_max_tokens=8))
    assert layer.plan.place(0, 30) is Place.EXPERTS and layer.plan.place(0, 8) is Place.MOE_LAYER
    got = layer(x)
    assert parts.launches == [8, 8, 8, 6]
    assert_same_bits(got, parts.by_hand(x))
    parts.launches.clear()
    layer(x[:8])
    assert parts.launches == [8]


def test_an_empty_call():
    parts = Parts()
    for plan in PLANS.values():
        assert parts.layer(plan)(hidden_of(0)).shape == (0, H)


def test_the_limit_only_goes_down():
    layer = Parts().layer(plan_of(tp=2))
    assert [layer.finalizes_in_next_layer(T) for T in (1, 16, 17)] == [True, True, False]
    layer.defer_finalize(4)
    layer.defer_finalize(8)
    assert [layer.finalizes_in_next_layer(T) for T in (1, 4, 5, 16)] == [True, True, False, False]
    with pytest.raises(ValueError, match="^hidden must have a number of tokens that the next layer finalizes, got 5"):
        layer.forward_unfinalized(hidden_of(5))
    with pytest.raises(ValueError, match="^num_tokens must be from 0 to the plan's 40, got 41"):
        layer(hidden_of(41))


def test_numerics_that_round_once_cannot_be_added_separately():
    tail = TailSpec(Numerics.SINGLE_ROUNDING)
    with pytest.raises(ValueError, match="^tail must have numerics that round twice"):
        Parts().layer(PLANS[Place.EXPERTS], tail)
    parts, x = Parts(), hidden_of(9)
    assert_same_bits(parts.layer(PLANS[Place.MOE_LAYER], tail)(x), parts.by_hand(x, numerics=Numerics.SINGLE_ROUNDING))


def test_where_the_part_is_written():
    parts, x, out = Parts(), hidden_of(5), torch.full((5, H), 9.0).bfloat16()
    got = parts.layer(PLANS[Place.EXPERTS])(x, out=out)
    assert got is out
    assert_same_bits(out, parts.by_hand(x))
    with pytest.raises(ValueError, match="^out must be None where one op finishes the call, got a tensor: 0-40 tokens"):
        parts.layer(PLANS[Place.MOE_LAYER])(x, out=out)


def test_modules_are_registered():
    mlp = torch.nn.Linear(H, H, bias=False, dtype=torch.bfloat16)
    parts = Parts()
    layer = MoELayer(parts.router, parts.experts, (mlp,), plan=plan_of(), index=0)
    assert [name for name, _ in layer.named_parameters()] == ["shared_expert_0.weight"]
    with pytest.raises(ValueError, match="^index must be that of a MoE layer of the plan, got 5"):
        MoELayer(parts.router, parts.experts, plan=plan_of(), index=5)


BAD_PARTS = {
    "router must be a module or a function": {"router": "softmax"},
    "experts must be a module or a function": {"experts": None},
    "shared_gate must be a module or a function": {"shared_gate": 1.0},
    "shared_experts must be a tuple of modules or functions": {"shared_experts": "mlp"},
    "shared_experts must be a tuple of modules or functions, got [None]": {"shared_experts": [None]},
    "plan must be what moetail.plan_tails returns": {"plan": [0]},
    "index must be that of a MoE layer of the plan": {"index": None},
    "tail must be a moetail.TailSpec or None": {"tail": Numerics.TRTLLM},
    "shared_slots must be a moetail.SharedSlots or None": {"shared_slots": 1},
    "shared_stream must be a torch.cuda.Stream or None": {"shared_stream": 0},
}


@pytest.mark.parametrize("sentence", BAD_PARTS)
def test_bad_parts(sentence):
    parts = Parts()
    good = {"router": parts.router, "experts": parts.experts, "plan": plan_of(), "index": 0}
    with pytest.raises(ValueError) as caught:
        MoELayer(**(good | BAD_PARTS[sentence]))
    assert str(caught.value).startswith(sentence) and ", got " in str(caught.value)


@pytest.mark.parametrize("hidden", [None, "x", torch.zeros(H), torch.zeros(1, 4, H)], ids=["None", "str", "1d", "3d"])
def test_bad_hidden(hidden):
    layer = Parts().layer(plan_of())
    for call in (layer, layer.forward_unfinalized):
        with pytest.raises(ValueError, match=r"^hidden must be a tensor \[T, H\], got (NoneType|str|shape \()"):
            call(hidden)


def every_place(group):
    """On one rank of a group: each place's output for several sizes, and this rank's part."""
    W = group.size()
    parts = Parts(group.rank())
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=torch.device("cpu"))
    tail = TailSpec(workspace=workspace)
    plans = (plan_of(tp=W), plan_of(tp=W, boundary=0), plan_of(tp=W, can_stop=False))
    results = []
    for T in (1, 16, 33, 0, 7):
        x = hidden_of(T)
        outs = [parts.layer(plan, tail)(x) for plan in plans]
        layer = parts.layer(plans[0], tail)
        if layer.finalizes_in_next_layer(T):
            outs.append(layer.forward_unfinalized(x).complete())
        results.append((outs, parts.by_hand(x)))
    workspace.destroy()
    return results


@pytest.mark.parametrize("W", [2, 3])
def test_tensor_parallel(W):
    with Ranks(W) as ranks:
        for of_rank in zip(*ranks.run(every_place), strict=True):
            want = reference.all_reduce([part for _, part in of_rank])
            for outs, _ in of_rank:
                for out in outs:
                    assert_same_bits(out, want)


@pytest.mark.gpu
def test_a_side_stream_on_a_gpu():  # B39, B51
    """Shared experts beside the routed ones, memory given back early and taken again: one output, also captured."""

    class OnGpu(Parts):
        def __init__(self):
            super().__init__()
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(self, name, value.cuda())
            self.mlps = [w.cuda() for w in self.mlps]

        def experts(self, hidden, topk_ids, topk_weights):
            order = topk_ids.reshape(-1).argsort(stable=True)
            row_map = torch.empty_like(order)
            row_map[order] = torch.arange(order.numel(), device="cuda")
            x, e = hidden[order // K], topk_ids.reshape(-1)[order]
            rows = torch.relu(x.unsqueeze(1) @ self.up[e]) @ self.down[e]
            return UnfinalizedMoEOutput(rows.squeeze(1), row_map.view_as(topk_ids), topk_weights)

    parts, x = OnGpu(), hidden_of(33).cuda()
    side = torch.cuda.Stream()
    shared = (lambda hidden: (torch.cuda._sleep(200_000), hidden @ parts.mlps[0])[1],)
    layer = MoELayer(parts.router, parts.experts, shared, plan=plan_of(), index=0, shared_stream=side)
    want = layer(x)
    for _ in range(100):
        got = layer(x)
        torch.full_like(want, 93.0)  # takes whatever memory was given away
        assert_same_bits(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, want)
