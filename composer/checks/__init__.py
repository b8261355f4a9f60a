"""Relations between keys that no single field can check: meshes, context lengths, batches, what each stage needs.

Each check raises a `PlanError` with the key to change, its value and the remedy. What would run, but not as its author
may think, becomes a warning of the plan. Pure: nothing here looks at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer.checks.common import generates, gpus_needed, largest_microbatch
from composer.checks.mesh import check_cluster, check_generator, check_mesh
from composer.checks.stages import check_env, check_phases, check_rl, check_stages
from composer.errors import ConfigError
from composer.models.base import check_model
from composer.models.sizes import count_parameters, generator_memory, trainer_memory
from composer.schema import Accelerator, Config, Dtype, Stage, SyncMethod

_LEAST_TOLERANCE = 0.05
"""Log-probabilities in bfloat16 have 8 bits: 0.03 apart at -8 for rounding alone."""


def check(config: Config) -> list[str]:
    """Check every relation.

    Returns:
        Warnings: what runs, but may not be meant.

    Raises:
        ConfigError: the model is not one of its family, or keys contradict each other.
        PlanError: the mesh is impossible or does not fit the GPUs.
    """
    check_model(config.model)
    check_stages(config)
    check_mesh(config)
    check_phases(config)
    check_generator(config)
    check_rl(config)
    check_env(config)
    check_cluster(config)
    _check_tracking(config)
    return list(_warnings(config))


def _check_tracking(config: Config) -> None:
    uri = config.tracking.uri
    if uri is None:
        return
    if re.search(r"//[^/@]*:[^/@]*@", uri):
        raise ConfigError(
            "tracking.uri",
            re.sub(r"//[^/@]*@", "//***@", uri),
            "secrets are not stored: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        )
    if not re.match(r"(?:https?|(?:sqlite|postgresql|mysql|mssql)(?:\+[a-z0-9]+)?)://.", uri):
        guess = f"http://{uri}" if re.match(r"[\w.-]+(:\d+)?$", uri) else "http://127.0.0.1:5000"
        raise ConfigError(
            "tracking.uri",
            uri,
            f"is no address: write `{guess}` for a server, `sqlite:////path/mlflow.db` for a file, or null",
        )


def _warnings(config: Config) -> Iterator[str]:
    model, p, env, g = config.model, config.parallel, config.env, config.generator
    if p.pipeline_parallel > 1 and model.num_layers % p.pipeline_parallel:
        yield f"{model.num_layers} layers do not divide into {p.pipeline_parallel} pipeline stages: some hold one more"
    if generates(config):
        episodes, seats = env.concurrency * env.num_workers, g.num_replicas * g.max_num_seqs
        if episodes > 2 * seats:
            yield f"{episodes} episodes at a time share {seats} generator seats: they will queue"
        tokens, longest = generator_memory(model, g).max_tokens, g.max_model_len
        if tokens < g.max_num_seqs * longest // 8:
            yield f"the KV cache holds {tokens} tokens for {g.max_num_seqs} episodes of up to {longest}: some will wait"
        tolerance = config.weight_sync.verify_tolerance
        if Stage.rl in config.stages and g.dtype is not Dtype.float32 and tolerance < _LEAST_TOLERANCE:
            yield (
                f"weight_sync.verify_tolerance={tolerance:g} is for float32: engines in {g.dtype.value} are further "
                "apart under the same weights, and the first load would end the run; set 0.2"
            )
    if p.accelerator is Accelerator.cuda and p.gpu_memory_bytes:
        memory = trainer_memory(model, p, largest_microbatch(config))
        if memory.total > 0.9 * p.gpu_memory_bytes:
            yield (
                f"a trainer rank may need {memory.total / 1e9:.0f} of a GPU's {p.gpu_memory_bytes / 1e9:.0f} GB: "
                "raise data_parallel_shard, context_parallel or expert_parallel, or lower microbatch_tokens and seq_len"
            )
    if config.weight_sync.method is SyncMethod.filesystem and gpus_needed(config) > p.gpus_per_node:
        folders = " and ".join(dict.fromkeys((config.run_root, config.weight_sync.directory or config.run_root)))
        yield f"{folders} must be on a file system that every machine sees: weights and checkpoints travel through it"
    count = count_parameters(model)
    if count.active > count.total / 2:
        yield f"a token uses {count.active / count.total:.0%} of all parameters: this is hardly a sparse model"
