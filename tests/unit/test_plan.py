"""Plans: numbers worked out by hand, classes that exist, and data that survives YAML."""

import ast
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from composer import plan as plans
from composer.compose import compose
from composer.plan import RunPlan, make_plan
from composer.plan_table import number, print_plan, size
from composer.schema import Stage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quickstart() -> RunPlan:
    return make_plan(
        compose(
            [
                "mix.phases.pretrain.tokens=10000",
                "mix.phases.pretrain.seq_len=128",
                "mix.phases.pretrain.batch_size=4",
                "algorithm.num_steps=60",
                "algorithm.groups_per_step=8",
                "algorithm.group_size=8",
                "algorithm.warmup_steps=3",
                "evaluation.num_tasks=64",
                "evaluation.samples_per_task=8",
                "generator.max_model_len=512",
            ]
        ),
        ("--config-dir", "my conf", "seed=1", "run_root=a b"),
    )


@pytest.fixture(scope="module")
def composer2() -> RunPlan:
    return make_plan(compose(["+experiment=composer2"]))


def test_stages_and_budgets(quickstart: RunPlan) -> None:
    assert [s.stage for s in quickstart.stages] == list(Stage)
    pretrain, before, rl, after = quickstart.stages
    phase = pretrain.phases[0]
    assert (phase.steps, phase.tokens, phase.sequences_per_rank) == (20, 20 * 512, 4)  # 10000 / 512 = 19.5
    assert pretrain.steps == sum(p.steps for p in pretrain.phases)
    assert pretrain.detail == "at most 1,354,240 tokens"  # 10,240 of text, 750 steps of 4 sessions of up to 448
    assert (rl.steps, rl.episodes) == (60, 60 * 64)
    assert before.episodes == after.episodes == 512


def test_the_mix_is_shown(quickstart: RunPlan, composer2: RunPlan) -> None:
    pretrain, sft = quickstart.stages[0].phases
    assert [(s.name, s.weight, s.tokens) for s in pretrain.sources] == [("code", 3.0, 7680), ("prose", 1.0, 2560)]
    assert sft.sources[0].where == "2,000 sessions of the expert, right in 46%"
    console = Console(width=150, force_terminal=False)
    with console.capture() as captured:
        print_plan(composer2, console)
    rows = [line.split() for line in captured.get().splitlines()]
    assert ["bulk_32k", "32,768", "code", "8", "800.02B", "files", "corpora/code/**/*"] in rows  # whole batches
    assert ["prose", "2", "200.00B", "jsonl", "corpora/prose.jsonl"] in rows


