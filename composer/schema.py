"""The dataclasses behind every config file: what each key means, its unit, its range.

`config.py` merges what Hydra composed into `Config` a second time, strictly, so that nothing unknown, of a wrong type or
out of range goes further. Ranges stand in the field's metadata (`number`), relations between keys in `plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


def number(
    default: float, minimum: float | None = None, maximum: float | None = None, above: float | None = None
) -> Any:
    """A numeric field with its range: inclusive `minimum` and `maximum`, exclusive `above`."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum, "above": above})


class Family(StrEnum):
    """Model families whose layers torchtitan and vLLM both know."""

    qwen3_moe = "qwen3_moe"
    deepseek_v3 = "deepseek_v3"


class Dtype(StrEnum):
    """Number formats."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ScoreFunction(StrEnum):
    """How a router turns logits into gates."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class PhaseKind(StrEnum):
    """What a training phase does: next-token loss on all tokens, or on the assistant's tokens of sessions."""

    pretrain = "pretrain"
    sft = "sft"


class SourceKind(StrEnum):
    """Where a source's documents come from."""

    stdlib_code = "stdlib_code"
    """The source files of the running Python's standard library."""
    stdlib_prose = "stdlib_prose"
    """Its docstrings and documentation text."""
    files = "files"
    """Text files below `path` that match `pattern`."""
    jsonl = "jsonl"
    """JSON lines at `path`; the text is in `text_field`."""
    sessions = "sessions"
    """Harness sessions of the env's scripted expert (kind sft only)."""


class Schedule(StrEnum):
    """Learning-rate schedules after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class AdvantageKind(StrEnum):
    """How rewards of a group become advantages."""

    mean_centered = "mean_centered"
    """reward - group mean (Dr. GRPO)."""
    standardized = "standardized"
    """(reward - group mean) / group standard deviation (GRPO)."""


class LossKind(StrEnum):
    """The policy-gradient loss."""

    clipped = "clipped"
    """PPO/DAPO: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    cispo = "cispo"
    """CISPO: the ratio is clipped and detached; no token loses its gradient."""


class Stage(StrEnum):
    """The stages a run may have, in the order of `Config.stages`."""

    pretrain = "pretrain"
    evaluate_before = "evaluate_before"
    rl = "rl"
    evaluate_after = "evaluate_after"


class ChatTemplate(StrEnum):
    """How conversations are written (`composer.rollout.chat.TEMPLATES`)."""

    compact = "compact"
    """Tools by signature only: for small models, to which every token is dear."""
    hermes = "hermes"
    """Tools as JSON schemas, as Hermes and Qwen models know them."""
    own = "own"
    """The tokenizer's own template."""


class Accelerator(StrEnum):
    """What the ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class SyncMethod(StrEnum):
    """How weights travel from the trainer to the generators."""

    shared_memory = "shared_memory"
    """Through /dev/shm: trainer and generators on one machine."""
    filesystem = "filesystem"
    """Through a directory that all machines see."""


@dataclass(frozen=True)
class TargetConfig:
    """A class by name and its arguments; `instantiate.py` allows prefixes envs., launchers. and those in `plugins`."""

    _target_: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The base mixture-of-experts model. Sizes in units (heads, features), not bytes."""

    name: str = MISSING
    family: Family = MISSING
    checkpoint: str | None = None
    """A Hugging Face folder to start from; null: random weights."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer folder; null: train a byte-level BPE of `vocab_size` on the mix."""
    vocab_size: int = number(MISSING, 256)
    hidden_size: int = number(MISSING, 32)
    num_layers: int = number(MISSING, 1)
    num_dense_layers: int = number(0, 0)
    """The first layers that have a plain feed-forward network instead of experts."""
    num_heads: int = number(MISSING, 1)
    num_kv_heads: int = number(MISSING, 1)
    head_dim: int = number(MISSING, 16)
    dense_ffn_size: int = number(0, 0)
    num_experts: int = number(MISSING, 2)
    experts_per_token: int = number(2, 1)
    num_shared_experts: int = number(0, 0)
    expert_ffn_size: int = number(MISSING, 16)
    router_score: ScoreFunction = ScoreFunction.softmax
    router_scale: float = number(1.0, above=0)
    router_bias_rate: float = number(0.0, 0)
    """Step of the auxiliary-loss-free balancing bias; 0: no bias (qwen3_moe has none)."""
    q_lora_rank: int = number(0, 0)
    kv_lora_rank: int = number(0, 0)
    qk_nope_head_dim: int = number(0, 0)
    qk_rope_head_dim: int = number(0, 0)
    v_head_dim: int = number(0, 0)
    router_groups: int = number(1, 1)
    """Experts are cut into so many groups, of which a token uses `router_groups_used` (deepseek_v3)."""
    router_groups_used: int = number(1, 1)
    rope_theta: float = number(10000.0, above=0)
    rope_factor: float = number(1.0, 1)
    """YaRN: how much longer the context is than `rope_original_context`; 1: plain rotary embedding (deepseek_v3)."""
    rope_original_context: int = number(4096, 16)
    rope_beta_fast: float = number(32.0, above=0)
    max_context: int = number(4096, 16)
    """Positions the rotary embedding is built for, in tokens."""
    norm_eps: float = number(1e-6, above=0)
    tie_embeddings: bool = False
    init_std: float = number(0.02, above=0)
    """Standard deviation of random weights (unused with `checkpoint`)."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mix."""

    kind: SourceKind = MISSING
    weight: float = number(1.0, above=0)
    """Share of tokens, relative to the other sources of the phase."""
    path: str | None = None
    pattern: str = "**/*"
    text_field: str = "text"


