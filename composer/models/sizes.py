"""How large a model is, what a token costs, and what a GPU must hold. Pure arithmetic, free of torch.

Notation: V vocabulary, D hidden size, L layers, H query heads, G key/value heads, h head size, E experts, K experts
per token, S shared experts, F expert FFN size; q, c latent ranks of MLA, n, r, v its head sizes without position, with
rotary position, and of values.

    attention (qwen3_moe)    D h (2 H + 2 G) + 2 h
    attention (deepseek_v3)  D q + q + q H (n + r)  [D H (n + r) when q = 0]  + D (c + r) + c + c H (n + v) + H v D
    layer with experts       attention + 2 D + D E + 3 D F (E + S)
    dense layer              attention + 2 D + 3 D F_dense
    model                    V D (1 if tied else 2) + D + layers
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from composer.schema import Accelerator, Dtype, Family, GeneratorConfig, ModelConfig, ParallelConfig

_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_OPTIMIZER_BYTES = 8
"""AdamW's two moments in float32."""
_MASTER_BYTES = 4
"""Parameters and gradients are kept sharded in float32 whatever the compute format."""
_MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's masks on CUDA."""
TOKENS_AT_ONCE = 8192
"""Tokens that pretraining and SFT send through the model at once, and scoring of held-out text (one row at least)."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by where they are, in numbers (not bytes). Balancing biases are buffers and not counted."""

    embeddings: int
    """Input and output embeddings; shared ones count once."""
    attention: int
    dense_ffn: int
    router: int
    shared_experts: int
    routed_experts: int
    norms: int
    inactive: int
    """Routed experts that a token does not use."""

    @property
    def total(self) -> int:
        """Everything."""
        return (
            self.embeddings
            + self.attention
            + self.dense_ffn
            + self.router
            + self.shared_experts
            + self.routed_experts
            + self.norms
        )

    @property
    def active(self) -> int:
        """What one token uses, embeddings included."""
        return self.total - self.inactive


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count exactly, as `transformers` would.

    Example:
        >>> from composer.schema import Family
        >>> tiny = ModelConfig(name="t", family=Family.qwen3_moe, vocab_size=1024, hidden_size=128, num_layers=2,
        ...                    num_heads=4, num_kv_heads=4, head_dim=32, num_experts=16, experts_per_token=2,
        ...                    expert_ffn_size=128, tie_embeddings=True)
        >>> count_parameters(tiny).total, count_parameters(tiny).active
        (1839872, 463616)
    """
    d, sparse = model.hidden_size, model.num_layers - model.num_dense_layers
    expert = 3 * d * model.expert_ffn_size
    attention_norms = 2 * model.head_dim if model.family is Family.qwen3_moe else model.q_lora_rank + model.kv_lora_rank
    return ParameterCount(
        embeddings=model.vocab_size * d * (1 if model.tie_embeddings else 2),
        attention=model.num_layers * _attention_matrices(model),
        dense_ffn=model.num_dense_layers * 3 * d * model.dense_ffn_size,
        router=sparse * d * model.num_experts,
        shared_experts=sparse * model.num_shared_experts * expert,
        routed_experts=sparse * model.num_experts * expert,
        norms=model.num_layers * (2 * d + attention_norms) + d,
        inactive=sparse * (model.num_experts - model.experts_per_token) * expert,
    )


def _attention_matrices(model: ModelConfig) -> int:
    d, heads = model.hidden_size, model.num_heads
    if model.family is Family.qwen3_moe:
        return d * model.head_dim * 2 * (heads + model.num_kv_heads)
    q, c, v = model.q_lora_rank, model.kv_lora_rank, model.v_head_dim
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    query = d * q + q * heads * qk if q else d * heads * qk
    return query + d * (c + model.qk_rope_head_dim) + c * heads * (model.qk_nope_head_dim + v) + heads * v * d


def _qk_and_v_sizes(model: ModelConfig) -> tuple[int, int]:
    if model.family is Family.qwen3_moe:
        return model.head_dim, model.head_dim
    return model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim


def training_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token, recomputation left out.

    6 per parameter that multiplies (PaLM, arXiv 2204.02311, appendix B; an input embedding is looked up, not
    multiplied), and attention over the (seq_len + 1) / 2 keys that a causal query sees on average: 2 for each of
    query x key and weight x value, three times over for forward and backward.
    """
    count = count_parameters(model)
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    qk, v = _qk_and_v_sizes(model)
    attention = 3 * 2 * model.num_layers * model.num_heads * (qk + v) * (seq_len + 1) / 2
    return 6.0 * (count.active - count.norms - looked_up) + attention


