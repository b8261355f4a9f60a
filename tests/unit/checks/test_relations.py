"""Relations between keys: impossible meshes, lengths that do not fit, stages without what they need."""

from dataclasses import fields
from functools import cache

import pytest

from composer.checks import check
from composer.checks.common import (
    data_parallel_ranks,
    gpus_needed,
    largest_microbatch,
    next_multiple,
    optimizer_steps,
    rank_memory,
    world_size,
)
from composer.checks.stages import check_env
from composer.compose import apply, compose
from composer.errors import ConfigError, PlanError
from composer.schema import Config, LimitsConfig, ParallelConfig, PhaseConfig, PhaseKind
from envs.sandbox import limits_check

NO_TOOLS = [f"~env.tools.{name}" for name in ("read_file", "search_replace", "list_dir", "grep", "shell", "finish")]
CUDA = ("parallel.accelerator=cuda", "parallel.num_nodes=0")


@cache
def recipe(*groups: str) -> Config:
    return compose(groups)


def configured(overrides: list[str]) -> Config:
    """The config of some overrides; single keys are set without composing again, which takes 20 times as long."""
    if any(o.startswith("~") for o in overrides):
        return compose(overrides)
    groups = [o for o in overrides if o.startswith("+experiment")]
    return apply(recipe(*groups), [o for o in overrides if o not in groups])


def test_all_phases_that_a_mesh_does_not_fit_are_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        check(configured(["parallel.data_parallel_shard=3"]))
    assert caught.value.key == "mix.phases.pretrain.batch_size"
    assert [note.partition("=")[0] for note in caught.value.__notes__] == ["mix.phases.sft.batch_size"]


