"""The dataclasses behind every config file: what each key means, its unit, its range.

`binding.py` merges what Hydra composed into `Config` a second time, strictly, so that nothing unknown, of a wrong type
or out of range goes further. Ranges stand in the field's metadata (`number`), relations between keys in `checks/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from composer.choices import (
    Accelerator,
    AdvantageKind,
    ChatTemplate,
    Dtype,
    Family,
    LossKind,
    PhaseKind,
    Schedule,
    ScoreFunction,
    SourceKind,
    Stage,
    SyncMethod,
)

# Far beyond what anybody runs, and within what the libraries below take: a number above was mistyped.
COUNT = 10**6
STEPS = 10**9
LENGTH = 10**8
"""Tokens of one sequence or micro-batch; vLLM's positions are 32-bit."""
TOKENS = 10**15
BYTES = 2**50
LEAST_SECONDS = 0.05
"""No process starts and no server answers in less."""
SECONDS = 1e9
"""threading refuses to wait longer than 9.2e9 s."""
LARGE = 1e30
"""A float32 ends at 3.4e38."""


def number(default: float, minimum: float | None = None, maximum: float = COUNT, *, above: float | None = None) -> Any:
    """A numeric field with its range: inclusive `minimum` and `maximum`, exclusive `above`."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum, "above": above})


def text(default: Any = MISSING, *, may_be_empty: bool = False, plain: bool = False) -> Any:
    """A text field. An empty text is refused unless it `may_be_empty`; a `plain` one can be part of a file's name."""
    return field(default=default, metadata={"may_be_empty": may_be_empty, "plain": plain})


@dataclass(frozen=True)
class TargetConfig:
    """A class by name and its arguments; `instantiate.py` allows prefixes envs., launchers. and those in `plugins`."""

    _target_: str = MISSING
    """`package.module.Class`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


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


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mix."""

    kind: SourceKind = MISSING
    """Decides which keys below are read."""
    weight: float = number(1.0, above=0, maximum=LARGE)
    """Share of tokens, relative to the other sources of the phase."""
    path: str | None = None
    """files: a folder; jsonl: a file. Relative to the working directory."""
    pattern: str = "**/*"
    """files: a glob below `path`."""
    text_field: str = "text"
    """jsonl: the key of the text."""


@dataclass(frozen=True)
class SessionsConfig:
    """The scripted expert's sessions (sources of kind `sessions`)."""

    num_sessions: int = number(2000, 1, STEPS)
    """Sessions, each on a task of its own; RL begins after these tasks."""
    expert_accuracy: float = number(0.5, 0, 1)
    """Share of sessions in which the expert is right."""


@dataclass(frozen=True)
class PhaseConfig:
    """One training phase of the mix."""

    kind: PhaseKind = MISSING
    """Decides which tokens count in the loss, and what the sources are."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """By a name of your choice."""
    tokens: int = number(MISSING, 1, TOKENS)
    """Tokens to train on, all ranks together; the last batch is whole. Kind sft counts a session, however short, as
    `seq_len` tokens: at most so many go through, and only the assistant's carry loss."""
    seq_len: int = number(MISSING, 16, LENGTH)
    """Tokens of one sequence."""
    batch_size: int = number(MISSING, 1)
    """Sequences per optimizer step, all ranks together."""
    learning_rate: float = number(MISSING, above=0, maximum=LARGE)
    """Peak, after the warm-up."""
    warmup_steps: int = number(10, 0, STEPS)
    """Optimizer steps from 0 to the peak; less than the phase has."""
    schedule: Schedule = Schedule.cosine
    """After the warm-up."""
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    """Where the schedule ends, as a share of the peak."""
    weight_decay: float = number(0.01, 0, LARGE)
    """AdamW's, decoupled."""
    max_grad_norm: float = number(1.0, above=0, maximum=LARGE)
    """The gradient's global norm is clipped to this."""
    evaluate_every: int = number(50, 1, STEPS)
    """Optimizer steps between evaluations of the codebase loss."""
    checkpoint_every: int = number(50, 1, STEPS)
    """Optimizer steps between checkpoints; what an interruption can cost."""