def test_a_tasksets_own_expert_has_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class Own:\n    def task(self, split, index): ...\n    def expert(self, task, seed): ...\n"
    (tmp_path / "own_expert.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["plugins=[own_expert]", "env.taskset._target_=own_expert.Own", "~env.taskset.args"]
    [sessions] = make_plan(compose(mine)).stages[0].phases[1].sources
    assert sessions.where == "2,000 sessions of the expert"


def test_tokens_of_sessions_are_a_bound(quickstart: RunPlan) -> None:
    console = Console(width=150, force_terminal=False)
    with console.capture() as captured:
        print_plan(quickstart, console)
    stages, _, rest = captured.get().partition("Mix")
    [text] = [line.split() for line in stages.splitlines() if line.startswith("  pretrain ")]
    [sft] = [line.split() for line in stages.splitlines() if line.startswith("  sft ")]
    assert text[1:3] == ["20", "10.24k"] and sft[1:3] == ["750", "≤1.34M"]
    assert "≤" not in text[3] and sft[3].startswith("≤")  # FLOP
    assert " ".join(sft[4:]) == "sft: 4 sessions of at most 448 tokens a step, 4 a rank"
    [sessions] = [line.split() for line in rest.splitlines() if "sessions of the expert" in line]
    assert sessions[:5] == ["sft", "448", "sessions", "1", "≤1.34M"]


def test_tokens_of_text_are_no_bound() -> None:
    assert make_plan(compose(["~mix.phases.sft"])).stages[0].detail == "80,384 tokens"  # 157 steps of 512


def test_processes_and_resources(quickstart: RunPlan) -> None:
    assert {p.role: (p.count, p.cpus, p.gpus) for p in quickstart.processes} == {
        "driver": (1, 0, 0),
        "trainer": (1, 1, 0),
        "generator": (1, 1, 0),
        "env": (1, 1, 0),
    }
    assert quickstart.resources == {"CPU": 3, "GPU": 0}
    assert (quickstart.mesh.world_size, quickstart.num_nodes) == (1, 1)


def test_processes_of_a_cluster(composer2: RunPlan) -> None:
    assert composer2.resources == {"CPU": 512 + 5 + 16, "GPU": 512 + 5 * 32}
    assert composer2.num_nodes == 84  # 672 GPUs, 8 a machine
    mesh = composer2.mesh
    assert (mesh.world_size, mesh.data_parallel_ranks, mesh.expert) == (512, 64, 8)
    # 16 pieces for 8 context ranks x 8 pieces of the loss, and blocks of 128 tokens on each of 8 ranks: 128 and 1024
    assert mesh.sequence_multiple == 1024


def test_every_class_in_a_plan_exists(quickstart: RunPlan) -> None:
    for process in quickstart.processes:
        module, _, name = process.target.rpartition(".")
        if module:
            tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
            assert name in [n.name for n in tree.body if isinstance(n, ast.ClassDef)], process.target


def test_published_sizes(composer2: RunPlan) -> None:
    """1.04 trillion and 32 billion are published; the vision tower is not counted here."""
    assert composer2.parameters == pytest.approx(1.04e12, rel=0.02)
    assert composer2.active_parameters == pytest.approx(32e9, rel=0.04)
    quick = make_plan(compose())
    # 1024*128 + 2 layers * (4*128*128 attention + 2*32 + 2*128 norms + 32*128 router + 32*3*128*128 experts) + 128
    assert quick.parameters == 1024 * 128 + 2 * (65536 + 64 + 256 + 4096 + 1572864) + 128


def test_memory_and_storage(composer2: RunPlan) -> None:
    memory = {m.part: m.bytes for m in composer2.memory}
    assert memory["weights, float32 shard"] == 4 * composer2.parameters // 512
    assert memory["AdamW moments, float32 shard"] == 8 * composer2.parameters // 512
    # the KL penalty's reference is a fifth number of 4 bytes beside weight, gradient and the two moments
    assert memory["reference weights of the KL penalty, float32 shard"] == 4 * composer2.parameters // 512
    assert memory["weights, bfloat16"] == 2 * composer2.parameters // 32
    # 64 groups x 16 x 200000 tokens x 60 expert layers x top-8 x uint16
    assert memory["expert ids of one step, at full length, if replayed"] == 64 * 16 * 200000 * 60 * 8 * 2
    assert composer2.memory_bytes("trainer rank") < 150e9
    storage = {s.what: s.bytes for s in composer2.storage}
    assert storage["one version of the weights"] == 2 * composer2.parameters
    assert storage["one checkpoint (weights and moments)"] == 12 * composer2.parameters


def test_commands_can_be_pasted(quickstart: RunPlan, composer2: RunPlan) -> None:
    assert quickstart.commands[0] == "composer --config-dir 'my conf' seed=1 'run_root=a b'"
    assert composer2.commands[0].startswith("ray start --head --port=6379 --num-gpus=8")
    assert "each of the other 83" in composer2.commands[1]
    batches = ["mix.phases.pretrain.batch_size=8", "mix.phases.sft.batch_size=8"]
    two = make_plan(compose(["parallel=h200_8", "weight_sync=filesystem", "launcher=ray", *batches]))
    assert two.commands[1].endswith("# on the other one")


def test_a_plan_survives_yaml(quickstart: RunPlan, tmp_path: Path) -> None:
    data = yaml.safe_load(plans.save(quickstart, tmp_path).read_text())
    assert data["mesh"]["world_size"] == 1
    assert data["resources"] == {"CPU": 3, "GPU": 0}
    assert [s["stage"] for s in data["stages"]] == [s.value for s in Stage]


@pytest.mark.parametrize("width", [60, 140])
def test_a_plan_is_printed_whole(composer2: RunPlan, width: int) -> None:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        print_plan(composer2, console)
    text = captured.get()
    for word in ("kimi_k2_5", "bulk_32k", "trainer", "512", "KV cache", "ray start --address=<first machine>:6379"):
        assert word in text


def test_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 1536, 2.08e12, 3e18)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 kB",
        "2.1 TB",
        "3000.0 PB",
    ]
    assert [number(n) for n in (60, 1500, 2_500_000, 1.04e12)] == ["60", "1.50k", "2.50M", "1.04T"]
