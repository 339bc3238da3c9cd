"""vLLM's own reduction kernels against the numerics that the hooks give them, on raw bits. Needs vLLM and a GPU:
pytest -m vllm tests/test_vllm_bits.py (scripts/vllm_gpu.sh bits)."""

import pytest
import torch

from moetail.integrations.vllm.hooks import route_major
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize
from moetail.testing import assert_same_bits

pytestmark = pytest.mark.vllm
SHAPES = [(1, 6, 2048), (33, 4, 2048), (257, 8, 4096), (2048, 6, 5120)]


def rows_and_weights(T, K, H):
    """Values spread over 2**16, so that order and rounding show."""
    generator = torch.Generator("cuda").manual_seed(T)
    scale = torch.exp2(torch.randint(-8, 8, (T * K, 1), device="cuda", generator=generator).float())
    rows = (torch.randn(T * K, H, device="cuda", generator=generator) * scale).bfloat16()
    return rows, torch.softmax(torch.randn(T, K, device="cuda", generator=generator), dim=1)


@pytest.mark.parametrize("T, K, H", SHAPES)
def test_moe_sum(T, K, H):
    from vllm import _custom_ops as ops

    rows, _ = rows_and_weights(T, K, H)
    want = rows.new_empty(T, H)
    ops.moe_sum(rows.view(T, K, H), want)
    assert_same_bits(finalize(rows, route_major(T, K, rows.device), None, numerics=Numerics.PREWEIGHTED), want)


@pytest.mark.parametrize("T, K, H", SHAPES)
def test_moe_fused_mul_sum(T, K, H):
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    rows, weights = rows_and_weights(T, K, H)
    want = moe_fused_mul_sum(rows.view(T, K, H), weights)
    assert_same_bits(finalize(rows, route_major(T, K, rows.device), weights), want)


@pytest.mark.parametrize("T, K, H", SHAPES)
def test_deepgemm_unpermute_and_reduce(T, K, H):
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_unpermute_and_reduce

    rows, weights = rows_and_weights(T, K, H)
    row_map = torch.randperm(T * K, device="cuda").to(torch.int32).view(T, K)
    want = rows.new_empty(T, H)
    deepgemm_unpermute_and_reduce(
        a=rows, topk_ids=torch.zeros_like(row_map), topk_weights=weights, inv_perm=row_map, expert_map=None, output=want
    )
    assert_same_bits(finalize(rows, row_map, weights), want)


@pytest.mark.parametrize("T, K, H", SHAPES)
def test_moe_unpermute(T, K, H):
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_unpermute

    rows, weights = rows_and_weights(T, K, H)
    row_map = torch.randperm(T * K, device="cuda").to(torch.int32).view(T, K)
    offsets = torch.tensor([0, T * K], dtype=torch.int64, device="cuda")
    want = rows.new_empty(T, H)
    moe_unpermute(want, rows, weights, row_map, offsets)
    assert_same_bits(finalize(rows, row_map, weights, num_valid_rows=offsets[-1:]), want)