@pytest.mark.parametrize("overrides", [[], ["+experiment=composer1"], ["+experiment=composer2"]])
def test_the_recipes_hold(overrides: list[str]) -> None:
    check(configured(overrides))


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        # tiny_moe: 4 heads, 2 layers, 32 experts top-2, vocabulary 1024, context 2048
        (["parallel.tensor_parallel=3"], "parallel.tensor_parallel", "must divide model.num_heads (4): use 1, 2, 4"),
        (["model.num_kv_heads=2", "parallel.tensor_parallel=4"], "parallel.tensor_parallel", "model.num_kv_heads (2)"),
        (["parallel.expert_parallel=3"], "parallel.expert_parallel", "must divide model.num_experts (32)"),
        (["parallel.expert_parallel=2"], "parallel.expert_parallel", "tensor_parallel (1), from which it is formed"),
        (["parallel.expert_parallel=4", "parallel.context_parallel=2"], "parallel.expert_parallel", "(2)"),
        (["parallel.pipeline_parallel=4"], "parallel.pipeline_parallel", "at most model.num_layers (2)"),
        (["parallel.pipeline_parallel=2", "model.tie_embeddings=false"], "parallel.pipeline_parallel",
         "RL loss does not run under pipeline"),
        (["parallel.pipeline_parallel=2", "stages=[pretrain]"], "parallel.pipeline_parallel", "tie_embeddings=false"),
        (["parallel.context_parallel=2", "model.max_context=2050"], "model.max_context", "multiple of 4 (tensor"),
        (["model.hidden_size=130"], "model.hidden_size", "multiple of 4 (16 bytes), for torch's"),
        ([*CUDA, "model.hidden_size=132"], "model.hidden_size", "multiple of 8 (16 bytes)"),
        (["parallel.tensor_parallel=4", "model.expert_ffn_size=136"], "model.expert_ffn_size",
         "of 4 tensor_parallel ranks it must be a multiple of 4 (16 bytes), for torch's grouped matrices: use 144"),
        (["parallel.data_parallel_shard=33", "mix.phases.pretrain.batch_size=33"], "parallel.data_parallel_shard",
         "has 33 ranks for 32 experts and so cuts hidden_size (128) and expert_ffn_size (128 a rank) into 33 parts"),
        (["parallel.data_parallel_shard=3"], "mix.phases.pretrain.batch_size", "3 data-parallel ranks, such as 6"),
        (["parallel.context_parallel=2", "mix.phases.sft.seq_len=254"], "mix.phases.sft.seq_len", "multiple of 4"),
        (["model.vocab_size=32768", "mix.phases.sft.seq_len=252"], "mix.phases.sft.seq_len", "multiple of 8"),
        (["+experiment=composer2", "mix.phases.bulk_32k.seq_len=32784"], "mix.phases.bulk_32k.seq_len",
         "must be a multiple of 1024, by which context and tensor parallelism"),
        (["mix.phases.sft.seq_len=4096"], "mix.phases.sft.seq_len", "at most model.max_context (2048)"),
        (["mix.phases.sft.tokens=100"], "mix.phases.sft.warmup_steps", "less than the phase's 1 steps"),
        (["mix.phases.sft.sources.sessions.kind=stdlib_code"], "mix.phases.sft.sources.sessions.kind", "`sessions`"),
        (["mix.phases.pretrain.sources.code.kind=sessions"], "mix.phases.pretrain.sources.code.kind", "of kind sft"),
        (["mix.phases.pretrain.sources.code.kind=files"], "mix.phases.pretrain.sources.code.path", "give its path"),
        (["mix.phases.pretrain.sources.code.path=x"], "mix.phases.pretrain.sources.code.path", "nothing reads it"),
        *(([f"mix.codebase.pattern='{p}'"], "mix.codebase.pattern", "'**/*.py'") for p in ("/x", "../x", "a/b**")),
        (["~mix.phases.pretrain", "~mix.phases.sft"], "mix.phases", "at least one phase"),
        (["mix.codebase.kind=sessions"], "mix.codebase.kind", "held-out text"),
        (["stages=[]"], "stages", "at least one"),
        (["stages=[rl,pretrain]"], "stages", "[pretrain, rl]"),
        (["stages=[pretrain,pretrain]"], "stages", "twice"),
        (["stages=[rl]"], "model.checkpoint", "nothing to start from"),
        (["stages=[pretrain,rl]"], "algorithm.min_start_average", "evaluate_before"),
        (["generator.max_model_len=4096"], "generator.max_model_len", "at most model.max_context (2048)"),
        (["env.max_turn_tokens=512"], "env.max_turn_tokens", "less than generator.max_model_len (512)"),
        (["generator.tensor_parallel=2"], "generator.tensor_parallel", "one process: use 1"),
        (["generator.tensor_parallel=3"], "generator.tensor_parallel", "must divide model.num_heads (4)"),
        # vLLM cuts 6 groups of heads over 4 GPUs neither evenly nor by copies
        ([*CUDA, "model.num_heads=12", "model.num_kv_heads=6", "generator.tensor_parallel=4"],
         "generator.tensor_parallel", "must divide model.num_kv_heads (6), or be a multiple of it"),
        ([*CUDA, "model.num_heads=12", "model.num_kv_heads=6", "generator.tensor_parallel=6"],
         "generator.tensor_parallel", "must divide model.expert_ffn_size (128)"),
        ([*CUDA, "generator.tensor_parallel=4", "model.num_experts=2"], "generator.tensor_parallel",
         "at most model.num_experts (2)"),
        (["+experiment=composer2", "model.dense_ffn_size=18448"], "generator.tensor_parallel",
         "must divide model.dense_ffn_size (18448)"),
        # 3 layers x 2 x 4 heads x 32 x 4 bytes = 3072 bytes a token; 512 tokens = 1572864 bytes
        (
            ["generator.kv_cache_bytes=1048576", "generator.max_model_len=768"],
            "generator.kv_cache_bytes",
            "at least 1572864 bytes",
        ),
        (["model.head_dim=48"], "model.head_dim", "vLLM on CPU knows 32, 64"),
        (["model.expert_ffn_size=48"], "model.expert_ffn_size", "multiple of 32: 64"),
        (["algorithm.microbatch_tokens=256"], "algorithm.microbatch_tokens", "at least 512"),
        (["algorithm.warmup_steps=55"], "algorithm.warmup_steps", "less than algorithm.num_steps (55)"),
        (["algorithm.groups_per_step=1", "algorithm.group_size=2", "parallel.data_parallel_shard=4"],
         "algorithm.groups_per_step", "at least 2 groups"),
        (["env.grader_weights.nobody=1.0"], "env.grader_weights.nobody", "the graders are hidden_tests"),
        (["env.grader_weights.hidden_tests=0.0"], "env.grader_weights", "every reward would be 0"),
        (["env.grader_weights.hidden_tests=-1"], "env.grader_weights.hidden_tests", "at least 0"),
        (["~env.graders.hidden_tests"], "env.graders", "at least one grader"),
        (NO_TOOLS, "env.tools", "at least one tool"),
        (["env.limits.lifetime_s=1.0"], "env.limits.lifetime_s", "at least env.episode_timeout_s (120)"),
        (["env.limits.memory_bytes=100000000"], "env.limits.disk_bytes", "(100000000), 50000000"),
        # Docker's lie in memory too, and so do those of environments, whichever backend they have.
        *(
            (
                [f"env.sandbox={{_target_: envs.sandbox.{backend}}}", "env.limits.memory_bytes=100000000"],
                "env.limits.disk_bytes",
                "(100000000), 50000000",
            )
            for backend in ("docker.DockerBackend", "installed.InstalledEnvironments")
        ),
        (["env.limits.memory_bytes=33554431"], "env.limits.memory_bytes", "at least 33554432"),
        (["env.limits.disk_bytes=1048575"], "env.limits.disk_bytes", "at least 1048576"),
        (["algorithm.group_timeout_s=1.0"], "algorithm.group_timeout_s", "at least env.episode_timeout_s (120)"),
        (["tracking.uri=127.0.0.1:5000"], "tracking.uri", "write `http://127.0.0.1:5000`"),
        (["tracking.uri=ftp://host"], "tracking.uri", "`sqlite:////path/mlflow.db`"),
        (["tracking.uri=https://me:hunter2@host"], "tracking.uri", "MLFLOW_TRACKING_PASSWORD"),
        *(
            ([f"tracking.uri='{uri}'"], "tracking.uri", remedy)
            for uri, remedy in (
                ("http://127.0.0.1:99999", "a number from 1 to 65535"),
                ("http://127.0.0.1:abc", "a number from 1 to 65535"),
                ("http://127.0.0.1:0", "a number from 1 to 65535"),
                ("http://[::1", "IPv6 in brackets"),
                ("http://:5000", "names no host"),
                ("http://ho st", "names no host"),
                ("http://hunter2@host", "MLFLOW_TRACKING_TOKEN"),
                ("http://host?token=hunter2", "MLFLOW_TRACKING_TOKEN"),
                ("http://host/?a=1&api%5fkey=hunter2", "MLFLOW_TRACKING_TOKEN"),
                ("https://me:hunter2/x@host", "a number from 1 to 65535"),
                ("me:hunter2@host", "MLFLOW_TRACKING_PASSWORD"),
                ("ftp://hunter2@host", "is no address"),
                ("postgresql://me:hunter2/x@host/db", "PGPASSWORD"),
                ("postgresql://host/db?user=me&password=hunter2", "PGPASSWORD"),
                ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dhunter2", "PGPASSWORD"),
            )
        ),
        (["model.experts_per_token=33"], "model.experts_per_token", "at most num_experts (32)"),
        (["model.num_shared_experts=1"], "model.num_shared_experts", "must be 0"),
        ([*CUDA, "parallel.num_nodes=1", "parallel.gpus_per_node=1"], "parallel.num_nodes", "need 2 machines"),
        ([*CUDA, "parallel.gpus_per_node=1"], "weight_sync.method", "weight_sync=filesystem"),
        ([*CUDA, "parallel.gpus_per_node=3", "parallel.data_parallel_shard=4"], "parallel", "machines of 3 GPUs"),
        (["+experiment=composer2", "parallel.data_parallel_shard=8", "mix.phases.extension_256k.batch_size=8"],
         "parallel.data_parallel_shard", "weights, reference, gradients and optimizer take 321 GB"),
        (["+experiment=composer2", "parallel.data_parallel_shard=8", "mix.phases.extension_256k.batch_size=8",
          "algorithm.kl_coefficient=0.0"],
         "parallel.data_parallel_shard", "weights, gradients and optimizer take 257 GB"),
        (["+experiment=composer2", "generator.tensor_parallel=16"], "generator.kv_cache_bytes", "raise generator."),
    ],
)  # fmt: skip
def test_what_cannot_be_run(overrides: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(configured(overrides))
    assert caught.value.key == key
    assert remedy in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "uri",
    [
        "http://[::1]:5000",
        "https://host/mlflow",
        "sqlite:////a/me:you@b/mlflow.db",
        "postgresql:///db",
        "postgresql://user@host:5432/db?sslmode=verify-full&sslkey=/a/client.pem",
    ],
)
def test_addresses_that_hold(uri: str) -> None:
    check(configured([f"tracking.uri='{uri}'"]))