@dataclass(frozen=True)
class SessionsConfig:
    """The scripted expert's sessions (sources of kind `sessions`)."""

    num_sessions: int = number(2000, 1)
    expert_accuracy: float = number(0.5, 0, 1)
    """Share of sessions in which the expert is right."""


@dataclass(frozen=True)
class PhaseConfig:
    """One training phase of the mix."""

    kind: PhaseKind = MISSING
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    tokens: int = number(MISSING, 1)
    """Tokens to train on, all ranks together; the last batch is whole."""
    seq_len: int = number(MISSING, 16)
    batch_size: int = number(MISSING, 1)
    """Sequences per optimizer step, all ranks together."""
    learning_rate: float = number(MISSING, above=0)
    warmup_steps: int = number(10, 0)
    schedule: Schedule = Schedule.cosine
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    weight_decay: float = number(0.01, 0)
    max_grad_norm: float = number(1.0, above=0)
    evaluate_every: int = number(50, 1)
    """Optimizer steps between evaluations of the codebase loss."""
    checkpoint_every: int = number(50, 1)


@dataclass(frozen=True)
class MixConfig:
    """What the model reads before RL, phase by phase, and the held-out codebase that measures it."""

    name: str = MISSING
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    codebase: SourceConfig = field(default_factory=lambda: SourceConfig(kind=SourceKind.stdlib_code))
    """Held-out documents: never trained on, their loss is logged at every evaluation."""
    codebase_share: float = number(0.1, above=0, maximum=0.9)
    """Share of the codebase source's documents that are held out."""
    codebase_tokens: int = number(16384, 64)
    """At most this many held-out tokens are scored at an evaluation."""


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of every sandbox (`composer.contract.SandboxLimits`); one that cannot be applied stops the start."""

    memory_bytes: int = number(512 * 2**20, 2**20)
    num_processes: int = number(64, 1)
    file_bytes: int = number(64 * 2**20, 1)
    disk_bytes: int = number(256 * 2**20, 1)
    cpu_seconds: int = number(60, 1)
    exec_timeout_s: float = number(30.0, above=0)
    lifetime_s: float = number(600.0, above=0)
    output_bytes: int = number(64 * 2**10, 1)


@dataclass(frozen=True)
class EnvConfig:
    """Tasks, tools and ending of an episode, and the machine it happens on."""

    name: str = MISSING
    taskset: TargetConfig = MISSING
    tools: dict[str, TargetConfig] = field(default_factory=dict)
    graders: dict[str, TargetConfig] = field(default_factory=dict)
    """The rubric; a grader's weight stands in `grader_weights` (1.0 if absent)."""
    grader_weights: dict[str, float] = field(default_factory=dict)
    sandbox: TargetConfig = MISSING
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    system_prompt: str = ""
    chat_template: ChatTemplate = ChatTemplate.compact
    max_turns: int = number(8, 1)
    max_turn_tokens: int = number(128, 1)
    """Tokens one turn may generate."""
    max_observation_bytes: int = number(4096, 16)
    """A tool result is cut in the middle beyond this."""
    invalid_calls_allowed: int = number(0, 0)
    """How many malformed tool calls are answered with an error before the episode ends."""
    episode_timeout_s: float = number(120.0, above=0)
    concurrency: int = number(32, 1)
    """Episodes at a time in one env worker."""
    num_workers: int = number(1, 1)