@dataclass(frozen=True)
class MixConfig:
    """What the model reads before RL, phase by phase, and the held-out codebase that measures it."""

    name: str = text(plain=True)
    """Shown in records."""
    phases: dict[str, PhaseConfig] = field(default_factory=dict)
    """By name, in order."""
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    """What sources of kind `sessions` hold."""
    codebase: SourceConfig = field(default_factory=lambda: SourceConfig(kind=SourceKind.stdlib_code))
    """Held-out documents: never trained on, their loss is logged at every evaluation."""
    codebase_share: float = number(0.1, above=0, maximum=0.9)
    """Share of the codebase source's documents that are held out."""
    codebase_tokens: int = number(16384, 64, TOKENS)
    """At most this many held-out tokens are scored at an evaluation."""


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of every sandbox (`composer.contract.SandboxLimits`); one that cannot be applied stops the start."""

    memory_bytes: int = number(512 * 2**20, 32 * 2**20, BYTES)
    """Of all processes of a sandbox together."""
    num_processes: int = number(64, 1)
    """Processes and threads at a time."""
    file_bytes: int = number(64 * 2**20, 4096, BYTES)
    """Largest single file."""
    disk_bytes: int = number(256 * 2**20, 2**20, BYTES)
    """Everything written to the sandbox's own file system; with bubblewrap at most half of `memory_bytes`."""
    cpu_seconds: int = number(60, 1, STEPS)
    """CPU time of any one process."""
    exec_timeout_s: float = number(30.0, LEAST_SECONDS, SECONDS)
    """Wall time of one command."""
    lifetime_s: float = number(600.0, LEAST_SECONDS, SECONDS)
    """Wall time of a sandbox; at least `episode_timeout_s`."""
    output_bytes: int = number(64 * 2**10, 256, BYTES)
    """Kept of one command's output."""


@dataclass(frozen=True)
class EnvConfig:
    """Tasks, tools and ending of an episode, and the machine it happens on."""

    name: str = text(plain=True)
    """Shown in records."""
    taskset: TargetConfig = MISSING
    """Where tasks come from (`composer.contract.Taskset`)."""
    tools: dict[str, TargetConfig] = field(default_factory=dict)
    """What the model may call, by a name of your choice (`composer.contract.Tool`)."""
    graders: dict[str, TargetConfig] = field(default_factory=dict)
    """The rubric; a grader's weight stands in `grader_weights` (1.0 if absent)."""
    grader_weights: dict[str, float] = field(default_factory=dict, metadata={"minimum": 0, "maximum": LARGE})
    """Weights of graders in the reward."""
    sandbox: TargetConfig = MISSING
    """The backend that starts sandboxes (`composer.contract.SandboxBackend`)."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Of every sandbox."""
    system_prompt: str = text("", may_be_empty=True)
    """Text before the tools' description; may be empty."""
    chat_template: ChatTemplate = ChatTemplate.compact
    """How messages and tool calls become text."""
    max_turns: int = number(8, 1)
    """Requests to the generator in one episode."""
    max_turn_tokens: int = number(128, 4, LENGTH)
    """Tokens one turn may generate."""
    max_observation_bytes: int = number(4096, 16, BYTES)
    """A tool result is cut in the middle beyond this."""
    invalid_calls_allowed: int = number(0, 0)
    """How many malformed tool calls are answered with an error before the episode ends."""
    episode_timeout_s: float = number(120.0, LEAST_SECONDS, SECONDS)
    """Wall time of one episode, grading included."""
    concurrency: int = number(32, 1)
    """Episodes at a time in one env worker."""
    num_workers: int = number(1, 1)
    """Env workers (processes)."""


