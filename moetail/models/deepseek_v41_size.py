"""How many bytes the parameters of a `deepseek_v41.Decoder` take, from its config: asked before any is allocated.

The formulas follow the `random` of each part; a test compares them with a decoder's tensors.
"""

from __future__ import annotations

from moetail.models import engram
from moetail.models.deepseek_v41_config import DeepseekV41Config

_BF16, _FP32 = 2, 4


def parameter_bytes(config: DeepseekV41Config, stage: range, ranks: int = 1) -> tuple[int, int]:
    """(of the layers `stage` with what the first and last stage have besides, on each of `ranks` tensor-parallel ranks;
    of the Engram tables alone, which each rank has whole)."""
    c, H = config, config.hidden_size
    bf16 = fp32 = tables = 0
    for layer in stage:
        bf16 += 2 * H + _attention(c, ranks) + _experts(c, ranks)
        fp32 += c.num_attention_heads // ranks + c.n_routed_experts  # sink, router bias
        rows = c.hc_mult * (c.hc_mult + 2)
        fp32 += 2 * (rows * c.hc_mult * H + rows + 3)  # the mixes of both sublayers
        if layer in c.engram_layer_ids:
            columns = engram.primes(c.engram_layer_ids, c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)
            tables += sum(columns[layer]) * c.engram_head_dim
            width = len(columns[layer]) * c.engram_head_dim
            bf16 += (c.hc_mult + 1) * H * width + 2 * c.hc_mult * H
    if stage.start == 0:
        bf16 += c.vocab_size * H
    if stage.stop == c.num_hidden_layers:
        bf16 += H + c.vocab_size // ranks * H
    return (bf16 + tables) * _BF16 + fp32 * _FP32, tables * _BF16


def _attention(c: DeepseekV41Config, ranks: int) -> int:
    whole = (c.q_lora_rank + c.head_dim) * c.hidden_size + c.q_lora_rank + c.head_dim
    heads = c.num_attention_heads * c.head_dim
    cut = heads * c.q_lora_rank + c.o_lora_rank * heads + c.hidden_size * c.o_groups * c.o_lora_rank
    return whole + cut // ranks


def _experts(c: DeepseekV41Config, ranks: int) -> int:
    """The router's gate, and three matrices of each expert, the shared one among them."""
    matrices = 3 * c.moe_intermediate_size // ranks * c.hidden_size
    return c.n_routed_experts * c.hidden_size + (c.n_routed_experts + 1) * matrices
