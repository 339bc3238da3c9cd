"""transformers models with the tail fused: the same bits as stock grouped_mm, and nothing left behind."""

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import moetail
from moetail import guards
from moetail.integrations import transformers as integration
from moetail.integrations.transformers import Reason
from moetail.testing import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_COMMON = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 6, "n_routed_experts": 16, "n_shared_experts": 1}
CONFIGS = {
    "deepseek_v3": _COMMON | _EXPERTS | _MLA | {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2,
                                                "first_k_dense_replace": 1},
    "glm4_moe": _COMMON | _EXPERTS | {"head_dim": 16, "first_k_dense_replace": 1},
    "dots1": _COMMON | _EXPERTS | {"head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v4": _COMMON | _EXPERTS | {"num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2,
                                         "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16,
                                         "sliding_window": 32},
    "qwen2_moe": _COMMON | {"moe_intermediate_size": 32, "num_experts_per_tok": 6, "num_experts": 16,
                            "shared_expert_intermediate_size": 48},
    "ernie4_5_moe": _COMMON | {"moe_intermediate_size": 32, "moe_num_experts": 16, "moe_k": 6,
                               "moe_num_shared_experts": 2},
    "gpt_oss": _COMMON | {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},  # with biases
    "mixtral": _COMMON | {"num_local_experts": 8, "num_experts_per_tok": 3},
}  # fmt: skip
ONE_KERNEL = [name for name in CONFIGS if name not in ("mixtral", "gpt_oss")]


def tiny(name, device="cpu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(name, **CONFIGS[name]), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.set_experts_implementation("grouped_mm")
    return model.to(device)


def tokens(model, batch=2, length=37):
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(1)).to(model.device)


@pytest.fixture
def count_finalizes(monkeypatch):
    """Whether each finalize came with a shared tensor."""
    calls = []
    real = moetail.UnfinalizedMoEOutput.finalize
    monkeypatch.setattr(
        moetail.UnfinalizedMoEOutput, "finalize",
        lambda self, shared, tail: (calls.append(shared is not None), real(self, shared, tail))[1],
    )  # fmt: skip
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_hidden_states_are_bit_equal(name, device, count_finalizes):
    model = tiny(name, device)
    with torch.no_grad():
        stock = model(tokens(model), output_hidden_states=True)
        moetail.transformers.enable(model)
        ours = model(tokens(model), output_hidden_states=True)
    assert_same_bits(ours.logits, stock.logits)
    for got, want in zip(ours.hidden_states, stock.hidden_states, strict=True):
        assert type(got) is torch.Tensor
        assert_same_bits(got, want)
    blocks = len(moetail.transformers.explain(model))
    assert count_finalizes == [name in ONE_KERNEL] * blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_tokens_are_equal(name, device, cache):
    # A name that generate() does not swap for batched_mm on a GPU pins the stock GEMM.
    ALL_EXPERTS_FUNCTIONS.register("pinned_grouped_mm", grouped_mm_experts_forward)
    model = tiny(name, device)
    model.generation_config.disable_compile = True
    generated = []
    for implementation in ("pinned_grouped_mm", "moetail"):
        model.set_experts_implementation(implementation)
        generated.append(model.generate(tokens(model), max_new_tokens=8, do_sample=False, cache_implementation=cache))
    assert torch.equal(*generated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    model = tiny("glm4_moe", dtype=dtype)
    with torch.no_grad():
        stock = model(tokens(model)).logits
        assert_same_bits(moetail.transformers.enable(model)(tokens(model)).logits, stock)


def test_from_pretrained_and_saved_config(tmp_path):
    model = tiny("glm4_moe")
    moetail.transformers.enable(model).save_pretrained(tmp_path)
    assert "moetail" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moetail", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        assert_same_bits(again(tokens(model)).logits, model(tokens(model)).logits)


def test_disable_restores_what_was_there():
    model = tiny("glm4_moe")
    for previous in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(previous)
        moetail.transformers.enable(moetail.transformers.enable(model))
        assert model.config._experts_implementation == "moetail"
        moetail.transformers.disable(model)
        assert model.config._experts_implementation == previous
        assert "_moetail_stock" not in vars(model)


def test_training_keeps_the_stock_path(count_finalizes):
    model = moetail.transformers.enable(tiny("deepseek_v3"))
    model.train()
    assert {plan.reason for plan in moetail.transformers.explain(model)} == {Reason.GRADIENTS}
    model(tokens(model), labels=tokens(model)).loss.backward()
    assert count_finalizes == []
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts.down_proj" in n)


@pytest.mark.parametrize("trainable", ["experts.gate_up_proj", "self_attn.q_proj.weight", None])
def test_a_step_that_trains_anything_keeps_the_stock_path(trainable, count_finalizes):
    model = moetail.transformers.enable(tiny("glm4_moe"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable is not None and name.endswith(f"layers.2.mlp.{trainable}"))
    out = model(tokens(model)).logits
    # Without gradients ours runs; a parameter of layer 2's experts makes that layer stock, layer 1 needs nothing.
    if trainable == "experts.gate_up_proj":
        out.sum().backward()
        assert len(count_finalizes) == 1
    else:
        assert len(count_finalizes) == 2


def test_experts_of_another_dtype_keep_the_stock_path(count_finalizes):
    model = tiny("glm4_moe")
    model.model.layers[1].mlp.experts.float()
    moetail.transformers.enable(model)
    plans = moetail.transformers.explain(model)
    assert [plan.reason for plan in plans] == [Reason.MIXED_DTYPES, None]


def test_blocks_that_change_the_routed_sum_first(count_finalizes):
    model = tiny("glm4_moe")
    model.config.enable_moe_fp32_combine = True  # what hy_v3 is by default
    assert {plan.reason for plan in moetail.transformers.explain(model)} == {Reason.TRANSFORMED}


def test_a_global_forward_hook_gets_tensors():
    model = moetail.transformers.enable(tiny("glm4_moe"))
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(out)))
    try:
        with torch.no_grad():
            model(tokens(model))
    finally:
        handle.remove()
    assert integration.DeferredRoutedSum not in seen


def test_autocast_keeps_the_stock_path(count_finalizes):
    model = moetail.transformers.enable(tiny("glm4_moe"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens(model))
        assert {plan.reason for plan in moetail.transformers.explain(model)} == {Reason.AUTOCAST}
    assert count_finalizes == []


def test_a_hook_on_the_experts_gets_a_tensor():
    model = tiny("glm4_moe")
    seen = []
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        stock = model(tokens(model)).logits
        moetail.transformers.enable(model)
        experts.register_forward_hook(lambda module, args, out: seen.append(out))
        assert_same_bits(model(tokens(model)).logits, stock)
    assert type(seen[0]) is torch.Tensor
    plans = moetail.transformers.explain(model)
    assert [plan.path for plan in plans] == ["finalize only", "one kernel"]
    assert plans[0].reason is Reason.WRAPPED
    assert str(plans[1]) == "model.layers.2.mlp.experts: one kernel"


def test_expert_parallel_sentinels():  # B18: another rank's slots have id >= num_experts, their rows are not written
    model = tiny("glm4_moe")
    experts = model.model.layers[1].mlp.experts
    hidden, weights = torch.randn(9, 64).bfloat16(), torch.rand(9, 6)
    index = torch.stack([torch.randperm(20)[:6] for _ in range(9)])
    weights[index >= 16] = 0.0
    with torch.no_grad():
        want = grouped_mm_experts_forward(experts, hidden, index, weights)
        routed = integration.expert_rows(experts, hidden, index, weights)
        routed.rows[int(routed.num_valid_rows) :] = float("nan")
        assert int(routed.num_valid_rows) == int((index < 16).sum())
        assert_same_bits(routed.finalize(None, integration.TAIL), want)


@pytest.mark.parametrize("K", [8, 17])
def test_top_k_that_has_no_defined_bits_is_stock(K, count_finalizes):
    torch.manual_seed(0)
    config = CONFIGS["glm4_moe"] | {"num_experts_per_tok": K, "n_routed_experts": 32}
    model = AutoModelForCausalLM.from_config(tf.AutoConfig.for_model("glm4_moe", **config), dtype=torch.bfloat16).eval()
    if K == 8:
        moetail.transformers.enable(model)
        return
    with pytest.raises(ValueError, match="^model must have a MoE block that moetail can serve"):
        moetail.transformers.enable(model)
    model.set_experts_implementation("moetail")  # by name it runs, on the stock path
    with torch.no_grad():
        model(tokens(model))
    assert count_finalizes == []
    assert moetail.transformers.explain(model)[0].reason is Reason.NO_BITS


@pytest.mark.parametrize("value", ["glm4_moe", None, torch.nn.Linear(2, 2), tf.MixtralForCausalLM],
                         ids=["a-name", "None", "a-module", "a-class"])  # fmt: skip
@pytest.mark.parametrize("call", [integration.enable, integration.disable, integration.explain])
def test_what_is_no_model_is_refused(call, value):
    with pytest.raises(ValueError, match="^model must be a transformers PreTrainedModel, got (a|the class) "):
        call(value)


def test_unknown_experts_are_refused():
    for call in (integration.enable, integration.explain):
        with pytest.raises(ValueError, match="^experts must be one of grouped_mm, triton, got 'moetail'"):
            call(tiny("glm4_moe"), "moetail")


def test_a_dense_model_is_refused():
    config = tf.AutoConfig.for_model("llama", **_COMMON)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="^model must have Mixture-of-Experts blocks"):
        moetail.transformers.enable(model)


def test_quantized_experts_find_the_name():
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    assert ALL_FP8_EXPERTS_FUNCTIONS["moetail"] is ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]