@dataclass(frozen=True)
class LengthPenaltyConfig:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), x a weighted sum, comes off the reward (Composer 2 report)."""

    coefficient: float = number(0.0, 0, LARGE)
    """Factor on C(x); 0: no penalty."""
    k: float = number(1.0, above=0, maximum=LARGE)
    """How soon the penalty bends."""
    q: float = number(0.5, 0, LARGE)
    """0: linear; 1: logarithmic; beyond: bounded."""
    generated_tokens: float = number(0.001, 0, LARGE)
    """Weight in x of a generated token."""
    tool_output_tokens: float = number(0.0, 0, LARGE)
    """Weight in x of a token of a tool result."""
    tool_calls: float = number(0.0, 0, LARGE)
    """Weight in x of a tool call."""
    turns: float = number(0.0, 0, LARGE)
    """Weight in x of a turn."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The RL algorithm."""

    name: str = text(plain=True)
    """Shown in plans and records."""
    num_steps: int = number(MISSING, 1, STEPS)
    """Optimizer steps."""
    groups_per_step: int = number(8, 1)
    """Groups (tasks) that make one optimizer step."""
    group_size: int = number(8, 2)
    """Sibling episodes of a task."""
    learning_rate: float = number(MISSING, above=0, maximum=LARGE)
    """Peak, after the warm-up."""
    warmup_steps: int = number(3, 0, STEPS)
    """Optimizer steps from 0 to the peak; less than `num_steps`."""
    schedule: Schedule = Schedule.constant
    """After the warm-up."""
    min_learning_rate_ratio: float = number(0.1, 0, 1)
    """Where the schedule ends, as a share of the peak."""
    weight_decay: float = number(0.0, 0, LARGE)
    """AdamW's, decoupled."""
    beta1: float = number(0.9, 0, 0.9999)
    """Adam's decay of the first moment."""
    beta2: float = number(0.95, 0, 0.99999)
    """Adam's decay of the second moment."""
    max_grad_norm: float = number(1.0, above=0, maximum=LARGE)
    """The gradient's global norm is clipped to this."""
    temperature: float = number(1.0, 0.01, 2)
    """Of sampling in training episodes, and of the probabilities in loss and KL penalty; vLLM takes no other."""
    advantage: AdvantageKind = AdvantageKind.mean_centered
    """From the rewards of a group."""
    loss: LossKind = LossKind.clipped
    """On every generated token."""
    clip_low: float = number(0.2, above=0, maximum=1)
    """The ratio is clipped at 1 - this."""
    clip_high: float = number(0.28, above=0, maximum=LARGE)
    """The ratio is clipped at 1 + this."""
    importance_cap: float = number(2.0, 1, LARGE)
    """Cap of a token's ratio of trainer to generator probability in the `cispo` loss; `clipped` has its own bounds."""
    entropy_coefficient: float = number(0.0, 0, LARGE)
    """Weight of the entropy bonus; 0: none."""
    kl_coefficient: float = number(0.0, 0, LARGE)
    """Weight of the k1 estimate of KL(policy || reference), put into the reward (Composer 2 report)."""
    max_staleness: int = number(1, 0)
    """Trainer version minus the oldest version in a group; one that exceeds it when its turn comes is dropped."""
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    """Subtracted from the reward."""
    microbatch_tokens: int = number(8192, 16, LENGTH)
    """Padded tokens of one forward and backward pass on one rank."""
    min_start_average: float = number(0.0, 0, 1)
    """Refuse to start RL when average@k before it is lower: a policy that never succeeds learns nothing."""
    group_timeout_s: float = number(300.0, LEAST_SECONDS, SECONDS)
    """A group not finished by then is dropped, counted, and replaced by a new task."""
    checkpoint_every: int = number(5, 1, STEPS)
    """Optimizer steps between checkpoints; what an interruption can cost."""


@dataclass(frozen=True)
class ParallelConfig:
    """The trainer's mesh. world size = replicate x shard x context x tensor x pipeline."""

    accelerator: Accelerator = Accelerator.cpu
    """Of trainer and generators."""
    data_parallel_replicate: int = number(1, 1)
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard: int = number(1, 1)
    """Ranks over which parameters are sharded (FSDP)."""
    tensor_parallel: int = number(1, 1)
    """Ranks over which heads and features are cut."""
    context_parallel: int = number(1, 1)
    """Ranks over which a sequence is cut."""
    pipeline_parallel: int = number(1, 1)
    """Pipeline stages; 1 for RL."""
    expert_parallel: int = number(1, 1)
    """Formed from the shard, context and tensor axes; must divide their product and the number of experts."""
    num_nodes: int = number(0, 0)
    """Machines of the cluster; 0: as many as the plan needs."""
    gpus_per_node: int = number(8, 1)
    """GPUs of one machine."""
    gpu_memory_bytes: int = number(0, 0, BYTES)
    """Memory of one GPU; 0: unknown, the plan then estimates without refusing."""
    param_dtype: Dtype = Dtype.float32
    """Compute format of parameters under mixed precision."""
    activation_checkpoint: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    threads_per_process: int = number(1, 1)
    """OpenMP threads (CPU). More threads than cores slows everything down many times."""
    timeout_s: float = number(1800.0, LEAST_SECONDS, SECONDS)
    """Wall time of one step, checkpoint, export, or of making the sessions, in seconds; the run ends after it."""


