"""The plugin in vLLM's own code, on a CPU: layers that vLLM's factory builds, with Triton kernels and compiled ops
replaced by torch (vllm_world.py). `make test-vllm`; deselected otherwise."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetail.testing import assert_same_bits

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def world():
    import vllm_world

    with vllm_world.one_rank():
        yield vllm_world


@pytest.fixture
def plugin(monkeypatch, world):
    """Registered, and gone after the test."""
    from vllm.model_executor import custom_op

    from moetail.integrations import vllm

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    vllm.register()
    return vllm


@pytest.fixture
def x():
    return torch.randn(5, 64, dtype=torch.bfloat16)


@pytest.fixture
def log():
    """What the logger vllm.moetail says; vLLM's loggers do not propagate."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("vllm.moetail")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def stock(world, monkeypatch, cfg, x, **kwargs):
    from vllm.model_executor import custom_op

    with monkeypatch.context() as alone:
        alone.setattr(custom_op, "op_registry_oot", {})
        runner = world.moe_layer(monkeypatch, cfg, **kwargs)
        assert type(runner).__name__ == "MoERunner"
        return world.run(runner, cfg, x)


def ours(world, monkeypatch, cfg, x, **kwargs):
    runner = world.moe_layer(monkeypatch, cfg, **kwargs)
    return runner, world.run(runner, cfg, x)


@pytest.mark.parametrize(
    "eager, kwargs, path",
    [
        (True, {}, "finalize + shared add"),
        (True, {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True}, "finalize + shared add"),
        (True, {"routed_scaling_factor": 2.5}, "finalize + shared add"),
        (True, {"shared": False}, "reduction without the copy"),
        (False, {}, "reduction without the copy"),
        (False, {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True}, "reduction without the copy"),
        (True, {"dtype": torch.float16}, "finalize + shared add"),
    ],
)
def test_the_bits_of_vllm(world, plugin, monkeypatch, x, eager, kwargs, path):
    x = x.to(kwargs.get("dtype", x.dtype))
    want = stock(world, monkeypatch, world.config(eager), x, **kwargs)
    runner, y = ours(world, monkeypatch, world.config(eager), x, **kwargs)
    assert_same_bits(y, want)
    (row,) = plugin.explain(runner)
    if path.startswith("reduction") and not _copies():
        assert (row.path, row.calls) == ("stock", 0)
        return
    assert (row.path, row.calls, row.finished) == (path, 1, 1)
    if runner._shared_experts is not None:
        assert runner._shared_experts._layer.runs == 1


def _copies():
    from moetail.integrations.vllm import build

    return build._copies()


def test_the_reduction_and_its_copy_do_not_run(world, plugin, monkeypatch, x):
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    cfg = world.config()
    runner = world.moe_layer(monkeypatch, cfg)
    ran = []
    monkeypatch.setattr(triton_moe.ops, "moe_sum", lambda *_: ran.append("moe_sum"))
    monkeypatch.setattr(topk_weight_and_reduce.TopKWeightAndReduceNoOP, "apply", lambda *_, **__: ran.append("copy"))
    world.run(runner, cfg, x)
    assert ran == []


def test_shared_experts_on_the_side_stream_run_once_and_before_the_tail(world, plugin, monkeypatch, x):
    from vllm.model_executor.layers.fused_moe.runner import shared_experts

    kind, orders = shared_experts.SharedExperts, shared_experts.SharedExpertsOrder
    cfg = world.config()
    want = stock(world, monkeypatch, world.config(), x)
    runner = world.moe_layer(monkeypatch, cfg)
    shared = runner._shared_experts
    monkeypatch.setattr(shared, "_determine_shared_experts_order", lambda _: orders.MULTI_STREAM_OVERLAPPED)
    waited = []
    if hasattr(kind, "maybe_forward_async"):  # from 0.29

        def launch(shared_input):
            shared._output[0] = shared._layer(shared_input)
            return True

        monkeypatch.setattr(shared, "maybe_forward_async", launch)
        monkeypatch.setattr(shared, "wait", lambda: waited.append(1))
    else:
        monkeypatch.setattr(shared, "maybe_sync_shared_experts_stream", lambda _: None)
        monkeypatch.setattr(shared, "_run_in_aux_stream", lambda shared_input: shared._layer(shared_input))
    assert_same_bits(world.run(runner, cfg, x), want)
    assert shared._layer.runs == 1 and runner.tail.finished == 1
    assert len(waited) == (2 if hasattr(kind, "maybe_forward_async") else 0)


