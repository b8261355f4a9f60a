"""Whole phases on a tiny model: they learn, resume exactly, leave a readable folder, and are the same on two ranks."""

import argparse
import contextlib
import dataclasses
import math
import random
from pathlib import Path

import pytest

from composer.errors import CorpusError, TokenizerError, TrainingError
from composer.pretrain.packing import Session
from composer.pretrain.tokenizer import train_tokenizer
from composer.pretrain.trainer import Phase, train_phase
from composer.schema import MixConfig, ModelConfig, ParallelConfig, PhaseConfig, PhaseKind, SourceConfig, SourceKind
from tests.integration.models.ranks import run_ranks
from tests.integration.models.small import QWEN

pytestmark = pytest.mark.usefixtures("one_process")

MODEL = dataclasses.replace(QWEN, hidden_size=32, num_experts=4, head_dim=16, num_heads=2, vocab_size=512)
MIX = MixConfig(
    name="small",
    codebase_share=0.2,
    codebase_tokens=1024,
    phases={
        "base": PhaseConfig(
            kind=PhaseKind.pretrain,
            tokens=64 * 4 * 10,
            seq_len=64,
            batch_size=4,
            learning_rate=5e-3,
            warmup_steps=2,
            evaluate_every=5,
            checkpoint_every=3,
            sources={
                "code": SourceConfig(kind=SourceKind.stdlib_code, weight=0.8),
                "prose": SourceConfig(kind=SourceKind.stdlib_prose, weight=0.2),
            },
        ),
        "tune": PhaseConfig(
            kind=PhaseKind.sft,
            tokens=64 * 4 * 60,
            seq_len=64,
            batch_size=4,
            learning_rate=1e-2,
            warmup_steps=2,
            evaluate_every=20,
            checkpoint_every=20,
        ),
    },
)
SAME = ("loss/train", "train/grad_norm", "train/learning_rate", "loss/codebase")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(argparse.__file__).read_text()], 400, folder)
    return folder


def phase(
    name: str,
    folder: Path,
    tokenizer: Path,
    model: ModelConfig = MODEL,
    parallel: ParallelConfig | None = None,
    mix: MixConfig = MIX,
) -> Phase:
    return Phase(name, mix, model, parallel or ParallelConfig(), tokenizer, folder, seed=1, sessions=sessions())


def sessions() -> list[Session]:
    """Echo: a random token is asked, the assistant repeats it; both lie among random tokens that cannot be learned."""
    r = random.Random(0)
    found = []
    for _ in range(200):
        asked, noise = r.randrange(10, 20), [r.randrange(100, 400) for _ in range(r.randrange(12, 20))]
        found.append(Session([*noise, 7, asked, 8, asked, 2], [False] * (len(noise) + 3) + [True, True]))
    return found


