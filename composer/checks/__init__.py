"""Relations between keys that no single field can check: meshes, context lengths, batches, what each stage needs.

Each check raises a `PlanError` with the key to change, its value and the remedy. What would run, but not as its author
may think, becomes a warning of the plan. Pure: nothing here looks at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from composer.checks.common import generates, gpus_needed, rank_memory
from composer.checks.mesh import check_cluster, check_generator, check_mesh
from composer.checks.stages import check_env, check_phases, check_rl, check_stages
from composer.checks.unread import check_unread
from composer.config import to_dict
from composer.errors import ConfigError
from composer.models.base import check_model
from composer.models.sizes import count_parameters, generator_memory, pipeline_layers
from composer.redaction import hide_address, secret_in_address
from composer.schema import Accelerator, Config, Dtype, Stage, SyncMethod
from composer.secrecy import refuse_secrets, secret_error

_LEAST_TOLERANCE = 0.05
"""Log-probabilities in bfloat16 have 8 bits: 0.03 apart at -8 for rounding alone."""


def check(config: Config, typed: Sequence[str] = ()) -> list[str]:
    """Check every relation.

    Args:
        config: the resolved config.
        typed: flags and overrides as the user typed them.

    Returns:
        Warnings: what runs, but may not be meant.

    Raises:
        ConfigError: it holds a secret, the model is not one of its family, or keys contradict each other.
        PlanError: the mesh is impossible or does not fit the GPUs.
    """
    refuse_secrets(to_dict(config))
    check_model(config.model)
    check_stages(config)
    check_mesh(config)
    check_phases(config)
    check_generator(config)
    check_rl(config)
    check_env(config)
    check_cluster(config)
    _check_tracking(config)
    keys = {override.partition("=")[0].lstrip("+") for override in typed if "=" in override}
    goes_on = config.resume is not None and "resume" in keys
    return [*check_unread(config, keys, stored=goes_on), *_warnings(config)]


def _check_tracking(config: Config) -> None:
    uri = config.tracking.uri
    if uri is None:
        return
    shown = hide_address(uri)
    if why := secret_in_address(uri):  # also of one without a scheme, which is no address yet
        raise secret_error("tracking.uri", why)
    if not re.match(r"(?:https?|(?:sqlite|postgresql|mysql|mssql)(?:\+[a-z0-9]+)?)://.", uri):
        guess = f"http://{uri}" if re.match(r"[\w.-]+(:\d+)?$", uri) else "http://127.0.0.1:5000"
        raise ConfigError(
            "tracking.uri",
            shown,
            f"is no address: write `{guess}` for a server, `sqlite:////path/mlflow.db` for a file, or null",
        )
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        # The message of a bad port quotes it, and what stands there may be part of a password.
        what = "the port must be a number from 1 to 65535" if "ort" in str(e) else "the host cannot be read"
        raise ConfigError("tracking.uri", shown, f"{what}: write `scheme://host:port`, IPv6 in brackets") from None
    if port == 0:
        raise ConfigError("tracking.uri", shown, "the port must be a number from 1 to 65535")
    if uri.startswith("http") and (not host or re.search(r"\s", uri)):
        raise ConfigError("tracking.uri", shown, "names no host: write `http://host:port`, without spaces")


def _warnings(config: Config) -> Iterator[str]:
    model, p, env, g = config.model, config.parallel, config.env, config.generator
    layers = pipeline_layers(model.num_layers, p.pipeline_parallel)
    if p.pipeline_parallel > 1 and ((model.num_layers + 2) % p.pipeline_parallel or not min(layers)):
        yield (
            f"pipeline stages hold {min(layers)} to {max(layers)} of {model.num_layers} layers (an embedding weighs as "
            "one): all wait for the fullest"
        )
    if generates(config):
        episodes, seats = env.concurrency * env.num_workers, g.num_replicas * g.max_num_seqs
        if episodes > 2 * seats:
            yield f"{episodes} episodes at a time share {seats} generator seats: they will queue"
        tokens, longest = generator_memory(model, g).max_tokens, g.max_model_len
        if tokens < g.max_num_seqs * longest // 8:
            yield f"the KV cache holds {tokens} tokens for {g.max_num_seqs} episodes of up to {longest}: some will wait"
        if env.agent.command and env.checkpoint_turns:
            yield (
                f"env.checkpoint_turns={env.checkpoint_turns}: an agent program cannot be stopped halfway, so its "
                "interrupted episodes begin anew; those that have ended are kept"
            )
        tolerance = config.weight_sync.verify_tolerance
        if Stage.rl in config.stages and g.dtype is not Dtype.float32 and tolerance < _LEAST_TOLERANCE:
            yield (
                f"weight_sync.verify_tolerance={tolerance:g} is for float32: engines in {g.dtype.value} are further "
                "apart under the same weights, and the first load would end the run; set 0.2"
            )
    if p.accelerator is Accelerator.cuda and p.gpu_memory_bytes:
        memory = rank_memory(config)
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
