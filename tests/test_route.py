"""route: the transformers routers' selection and bits, an independent oracle, ties, masks, NaN, and the contract.

`run` is one implementation: the dispatcher's on a CPU, Triton's kernel in the interpreter, the dispatcher's on a GPU.
The interpreter's exp is numpy's, not torch's: there the ids are the reference's, and the bits an oracle's that uses
numpy's exp too. On a CPU and on a GPU the bits are the reference's.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moetail
from moetail import Router, reference
from moetail.testing import assert_same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


class Implementation:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def __call__(self, logits, router, correction_bias=None):
        if self.name != "interpreter":
            return moetail.route(logits, router, correction_bias)
        from moetail.ops import route_triton

        T, K = logits.shape[0], router.top_k
        weights, ids = torch.full((T, K), NAN), torch.full((T, K), -7, dtype=torch.int32)
        route_triton.launch(logits, correction_bias, router, weights, ids)
        return weights, ids

    def check(self, logits, router, correction_bias=None):
        weights, ids = self(logits, router, correction_bias)
        want_weights, want_ids = reference.route(logits, router, correction_bias)
        assert_same_bits(ids, want_ids)
        if self.name == "interpreter":
            torch.testing.assert_close(weights, want_weights, rtol=5e-7, atol=0, equal_nan=True)  # 4 ulp: exp's
        else:
            assert_same_bits(weights, want_weights)
        return weights, ids


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Implementation(request.param, "cuda" if request.param == "cuda" else "cpu")


def inputs(T, E, device="cpu", dtype=F32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(T, E, generator=g) * 2).to(dtype).to(device), (torch.randn(E, generator=g) / 8).to(device)


ROUTERS = {
    "deepseek-v3": (256, Router.DEEPSEEK_V3, True),
    "deepseek-v4": (384, Router.DEEPSEEK_V4, True),
    "ernie": (64, Router.ERNIE4_5, True),
    "glm4": (128, Router.GLM4_MOE, True),
    "gpt-oss": (128, Router.GPT_OSS, False),
    "mixtral": (8, Router.MIXTRAL, False),
    "qwen2": (60, Router.QWEN2_MOE, False),
    "qwen3": (128, Router.QWEN3_MOE, False),
    "odd-groups": (15, Router(4, "sigmoid", True, num_groups=5, top_groups=3, routed_scale=0.7), True),
    "odd-groups-of-odd-size": (21, Router(5, "softmax", num_groups=3, top_groups=2), True),
    "largest": (1024, Router(32, "softmax", True), False),
    "large-and-odd": (1000, Router(31, "sqrtsoftplus", True, routed_scale=1.5), True),
    "every-expert": (5, Router(5, "softmax_topk"), True),
    "one-of-one": (1, Router(1, "softmax"), False),
    "top-1": (40, Router(1, "sigmoid", routed_scale=2.0), False),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_reference(run, name, dtype):
    E, router, biased = ROUTERS[name]
    logits, bias = inputs(5, E, run.device, dtype)
    run.check(logits, router, bias if biased else None)


def oracle(logits, router, bias):
    """One token by hand, in numpy: the kernel's orders of addition, and numpy's exp."""

    def fold(values):
        values = list(values) + [np.float32(0)] * (2 ** math.ceil(math.log2(len(values))) - len(values))
        while len(values) > 1:
            half = len(values) // 2
            values = [values[i] + values[i + half] for i in range(half)]
        return values[0]

    def softmax(x):
        e, lanes = np.exp(x - x.max()), [np.float32(0)] * 32
        for i, value in enumerate(e):
            lanes[i % 32] += value
        return e / fold(lanes)

    x = logits.astype(np.float32)
    scores = {
        "softmax": softmax,
        "softmax_topk": lambda x: x,
        "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
        "sqrtsoftplus": lambda x: np.sqrt(np.float32([v if v > 20 else math.log1p(math.exp(v)) for v in x.tolist()])),
    }[router.score](x)
    choice = [s + b for s, b in zip(scores, bias, strict=True)] if bias is not None else list(scores)
    size = len(x) // router.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(router.num_groups)]
    if router.top_groups < router.num_groups:
        best = sorted(range(len(groups)), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))[: router.top_groups]
    else:
        best = range(len(groups))
    ids = sorted((i for i in range(len(x)) if i // size in best), key=lambda i: (-choice[i], i))[: router.top_k]
    weights = scores[ids]
    if router.score == "softmax_topk":
        weights = softmax(weights)
    if router.renormalize:
        weights = weights / (fold(weights) + np.float32(1e-20))
    return weights * np.float32(router.routed_scale), ids


@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernels_bits(name):
    """Exact in the interpreter: what differs on a GPU is exp and log1p alone."""
    E, router, biased = ROUTERS[name]
    logits, bias = inputs(6, E, seed=1)
    bias = bias if biased else None
    weights, ids = Implementation("interpreter", "cpu")(logits, router, bias)
    rows = [oracle(row, router, None if bias is None else bias.numpy()) for row in logits.numpy()]
    assert ids.tolist() == [row[1] for row in rows]
    assert_same_bits(weights, torch.tensor(np.stack([row[0] for row in rows])))


# --- the routers of transformers


def config(E, K, **facts):
    defaults = {"hidden_size": 48, "num_local_experts": E, "num_experts": E, "num_experts_per_tok": K,
                "scoring_func": "sqrtsoftplus", "moe_norm_min": 1e-12}  # fmt: skip
    return SimpleNamespace(**defaults | facts)


def sigmoid_config(E, K, groups, top_groups, scale, renormalize=True):
    return config(E, K, n_group=groups, topk_group=top_groups, norm_topk_prob=renormalize, routed_scaling_factor=scale)


# name: class, its config, our router
FAMILIES = {
    "deepseek_v3": ("DeepseekV3TopkRouter", sigmoid_config(256, 8, 8, 4, 2.5), Router.DEEPSEEK_V3),
    "glm4_moe": ("Glm4MoeTopkRouter", sigmoid_config(128, 8, 1, 1, 1.0), Router.GLM4_MOE),
    "dots1": ("Dots1TopkRouter", sigmoid_config(128, 6, 1, 1, 2.5, False), Router(6, "sigmoid", routed_scale=2.5)),
    "deepseek_v4": ("DeepseekV4TopKRouter", config(256, 6, routed_scaling_factor=1.5), Router.DEEPSEEK_V4),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", config(64, 6), Router.ERNIE4_5),
    "qwen2_moe": ("Qwen2MoeTopKRouter", config(60, 4, norm_topk_prob=False), Router.QWEN2_MOE),
    "qwen3_moe": ("Qwen3MoeTopKRouter", config(128, 8, norm_topk_prob=True), Router.QWEN3_MOE),
    "mixtral": ("MixtralTopKRouter", config(8, 2), Router.MIXTRAL),
    "gpt_oss": ("GptOssTopKRouter", config(128, 4), Router.GPT_OSS),
}


def stock(family, device, dtype=F32, T=200):
    """The family's own router on random weights: its logits, weights and ids, and its correction bias."""
    name, facts, _ = FAMILIES[family]
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    g = torch.Generator().manual_seed(0)
    router = getattr(module, name)(facts).to(dtype)
    for parameter in (*router.parameters(), *router.buffers()):
        parameter.data = torch.randn(parameter.shape, generator=g).to(parameter.dtype) / 4
    router = router.to(device)
    hidden = torch.randn(T, facts.hidden_size, generator=g).to(dtype).to(device)
    with torch.no_grad():
        logits, weights, ids = router(hidden)
    bias = [b for n, b in (*router.named_parameters(), *router.named_buffers()) if "correction_bias" in n]
    return logits, weights, ids, bias[0].flatten() if bias else None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_bits(family, device, monkeypatch):
    """Equal ids and weights, slot for slot. The sigmoid routers ask torch.topk for *any* slot order (sorted=False), and
    their sum of weights follows it: here torch.topk sorts, as it does for the others."""
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda *args, **kwargs: topk(*args, **kwargs | {"sorted": True}))
    logits, weights, ids, bias = stock(family, device)
    got = moetail.route(logits, FAMILIES[family][2], bias)
    assert_same_bits(got[1], ids.int())
    assert_same_bits(got[0], weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_selection_as_it_comes(family, device):
    """In whatever slot order: the same experts, each with the same weight within an ulp or two of the sum."""
    logits, weights, ids, bias = stock(family, device)
    got_weights, got_ids = moetail.route(logits, FAMILIES[family][2], bias)
    (ids, order), (got_ids, got_order) = ids.int().sort(), got_ids.sort()
    assert_same_bits(got_ids, ids)
    torch.testing.assert_close(got_weights.gather(1, got_order), weights.gather(1, order), rtol=3e-7, atol=0)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "ernie4_5_moe"])
