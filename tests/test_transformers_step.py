"""A transformers model runs every form of the case grammar: bits of both arms, rows, context, refusals."""

import json

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moetail.bench import models, tail
from moetail.bench.cases import Case, jitter, parse_case
from moetail.bench.routing import balanced_tables, replaced
from moetail.bench.transformers_step import TransformersModel
from moetail.integrations.transformers import explain
from moetail.testing import assert_same_bits

_SMALL = {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
# Weights ten times as large as usual: attention that looks at a wrong token then shows.
CONFIGS = {
    "glm4": models.BUILT_IN["glm4-moe-mini"] | _SMALL | {"head_dim": 16, "num_key_value_heads": 2},
    "deepseek": models.BUILT_IN["deepseek-v3-mini"] | _SMALL | {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
TEXT = torch.randint(0, 300, (700,), generator=torch.Generator().manual_seed(1))
FORMS = {
    "prefill": "3*16", "two prefills": "2*16,16", "hit": "5@20", "decode": "4*1@32", "chunk": "8@24c",
    "verify": "3*4@20:3", "decodes": "2*1@20,1@90", "verify and hit": "2*4@20:3,4@90", "prefill and hit": "4,4@90",
    "a pad in the middle": "1@64,1@2,1@30",
}  # fmt: skip


def load(config, path, dtype=torch.bfloat16, device="cpu"):
    (path / "config.json").write_text(json.dumps(CONFIGS[config]))
    model = models.load_transformers(str(path), torch.device(device), dtype)
    return TransformersModel(config, model, TEXT.to(device))


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request, tmp_path_factory):
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=list(CONFIGS))
def fp32_model(request, tmp_path_factory):
    return load(request.param, tmp_path_factory.mktemp(request.param), torch.float32)


@pytest.fixture
def own_model(tmp_path):
    """One whose config a test may change."""
    return load("glm4", tmp_path)


def run(model, step, arm="stock"):
    model.use(arm)
    step.restore()
    return step.forward()


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("routing", ["real", "balanced"])
@pytest.mark.parametrize("form", FORMS)
def test_both_arms_have_the_same_bits_and_repeat_them(model, form, routing):
    case = parse_case(FORMS[form])
    model.check(case)
    model.use("stock")
    step = model.build(case, routing)
    stock = run(model, step, "stock")
    assert same(stock, run(model, step, "moetail"))
    assert same(stock, run(model, step, "stock"))
    N, Q, D = sum(r.count for r in case.requests), case.requests[0].query_len, case.requests[0].num_draft_tokens
    assert stock[0].shape == (N, 1 + D, 300) and stock[1].shape == (N, Q, 64)
    if routing == "balanced":
        assert not same(stock, run(model, model.build(case, "real")))


def test_a_jittered_case_runs(model):
    case = jitter(parse_case("decode=8*1@60"), 0.5, 128)
    assert len(case.requests) > 4
    step = model.build(case, "real")
    assert same(run(model, step, "stock"), run(model, step, "moetail"))


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_end_of_a_prefill(fp32_model, form):
    """Rows, positions, masks and context at once: each row's outputs are those of its whole text without a cache.

    fp32, where a token more or less in the attention is far above assert_close's defaults; not the same bits, since
    a prefill's attention adds in another order.
    """
    case = parse_case(FORMS[form])
    logits, hidden = run(fp32_model, fp32_model.build(case, "real"))
    Q, first, row = case.requests[0].query_len, 0, 0
    for request in case.requests:
        for _ in range(request.count):
            with torch.no_grad():
                whole = fp32_model.model.model(TEXT[None, first : first + request.kv_len]).last_hidden_state[0, -Q:]
                torch.testing.assert_close(hidden[row], whole)
                torch.testing.assert_close(logits[row], fp32_model.model.lm_head(whole[-logits.shape[1] :]))
            first, row = first + request.kv_len, row + 1


@pytest.mark.parametrize("form", ["decodes", "verify and hit", "a pad in the middle"])
def test_a_padded_row_is_the_row_run_alone(fp32_model, form):
    """Its context has the same bits. Its outputs are close: on a CPU the attention kernel adds in another order when
    the same keys stand behind pads (seen with scaled_dot_product_attention alone, fp32 and bf16)."""
    model, case = fp32_model, parse_case(FORMS[form])
    step = model.build(case, "real")
    logits, hidden = run(model, step)
    Q, first, row = case.requests[0].query_len, 0, 0
    for request in case.requests:
        alone = TransformersModel("alone", model.model, TEXT.roll(-first))
        alone_step = alone.build(Case("alone", (request,)), "real")
        rows, end = slice(row, row + request.count), step.cache.max_cache_len - Q
        for layer, of_alone in zip(step.cache.layers, alone_step.cache.layers, strict=True):
            for name in ("keys", "values"):
                padded, kept = getattr(layer, name)[rows], getattr(of_alone, name)[:, :, : request.prefix_len]
                assert torch.equal(padded[:, :, end - request.prefix_len : end], kept)
                assert not padded[:, :, : end - request.prefix_len].any()
        alone_logits, alone_hidden = run(alone, alone_step)
        torch.testing.assert_close(hidden[rows], alone_hidden)
        torch.testing.assert_close(logits[rows, -alone_logits.shape[1] :], alone_logits)
        first, row = first + request.count * request.kv_len, row + request.count


def test_a_step_that_is_not_restored_does_not_run_on_old_state(model):
    for text in ("4*1@32", "1@20,1@32"):
        step = model.build(parse_case(text), "real")
        step.forward()
        with pytest.raises(IndexError):  # the cache is full
            step.forward()


class Ops(TorchDispatchMode):
    """The names of the ops that run inside the block."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.add(op.name())
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["prefill", "decode", "prefill and hit"])
def test_a_captured_step_makes_the_masks_of_eager_mode(own_model, form, monkeypatch):
    """transformers asks whether a stream is capturing, and then makes a mask that no eager step has."""
    from transformers.utils import import_utils

    step = own_model.build(parse_case(f"c={FORMS[form]}"), "real")
    with Masks() as eager:
        wanted = run(own_model, step)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with Masks() as captured:
        got = run(own_model, step)
    assert len(eager.seen) == 2
    assert captured.seen == eager.seen
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


class Masks(TorchFunctionMode):
    """The shape of each attention call's mask, or None."""

    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            self.seen.append(None if mask is None else tuple(mask.shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("routing", ["real", "balanced"])
def test_a_padded_step_waits_for_nothing_and_each_arm_runs_its_own_experts(model, routing):
    step = model.build(parse_case("4@20:3,4@90"), routing)
    for arm in model.arms:
        model.use(arm)
        with Ops() as ops:
            step.restore()
            step.forward()
        assert "aten::_local_scalar_dense" not in ops.seen  # what every .item(), bool() and tolist() ends in
        assert ("moetail::finalize" in ops.seen) == (arm == "moetail")


def test_balanced_routing_leaves_the_fused_tail_as_it_is(model):
    """A hook that reads the experts' output would make it two kernels."""
    model.use("moetail")
    with replaced(balanced_tables(model.model, 8)):
        assert [plan.path for plan in explain(model.model)] == ["one kernel"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ["real", "balanced"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_padded_step_is_captured(config, routing, tmp_path):
    model = load(config, tmp_path, device="cuda")
    step = model.build(parse_case("2*4@20:3,4@90"), routing)
    for arm in model.arms:
        eager = run(model, step, arm)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(model, step, arm)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.restore()
            captured = step.forward()
        for _ in range(2):
            graph.replay()
            assert same(captured, eager)


def test_the_tails_are_measured_under_the_routing_of_the_step(model, monkeypatch):
    seen = []

    def measure(index, weights, H, inner, dtype, rounds):
        seen.append((index, weights, H, inner, dtype))
        return {"stock": [2.0] * rounds, "moetail": [1.0] * rounds, "masks": [0.5] * rounds}

    monkeypatch.setattr(tail, "measure", measure)
    step = model.build(parse_case("3*4@20:3"), "balanced")
    tails = model.tails(step)
    (index, weights, *rest) = seen[0]
    assert torch.equal(index, (torch.arange(96) % 64).view(12, 8)) and weights.shape == (12, 8)
    assert rest == [64, 2 * 32, torch.bfloat16]
    assert (tails.layers, tails.T, tails.K, tails.H) == (2, 12, 8, 64)
    assert (tails.dtype, tails.weights_dtype) == ("bfloat16", "float32")
    assert tails.gain_us("stock", "moetail") == 1.5 * 2
    step.forward()  # it was left restored


def test_the_tails_are_measured(model):
    tails = model.tails(model.build(parse_case("8"), "real"))
    assert list(tails.samples) == ["stock", "moetail", "masks"]
    assert all(us > 0 for values in tails.samples.values() for us in values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mix=8,2*1@8", "case mix: query lengths must be equal, a transformers model takes one a step .*got 8, 1"),
        ("long=1@20,1@129", "case long: KV length must be <= the model's 128 positions, got 129"),
        ("long=129", "positions, got 129"),
    ],
)
def test_cases_it_cannot_run(model, text, says):
    for refuse in (model.check, lambda case: model.build(case, "real")):
        with pytest.raises(ValueError, match=says):
            refuse(parse_case(text))


def test_a_cache_it_does_not_know_is_refused(own_model):
    own_model.model.config.sliding_window = 16
    own_model.model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="case x: a prefix needs plain StaticCache layers.*StaticSlidingWindowLayer$"):
        own_model.check(parse_case("x=4*1@32"))
    own_model.check(parse_case("x=32"))


def test_an_attention_that_makes_its_own_mask_is_refused(own_model):
    own_model.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="case x: rows of different KV lengths .*this model runs flash_attention_2"):
        own_model.check(parse_case("x=1@20,1@32"))
    own_model.check(parse_case("x=2*1@20"))


def test_eager_attention_takes_padded_rows(tmp_path):
    model, case = load("glm4", tmp_path, torch.float32), parse_case("2*4@20,4@90")
    sdpa = run(model, model.build(case, "real"))
    model.model.set_attn_implementation("eager")
    eager = run(model, model.build(case, "real"))
    torch.testing.assert_close(eager, sdpa)


@pytest.mark.parametrize("text", [f"{10**9}*4", f"{10**12}*1@100", f"{10**20}*1@100"])
def test_a_case_larger_than_memory_is_refused_before_it_is_tried(model, text):
    with pytest.raises(ValueError, match=r"^case big must fit in memory: the expert rows of one layer take [0-9.]+ GB"):
        model.build(parse_case(f"big={text}"), "real")


def test_bad_arm_and_routing(model):
    with pytest.raises(ValueError, match="arm must be one of stock, moetail, got 'fused'"):
        model.use("fused")
    with pytest.raises(ValueError, match="routing must be real or balanced, got 'auto'"):
        model.build(parse_case("4"), "auto")
