"""Experts: both backends against plain loops, with and without experts of other ranks, and under MoELayer."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moetail
from moetail import GroupedMMExperts, MoELayer, TailSpec, TritonExperts, UnfinalizedMoEOutput, experts, tuning
from moetail.integrations.transformers import expert_rows
from moetail.plan import LayerFacts, Place, WorldFacts, plan_tails
from moetail.testing import assert_same_bits

T, K, E, H, INNER = 13, 3, 7, 64, 48
BF16 = torch.bfloat16
BACKENDS = pytest.mark.parametrize("backend", [GroupedMMExperts, TritonExperts])


class Call:
    """Random experts and one call of them."""

    def __init__(self, T=T, K=K, E=E, device="cpu", bias=False, scale=1.0):
        g = torch.Generator().manual_seed(3)

        def numbers(*shape, scale=1.0):
            return (torch.randn(*shape, generator=g) * scale).to(BF16).to(device)

        self.hidden = numbers(T, H, scale=scale)
        self.up, self.down = numbers(E, 2 * INNER, H, scale=H**-0.5), numbers(E, H, INNER, scale=INNER**-0.5)
        self.biases = {"gate_up_bias": numbers(E, 2 * INNER), "down_bias": numbers(E, H)} if bias else {}
        self.ids = torch.rand(T, E, generator=g).argsort(1)[:, :K].int().to(device)
        self.weights = torch.rand(T, K, generator=g).to(device)

    def __call__(self, backend, **kwargs):
        return backend(self.up, self.down, **self.biases, **kwargs)(self.hidden, self.ids, self.weights)

    def slots(self, limit=None):
        """(fp64 rows of the slots [T*K, H], how far bf16 roundings on the way may move them).

        A rounding to bf16 moves a number by 2**-8 of itself at most. A product and its biased sum may each be rounded,
        silu and silu * up too; |silu'| < 1.1, and clamping moves no two numbers apart. What errors do to errors, and
        fp32 sums of at most 64 numbers (2**-18 of their absolute sum), is less than 5 % of that.
        """
        e = self.ids.flatten().long()
        x = self.hidden.double()[torch.arange(len(e), device=e.device) // self.ids.shape[1]]
        product = torch.einsum("rh,rnh->rn", x, self.up.double()[e])
        y = product + self.biases["gate_up_bias"].double()[e] if self.biases else product
        (gate, up), (dg, du) = y.chunk(2, -1), (2**-8 * (product.abs() + y.abs())).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        silu = gate / (1 + torch.exp(-gate))
        h = silu * up
        dh = 1.1 * dg * up.abs() + silu.abs() * du + 2 * 2**-8 * h.abs()
        down = self.down.double()[e]
        product = torch.einsum("ri,rhi->rh", h, down)
        rows = product + self.biases["down_bias"].double()[e] if self.biases else product
        error = torch.einsum("ri,rhi->rh", dh, down.abs()) + 2**-8 * (product.abs() + rows.abs())
        return rows, 1.05 * error


def check(call, out, limit=None, present=None):
    want, bound = call.slots(limit)
    assert isinstance(out, UnfinalizedMoEOutput) and out.weights is call.weights
    slots = out.row_map.flatten().long()
    present = torch.ones_like(slots, dtype=torch.bool) if present is None else present.flatten()
    assert torch.equal(slots >= 0, present)
    got = out.rows[slots[present]].double()
    wrong = ~((got - want[present]).abs() <= bound[present])
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outside the bound"


@BACKENDS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [({}, {}), ({"T": 1}, {}), ({"K": 1, "E": 1}, {}), ({"bias": True}, {}), ({"scale": 9.0}, {"limit": 4.0}),
     ({"T": 200}, {})],
    ids=["plain", "one-token", "one-expert", "bias", "clamp", "200-tokens"],
)  # fmt: skip
def test_against_loops(backend, device, shape, kind):
    call = Call(device=device, **shape)
    check(call, call(backend, **kind), **kind)


@BACKENDS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens(backend, device):
    out = Call(T=0, device=device)(backend)
    assert out.num_tokens == 0 and out.finalize(None, TailSpec()).shape == (0, H)


@BACKENDS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_of_other_ranks(backend, device):
    """Two ranks with an expert map each: every slot has a row on one of them, and the parts add up."""
    call = Call(device=device)
    owner = torch.tensor([0, 1, 1, 0, 0, 1, 0], device=device)
    parts = []
    for rank in range(2):
        mine = (owner == rank).nonzero().flatten()
        expert_map = torch.full((E,), -1, device=device)
        expert_map[mine] = torch.arange(len(mine), device=device)
        out = backend(call.up[mine], call.down[mine], expert_map=expert_map)(call.hidden, call.ids, call.weights)
        check(call, out, present=owner[call.ids.long()] == rank)
        parts.append(out.finalize(None, TailSpec()).double())
    rows, bound = call.slots()
    weights = call.weights.double().flatten()[:, None]
    want, most = ((r * weights).view(T, K, H).sum(1) for r in (rows, bound))
    assert ((parts[0] + parts[1] - want).abs() <= most + 2**-7 * sum(p.abs() for p in parts)).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_grouped_mm_has_the_bits_of_transformers(bias, device):
    call = Call(T=50, bias=bias, device=device)
    stock = SimpleNamespace(
        num_experts=E, has_bias=bias, has_gate=True, is_transposed=False, gate_up_proj=call.up, down_proj=call.down,
        gate_up_proj_bias=call.biases.get("gate_up_bias"), down_proj_bias=call.biases.get("down_bias"),
        _apply_gate=lambda y: torch.nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    )  # fmt: skip
    want = expert_rows(stock, call.hidden, call.ids, call.weights)
    got = call(GroupedMMExperts)
    assert_same_bits(got.rows[got.row_map.flatten()], want.rows[want.row_map.flatten()])


def plan_of(tp=1, **facts):
    first = LayerFacts(**{"index": 0, "can_stop": True, "has_shared_experts": True, **facts})
    return plan_tails(
        [first, LayerFacts(1, can_stop=True, has_shared_experts=True, boundary_max_tokens=64)], WorldFacts(64, tp=tp)
    )


PLANS = {Place.NEXT_LAYER: plan_of(tp=2), Place.MOE_LAYER: plan_of(), Place.EXPERTS: plan_of(can_stop=False)}


def layer_of(call, backend, place):
    shared = (torch.randn(H, H, generator=torch.Generator().manual_seed(8)).to(BF16) * H**-0.5).to(call.hidden.device)
    return MoELayer(
        lambda hidden: (call.weights, call.ids), backend(call.up, call.down), (lambda hidden: hidden @ shared,),
        plan=PLANS[place], index=0,
    )  # fmt: skip


class Asked(TorchDispatchMode):
    """What is asked of the experts' ops: every fact that a tuning key can be made of."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.facts = []
        block_for = experts.block_for
        monkeypatch.setattr(
            experts, "block_for", lambda *facts: self.facts.append(("block_for", *facts)) or block_for(*facts)
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("moetail::permute", "moetail::grouped_gemm", "aten::_grouped_mm"):
            self.facts.append((func.name(), *((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor)
                                              else a for a in args)))  # fmt: skip
        return func(*args, **(kwargs or {}))


@BACKENDS
def test_deferred_and_finalized_calls_ask_for_the_same_configs(backend, monkeypatch):
    call, asked = Call(), {}
    for place in PLANS:
        layer = layer_of(call, backend, place)
        with monkeypatch.context() as patch, Asked(patch) as seen:
            if place is Place.NEXT_LAYER:
                layer.forward_unfinalized(call.hidden).complete()
            else:
                layer(call.hidden)
        asked[place] = seen.facts
    assert len(asked[Place.EXPERTS]) >= 3
    assert asked[Place.NEXT_LAYER] == asked[Place.MOE_LAYER] == asked[Place.EXPERTS]


@pytest.mark.gpu
def test_deferred_and_finalized_calls_look_up_the_same_keys(monkeypatch):
    call, asked = Call(device="cuda"), {}
    real = tuning.tuned
    for place in PLANS:
        layer, seen = layer_of(call, TritonExperts, place), []
        with monkeypatch.context() as patch:
            patch.setattr(
                tuning, "tuned",
                lambda kind, device, shape, source, T, seen=seen: seen.append((shape, source, T))
                or real(kind, device, shape, source, T),
            )  # fmt: skip
            if place is Place.NEXT_LAYER:
                layer.forward_unfinalized(call.hidden).complete()
            else:
                layer(call.hidden)
        asked[place] = [key for key in seen if not key[0].op.startswith("finalize")]
    assert [shape.op for shape, _, _ in asked[Place.EXPERTS]] == ["permute", "grouped_gemm", "grouped_gemm"]
    assert asked[Place.NEXT_LAYER] == asked[Place.MOE_LAYER] == asked[Place.EXPERTS]


@BACKENDS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_tail_has_the_bits_of_experts_finalize_add(backend, device):
    call = Call(device=device)
    assert all(PLANS[place].place(0, T) is place for place in PLANS)
    out = call(backend)
    layers = {place: layer_of(call, backend, place) for place in PLANS}
    shared = layers[Place.EXPERTS].shared_experts[0](call.hidden)
    want = moetail.finalize(out.rows, out.row_map, out.weights) + shared
    assert_same_bits(out.finalize(shared, TailSpec()), want)
    for layer in layers.values():
        assert_same_bits(layer(call.hidden), want)


BAD = {
    "gate-up-odd": ("gate_up_proj", lambda c: TritonExperts(c.up[:, 1:], c.down)),
    "grouped-mm-strides": ("gate_up_proj", lambda c: GroupedMMExperts(c.up[:, 4:-4], c.down[:, :, 4:])),
    "down-shape": ("down_proj", lambda c: TritonExperts(c.up, c.down.transpose(1, 2))),
    "down-dtype": ("down_proj", lambda c: TritonExperts(c.up, c.down.float())),
    "gate-up-bias": ("gate_up_bias", lambda c: TritonExperts(c.up, c.down, c.down[:, 0])),
    "down-bias": ("down_bias", lambda c: TritonExperts(c.up, c.down, None, c.up[:, 0, :3])),
    "gate-up-list": ("gate_up_proj", lambda c: TritonExperts([0.0], c.down)),
    "down-none": ("down_proj", lambda c: GroupedMMExperts(c.up, None)),
    "bias-number": ("gate_up_bias", lambda c: TritonExperts(c.up, c.down, 0.0)),
    "map-list": ("expert_map", lambda c: TritonExperts(c.up, c.down, expert_map=[0, 1])),
    "down-device": ("down_proj", lambda c: TritonExperts(c.up, c.down.to("meta"))),
    "limit-text": ("limit", lambda c: GroupedMMExperts(c.up, c.down, limit="10")),
    "limit-negative": ("limit", lambda c: GroupedMMExperts(c.up, c.down, limit=-1.0)),
    "limit-nan": ("limit", lambda c: TritonExperts(c.up, c.down, limit=float("nan"))),
    "hidden-list": ("hidden", lambda c: GroupedMMExperts(c.up, c.down)([0.0], c.ids, c.weights)),
    "hidden-device": ("hidden", lambda c: GroupedMMExperts(c.up, c.down)(c.hidden.to("meta"), c.ids, c.weights)),
    "ids-device": ("topk_ids", lambda c: TritonExperts(c.up, c.down)(c.hidden, c.ids.to("meta"), c.weights)),
    "weights-device": ("topk_weights", lambda c: TritonExperts(c.up, c.down)(c.hidden, c.ids, c.weights.to("meta"))),
    "weights-dtype": ("topk_weights", lambda c: GroupedMMExperts(c.up, c.down)(c.hidden, c.ids, c.weights.long())),
    "weights-slots": ("topk_weights", lambda c: GroupedMMExperts(c.up, c.down)(c.hidden, c.ids, c.weights[:, 1:])),
    "hidden": ("hidden", lambda c: TritonExperts(c.up, c.down)(c.hidden[:, 1:], c.ids, c.weights)),
    "hidden-dtype": ("hidden", lambda c: GroupedMMExperts(c.up, c.down)(c.hidden.float(), c.ids, c.weights)),
    "ids": ("topk_ids", lambda c: GroupedMMExperts(c.up, c.down)(c.hidden, c.ids[:2], c.weights)),
    "weights": ("topk_weights", lambda c: TritonExperts(c.up, c.down)(c.hidden, c.ids, c.weights[:2])),
}


@pytest.mark.parametrize(("name", "make"), BAD.values(), ids=BAD)
def test_bad_input(name, make):
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        make(Call())