def test_transformers_bits_of_a_16_bit_model(family):
    """Their routers compute in fp32 from 16-bit logits and round at the end. Ties are frequent: torch.topk may name
    another expert of the same score, so the scores of the chosen are compared, and ids where no tie is."""
    logits, weights, ids, bias = stock(family, "cpu", BF16)
    got_weights, got_ids = moetail.route(logits, FAMILIES[family][2], bias)
    assert_same_bits(got_weights.to(weights.dtype), weights)
    other = got_ids != ids
    assert other.float().mean() < 0.1
    if bias is None:
        assert_same_bits(logits.gather(1, got_ids.long())[other], logits.gather(1, ids)[other])


def test_presets_are_the_released_numbers():
    from transformers import (
        DeepseekV3Config,
        DeepseekV4Config,
        Ernie4_5_MoeConfig,
        Glm4MoeConfig,
        GptOssConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )

    configs = {
        Router.DEEPSEEK_V3: DeepseekV3Config(),
        Router.DEEPSEEK_V4: DeepseekV4Config(),
        Router.ERNIE4_5: Ernie4_5_MoeConfig(),
        Router.GLM4_MOE: Glm4MoeConfig(),
        Router.GPT_OSS: GptOssConfig(),
        Router.MIXTRAL: MixtralConfig(),
        Router.QWEN2_MOE: Qwen2MoeConfig(),
        Router.QWEN3_MOE: Qwen3MoeConfig(norm_topk_prob=True),  # the released checkpoints', not the class's default
    }
    for router, facts in configs.items():
        assert router.top_k == getattr(facts, "moe_k", None) or router.top_k == facts.num_experts_per_tok
        assert router.renormalize == getattr(facts, "norm_topk_prob", router.renormalize)
        assert router.routed_scale == getattr(facts, "routed_scaling_factor", 1.0)
        assert (router.num_groups, router.top_groups) == (
            getattr(facts, "n_group", None) or 1,
            getattr(facts, "topk_group", None) or 1,
        )
        assert getattr(facts, "scoring_func", router.score) == router.score