def kv_cache_bytes_per_token(model: ModelConfig, dtype: Dtype) -> int:
    """What one token of context occupies in the generator: keys and values, or the latent and the rotary key of MLA."""
    per_layer = (
        2 * model.num_kv_heads * model.head_dim
        if model.family is Family.qwen3_moe
        else model.kv_lora_rank + model.qk_rope_head_dim
    )
    return model.num_layers * per_layer * _BYTES[dtype]


def loss_chunks(model: ModelConfig, parallel: ParallelConfig) -> int:
    """In how many pieces of the sequence the trainer makes its logits.

    Whole float32 logits of a 160k vocabulary, their log-softmax and gradient take 16 GB per 8k tokens.
    """
    return 8 if model.vocab_size >= 32768 and parallel.pipeline_parallel == 1 else 1


def sequence_multiple(model: ModelConfig, parallel: ParallelConfig) -> int:
    """What the length of every row, in tokens, must be a multiple of on this mesh.

    Tensor parallelism cuts the sequence between layers; context parallelism gives each rank a piece of its head and one
    of its tail, on CUDA in whole blocks of the attention mask; the loss may be made in pieces.
    """
    multiple = position_multiple(parallel) * loss_chunks(model, parallel)
    if parallel.context_parallel > 1 and parallel.accelerator is Accelerator.cuda:
        return math.lcm(multiple, _MASK_BLOCK * parallel.context_parallel)
    return multiple


def position_multiple(parallel: ParallelConfig) -> int:
    """What the mesh cuts positions into: the model's longest context, in tokens, must be a multiple of it."""
    context = 2 * parallel.context_parallel if parallel.context_parallel > 1 else 1
    return parallel.tensor_parallel * context