def test_the_version_range():
    for version in ("5.17.0", "5.24.1", "5.18.0.dev0"):
        integration.check_version(version)
    for version in ("5.16.9", "6.0.0", "4.57.1"):
        with pytest.raises(ValueError, match=f"^transformers must be .*got {version}"):
            integration.check_version(version)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen2_moe"])
def test_fullgraph_compile(name):
    torch._dynamo.reset()
    model = moetail.transformers.enable(tiny(name))
    with torch.no_grad():
        want = model(tokens(model), use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(tokens(model), use_cache=False).logits, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen2_moe"])
def test_manual_graph_capture_of_a_decode_step(name):
    model = tiny(name, "cuda")
    cache = tf.StaticCache(config=model.config, max_cache_len=64)
    token = tokens(model)[:, :1].contiguous()
    outputs = {}
    with torch.no_grad():
        model(tokens(model), past_key_values=cache)
        for implementation in ("grouped_mm", "moetail"):
            model.set_experts_implementation(implementation)

            def step():
                for layer in cache.layers:
                    layer.cumulative_length.fill_(37)
                return model(token, past_key_values=cache).logits

            eager = step().clone()
            graph = torch.cuda.CUDAGraph()
            with guards.no_jit(), torch.cuda.graph(graph):
                captured = step()
            for _ in range(3):
                captured.fill_(float("nan"))
                graph.replay()
                assert_same_bits(captured, eager)
            outputs[implementation] = eager
    assert_same_bits(*outputs.values())