# --- the contract


def test_the_bias_chooses_and_never_weighs(run):  # the worked example of DeepSeek-V4.1
    logits = torch.tensor([[2.0, -1.0, 0.5, 30.0]], device=run.device)
    bias = torch.tensor([0.0, 5.0, 0.0, -9.0], device=run.device)
    weights, ids = run(logits, Router(2, "sqrtsoftplus", renormalize=True, routed_scale=1.5), bias)
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.4160, 1.0840]]), rtol=0, atol=5e-5)


def test_groups_by_their_two_best(run):
    """Group 1 holds the best expert, and loses: 0.9 + 0.1 < 0.6 + 0.5 and 0.55 + 0.55."""
    scores = torch.tensor([[0.6, 0.5, 0.1, 0.9, 0.1, 0.1, 0.55, 0.55, 0.2]], device=run.device)
    router = Router(3, "sigmoid", num_groups=3, top_groups=2)
    _, ids = run.check(torch.logit(scores), router)
    assert ids.tolist() == [[0, 6, 7]]


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"])
def test_the_lowest_id_wins_a_tie(run, score):
    logits = torch.tensor([-0.0, 1.0, 0.0, 1.0, -0.0, 0.5], device=run.device).repeat(2, 3)
    _, ids = run.check(logits, Router(17, score))
    assert ids.tolist() == [[1, 3, 7, 9, 13, 15, 5, 11, 17, 0, 2, 4, 6, 8, 10, 12, 14]] * 2
    _, ids = run.check(torch.zeros(2, 300, device=run.device), Router(5, score))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    router = Router(4, score, num_groups=8, top_groups=2)
    _, ids = run.check(torch.zeros(2, 64, device=run.device), router)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"])
