"""`enable(model, experts="triton")`: our experts inside transformers' blocks, and where a block cannot run them."""

import re

import pytest
import torch
from test_transformers import CONFIGS, DEVICES, tiny, tokens

import moetail
from moetail.integrations import transformers as integration
from moetail.integrations.transformers import Reason
from moetail.testing import assert_same_bits

SERVED = [name for name in CONFIGS if name != "gpt_oss"]  # whose gate is another function


def experts_of(model):
    return next(module for module in model.modules() if hasattr(module, "_apply_gate"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SERVED)
def test_a_block_has_the_bits_of_its_experts_then_finalize_then_add(name, device):
    model = moetail.transformers.enable(tiny(name, device), experts="triton")
    experts = experts_of(model)
    hidden = torch.randn(33, 64, device=device).bfloat16()
    E, K = experts.num_experts, CONFIGS[name].get("num_experts_per_tok", CONFIGS[name].get("moe_k"))
    ids = torch.rand(33, E, device=device).argsort(1)[:, :K]
    weights, shared = torch.rand(33, K, device=device), torch.randn(33, 64, device=device).bfloat16()
    with torch.no_grad():
        got = integration.triton_experts_forward(experts, hidden, ids, weights) + shared
        limit = 10.0 if name == "deepseek_v4" else None
        assert getattr(experts, "limit", None) == limit
        rows = moetail.TritonExperts(experts.gate_up_proj, experts.down_proj, limit=limit)(hidden, ids, weights)
    separate = moetail.finalize(rows.rows, rows.row_map, weights, numerics=moetail.Numerics.TRANSFORMERS) + shared
    assert_same_bits(got, separate)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v4"])
def test_logits_are_close_to_stock(name, device):
    """Not equal: gate and up are rounded once and not thrice. As far from stock as fp32 is, and no further."""
    model = tiny(name, device)
    with torch.no_grad():
        stock = model(tokens(model)).logits.float()
        ours = moetail.transformers.enable(model, experts="triton")(tokens(model)).logits.float()
        exact = tiny(name, device).float()(tokens(model)).logits.float()
    assert not torch.equal(ours, stock)
    assert (ours - exact).square().mean() < 1.2 * (stock - exact).square().mean()


def test_explain_says_whose_experts_run():
    model = tiny("glm4_moe")
    assert {plan.backend for plan in moetail.transformers.explain(model)} == {"grouped_mm"}
    assert {plan.backend for plan in moetail.transformers.explain(model, "triton")} == {"triton"}
    moetail.transformers.enable(model, experts="triton")
    (first, *_) = moetail.transformers.explain(model)
    assert str(first).endswith("one kernel, triton experts")
    moetail.transformers.enable(model)
    assert {plan.backend for plan in moetail.transformers.explain(model)} == {"grouped_mm"}
    moetail.transformers.disable(model)
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}
    assert not any("_moetail_limit" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [("gpt_oss", torch.bfloat16, Reason.OTHER_GATE), ("glm4_moe", torch.float16, Reason.NOT_BF16)],
)
def test_a_model_without_a_block_that_can_is_refused(name, dtype, why):
    model = tiny(name, dtype=dtype)
    with pytest.raises(
        ValueError, match=f"^experts must be grouped_mm for this model, got triton: .*{re.escape(why.value)}"
    ):
        moetail.transformers.enable(model, experts="triton")
    assert {plan.backend_reason for plan in moetail.transformers.explain(model, "triton")} == {why}


def test_a_block_that_cannot_keeps_the_bits_of_stock():
    """Set by name, where `enable` would refuse."""
    model = tiny("gpt_oss")
    with torch.no_grad():
        stock = model(tokens(model)).logits
        model.set_experts_implementation(integration.TRITON)
        assert_same_bits(model(tokens(model)).logits, stock)


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"^experts must be one of grouped_mm, triton, got 'marlin'"):
        moetail.transformers.enable(tiny("mixtral"), experts="marlin")


def test_slots_of_other_ranks():
    model = moetail.transformers.enable(tiny("glm4_moe"), experts="triton")
    experts = experts_of(model)
    hidden, weights = torch.randn(9, 64).bfloat16(), torch.rand(9, 2)
    ids = torch.tensor([[3, 16]]).repeat(9, 1)  # 16 experts here: the second is another rank's
    with torch.no_grad():
        got = integration.triton_experts_forward(experts, hidden, ids, weights) + torch.zeros_like(hidden)
        alone = integration.triton_experts_forward(experts, hidden, ids[:, :1], weights[:, :1]) + torch.zeros_like(
            hidden
        )
    assert_same_bits(got, alone)


def test_fullgraph_compile():
    model = moetail.transformers.enable(tiny("glm4_moe"), experts="triton")
    with torch.no_grad():
        eager = model(tokens(model)).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(tokens(model)).logits, eager)
