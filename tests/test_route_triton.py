"""route's CUDA kernel: its machine code, compiled here for sm_90 without a GPU, and on a GPU its launches."""

import machine_code
import pytest
import torch

import moetail
from moetail import Router, guards, reference
from moetail.testing import assert_same_bits

COMPILE = """
import json
from machine_code import WAIT, sm_90
from moetail import Router
from moetail.ops import route_triton
pointers = dict(logits="*fp32", bias="*fp32", weights="*fp32", ids="*i32")
results = {}
for E, router in ((256, Router.DEEPSEEK_V3), (384, Router.DEEPSEEK_V4), (1024, Router(32, "softmax", True)),
                  (128, Router.GPT_OSS), (8, Router.MIXTRAL), (1, Router(1))):
    constants = route_triton.options(E, router, pdl=True)
    options = {k: constants.pop(k) for k in ("num_warps", "enable_fp_fusion", "launch_pdl")}
    code = sm_90(route_triton._route_kernel, pointers, constants, options)
    results[f"E={E} {router}"] = dict(
        registers=code.registers, stack=code.stack, barriers=code.count("bar.sync"),
        shared=code.count("(?:ld|st).shared"),
        approximate=code.count(r"div\\.full|div\\.approx|sqrt\\.approx|rcp\\.approx|lg2\\.approx"),
        waits=code.count(WAIT), triggers=code.count("griddepcontrol.launch_dependents"), before_wait=code.before_wait)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled():
    return machine_code.run(COMPILE)


def test_one_warp_stays_in_its_registers(compiled):
    for name, code in compiled.items():
        assert code["stack"] == code["barriers"] == code["shared"] == 0, name
        assert code["registers"] <= 128, f"{name}: {code['registers']} registers"


def test_divisions_and_roots_are_correctly_rounded(compiled):
    for name, code in compiled.items():
        assert code["approximate"] == 0, name


def test_pdl_rules(compiled):
    """One wait, one trigger, and no global memory touched before the wait."""
    for name, code in compiled.items():
        assert (code["waits"], code["triggers"], code["before_wait"]) == (1, 1, 0), name


def logits(T, E=384, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(T, E, generator=g, device="cuda") * 2


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls, bias = [logits(T) for T in (1, 2, 3, 15, 16, 17, 100, 1000, 4096, 20000)], torch.rand(384, device="cuda")
    moetail.route(logits(5), Router.DEEPSEEK_V4, bias)
    with guards.no_jit():
        for x in calls:
            moetail.route(x, Router.DEEPSEEK_V4, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("router", [Router.DEEPSEEK_V4, Router.GLM4_MOE, Router.QWEN3_MOE, Router.GPT_OSS], ids=str)
def test_many_tokens(router):
    x, bias = logits(20000), torch.rand(384, device="cuda") / 8
    for got, want in zip(moetail.route(x, router, bias), reference.route(x, router, bias), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_graph_replays_on_changed_inputs():
    x, bias = logits(33), torch.rand(384, device="cuda") / 8
    moetail.route(x, Router.DEEPSEEK_V4, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = moetail.route(x, Router.DEEPSEEK_V4, bias)
    for seed in range(1, 50):
        x.copy_(logits(33, seed=seed))
        weights.fill_(float("nan"))
        graph.replay()
        want = reference.route(x, Router.DEEPSEEK_V4, bias)
        assert_same_bits(weights, want[0])
        assert_same_bits(ids, want[1])