def test_a_tail_that_cannot_finish_falls_back_inside_the_op(world, plugin, monkeypatch, x):
    scaled = {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True}
    cfg = world.config()
    want = stock(world, monkeypatch, world.config(), x, **scaled)
    runner = world.moe_layer(monkeypatch, cfg, **scaled)
    monkeypatch.setattr(runner.tail, "take", lambda *_: False)
    assert_same_bits(world.run(runner, cfg, x), want)
    assert (runner.tail.calls, runner.tail.finished) == (1, 0)


def test_a_new_kernel_gets_the_hooks(world, plugin, monkeypatch, x):
    cfg = world.config()
    runner, y = ours(world, monkeypatch, cfg, x)
    method = runner.routed_experts.quant_method
    method.moe_kernel = None
    method.process_weights_after_loading(runner.routed_experts)  # a reload that builds a new one
    assert_same_bits(world.run(runner, cfg, x), y)
    assert runner.tail.finished == 2


def test_no_tokens(world, plugin, monkeypatch, x):
    _, y = ours(world, monkeypatch, world.config(), x[:0])
    assert y.shape == (0, 64)


def test_two_ranks_skip_vllms_all_reduce_once(world, plugin, monkeypatch, x):
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    reduced = []
    monkeypatch.setattr(moe_runner, "tensor_model_parallel_all_reduce", lambda y: reduced.append(y) or y)
    cfg = world.config()
    want = stock(world, monkeypatch, world.config(), x)
    for eager in (True, False):
        cfg = world.config(eager)
        runner = world.moe_layer(monkeypatch, cfg, tp_size=2)
        runner_path = runner.tail.decision.path.value
        assert runner_path == "finalize + shared add + all-reduce"
        monkeypatch.setattr(runner, "tail_workspace", lambda *_: None)
        y = world.run(runner, cfg, x)
        assert len(reduced) == 1 and reduced.pop() is not None
        assert y.shape == want.shape


def test_eligibility_comes_from_vllms_own_facts(world, plugin, monkeypatch):
    from vllm.config import set_current_vllm_config

    from moetail.integrations.vllm import build

    cfg = world.config()
    runner = world.moe_layer(monkeypatch, cfg)
    with set_current_vllm_config(cfg):
        for change, reason in (
            ({"is_lora_enabled": True}, "LoRA"),
            ({"hidden_dim_unpadded": 48}, "padded"),
            ({"in_dtype": torch.float32}, "bf16 or fp16"),
        ):
            with monkeypatch.context() as patched:
                for name, value in change.items():
                    patched.setattr(runner.moe_config, name, value)
                assert reason in str(build.decide_for(runner, cfg))
        monkeypatch.delattr(runner.moe_config, "experts_per_token")
        assert "stock (vLLM does not say: " in str(build.decide_for(runner, cfg))


def test_a_worker_process_loads_the_entry_point(tmp_path):
    """As vLLM's executors start one: a new process that knows nothing but its path."""
    info = tmp_path / "moetail-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moetail\nVersion: 0.1.0\n")
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'entry-points."vllm.general_plugins"]\nmoetail = "(.*)"', project)
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nmoetail = {declared[1]}\n")
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()\n"
        "from vllm.model_executor.custom_op import op_registry_oot as found\n"
        "print(getattr(found.get('MoERunner'), '__name__', None))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    env.pop("VLLM_PLUGINS", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "MoETailRunner"


def test_off_for_one_engine(world, plugin, monkeypatch, x):
    cfg = world.config(additional_config={"moetail": "off"})
    runner, y = ours(world, monkeypatch, cfg, x)
    assert plugin.explain(runner)[0].path == "stock"
    assert_same_bits(y, stock(world, monkeypatch, world.config(), x))
    assert cfg.additional_config == {"moetail": "off"}