def test_a_masked_expert_is_the_last_resort(run, score):
    """Even where its score, 0, ties with one that underflows, and where its bias is the largest."""
    logits = torch.tensor([[-INF, -INF, 3.0, -200.0, -INF, -300.0]], device=run.device)
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0, 0.0], device=run.device)
    for b in (None, bias):
        _, ids = run.check(logits, Router(3, score), b)
        assert ids.tolist() == [[2, 3, 5]]
        weights, ids = run.check(logits, Router(5, score), b)
        assert ids.tolist() == [[2, 3, 5, 0, 1]]
        assert weights[0, 3:].tolist() == [0.0, 0.0]


def test_masked_experts_of_groups_of_odd_size(run):
    """Where candidates run out: the lowest ids, each once, from the groups that lost too."""
    logits = torch.full((2, 21), -INF, device=run.device)
    logits[:, [7, 8, 14, 15]] = 1.0
    _, ids = run.check(logits, Router(12, "sigmoid", num_groups=3, top_groups=2))
    assert ids.tolist() == [[7, 8, 14, 15, 0, 1, 2, 3, 4, 5, 6, 9]] * 2


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"])
def test_nan_and_infinity(run, score):
    """As torch's: NaN sorts first and is seen in the weights; ids stay valid and distinct."""
    logits, bias = inputs(7, 40, run.device)
    logits[0, 33], logits[1, 2], logits[1, 3], logits[2, 5] = NAN, NAN, -NAN, INF
    logits[3], logits[4], logits[5, ::2] = -INF, INF, NAN
    for router in (Router(6, score), Router(6, score, renormalize=True, num_groups=4, top_groups=2)):
        for b in (None, bias):
            weights, ids = run.check(logits, router, b)
            assert all(len(set(token)) == 6 and min(token) >= 0 and max(token) < 40 for token in ids.tolist())
            assert weights[0].isnan().any() and weights[1].isnan().any() and not weights[6].isnan().any()