@dataclass(frozen=True)
class GeneratorConfig:
    """vLLM."""

    num_replicas: int = number(1, 1)
    """Engines, each with the whole model."""
    tensor_parallel: int = number(1, 1)
    """GPUs of one replica."""
    expert_parallel: bool = False
    """Cut experts by number, not by features, over the GPUs of a replica."""
    max_model_len: int = number(512, 16, LENGTH)
    """Tokens of one episode, prompt and tool results included."""
    max_num_seqs: int = number(64, 1)
    """Episodes that decode at a time in one replica."""
    kv_cache_bytes: int = number(256 * 2**20, 2**20, BYTES)
    """KV cache of one replica (per GPU with tensor parallelism)."""
    dtype: Dtype = Dtype.float32
    """Of weights and KV cache."""
    enforce_eager: bool = True
    """No CUDA graphs."""
    gpu_memory_utilization: float = number(0.85, above=0, maximum=1)
    """Share of a GPU's memory that must be free when the engine starts; weights and KV cache must fit into it."""
    request_timeout_s: float = number(120.0, LEAST_SECONDS, SECONDS)
    """Wall time of one request."""
    start_timeout_s: float = number(300.0, LEAST_SECONDS, SECONDS)
    """Wall time until an engine answers."""


@dataclass(frozen=True)
class WeightSyncConfig:
    """Publish on the trainer, load on the generators, after every optimizer step."""

    method: SyncMethod = SyncMethod.shared_memory
    """shared_memory: one machine only."""
    directory: str | None = None
    """Where versions are published; null: /dev/shm (shared_memory) or the run directory (filesystem)."""
    keep_versions: int = number(2, 1)
    """Versions kept beside the one being written."""
    clear_kv_cache: bool = True
    """Recompute the KV cache of running requests with the new weights."""
    verify_tolerance: float = number(1e-3, above=0, maximum=LARGE)
    """How far generator's and trainer's log-probabilities of 9 in 10 of a probe's tokens may be apart after a load."""
    timeout_s: float = number(60.0, LEAST_SECONDS, SECONDS)
    """Wall time of one publication and of one load."""


@dataclass(frozen=True)
class TrackingConfig:
    """MLflow and the console."""

    uri: str | None = None
    """null: SQLite in the run root. Else a server or database URI."""
    experiment: str = "composer"
    """MLflow's experiment."""
    run_name: str | None = None
    """In MLflow; null: the name of the run directory."""
    system_metrics_every_s: float = number(10.0, LEAST_SECONDS, SECONDS)
    """Between readings of CPU, memory and GPU."""
    traces_per_step: int = number(1, 0)
    """Episode traces logged at each RL step."""
    timeout_s: float = number(10.0, LEAST_SECONDS, SECONDS)
    """A tracking server that does not answer for so long is left alone; metrics stay in the run directory."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation before and after RL on unseen tasks."""

    num_tasks: int = number(64, 1)
    """Tasks of the evaluation split, from its beginning."""
    samples_per_task: int = number(8, 1)
    """Episodes of each task: the k of average@k and best@k."""
    temperature: float = number(1.0, 0.01, 2)
    """Of sampling; vLLM takes no other."""
    timeout_s: float = number(1800.0, LEAST_SECONDS, SECONDS)
    """Wall time of one evaluation."""


@dataclass(frozen=True)
class Config:
    """Everything a run is."""

    seed: int = number(0, 0, 2**31 - 1)
    """Of weights, data order, tasks and sampling. NumPy's end at 2^32, and replica i of the generator adds i."""
    run_root: str = "runs"
    """Run directories and the default MLflow database live here; relative to the working directory."""
    resume: str | None = None
    """A run directory to continue."""
    plugins: list[str] = field(default_factory=list)
    """Further package prefixes that `_target_` may name."""
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    """Which stages run, in this order."""
    model: ModelConfig = MISSING
    """`model=` in conf/model, and so on for the groups below."""
    mix: MixConfig = MISSING
    """What the model reads before RL."""
    env: EnvConfig = MISSING
    """Where it acts."""
    algorithm: AlgorithmConfig = MISSING
    """How it learns from acting."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the trainer is spread."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """How rollouts are generated."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How new weights reach the generators."""
    launcher: TargetConfig = MISSING
    """How the Ray cluster comes to be."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where the record goes."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How the model is measured."""