@dataclass(frozen=True)
class LengthPenaltyConfig:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), x a weighted sum; subtracted from the reward (Composer 2 report)."""

    coefficient: float = number(0.0, 0)
    k: float = number(1.0, above=0)
    q: float = number(0.5, 0)
    generated_tokens: float = number(0.001, 0)
    tool_output_tokens: float = number(0.0, 0)
    tool_calls: float = number(0.0, 0)
    turns: float = number(0.0, 0)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The RL algorithm."""

    name: str = MISSING
    num_steps: int = number(MISSING, 1)
    """Optimizer steps."""
    groups_per_step: int = number(8, 1)
    group_size: int = number(8, 2)
    """Sibling episodes of a task."""
    learning_rate: float = number(MISSING, above=0)
    warmup_steps: int = number(3, 0)
    schedule: Schedule = Schedule.constant
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    weight_decay: float = number(0.0, 0)
    beta1: float = number(0.9, 0, 0.9999)
    beta2: float = number(0.95, 0, 0.99999)
    max_grad_norm: float = number(1.0, above=0)
    temperature: float = number(1.0, above=0)
    advantage: AdvantageKind = AdvantageKind.mean_centered
    loss: LossKind = LossKind.clipped
    clip_low: float = number(0.2, above=0, maximum=1)
    clip_high: float = number(0.28, above=0)
    importance_cap: float = number(2.0, 1)
    """Truncation of the trainer-over-generator ratio of a token (TIS); only the `cispo` loss uses it as its cap."""
    entropy_coefficient: float = number(0.0, 0)
    kl_coefficient: float = number(0.0, 0)
    """Weight of the k1 estimate of KL(policy || reference), put into the reward (Composer 2 report)."""
    max_staleness: int = number(1, 0)
    """Trainer version minus the version current when a group starts; a group that would exceed it waits."""
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    microbatch_tokens: int = number(8192, 16)
    """Padded tokens of one forward and backward pass on one rank."""
    min_start_average: float = number(0.0, 0, 1)
    """Refuse to start RL when average@k before it is lower: a policy that never succeeds learns nothing."""
    group_timeout_s: float = number(300.0, above=0)
    """A group not finished by then is dropped, counted, and replaced by a new task."""
    checkpoint_every: int = number(5, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """The trainer's mesh. world size = replicate x shard x context x tensor x pipeline."""

    accelerator: Accelerator = Accelerator.cpu
    data_parallel_replicate: int = number(1, 1)
    data_parallel_shard: int = number(1, 1)
    tensor_parallel: int = number(1, 1)
    context_parallel: int = number(1, 1)
    pipeline_parallel: int = number(1, 1)
    expert_parallel: int = number(1, 1)
    """Formed from the shard, context and tensor axes; must divide their product and the number of experts."""
    num_nodes: int = number(0, 0)
    """Machines of the cluster; 0: as many as the plan needs."""
    gpus_per_node: int = number(8, 1)
    gpu_memory_bytes: int = number(0, 0)
    """Memory of one GPU; 0: unknown, the plan then estimates without refusing."""
    param_dtype: Dtype = Dtype.float32
    """Compute format of parameters under mixed precision."""
    activation_checkpoint: bool = False
    threads_per_process: int = number(1, 1)
    """OpenMP threads (CPU). More threads than cores slows everything down many times."""


@dataclass(frozen=True)
class GeneratorConfig:
    """vLLM."""

    num_replicas: int = number(1, 1)
    tensor_parallel: int = number(1, 1)
    expert_parallel: bool = False
    max_model_len: int = number(512, 16)
    """Tokens of one episode, prompt and tool results included."""
    max_num_seqs: int = number(64, 1)
    kv_cache_bytes: int = number(256 * 2**20, 2**20)
    """KV cache of one replica (per GPU with tensor parallelism)."""
    dtype: Dtype = Dtype.float32
    enforce_eager: bool = True
    gpu_memory_utilization: float = number(0.85, above=0, maximum=1)
    request_timeout_s: float = number(120.0, above=0)
    start_timeout_s: float = number(300.0, above=0)


@dataclass(frozen=True)
class WeightSyncConfig:
    """Publish on the trainer, load on the generators, after every optimizer step."""

    method: SyncMethod = SyncMethod.shared_memory
    directory: str | None = None
    """Where versions are published; null: /dev/shm (shared_memory) or the run directory (filesystem)."""
    keep_versions: int = number(2, 1)
    clear_kv_cache: bool = True
    """Recompute the KV cache of running requests with the new weights."""
    verify_tolerance: float = number(1e-3, above=0)
    """Largest |difference| of log-probabilities, generator against trainer, on a probe after each load."""
    timeout_s: float = number(60.0, above=0)


@dataclass(frozen=True)
class TrackingConfig:
    """MLflow and the console."""

    uri: str | None = None
    """null: SQLite in the run root. Else a server or database URI."""
    experiment: str = "composer"
    run_name: str | None = None
    system_metrics_every_s: float = number(10.0, above=0)
    traces_per_step: int = number(1, 0)
    """Episode traces logged at each RL step."""
    timeout_s: float = number(10.0, above=0)
    """A tracking server that does not answer for so long is left alone; metrics stay in the run directory."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation before and after RL on unseen tasks."""

    num_tasks: int = number(64, 1)
    samples_per_task: int = number(8, 1)
    temperature: float = number(1.0, above=0)
    timeout_s: float = number(1800.0, above=0)


@dataclass(frozen=True)
class Config:
    """Everything a run is."""

    seed: int = number(0, 0)
    run_root: str = "runs"
    """Run directories and the default MLflow database live here; relative to the working directory."""
    resume: str | None = None
    """A run directory to continue."""
    plugins: list[str] = field(default_factory=list)
    """Further package prefixes that `_target_` may name."""
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    model: ModelConfig = MISSING
    mix: MixConfig = MISSING
    env: EnvConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    launcher: TargetConfig = MISSING
    """How the Ray cluster comes to be."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
