"""The presets against torch and FlashInfer's own rules, and the Numerics value itself."""

import pytest
import torch

from moetail.numerics import PRESETS, Numerics, slot_groups, torch_cpu_main_columns

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("name", PRESETS)
def test_spec_round_trips(name):
    preset = PRESETS[name]
    assert Numerics.parse(preset.spec) == preset
    assert Numerics.parse(name) == preset
    assert preset.name == name


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("product", "fp64"),
        ("order", "random"),
        ("order", "split(3)"),
        ("rounding", "three"),
        ("zero", "minus"),
        ("scale", "x"),
        ("product", None),
        ("order", 4),
        ("rounding", 2),
        ("zero", True),
        ("scale", 1.0),
    ],
)
def test_refuses_unknown_fields(field, bad):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Numerics(**{"product": "fma", field: bad})


@pytest.mark.parametrize(
    ("order", "K", "groups"),
    [
        ("sequential", 3, ((0, 1, 2),)),
        ("split(2)", 5, ((0, 2, 4), (1, 3))),
        ("split(4)", 6, ((0, 4), (1, 5), (2,), (3,))),
        ("split(4)", 2, ((0,), (1,))),
        ("torch_cpu", 6, ((0, 4, 5), (1,), (2,), (3,))),
        ("torch_cpu", 3, ((0, 1, 2),)),
    ],
)
def test_slot_groups(order, K, groups):
    assert slot_groups(order, K) == groups


@pytest.mark.parametrize(
    ("T", "K", "H", "order"),
    [
        (59, 6, 5120, "split(2)"), (60, 6, 5120, "sequential"),  # 20 blocks of columns: 59 * 20 < 1184 <= 60 * 20
        (42, 8, 7168, "split(2)"), (43, 8, 7168, "sequential"), (1, 4, 5120, "sequential"), (1, 9, 5120, "split(4)"),
        (1, 17, 5120, "split(8)"), (1, 33, 5120, "split(16)"), (1, 64, 5120, "split(16)"), (1, 8, 5124, "sequential"),
        (37, 6, 8192, "sequential"),  # exactly 1184
    ],
)  # fmt: skip
def test_flashinfer_is_a_function_of_t_k_h(T, K, H, order):
    assert Numerics.FLASHINFER.resolve(T, K, H, "cuda", BF16, F32).order == order


@pytest.mark.parametrize(
    ("rows", "weights", "product"),
    [(BF16, F32, "round_f32"), (BF16, BF16, "round_row"), (BF16, F16, "round_f32"), (F16, F16, "round_row"),
     (F32, F32, "round_f32"), (F32, BF16, "round_f32")],
)  # fmt: skip
def test_transformers_product_is_torch_type_promotion(rows, weights, product):
    assert Numerics.TRANSFORMERS.resolve(4, 8, 64, "cpu", rows, weights).product == product


@pytest.mark.parametrize(
    ("device", "K", "H", "what"),
    [("cpu", 17, 64, "K <= 16"), ("cpu", 8, 1, "H >= 2"), ("cuda", 49, 64, "K <= 48"), ("mps", 8, 64, "cpu and cuda")],
)
def test_transformers_declines_what_it_does_not_define(device, K, H, what):
    with pytest.raises(ValueError, match=what):
        Numerics.TRANSFORMERS.resolve(4, K, H, device, BF16, F32)


def wide_products(T, K, H, dtype, device="cpu"):
    """Values spread so far that fp32 addition order shows, in 16-bit inputs too (bf16 sums are otherwise exact)."""
    g = torch.Generator().manual_seed(T * 1000 + K * 10 + H)
    top = 9 if dtype == F16 else 20
    return (
        (torch.randn(T, K, H, generator=g) * torch.exp2(torch.randint(0, top, (T, K, H), generator=g)))
        .to(dtype)
        .to(device)
    )


def sum_in_order(products, order):
    total = None
    for group in slot_groups(order, products.shape[1]):
        acc = torch.zeros_like(products[:, 0], dtype=F32)
        for k in group:
            acc = acc + products[:, k].float()
        total = acc if total is None else total + acc
    return total


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("T", [1, 3, 64, 333])
def test_torch_sum_order_on_cpu(T, dtype):
    for K in (1, 2, 3, 4, 5, 6, 7, 8, 10, 15, 16):
        for H in (2, 7, 8, 31, 32, 33, 96, 255, 2048, 5120):
            products = wide_products(T, K, H, dtype)
            cut = torch_cpu_main_columns(H)
            want = torch.cat(
                [sum_in_order(products[..., :cut], "sequential"), sum_in_order(products[..., cut:], "torch_cpu")], 1
            )
            assert torch.equal(products.sum(1), want.to(dtype)), (K, H)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("T", [1, 3, 64, 1000])
def test_torch_sum_order_on_cuda(T, dtype):
    for K in (1, 2, 4, 5, 6, 8, 10, 15, 16, 17, 33, 48):
        for H in (2, 7, 96, 255, 2048, 5120):
            products = wide_products(T, K, H, dtype, "cuda")
            assert torch.equal(products.sum(1), sum_in_order(products, "split(4)").to(dtype)), (K, H)
