"""The neutral description of a model: what each family demands of `ModelConfig`, and its form as a Hugging Face config.

Free of torch, so that plans for any size can be made anywhere. Key names on the Hugging Face side are those of
`transformers` 5.19 (`Qwen3MoeConfig`, `DeepseekV3Config`) and are also what vLLM reads.
"""

from __future__ import annotations

from typing import Any

from composer.errors import ConfigError
from composer.schema import Family, ModelConfig, ScoreFunction

_ARCHITECTURES = {Family.qwen3_moe: "Qwen3MoeForCausalLM", Family.deepseek_v3: "DeepseekV3ForCausalLM"}
BALANCING_BIAS = "e_score_correction_bias"
"""The end of the name of a router's balancing bias. It is float32 in every format, in vLLM too: in bfloat16 its small
steps would be lost."""


def check_model(model: ModelConfig) -> None:
    """Refuse what the family cannot be.

    Raises:
        ConfigError: names the key under `model.`, its value and what to type instead.
    """
    if model.experts_per_token > model.num_experts:
        raise ConfigError(
            "model.experts_per_token", model.experts_per_token, f"must be at most num_experts ({model.num_experts})"
        )
    demands = {Family.qwen3_moe: _qwen3_moe_demands, Family.deepseek_v3: _deepseek_v3_demands}[model.family]
    for key, wrong, remedy in demands(model):
        if wrong:
            raise ConfigError(f"model.{key}", getattr(model, key), f"{remedy} (family {model.family.value})")


def _qwen3_moe_demands(model: ModelConfig) -> list[tuple[str, bool, str]]:
    return [
        ("num_kv_heads", model.num_heads % model.num_kv_heads != 0, f"must divide num_heads ({model.num_heads})"),
        ("head_dim", model.head_dim % 2 != 0, "must be even"),
        ("num_dense_layers", model.num_dense_layers != 0, "must be 0: every layer has experts"),
        ("num_shared_experts", model.num_shared_experts != 0, "must be 0: there are no shared experts"),
        ("router_score", model.router_score is not ScoreFunction.softmax, "must be softmax"),
        ("router_scale", model.router_scale != 1.0, "must be 1"),
        ("router_bias_rate", model.router_bias_rate != 0.0, "must be 0: the checkpoint format has no expert bias"),
        ("router_groups", model.router_groups != 1, "must be 1"),
        ("rope_factor", model.rope_factor != 1.0, "must be 1"),
    ]


def _deepseek_v3_demands(model: ModelConfig) -> list[tuple[str, bool, str]]:
    positive = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    qk_head_dim, per_group = model.qk_nope_head_dim + model.qk_rope_head_dim, model.num_experts // model.router_groups
    return [
        ("num_kv_heads", model.num_kv_heads != model.num_heads, f"must be num_heads ({model.num_heads})"),
        *((key, getattr(model, key) < 1, "must be at least 1") for key in positive),
        ("qk_rope_head_dim", model.qk_rope_head_dim % 2 != 0, "must be even"),
        ("head_dim", model.head_dim != qk_head_dim, f"must be qk_nope_head_dim + qk_rope_head_dim ({qk_head_dim})"),
        (
            "num_dense_layers",
            model.num_dense_layers >= model.num_layers,
            f"must be less than num_layers ({model.num_layers})",
        ),
        (
            "dense_ffn_size",
            model.num_dense_layers > 0 and model.dense_ffn_size < 1,
            "must be at least 1 when num_dense_layers is not 0",
        ),
        ("num_shared_experts", model.num_shared_experts < 1, "must be at least 1"),
        ("router_score", model.router_score is not ScoreFunction.sigmoid, "must be sigmoid"),
        (
            "router_groups",
            model.num_experts % model.router_groups != 0,
            f"must divide num_experts ({model.num_experts})",
        ),
        (
            "router_groups_used",
            model.router_groups_used > model.router_groups,
            f"must be at most router_groups ({model.router_groups})",
        ),
        (
            "router_groups",
            model.router_groups > 1 and per_group < 2,
            f"a group holds two experts or more: at most {model.num_experts // 2}",
        ),
        (
            "experts_per_token",
            model.experts_per_token > model.router_groups_used * per_group,
            f"must be at most the experts of router_groups_used ({model.router_groups_used} x {per_group})",
        ),
        ("tie_embeddings", model.tie_embeddings, "must be false"),
    ]