def rows_at_once(row_length: int, pipelined: bool) -> int:
    """Rows of `row_length` tokens that a rank sends through the model at once in pretraining and SFT.

    A pipeline takes single rows.
    """
    return 1 if pipelined else max(1, TOKENS_AT_ONCE // row_length)


def pipeline_layers(num_layers: int, stages: int) -> list[int]:
    """Transformer layers of each pipeline stage, as torchtitan spreads them.

    The input embedding weighs as much as a layer, and so does the output; what does not divide goes to the first
    stages.
    """
    if stages == 1:
        return [num_layers]
    each, more = divmod(num_layers + 2, stages)
    layers = [each + (stage < more) for stage in range(stages)]
    layers[0] -= 1
    layers[-1] -= 1
    return layers


@dataclass(frozen=True)
class TrainerMemory:
    """What one trainer rank holds at the peak of a step, in bytes. An estimate; allocator overhead is left out."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole layers in the compute format while they are used: the current one, the prefetched one, one of gradients."""
    activations: int
    logits: int
    reference: int
    """The weights that RL started from, where a KL penalty needs them."""

    @property
    def states(self) -> int:
        """What stays from step to step, and only more shards make smaller."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.gathered + self.activations + self.logits


def trainer_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    microbatch_tokens: int,
    reference: bool = False,
    rl_tokens: int = 0,
) -> TrainerMemory:
    """Estimate the memory of one rank.

    Args:
        model: the model.
        parallel: the mesh. Parameters, gradients and moments are sharded over shard x context x tensor x pipeline.
        microbatch_tokens: padded tokens that go through the model at once on one data-parallel rank, before the
            sequence is cut by context parallelism.
        reference: whether the weights that RL started from are kept, sharded like the parameters.
        rl_tokens: the same number in RL alone; 0 without RL. Its logits are gathered: every tensor-parallel rank holds
            the whole vocabulary of each token.
    """
    count, compute = count_parameters(model), _BYTES[parallel.param_dtype]
    shards = (
        parallel.data_parallel_shard * parallel.context_parallel * parallel.tensor_parallel * parallel.pipeline_parallel
    )
    stored = count.total / shards
    layers = max(pipeline_layers(model.num_layers, parallel.pipeline_parallel))
    gathered = 0.0
    if shards > 1 or compute != _MASTER_BYTES:
        sparse = max(1, model.num_layers - model.num_dense_layers)
        layer = (
            (count.attention + count.norms) / model.num_layers + (count.router + count.shared_experts) / sparse
        ) / parallel.tensor_parallel
        layer += count.routed_experts / sparse / max(parallel.expert_parallel, parallel.tensor_parallel)
        gathered = 3 * layer * compute
    tokens = microbatch_tokens / parallel.context_parallel / parallel.tensor_parallel
    # the pipeline keeps as many micro-batches in flight as it has stages
    in_flight = parallel.pipeline_parallel
    if parallel.activation_checkpoint:
        activations = tokens * (in_flight * layers * model.hidden_size + _layer_activations(model)) * compute
    else:
        activations = tokens * in_flight * layers * _layer_activations(model) * compute
    # logits, their log-softmax and their gradient, in float32
    scored = max(tokens, rl_tokens / parallel.context_parallel)
    logits = 3 * 4 * scored * model.vocab_size / loss_chunks(model, parallel)
    return TrainerMemory(
        parameters=int(_MASTER_BYTES * stored),
        gradients=int(_MASTER_BYTES * stored),
        optimizer=int(_OPTIMIZER_BYTES * stored),
        gathered=int(gathered),
        activations=int(activations),
        logits=int(logits),
        reference=int(_MASTER_BYTES * stored) if reference else 0,
    )


def _layer_activations(model: ModelConfig) -> int:
    """Numbers that one layer keeps per token for its backward pass.

    Inputs and outputs of the norms, the attention's projections before and after rotation and its output; for each
    routed expert its input, three hidden vectors and its output; the shared experts' hidden vectors; router scores.
    """
    d, heads = model.hidden_size, model.num_heads
    qk, v = _qk_and_v_sizes(model)
    attention = 4 * d + heads * (3 * qk + 2 * v)
    if model.family is Family.qwen3_moe:
        attention += model.num_kv_heads * (3 * qk + v)
    else:
        attention += heads * (qk + v) + 2 * (model.q_lora_rank + model.kv_lora_rank)
    used = model.experts_per_token * (2 * d + 4 * model.expert_ffn_size)
    return attention + used + model.num_shared_experts * 4 * model.expert_ffn_size + 3 * model.num_experts


@dataclass(frozen=True)
class GeneratorMemory:
    """What one GPU of a generator replica holds, in bytes."""

    weights: int
    kv_cache: int
    max_tokens: int
    """Tokens of context that fit into the KV cache of the replica."""

    @property
    def total(self) -> int:
        """Weights and KV cache; the engine's own work space comes on top."""
        return self.weights + self.kv_cache


def generator_memory(model: ModelConfig, generator: GeneratorConfig) -> GeneratorMemory:
    """Estimate the memory of one GPU of a replica; weights are cut by tensor (or expert) parallelism.

    Key/value heads are cut by tensor parallelism as far as there are heads; MLA's latent is copied to every GPU.
    """
    weights = count_parameters(model).total * _BYTES[generator.dtype] // generator.tensor_parallel
    heads_cut = min(generator.tensor_parallel, model.num_kv_heads) if model.family is Family.qwen3_moe else 1
    per_token = kv_cache_bytes_per_token(model, generator.dtype) / heads_cut
    return GeneratorMemory(weights, generator.kv_cache_bytes, int(generator.kv_cache_bytes / per_token))