def test_least_limits_are_those_of_the_backend() -> None:
    least = {f.name: f.metadata["minimum"] for f in fields(LimitsConfig)}
    assert least["memory_bytes"] == limits_check.LEAST_MEMORY_BYTES
    assert least["disk_bytes"] == limits_check.LEAST_DISK_BYTES


class OnDisk:
    """A backend of somebody else's."""


def test_another_backend_may_have_a_disk() -> None:
    target = f"env.sandbox={{_target_: {__name__}.OnDisk}}"
    check(configured(["env.limits.memory_bytes=100000000", "plugins=[tests]", target]))


def test_a_mesh_is_a_plan_error() -> None:
    with pytest.raises(PlanError):
        check(configured(["parallel.expert_parallel=3"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.concurrency=1000"], "1000 episodes at a time share 64 generator seats"),
        (["generator.kv_cache_bytes=2097152"], "some will wait"),
        (
            ["stages=[pretrain]", "model.tie_embeddings=false", "model.num_layers=3", "parallel.pipeline_parallel=2"],
            "pipeline stages hold 1 to 2 of 3 layers",
        ),
        (["model.experts_per_token=16"], "hardly a sparse model"),
        (["generator.dtype=bfloat16"], "is for float32: engines in bfloat16 are further apart"),
        (["+experiment=composer2"], "a file system that every machine sees"),
        (["+experiment=composer2", "algorithm.microbatch_tokens=524288"], "a trainer rank may need"),
    ],
)
def test_what_may_not_be_meant_is_a_warning(overrides: list[str], words: str) -> None:
    assert any(words in warning for warning in check(configured(overrides)))


def test_numbers_of_a_mesh() -> None:
    parallel = ParallelConfig(data_parallel_replicate=2, data_parallel_shard=3, context_parallel=4, tensor_parallel=5)
    assert world_size(parallel) == 120
    assert data_parallel_ranks(parallel) == 6
    assert (
        optimizer_steps(PhaseConfig(kind=PhaseKind.sft, tokens=1001, seq_len=100, batch_size=2, learning_rate=1.0)) == 6
    )
    assert (next_multiple(10, 4), next_multiple(12, 4)) == (12, 12)


def test_logits_of_a_rank_by_hand() -> None:
    # RL: 8192 tokens and a row of 512 to fill up, all of the 1024 words on each of two tensor-parallel ranks
    rl = configured(["stages=[pretrain,evaluate_before,rl]", "parallel.tensor_parallel=2"])
    assert rank_memory(rl).logits == (8192 + 512) * rl.model.vocab_size * 3 * 4
    # pretraining: at most 4 rows of 448 tokens and one to fill up, half of the words on each
    pretraining = configured(["stages=[pretrain]", "parallel.tensor_parallel=2"])
    assert rank_memory(pretraining).logits == 5 * 448 // 2 * rl.model.vocab_size * 3 * 4


def test_numbers_of_a_config() -> None:
    assert gpus_needed(recipe()) == 0
    assert gpus_needed(recipe("+experiment=composer2")) == 512 + 5 * 32
    assert largest_microbatch(recipe("+experiment=composer2")) == 262144


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 4 * 448),  # pretrain: 4 rows of 128; SFT: at most 4 of 448
        (["mix.phases.pretrain.seq_len=2048", "mix.phases.pretrain.batch_size=6"], 4 * 2048),  # as 8192 hold
        (["mix.phases.pretrain.seq_len=1500", "mix.phases.pretrain.batch_size=8"], 5 * 1500),
        (["mix.phases.sft.seq_len=1500", "mix.phases.sft.batch_size=8"], 8192),  # 8 rows of 1024 tokens
        (["mix.phases.sft.seq_len=1500", "mix.phases.sft.batch_size=8", "parallel.data_parallel_shard=4"], 2 * 1500),
        # the trainer fills up to as many rows as there are tensor-parallel ranks
        (["mix.phases.pretrain.batch_size=1", "mix.phases.sft.batch_size=1", "parallel.tensor_parallel=4"], 4 * 448),
        (
            ["model.tie_embeddings=false", "parallel.pipeline_parallel=2", "mix.phases.pretrain.seq_len=512"],
            512,  # one row at a time
        ),
        (["stages=[pretrain,evaluate_before,rl]"], 8192),  # algorithm.microbatch_tokens
        (["stages=[pretrain,evaluate_before,rl]", "parallel.tensor_parallel=2"], 8192 + 512),  # and a row to fill up
    ],
)
def test_tokens_at_once(overrides: list[str], tokens: int) -> None:
    assert largest_microbatch(configured(["stages=[pretrain]", *overrides])) == tokens


def test_an_agent_program_takes_the_place_of_tools() -> None:
    check_env(compose(["env=mini_swe_agent", "algorithm.group_timeout_s=900"]))
    with pytest.raises(PlanError, match="at least one tool"):
        check_env(configured(NO_TOOLS))


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["+env.agent.environment.KEY=a"], "env.agent.environment", "give env.agent.command too"),
        (["env=openai_sdk", "env.agent.files.agent.path=agent.py"], "env.agent.files.agent.path", "an absolute path"),
        (["env=openai_sdk", "env.prompt_dropout=0.5"], "env.prompt_dropout", "writes its own prompts"),
        (["env=openai_sdk", "evaluation.no_prompt=true"], "evaluation.no_prompt", "writes its own prompts"),
    ],
)
def test_what_does_not_go_with_an_agent_program(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        check_env(compose(overrides))
    assert caught.value.key == key