def hf_config(
    model: ModelConfig, *, dtype: str = "float32", eos_token_id: int | None = None, pad_token_id: int | None = None
) -> dict[str, Any]:
    """The content of `config.json` for an exported model."""
    common = {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family.value,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": model.max_context,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "use_cache": True,
    }
    if model.family is Family.qwen3_moe:
        return {
            **common,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "num_experts": model.num_experts,
            # unused: every layer has experts; transformers and vLLM still want a number
            "intermediate_size": model.dense_ffn_size or model.expert_ffn_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
            "output_router_logits": False,
            "use_sliding_window": False,
        }
    yarn = (
        {}
        if model.rope_factor == 1.0
        else {
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": model.rope_theta,
                "factor": model.rope_factor,
                "original_max_position_embeddings": model.rope_original_context,
                "beta_fast": model.rope_beta_fast,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        }
    )
    return {
        **common,
        **yarn,
        "num_key_value_heads": model.num_heads,
        "intermediate_size": model.dense_ffn_size or model.expert_ffn_size,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.num_shared_experts,
        "n_group": model.router_groups,
        "topk_group": model.router_groups_used,
        "routed_scaling_factor": model.router_scale,
        # vLLM applies the expert bias only when these two say so; transformers does not write them
        "scoring_func": model.router_score.value,
        "topk_method": "noaux_tc",
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_interleave": True,
    }


def hf_parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of this model, as transformers and vLLM read it.

    A shared output embedding is left out. The balancing bias counts as a tensor where the model has one.
    """
    d = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, d), "model.norm.weight": (d,)}
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    attention = {Family.qwen3_moe: _qwen3_attention, Family.deepseek_v3: _mla_attention}[model.family](model)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (d,)
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if layer < model.num_dense_layers:
            shapes |= _ffn(prefix + "mlp.", d, model.dense_ffn_size)
            continue
        shapes[prefix + "mlp.gate.weight"] = (model.num_experts, d)
        for expert in range(model.num_experts):
            shapes |= _ffn(f"{prefix}mlp.experts.{expert}.", d, model.expert_ffn_size)
        if model.family is Family.deepseek_v3:
            shapes |= _ffn(prefix + "mlp.shared_experts.", d, model.expert_ffn_size * model.num_shared_experts)
            if model.router_bias_rate:
                shapes[f"{prefix}mlp.gate.{BALANCING_BIAS}"] = (model.num_experts,)
    return shapes


def _ffn(prefix: str, d: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (hidden, d),
        f"{prefix}up_proj.weight": (hidden, d),
        f"{prefix}down_proj.weight": (d, hidden),
    }


def _qwen3_attention(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (query, d),
        "k_proj": (key, d),
        "v_proj": (key, d),
        "o_proj": (d, query),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
    }


def _mla_attention(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, heads, q, c = model.hidden_size, model.num_heads, model.q_lora_rank, model.kv_lora_rank
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    low_rank = {"q_a_proj": (q, d), "q_a_layernorm": (q,), "q_b_proj": (heads * qk, q)}
    query = low_rank if q else {"q_proj": (heads * qk, d)}
    return {
        **query,
        "kv_a_proj_with_mqa": (c + model.qk_rope_head_dim, d),
        "kv_a_layernorm": (c,),
        "kv_b_proj": (heads * (model.qk_nope_head_dim + model.v_head_dim), c),
        "o_proj": (d, heads * model.v_head_dim),
    }