class Recorder:
    """Keeps what a phase reports; may stop it like a crash would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.stop_after = stop_after

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.rows[step] = {k: v for k, v in metrics.items() if k in SAME or k.startswith("mix/")}
        if step == self.stop_after:
            raise KeyboardInterrupt


def run_phase(phase: Phase, seen: Recorder | None = None) -> Recorder:
    """Train a phase and keep what it reports."""
    seen = seen or Recorder()
    with contextlib.closing(train_phase(phase)) as steps:
        for step, metrics in steps:
            seen(step, metrics)
    return seen


def test_pretraining_learns_and_leaves_a_folder(tokenizer: Path, tmp_path: Path) -> None:
    started = phase("base", tmp_path, tokenizer)
    seen = run_phase(started)
    assert sorted(seen.rows) == list(range(11))
    assert [s for s, m in seen.rows.items() if "loss/codebase" in m] == [0, 5, 10]
    # the start is worse than guessing all tokens alike; ten steps are better than that
    assert seen.rows[0]["loss/codebase"] > math.log(512) - 0.1
    assert seen.rows[10]["loss/codebase"] < math.log(512) - 0.5
    shares = [seen.rows[10][f"mix/tokens/{name}"] for name in ("code", "prose")]
    assert shares[0] / sum(shares) > 0.5
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(started.exported)
    assert model.config.num_experts == 4
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(started.exported).eos_token_id == 2


@pytest.mark.parametrize("name", ["base", "tune"])
def test_interrupted_twice_equals_uninterrupted(name: str, tokenizer: Path, tmp_path: Path) -> None:
    tokens = {"base": 64 * 4 * 10, "tune": 64 * 4 * 10}  # ten steps
    phases = {n: dataclasses.replace(p, checkpoint_every=3, tokens=tokens[n]) for n, p in MIX.phases.items()}
    mix = dataclasses.replace(MIX, phases=phases)
    whole = Recorder()
    run_phase(phase(name, tmp_path / "whole", tokenizer, mix=mix), whole)
    parts: dict[int, dict[str, float]] = {}
    for stop in (4, 7, None):
        recorder = Recorder(stop)
        try:
            run_phase(phase(name, tmp_path / "parts", tokenizer, mix=mix), recorder)
        except KeyboardInterrupt:
            assert not (tmp_path / "parts" / "exported").exists()
        assert min(recorder.rows) == {4: 0, 7: 4, None: 7}[stop]
        parts |= recorder.rows
    assert parts == whole.rows
    ours, theirs = (next((tmp_path / p / "exported").glob("*.safetensors")).read_bytes() for p in ("parts", "whole"))
    assert ours == theirs


def test_a_finished_phase_that_lost_its_export_makes_it_again(tokenizer: Path, tmp_path: Path) -> None:
    base = phase("base", tmp_path, tokenizer)
    first = run_phase(base)
    base.exported.rename(tmp_path / "away")
    again = run_phase(base)
    assert again.rows == {10: {"loss/codebase": first.rows[10]["loss/codebase"]}}
    assert base.exported.exists()


def test_fine_tuning_learns_the_assistants_tokens(tokenizer: Path, tmp_path: Path) -> None:
    before = phase("base", tmp_path / "base", tokenizer)
    base = run_phase(before)
    started = dataclasses.replace(MODEL, checkpoint=str(before.exported))
    # rows of another length than before, and still the same held-out text
    longer = {**MIX.phases, "tune": dataclasses.replace(MIX.phases["tune"], tokens=96 * 4 * 60, seq_len=96)}
    mix = dataclasses.replace(MIX, phases=longer)
    seen = run_phase(phase("tune", tmp_path / "tune", tokenizer, model=started, mix=mix))
    assert seen.rows[0]["loss/codebase"] == pytest.approx(base.rows[10]["loss/codebase"], abs=1e-5)
    assert seen.rows[1]["loss/train"] > 3
    assert seen.rows[60]["loss/train"] < 1.5  # ln 10 / 2 = 1.15 without copying: one of ten tokens, then the end


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel_shard=2),
        ParallelConfig(tensor_parallel=2),
        ParallelConfig(context_parallel=2),
        ParallelConfig(pipeline_parallel=2),
    ],
    ids=["shard2", "tensor2", "context2", "pipeline2"],
)
@pytest.mark.parametrize("name", ["base", "tune"])
def test_two_ranks_train_like_one(name: str, parallel: ParallelConfig, tokenizer: Path, tmp_path: Path) -> None:
    mix = dataclasses.replace(MIX, phases={n: dataclasses.replace(p, tokens=64 * 4 * 4) for n, p in MIX.phases.items()})
    model = dataclasses.replace(MODEL, tie_embeddings=False)  # stages of a pipeline cannot share a matrix

    def run(folder: Path, mesh: ParallelConfig) -> dict[int, dict[str, float]]:
        return run_phase(phase(name, folder, tokenizer, model, mesh, mix)).rows

    one = run_ranks(1, lambda: run(tmp_path / "one", ParallelConfig()), tmp_path)[0]
    (tmp_path / "rank0.pickle").unlink()
    two = run_ranks(2, lambda: run(tmp_path / "two", parallel), tmp_path)[0]
    assert two.keys() == one.keys()
    for step, row in one.items():
        for key in set(row) & {"loss/train", "loss/codebase"}:
            if key == "loss/codebase" and parallel.pipeline_parallel > 1:
                continue  # a pipeline scores code in rows of the phase's length, see below
            assert two[step][key] == pytest.approx(row[key], abs=2e-4), (step, key)
    if parallel.pipeline_parallel > 1:
        assert two[0]["loss/codebase"] == pytest.approx(one[0]["loss/codebase"], abs=0.05)


def test_broken_losses_leave_the_checkpoint(tokenizer: Path, tmp_path: Path) -> None:
    phases = {
        "base": dataclasses.replace(
            MIX.phases["base"],
            learning_rate=1e30,
            max_grad_norm=1e30,
            warmup_steps=6,
            checkpoint_every=1,
            weight_decay=0.0,
        )
    }
    with pytest.raises(
        TrainingError, match=r"Step \d+: the (loss|gradient) is not finite\. Start a new run with a lower"
    ):
        run_phase(phase("base", tmp_path, tokenizer, mix=dataclasses.replace(MIX, phases=phases)))
    assert list((tmp_path / "checkpoints").glob("step-*/.metadata"))
    assert not (tmp_path / "exported").exists()


def test_what_does_not_fit_stops_before_training(tokenizer: Path, tmp_path: Path) -> None:
    small = dataclasses.replace(MODEL, vocab_size=300)
    with pytest.raises(TokenizerError, match=r"vocab_size=300: .*400 tokens; raise it to at least 400"):
        run_phase(phase("base", tmp_path, tokenizer, model=small))
    short = dataclasses.replace(MODEL, max_context=32)
    with pytest.raises(CorpusError, match=r"seq_len=64: the model has only 32 positions"):
        run_phase(phase("base", tmp_path, tokenizer, model=short))
    long = dataclasses.replace(MIX, phases={"tune": dataclasses.replace(MIX.phases["tune"], seq_len=16)})
    with pytest.raises(CorpusError, match=r"tune\.seq_len=16: the longest session has 24 tokens; raise it to at"):
        run_phase(phase("tune", tmp_path, tokenizer, mix=long))
