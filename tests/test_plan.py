"""plan_tails: each reason from the facts that cause it; total; limits only go down; contradictions named."""

from dataclasses import replace

import pytest

from moetail.models import ModelFacts, deepseek_v41_facts
from moetail.plan import (
    Covered,
    LayerFacts,
    Measured,
    Place,
    Plan,
    Range,
    Reason,
    RoutedScale,
    WorldFacts,
    measured,
    plan_tails,
)

NEXT, HERE, EXPERTS = Place.NEXT_LAYER, Place.MOE_LAYER, Place.EXPERTS
WORLD = WorldFacts(max_tokens=100, tp=4)
R = Reason


def model(count=3, at=None, **changes):
    """Layers that pass everything up to 16 tokens on; layer `at` with `changes`."""
    layers = [LayerFacts(i, can_stop=True, has_shared_experts=True, boundary_max_tokens=16) for i in range(count)]
    if at is not None:
        layers[at] = replace(layers[at], **changes)
    return layers


def drafted(count=3):
    return [*model(count), LayerFacts(count, can_stop=True, has_shared_experts=True, is_drafter=True)]


PASSED_ON = [(0, 16, NEXT, R.NEXT_TAKES_IT), (17, 100, HERE, R.ABOVE_LIMIT)]

# name: layers, world, the layer asked, its ranges
TABLE = {
    "next layer": (model(), WORLD, 0, PASSED_ON),
    "next layer takes all": (model(at=1, boundary_max_tokens=500), WORLD, 0, [(0, 100, NEXT, R.NEXT_TAKES_IT)]),
    "the limit is the next layer's": (
        model(at=1, boundary_max_tokens=3), WORLD, 0, [(0, 3, NEXT, R.NEXT_TAKES_IT), (4, 100, HERE, R.ABOVE_LIMIT)],
    ),
    "its own limit is the layer before's": (model(at=1, boundary_max_tokens=3), WORLD, 1, PASSED_ON),
    "next takes none": (model(at=1, boundary_max_tokens=0), WORLD, 0, [(0, 100, HERE, R.NEXT_TAKES_NONE)]),
    "a dense next layer takes it": (
        [model()[0], LayerFacts(1, is_moe=False, boundary_max_tokens=16), replace(model()[2])], WORLD, 0, PASSED_ON,
    ),
    "before Engram": (
        model(at=1, has_engram=True, boundary_max_tokens=0), WORLD, 0, [(0, 100, HERE, R.BEFORE_ENGRAM)],
    ),
    "an Engram layer itself passes on": (model(at=1, has_engram=True, boundary_max_tokens=0), WORLD, 1, PASSED_ON),
    "last of stage": (model(), replace(WORLD, stage_starts=(0, 2)), 1, [(0, 100, HERE, R.LAST_OF_STAGE)]),
    "first of stage passes on": (model(4), replace(WORLD, stage_starts=(0, 2)), 2, PASSED_ON),
    "last of stage, before Engram": (
        model(at=2, has_engram=True, boundary_max_tokens=0), replace(WORLD, stage_starts=(0, 2)), 1,
        [(0, 100, HERE, R.LAST_OF_STAGE)],
    ),
    "last layer": (model(), WORLD, 2, [(0, 100, HERE, R.LAST_LAYER)]),
    "last layer, drafter behind": (drafted(), WORLD, 2, [(0, 100, HERE, R.LAST_LAYER)]),
    "one rank": (model(), replace(WORLD, tp=1), 0, [(0, 100, HERE, R.ONE_RANK)]),
    "one rank, a boundary with more to fuse": (
        model(at=1, alone_max_tokens=9), replace(WORLD, tp=1), 0,
        [(0, 9, NEXT, R.NEXT_TAKES_IT), (10, 100, HERE, R.ABOVE_LIMIT)],
    ),
    "several ranks, a boundary that takes more alone": (model(at=1, alone_max_tokens=99), WORLD, 0, PASSED_ON),
    "one rank, before Engram": (
        model(at=1, has_engram=True, boundary_max_tokens=0), replace(WORLD, tp=1), 0, [(0, 100, HERE, R.BEFORE_ENGRAM)],
    ),
    "one rank, experts cannot stop": (
        model(at=0, can_stop=False), replace(WORLD, tp=1), 0, [(0, 100, EXPERTS, R.CANNOT_STOP)],
    ),
    "drafter": (drafted(), WORLD, 3, [(0, 100, EXPERTS, R.DRAFTER)]),
    "cannot stop": (model(at=0, can_stop=False), WORLD, 0, [(0, 100, EXPERTS, R.CANNOT_STOP)]),
    "LoRA": (model(at=0, lora_on_w2=True), WORLD, 0, [(0, 100, EXPERTS, R.LORA)]),
    "input weights": (model(at=0, weights_on_input=True), WORLD, 0, [(0, 100, EXPERTS, R.INPUT_WEIGHTS)]),
    "no shared": (model(at=0, has_shared_experts=False), WORLD, 0, [(0, 100, EXPERTS, R.NO_SHARED_EXPERTS)]),
    "shared experts as slots": (model(at=0, has_shared_experts=False, shared_slots=1), WORLD, 0, PASSED_ON),
    "scale of the runner": (
        model(at=0, routed_scale=RoutedScale.RUNNER), WORLD, 0, [(0, 100, EXPERTS, R.ROUTED_SCALE)],
    ),
    "scale of the tail": (model(at=0, routed_scale=RoutedScale.TAIL), WORLD, 0, PASSED_ON),
    "padding": (
        model(at=0, hidden_padding=64, padding_is_stride=False), WORLD, 0, [(0, 100, EXPERTS, R.PADDING)],
    ),
    "padding as a stride": (model(at=0, hidden_padding=64), WORLD, 0, PASSED_ON),
    "data parallel": (model(), replace(WORLD, data_parallel=2), 0, [(0, 100, EXPERTS, R.DATA_PARALLEL)]),
    "expert parallel": (model(), replace(WORLD, expert_parallel=4), 0, [(0, 100, EXPERTS, R.EXPERT_PARALLEL)]),
    "sequence parallel": (model(), replace(WORLD, sequence_parallel=4), 0, [(0, 100, EXPERTS, R.SEQUENCE_PARALLEL)]),
    "context parallel": (model(), replace(WORLD, context_parallel=2), 0, [(0, 100, EXPERTS, R.CONTEXT_PARALLEL)]),
    "several launches": (
        model(at=0, experts_max_tokens=64), WORLD, 0,
        [*PASSED_ON[:1], (17, 64, HERE, R.ABOVE_LIMIT), (65, 100, EXPERTS, R.SEVERAL_LAUNCHES)],
    ),
    "several launches just above the limit": (
        [replace(model()[0], experts_max_tokens=64), replace(model()[1], boundary_max_tokens=63)], WORLD, 0,
        [(0, 63, NEXT, R.NEXT_TAKES_IT), (64, 64, HERE, R.ABOVE_LIMIT), (65, 100, EXPERTS, R.SEVERAL_LAUNCHES)],
    ),
    "several launches below the limit": (
        model(at=0, experts_max_tokens=8), WORLD, 0,
        [(0, 8, NEXT, R.NEXT_TAKES_IT), (9, 100, EXPERTS, R.SEVERAL_LAUNCHES)],
    ),
    "measured slower": (
        model(at=0, measured=(Measured(1, 4, False), Measured(8, 20, True))), WORLD, 0,
        [(0, 7, NEXT, R.NEXT_TAKES_IT), (8, 20, EXPERTS, R.MEASURED_SLOWER), (21, 100, HERE, R.ABOVE_LIMIT)],
    ),
    "measured slower from one token, so at none": (
        model(at=0, measured=(Measured(1, 1, True),)), WORLD, 0,
        [(0, 1, EXPERTS, R.MEASURED_SLOWER), (2, 16, NEXT, R.NEXT_TAKES_IT), (17, 100, HERE, R.ABOVE_LIMIT)],
    ),
    "worse coverage": (  # B61, B64
        model(at=0, coverage=(Covered(0, 50, "exact", "bucket"), Covered(51, 300, "heuristic", "bucket"))), WORLD, 0,
        [*PASSED_ON[:1], (17, 50, HERE, R.ABOVE_LIMIT), (51, 100, EXPERTS, R.WORSE_COVERAGE)],
    ),
    "equal coverage": (model(at=0, coverage=(Covered(0, 100, "heuristic", "heuristic"),)), WORLD, 0, PASSED_ON),
    "a measurement overrides coverage": (
        model(at=0, coverage=(Covered(0, 100, "bucket", "exact"),), measured=(Measured(60, 100, False),)), WORLD, 0,
        [(0, 59, EXPERTS, R.WORSE_COVERAGE), (60, 100, HERE, R.ABOVE_LIMIT)],
    ),
    "one call of one token": (model(), replace(WORLD, max_tokens=1), 0, [(0, 1, NEXT, R.NEXT_TAKES_IT)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_each_reason_from_its_facts(name):
    layers, world, layer, want = TABLE[name]
    plan = plan_tails(layers, world)
    assert plan.ranges[layer] == tuple(Range(*row) for row in want)
    for T in range(world.max_tokens + 1):  # exactly one place each
        (row,) = [row for row in want if row[0] <= T <= row[1]]
        assert plan.place(layer, T) is row[2] and plan.range_of(layer, T).reason is row[3]


def test_every_reason_is_reached_and_is_a_sentence():
    reached = {row[3] for *_, want in TABLE.values() for row in want}
    assert reached == set(Reason)
    assert len({reason.value for reason in Reason}) == len(Reason)
    shown = str(plan_tails(model(), replace(WORLD, stage_starts=(0, 2))).ranges[1][0])
    assert shown == "0-100 tokens: finalized here (last local layer of the pipeline stage)"


@pytest.mark.parametrize("name", TABLE)
def test_a_limit_only_goes_down(name):
    layers, world, layer, _ = TABLE[name]
    plan = plan_tails(layers, world)

    def passed_on(plan):
        return {T for T in range(world.max_tokens + 1) if plan.place(layer, T) is NEXT}

    assert plan.lowered(layer, 10_000) == plan
    lowered = plan.lowered(layer, 5)
    assert passed_on(lowered) == {T for T in passed_on(plan) if T <= 5}
    assert lowered.lowered(layer, 16) == lowered
    others = [i for i, ranges in enumerate(plan.ranges) if i != layer and ranges]
    assert [lowered.ranges[i] for i in others] == [plan.ranges[i] for i in others]  # the limit is one layer's
    kept = {T for T in range(world.max_tokens + 1) if plan.place(layer, T) is EXPERTS}
    assert kept == {T for T in range(world.max_tokens + 1) if plan.lowered(layer, 0).place(layer, T) is EXPERTS}
    assert passed_on(plan.lowered(layer, 0)) <= {0} and not passed_on(plan.lowered(layer, 0))


def test_what_a_plan_is_not_made_for():
    plan = plan_tails([model()[0], LayerFacts(1, is_moe=False), replace(model()[2])], WORLD)
    for tokens in (101, -1, 1.0, True):
        with pytest.raises(ValueError, match="^num_tokens must be from 0 to the plan's 100"):
            plan.place(0, tokens)
    for layer in (1, 3, -1, "0"):
        with pytest.raises(ValueError, match="^layer must be a MoE layer"):
            plan.place(layer, 1)
    with pytest.raises(ValueError, match="^next_layer_max_tokens must"):
        plan.lowered(0, -1)
    assert plan.ranges[1] == ()


BAD_LAYERS = {
    "tp_group must be the same in every layer, got 'a' from layer 0, 'b' from layer 2": [
        replace(layer, tp_group="b" if layer.index == 2 else "a") for layer in model()
    ],
    "layers must have a MoE layer, got 1": [LayerFacts(0, is_moe=False)],
    "index must count from 0": model()[1:],
    "is_drafter must hold for the last layers only": [
        LayerFacts(0, is_drafter=True), replace(model()[1]), replace(model()[2]),
    ],
    "can_stop must be False in layer 1, which has no experts": model(at=1, is_moe=False),
    "measured must be () in layer 1, which has no experts": [
        model()[0], LayerFacts(1, is_moe=False, measured=(Measured(1, 2, True),)),
    ],
    "boundary_max_tokens must be 0 in layer 1, which reads the finished state (has_engram), got 16": model(
        at=1, has_engram=True
    ),
    "boundary_max_tokens must be 0 in layer 2, which reads the finished state (is_drafter), got 16": model(
        at=2, is_drafter=True
    ),
    "shared_slots must be 0 in layer 1, which adds its shared experts, got 2": model(at=1, shared_slots=2),
    "shared_slots must be 0 or more in layer 1, got -1": model(at=1, has_shared_experts=False, shared_slots=-1),
    "boundary_max_tokens must be 0 or more in layer 1, got -1": model(at=1, boundary_max_tokens=-1),
    "hidden_padding must be 0 or more in layer 0": model(at=0, hidden_padding=-8),
    "experts_max_tokens must be 1 or more, or None, in layer 0, got 0": model(at=0, experts_max_tokens=0),
    "measured must have 0 <= min_T <= max_T in layer 0, got 9 to 8": model(at=0, measured=(Measured(9, 8, True),)),
    "measured must not say two things of one T in layer 0, got 1 to 8 and 8 to 9": model(
        at=0, measured=(Measured(8, 9, False), Measured(1, 8, True))
    ),
    "coverage must not say two things of one T": model(
        at=0, coverage=(Covered(1, 8, "exact", "exact"), Covered(2, 3, "bucket", "exact"))
    ),
    "coverage must be one of stale, heuristic, bucket, exact in layer 0, got 'fuzzy'": model(
        at=0, coverage=(Covered(1, 8, "exact", "fuzzy"),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD_LAYERS)
def test_contradictory_facts_are_named(sentence):
    with pytest.raises(ValueError) as caught:
        plan_tails(BAD_LAYERS[sentence], WORLD)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("tp", 0), ("tp", True), ("data_parallel", -1), ("expert_parallel", 0),
     ("context_parallel", 0), ("sequence_parallel", 2), ("stage_starts", ()), ("stage_starts", (1,)),
     ("stage_starts", (0, 2, 1)), ("stage_starts", (0, 3)), ("stage_starts", (0, 0))],
)  # fmt: skip
def test_the_world_is_checked(name, value):
    with pytest.raises(ValueError, match=f"^{name} must"):
        plan_tails(model(), replace(WORLD, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_moe", 1), ("can_stop", None), ("has_shared_experts", "yes"), ("routed_scale", "weights"), ("tp_group", 0),
     ("measured", None), ("measured", ((1, 8, True),)), ("coverage", [1]), ("index", "0"), ("index", True)],
)  # fmt: skip
def test_facts_of_another_kind_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        plan_tails([replace(model()[0], **{name: value})], WORLD)


@pytest.mark.parametrize(
    ("layers", "world", "name"),
    [(None, WORLD, "layers"), (["x"], WORLD, "layers"), (5, WORLD, "layers"), (model(), None, "world"),
     (model(), 100, "world"), (model(), replace(WORLD, stage_starts=0), "stage_starts"),
     (model(), replace(WORLD, stage_starts=("0",)), "stage_starts")],
)  # fmt: skip
def test_what_is_no_fact_is_refused(layers, world, name):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        plan_tails(layers, world)


def test_a_drafter_may_have_its_own_group():
    layers = drafted()
    layers[3] = replace(layers[3], tp_group="draft")
    assert plan_tails(layers, WORLD).place(0, 1) is NEXT
    with pytest.raises(ValueError, match="^stage_starts"):  # a stage of a drafter alone
        plan_tails(layers, replace(WORLD, stage_starts=(0, 3)))


def test_what_a_gate_measured():
    assert measured({}) == ()
    slower = measured({8: True, 1: False, 32: False})
    assert slower == (Measured(1, 1, False), Measured(2, 8, True), Measured(9, 32, False))
    plan = plan_tails(model(at=0, measured=slower), WORLD)
    assert [plan.place(0, T) for T in (1, 2, 8, 9, 16)] == [NEXT, EXPERTS, EXPERTS, NEXT, NEXT]
    with pytest.raises(ValueError, match="^slower must be of calls of 1 token or more, got 0"):
        measured({0: True})


def test_a_lowered_limit_is_one_ranks_too():
    plan = plan_tails(model(at=1, alone_max_tokens=9), replace(WORLD, tp=1))
    assert [plan.lowered(0, 4).place(0, T) for T in (4, 5)] == [NEXT, HERE]


def test_deepseek_v41():
    facts = deepseek_v41_facts.facts()
    plan = plan_tails(facts.layers, WorldFacts(8192, tp=4, stage_starts=facts.stage_starts(2)))
    assert len(facts.layers) == 41 and all(layer.is_moe for layer in facts.layers)
    not_passed_on = {i: plan.range_of(i, 256).reason for i in range(41) if plan.place(i, 256) is not NEXT}
    assert not_passed_on == {
        0: R.BEFORE_ENGRAM, 13: R.BEFORE_ENGRAM, 19: R.LAST_OF_STAGE, 39: R.LAST_LAYER, 40: R.DRAFTER,
    }  # fmt: skip
    assert {plan.place(i, 257) for i in range(40)} == {HERE}
    assert [(first, last) for first, last, _ in plan.folded()] == [
        (0, 0), (1, 12), (13, 13), (14, 18), (19, 19), (20, 38), (39, 39), (40, 40),
    ]  # fmt: skip
    one = plan_tails(facts.layers, WorldFacts(8192))
    for T in (0, 1, 8192):  # the streams are worth fusing with on one rank too
        assert [i for i in range(40) if one.place(i, T) is not NEXT] == [0, 13, 39]
    with pytest.raises(ValueError, match="^pp must cut deepseek-v4.1-flash at layers 1, 2, 8, 14, 20 only, got 4"):
        facts.stage_starts(4)


def test_stages_of_equal_length():
    facts = ModelFacts("m", tuple(model(7)), K=2, H=8)
    assert facts.stage_starts(1) == (0,) and facts.stage_starts(3) == (0, 2, 4)
    assert facts.stage_starts(7) == tuple(range(7))
    assert ModelFacts("m", tuple(drafted(7)), K=2, H=8).stage_starts(3) == (0, 2, 4)  # the drafter is no stage
    for pp in (0, 8):
        with pytest.raises(ValueError, match="^pp must be from 1 to the 7 layers"):
            facts.stage_starts(pp)


def test_a_plan_is_a_value():
    assert plan_tails(model(), WORLD) == plan_tails(model(), WORLD)
    assert isinstance(hash(plan_tails(model(), WORLD)), int)
    assert isinstance(plan_tails(iter(model()), WORLD), Plan)
