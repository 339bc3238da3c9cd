"""DeepSeek-V4.1-Flash's text config: the released values, and a small one of the same shape for tests.

Field names are those of the released `config.json`. `swiglu_limit`, `hc_eps` and all others are used as they are there;
fields of the sparse attention, the quantization and the vision tower are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeepseekV41Config:
    """The released values are the defaults. `engram_layer_ids` may name layers that a truncated model does not have.

    engram_vocab_size  each hash column of an Engram table is a prime above this many rows long
    window_only_layers layers without compressed context in the original: they rotate by plain RoPE, others by YaRN
    image_tokens       first and end of the token ids that an Engram takes as dead

    Raises: ValueError naming the field, what it was and what it must be.
    """

    num_hidden_layers: int = 40
    hidden_size: int = 5120
    vocab_size: int = 129280
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_positions: int = 65536
    window_only_layers: tuple[int, ...] = (0, 1)
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2304
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_compressed_vocab_size: int = 99092
    engram_pad_token_id: int = 2
    image_tokens: tuple[int, int] = (129264, 129269)
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3

    def __post_init__(self) -> None:
        experts, drafters = (self.n_routed_experts, self.dspark_n_routed_experts)
        for name, value, rule, holds in (
            ("num_hidden_layers", self.num_hidden_layers, "1 or more", self.num_hidden_layers >= 1),
            ("hidden_size", self.hidden_size, "a multiple of 8", self.hidden_size % 8 == 0),
            ("hc_mult", self.hc_mult, "1 or more", self.hc_mult >= 1),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters, "1 or more", self.hc_sinkhorn_iters >= 1),
            ("num_experts_per_tok", self.num_experts_per_tok, f"from 1 to {experts}",
             1 <= self.num_experts_per_tok <= experts),
            ("dspark_num_experts_per_tok", self.dspark_num_experts_per_tok, f"from 1 to {drafters}",
             1 <= self.dspark_num_experts_per_tok <= drafters),
            ("num_attention_heads", self.num_attention_heads, f"a multiple of o_groups {self.o_groups}",
             self.num_attention_heads % self.o_groups == 0),
            ("qk_rope_head_dim", self.qk_rope_head_dim, f"even and <= head_dim {self.head_dim}",
             self.qk_rope_head_dim % 2 == 0 and self.qk_rope_head_dim <= self.head_dim),
            ("engram_max_ngram_size", self.engram_max_ngram_size, f"from 2 to sliding_window {self.sliding_window}",
             2 <= self.engram_max_ngram_size <= self.sliding_window),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {value}")

    def check_tp(self, size: int) -> None:
        """Raises: ValueError where `size` ranks cannot split the model evenly."""
        for name, value, unit in (
            ("o_groups", self.o_groups, 1),
            ("moe_intermediate_size", self.moe_intermediate_size, 8),  # rows of whole 16 bytes
            ("vocab_size", self.vocab_size, 1),
        ):
            if value % (size * unit):
                raise ValueError(f"{name} must be a multiple of {size * unit} for {size} ranks, got {value}")


FLASH = DeepseekV41Config()


def small(**changes: object) -> DeepseekV41Config:
    """A model of milliseconds on a CPU, for 1, 2 or 3 ranks: six layers, Engrams at layers 1 and 3."""
    config = DeepseekV41Config(
        num_hidden_layers=6, hidden_size=64, vocab_size=300, num_attention_heads=12, head_dim=32, qk_rope_head_dim=16,
        q_lora_rank=24, o_lora_rank=16, o_groups=6, sliding_window=8, max_position_embeddings=4096,
        rope_original_positions=64, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
        engram_layer_ids=(1, 3), engram_max_ngram_size=3, engram_n_heads=2, engram_head_dim=16, engram_vocab_size=1000,
        engram_compressed_vocab_size=250, image_tokens=(290, 295), dspark_n_routed_experts=5,
        dspark_num_experts_per_tok=2,
    )  # fmt: skip
    return replace(config, **changes)  # type: ignore[arg-type]
