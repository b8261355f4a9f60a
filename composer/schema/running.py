"""Config groups `parallel`, `generator`, `weight_sync`, `tracking`, `evaluation`: how a run is spread and measured."""

from __future__ import annotations

from dataclasses import dataclass

from composer.choices import Accelerator, Dtype, SyncMethod
from composer.schema.fields import BYTES, LARGE, LEAST_SECONDS, LENGTH, SECONDS, number


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
    no_prompt: bool = False
    """Leave the system message (prompt and tools) out: what the model does without being told."""
    timeout_s: float = number(1800.0, LEAST_SECONDS, SECONDS)
    """Wall time of one evaluation."""