def test_a_nan_expert_is_chosen_first(run):
    logits, _ = inputs(1, 40, run.device)
    logits[0, 33] = NAN
    weights, ids = run.check(logits, Router(2, "sigmoid"))
    assert ids[0, 0] == 33 and weights[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens(device):
    weights, ids = moetail.route(torch.empty(0, 64, device=device), Router.QWEN3_MOE)
    assert weights.shape == ids.shape == (0, 8) and (weights.dtype, ids.dtype) == (F32, torch.int32)


def test_a_token_is_alone(run):
    """The same bits alone, in a batch, and from rows that are not side by side."""
    logits, bias = inputs(9, 100, run.device)
    router = Router(5, "softmax", renormalize=True)
    want = run(logits, router, bias)
    wide = torch.full((9, 132), INF, device=run.device)
    wide[:, 3:103] = logits
    for got in (run(wide[:, 3:103], router, bias), run(logits.repeat(2, 1)[4:13].roll(4, 0), router, bias)):
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
    for t in range(9):
        assert_same_bits(run(logits[t : t + 1], router, bias)[0], want[0][t : t + 1])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_bias_of_each_dtype(run, dtype):
    logits, bias = inputs(4, 64, run.device)
    run.check(logits, Router(4, "sigmoid", True), bias.to(dtype))


BAD_FIELDS = {
    "top_k-0": ("top_k", {"top_k": 0}), "top_k-33": ("top_k", {"top_k": 33}), "score": ("score", {"score": "relu"}),
    "num_groups": ("num_groups", {"num_groups": 0}), "top_groups-0": ("top_groups", {"top_groups": 0}),
    "top_groups": ("top_groups", {"num_groups": 4, "top_groups": 5}), "scale": ("routed_scale", {"routed_scale": 1e39}),
    "top_k-float": ("top_k", {"top_k": 2.0}), "top_k-text": ("top_k", {"top_k": "2"}),
    "num_groups-none": ("num_groups", {"num_groups": None}), "top_groups-true": ("top_groups", {"top_groups": True}),
    "renormalize": ("renormalize", {"renormalize": "yes"}),
    "scale-nan": ("routed_scale", {"routed_scale": NAN}), "scale-text": ("routed_scale", {"routed_scale": "1"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_router(name, fields):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        replace(Router(2), **fields)


LOGITS, BIAS = torch.zeros(3, 12), torch.zeros(12)
BAD = {
    "router": ("router", (LOGITS, "softmax")),
    "logits-list": ("logits", ([1.0], Router(1))),
    "logits-vector": ("logits", (LOGITS[0], Router(1))),
    "logits-int": ("logits", (LOGITS.int(), Router(1))),
    "logits-none": ("logits", (LOGITS[:, :0], Router(1))),
    "logits-1025": ("logits", (torch.zeros(1, 1025), Router(1))),
    "logits-columns": ("logits", (LOGITS.t().contiguous().t(), Router(1))),
    "logits-grad": ("logits", (LOGITS.clone().requires_grad_(), Router(1))),
    "top_k": ("top_k", (LOGITS, Router(13))),
    "top_k-groups": ("top_k", (LOGITS, Router(9, num_groups=3, top_groups=2))),
    "groups": ("num_groups", (LOGITS, Router(2, num_groups=5, top_groups=2))),
    "groups-of-one": ("num_groups", (LOGITS, Router(2, num_groups=12, top_groups=2))),
    "bias-list": ("correction_bias", (LOGITS, Router(2), [0.0])),
    "bias-shape": ("correction_bias", (LOGITS, Router(2), BIAS[:11])),
    "bias-dtype": ("correction_bias", (LOGITS, Router(2), BIAS.int())),
    "bias-stride": ("correction_bias", (LOGITS, Router(2), torch.zeros(24)[::2])),
    "bias-device": ("correction_bias", (LOGITS, Router(2), BIAS.to("meta"))),
}


@pytest.mark.parametrize(("name", "args"), BAD.values(), ids=BAD)
def test_bad_input(name, args):
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        moetail.route(*args)


def test_opcheck():
    logits, bias = inputs(3, 40, dtype=BF16)
    torch.library.opcheck(torch.ops.moetail.route.default, (logits, bias, 4, "sigmoid", True, 5, 2, 2.5))
    torch.library.opcheck(torch.ops.moetail.route.default, (logits, None, 7, "softmax", False, 1, 1, 1.0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fullgraph_compile_does_not_recompile_with_t(device):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def routed(logits, bias):
        weights, ids = moetail.route(logits, Router.GLM4_MOE, bias)
        return weights * 2, ids + 1

    for T in (3, 5, 17, 64):
        logits, bias = inputs(T, 64, device)
        weights, ids = moetail.route(logits, Router.GLM4_MOE, bias)
        got = routed(logits, bias)
        assert_same_bits(got[0], weights * 2)
        assert_same_bits(got[1], ids + 1)
    assert len([g for g in counter.graphs if any("route" in str(node.target) for node in g.graph.nodes)]) == 1
