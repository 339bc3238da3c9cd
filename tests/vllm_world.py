"""A real vLLM MoE layer on a CPU: vLLM's own factory builds it, its Triton kernels and compiled ops are torch's."""

import contextlib
import tempfile
import types

import torch
import torch.nn.functional as F
import vllm.distributed as distributed
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import layer as factory
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.v1.worker import workspace

E, K, H, INNER = 8, 3, 64, 32
LAYER = "model.layers.0.mlp.experts"


def config(eager=True, **kwargs):
    return VllmConfig(
        device_config=DeviceConfig(device="cpu"), compilation_config=CompilationConfig(mode=0 if eager else 3), **kwargs
    )


@contextlib.contextmanager
def one_rank():
    """The process groups of a world of one."""
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(config()):
        distributed.init_distributed_environment(1, 0, f"file://{store.name}.store", 0, "gloo")
        distributed.initialize_model_parallel(1)
        workspace.init_workspace_manager(torch.device("cpu"))
        try:
            yield
        finally:
            workspace.reset_workspace_manager()
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()


class Shared(torch.nn.Module):
    """`runs`: how often it has run."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(H, H, dtype=dtype) / 8, requires_grad=False)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x @ self.weight


def moe_layer(monkeypatch, cfg, shared=True, dtype=torch.bfloat16, experts_cls=triton_moe.TritonExperts, **kwargs):
    """The runner that vLLM builds, with random weights, its kernel made, its routing random but a function of the
    hidden states."""
    _torch_kernels(monkeypatch)
    monkeypatch.setattr(
        unquantized, "select_unquantized_moe_backend", lambda *_, **__: (UnquantizedMoeBackend.TRITON, experts_cls)
    )
    torch.manual_seed(1)
    with set_current_vllm_config(cfg):
        runner = _factory()(
            num_experts=E, top_k=K, hidden_size=H, intermediate_size=INNER, prefix=LAYER, params_dtype=dtype,
            shared_experts=Shared(dtype) if shared else None, **kwargs,
        )  # fmt: skip
        experts = runner.routed_experts
        for name in ("w13_weight", "w2_weight"):
            getattr(experts, name).data.normal_(std=0.2)
        experts.quant_method.process_weights_after_loading(experts)
    monkeypatch.setattr(runner.router, "select_experts", _select)
    return runner


def _factory():
    """Its name has changed since 0.26."""
    return getattr(factory, "FusedMoE", None) or factory.FusedMoEFactory


def run(runner, cfg, x):
    with set_current_vllm_config(cfg), set_forward_context(None, cfg, num_tokens=x.shape[0]), torch.inference_mode():
        return runner(x, x[:, :E].clone())


def _grouped(x, weight, ids):
    return torch.einsum("tkh,tknh->tkn", x.float(), weight[ids].float())


def _select(hidden_states, **_):
    order = hidden_states.float()[:, :E].argsort(dim=1)[:, :K]
    weights = torch.softmax(hidden_states.float()[:, :K], dim=1)
    return weights, order.to(torch.int32)


def _torch_kernels(monkeypatch):
    def kernel(a, b, c, a_scale, b_scale, weights, ids, _experts, _padded, multiply, top_k, *_, **__):
        T = ids.shape[0]
        x = a.view(T, 1, -1).expand(-1, K, -1) if top_k == K else a.view(T, K, -1)
        y = _grouped(x, b, ids.long())
        c.view(T, K, -1).copy_(y * weights[..., None] if multiply else y)

    def moe_sum(rows, out, *_):
        total = torch.zeros(out.shape)
        for k in range(rows.shape[1]):
            total += rows[:, k].float()
        out.copy_(total)

    def activation(self, _kind, out, x, **_):
        gate, up = x.chunk(2, dim=1)
        out.copy_(F.silu(gate) * up)

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # vLLM calls it without an accelerator
    monkeypatch.setattr(triton_moe, "tl", types.SimpleNamespace(bfloat16=None, float16=None, float32=None))
    monkeypatch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", kernel)
    monkeypatch.setattr(triton_moe, "_prepare_expert_assignment", lambda ids, *_, **__: (ids, None, None))
    monkeypatch.setattr(triton_moe, "try_get_optimal_moe_config", lambda *_, **__: {})
    monkeypatch.setattr(triton_moe.TritonExperts, "activation", activation)
    monkeypatch.setattr(triton_moe.ops, "moe_sum", moe_sum, raising=False)