def test_the_compile_cache_key_is_marked(world, plugin, monkeypatch):
    for eager in (True, False):
        cfg = world.config(eager)
        runner = world.moe_layer(monkeypatch, cfg)
        assert ("moetail" in cfg.additional_config) == (runner.tail.decision.path.value != "stock")
    marked = world.config(additional_config={"moetail": "0.1.0"})
    assert marked.compute_hash() != world.config().compute_hash()


def test_registering_twice_and_after_another(plugin, monkeypatch, log):
    from vllm.model_executor import custom_op

    plugin.register()
    assert log == []

    class Foreign:
        pass

    monkeypatch.setattr(custom_op, "op_registry_oot", {"MoERunner": Foreign})
    plugin.register()
    assert len(log) == 1 and "has replaced MoERunner already" in log[0]


@pytest.mark.parametrize(
    "module, cls, name",
    [
        ("runner.moe_runner", "MoERunner", "_maybe_reduce_final_output"),
        ("runner.moe_runner", None, "get_layer_from_name"),
        ("experts.triton_moe", "TritonExperts", "moe_sum"),
        ("experts.cutlass_moe", None, "run_cutlass_moe_fp8"),
        ("runner.shared_experts", "SharedExperts", "_determine_shared_experts_order"),
    ],
)
def test_a_renamed_internal_leaves_vllm_as_it_is(world, monkeypatch, x, log, module, cls, name):
    import importlib

    from vllm.model_executor import custom_op

    from moetail.integrations import vllm

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    holder = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{module}")
    holder = getattr(holder, cls) if cls else holder
    with monkeypatch.context() as renamed:
        renamed.setattr(holder, name + "_renamed", getattr(holder, name), raising=False)
        renamed.delattr(holder, name)
        vllm.register()
    assert custom_op.op_registry_oot == {}
    assert len(log) == 1 and log[0].startswith("moetail: vLLM stays as it is:") and name in log[0]
    cfg = world.config()
    assert type(world.moe_layer(monkeypatch, cfg)).__name__ == "MoERunner"


@pytest.mark.parametrize("eager, op, adds", [(True, "moetail.vllm_moe_forward", 0), (False, "moe_forward_shared", 1)])
def test_a_compiled_model_holds_one_op(world, plugin, monkeypatch, x, eager, op, adds):
    """Dynamo traces the runner without a break, with the op that the decision says."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    cfg = world.config(eager)
    want = stock(world, monkeypatch, world.config(), x)
    runner = world.moe_layer(monkeypatch, cfg)
    with set_current_vllm_config(cfg), set_forward_context(None, cfg, num_tokens=5), torch.inference_mode():
        y = torch.compile(runner, fullgraph=True, backend=backend)(x, x[:, :8].clone())
    assert_same_bits(y, want)
    assert len(graphs) == 1 and graphs[0].count(f"{op}](") == 1 and graphs[0].count("target=operator.add]") == adds


def test_the_contract_with_vllms_own_classes():
    if not _has_contract():  # vLLM 0.26
        return
    from vllm.model_executor.layers.fused_moe import moe_output

    from moetail.integrations.vllm import contract

    rows, ids = torch.randn(5, 3, 64).bfloat16(), torch.randint(8, (5, 3))
    weights, shared = torch.rand(5, 3), torch.randn(5, 64).bfloat16()
    theirs = moe_output.MoEOutput(
        moe_output.route_major_moe_output(rows, weights, ids, None), shared, routed_scaling_factor=2.5
    )
    back = contract.to_vllm(contract.from_vllm(theirs))
    assert back.routed.gemm2_permuted is theirs.routed.gemm2_permuted
    assert back.routed.expert_weights is weights and back.shared_output is shared
    assert back.routed_scaling_factor == 2.5 and type(back) is moe_output.MoEOutput


def _has_contract():
    import importlib.util

    return importlib.util.find_spec("vllm.model_executor.layers.fused_moe.moe_output") is not None
