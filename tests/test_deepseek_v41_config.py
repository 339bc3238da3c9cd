"""The config's numbers, added up, and what it refuses."""

import re

import pytest

from moetail.models.deepseek_v41_config import FLASH, small


def test_the_released_model_has_its_published_size():
    c = FLASH
    one = 3 * c.hidden_size * c.moe_intermediate_size
    assert one == 35_389_440
    heads = c.num_attention_heads * c.head_dim
    attention = (
        (c.q_lora_rank + c.head_dim) * c.hidden_size + heads * c.q_lora_rank + c.o_lora_rank * heads
        + c.o_groups * c.o_lora_rank * c.hidden_size
    )  # fmt: skip
    assert round(attention / 1e6, 1) == 126.6
    mixes = 2 * c.hc_mult * (c.hc_mult + 2) * c.hc_mult * c.hidden_size
    layer = (c.n_routed_experts + 1) * one + attention + mixes + c.n_routed_experts * c.hidden_size
    assert round(c.num_hidden_layers * layer / 1e9, 1) == 550.2
    assert round((c.num_hidden_layers * layer + 2 * c.vocab_size * c.hidden_size) / 1e9) == 552
    assert (c.rms_norm_eps, c.hc_eps, c.swiglu_limit, c.routed_scaling_factor) == (1e-20, 1e-6, 10.0, 1.5)
    assert (c.sliding_window, c.dspark_n_routed_experts, c.dspark_num_experts_per_tok) == (128, 128, 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be 1 or more, got 0"),
        ({"hidden_size": 60}, "hidden_size must be a multiple of 8, got 60"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be from 1 to 8, got 9"),
        ({"dspark_num_experts_per_tok": 0}, "dspark_num_experts_per_tok must be from 1 to 5, got 0"),
        ({"num_attention_heads": 8}, "num_attention_heads must be a multiple of o_groups 6, got 8"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim must be even and <= head_dim 32, got 33"),
        ({"engram_max_ngram_size": 9}, "engram_max_ngram_size must be from 2 to sliding_window 8, got 9"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters must be 1 or more, got 0"),
    ],
)
def test_what_it_refuses(changes, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        small(**changes)


def test_ranks_that_cannot_split_it():
    for size in (1, 2, 3):
        small().check_tp(size)
    for size in (1, 2, 4, 8):
        FLASH.check_tp(size)
    with pytest.raises(ValueError, match="^o_groups must be a multiple of 4 for 4 ranks, got 6$"):
        small().check_tp(4)
    with pytest.raises(ValueError, match="^moe_intermediate_size must be a multiple of 16 for 2 ranks, got 40$"):
        small(moe_intermediate_size=40).check_tp(2)
