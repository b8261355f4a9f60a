"""Config group `model`: the base mixture-of-experts model."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from composer.choices import Family, ScoreFunction
from composer.schema.fields import LARGE, LENGTH, number, text


@dataclass(frozen=True)
class ModelConfig:
    """The base mixture-of-experts model. Sizes in units (heads, features), not bytes."""

    name: str = text(plain=True)
    """Shown in plans and records."""
    family: Family = MISSING
    """Decides layers, checkpoint format and which keys below mean something."""
    checkpoint: str | None = None
    """A Hugging Face folder to start from; null: random weights."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer folder; null: train a byte-level BPE of `vocab_size` on the mix."""
    vocab_size: int = number(MISSING, 263, LENGTH)
    """Tokens; also the size of a tokenizer that is trained."""
    hidden_size: int = number(MISSING, 32)
    """Features of the residual stream."""
    num_layers: int = number(MISSING, 1)
    """Transformer layers, dense ones included."""
    num_dense_layers: int = number(0, 0)
    """The first layers that have a plain feed-forward network instead of experts."""
    num_heads: int = number(MISSING, 1)
    """Query heads."""
    num_kv_heads: int = number(MISSING, 1)
    """Key and value heads; divides `num_heads` (MLA: equal to it)."""
    head_dim: int = number(MISSING, 16)
    """Features of a head (MLA: of a query or key head, qk_nope_head_dim + qk_rope_head_dim)."""
    dense_ffn_size: int = number(0, 0)
    """Hidden features of the feed-forward network in dense layers."""
    num_experts: int = number(MISSING, 2)
    """Routed experts of a layer."""
    experts_per_token: int = number(2, 1)
    """Routed experts that a token uses (top-k)."""
    num_shared_experts: int = number(0, 0)
    """Experts that every token uses (deepseek_v3)."""
    expert_ffn_size: int = number(MISSING, 16)
    """Hidden features of one expert."""
    router_score: ScoreFunction = ScoreFunction.softmax
    """softmax over all experts (qwen3_moe), or a sigmoid each (deepseek_v3)."""
    router_scale: float = number(1.0, above=0, maximum=LARGE)
    """Factor on the gates (deepseek_v3)."""
    router_bias_rate: float = number(0.0, 0, LARGE)
    """Step of the auxiliary-loss-free balancing bias; 0: no bias (qwen3_moe has none)."""
    q_lora_rank: int = number(0, 0)
    """MLA: rank of the queries' latent; 0: queries are not compressed."""
    kv_lora_rank: int = number(0, 0)
    """MLA: rank of the latent that keys and values share."""
    qk_nope_head_dim: int = number(0, 0)
    """MLA: features of a query or key head without rotation."""
    qk_rope_head_dim: int = number(0, 0)
    """MLA: features of a query or key head with rotation."""
    v_head_dim: int = number(0, 0)
    """MLA: features of a value head."""
    router_groups: int = number(1, 1)
    """Experts are cut into so many groups, of which a token uses `router_groups_used` (deepseek_v3)."""
    router_groups_used: int = number(1, 1)
    """At most `router_groups`."""
    rope_theta: float = number(10000.0, above=0, maximum=LARGE)
    """Base of the rotary embedding's wavelengths."""
    rope_factor: float = number(1.0, 1, LARGE)
    """YaRN: how much longer the context is than `rope_original_context`; 1: plain rotary embedding (deepseek_v3)."""
    rope_original_context: int = number(4096, 16, LENGTH)
    """YaRN: context that the model was first trained for, in tokens."""
    rope_beta_fast: float = number(32.0, above=0, maximum=LARGE)
    """YaRN: rotations over the original context above which a dimension is left alone."""
    max_context: int = number(4096, 16, LENGTH)
    """Positions the rotary embedding is built for, in tokens."""
    norm_eps: float = number(1e-6, above=0, maximum=LARGE)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Input and output embeddings are one matrix."""
    init_std: float = number(0.02, above=0, maximum=LARGE)
    """Standard deviation of random weights (unused with `checkpoint`)."""
