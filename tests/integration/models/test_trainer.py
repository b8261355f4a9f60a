"""The trainer by itself: resuming, packed documents, losses with inputs of their own, schedules, broken losses."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.loss import BaseLoss, compute_logprobs

from composer.errors import ResumeError, TrainingError
from composer.models.settings import TrainSettings, trainer_config
from composer.models.trainer import Microbatch
from composer.schema import ModelConfig, ParallelConfig, Schedule
from composer.types import NO_LABEL
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")


class Cursor:
    """Any state that has to go along."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda m: m.name)
def test_interrupted_twice_equals_uninterrupted(model: ModelConfig, tmp_path: Path) -> None:
    trainer = build(model, tmp_path / "whole")
    whole = [trainer.update([batch(step)]) for step in range(9)]
    weights = dict(trainer.hf_state_dict())
    trainer.close()

    resumed: dict[int, dict[str, float]] = {}
    for stop, expected_start in ((5, 0), (8, 4), (9, 8)):  # checkpoints every 4 steps; the 5th step is done again
        trainer, cursor = build(model, tmp_path / "parts"), Cursor()
        trainer.track("cursor", cursor)
        start = trainer.load()
        assert start == expected_start
        assert cursor.seen == list(range(start))
        for step in range(start, stop):
            resumed[step] = trainer.update([batch(step)])
            cursor.seen.append(step)
            if trainer.step % 4 == 0:
                trainer.save()
        again = {name: value.clone() for name, value in trainer.hf_state_dict()}
        trainer.close()
    for step, expected in enumerate(whole):
        assert {k: resumed[step][k] for k in ("loss", "grad_norm", "learning_rate", "worst_expert_load")} == {
            k: expected[k] for k in ("loss", "grad_norm", "learning_rate", "worst_expert_load")
        }
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path)
    trainer.update([batch(0)])
    trainer.save()
    trainer.close()
    (tmp_path / "checkpoints" / "step-2").mkdir()
    (tmp_path / "checkpoints" / "step-2" / "__0_0.distcp").write_bytes(b"half")
    trainer = build(QWEN, tmp_path)
    assert trainer.load() == 1
    trainer.close()


def test_an_unreadable_checkpoint_names_its_folder(tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path)
    trainer.update([batch(0)])
    trainer.save()
    trainer.close()
    trainer = build(dataclasses.replace(QWEN, expert_ffn_size=64), tmp_path)
    with pytest.raises(ResumeError, match=r"checkpoints cannot be loaded \(ValueError\(.Size mismatch.*inner_experts"):
        trainer.load()
    trainer.close()


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda m: m.name)
def test_packed_documents_do_not_see_each_other(model: ModelConfig, tmp_path: Path) -> None:
    trainer = build(model, tmp_path)
    first, second = batch(1, rows=1, length=20), batch(2, rows=1, length=12)
    packed = Microbatch(
        *(torch.cat([getattr(first, k), getattr(second, k)], dim=1) for k in ("tokens", "labels", "positions"))
    )
    apart = torch.cat([trainer.score(first), trainer.score(second)], dim=1)
    torch.testing.assert_close(trainer.score(packed), apart, atol=1e-5, rtol=0)
    mixed = Microbatch(packed.tokens, packed.labels, torch.arange(32)[None])  # the control: one document
    assert (trainer.score(mixed) - apart)[:, 20:].abs().max() > 1e-2
    trainer.close()


def test_padding_and_prompts_do_not_count(tmp_path: Path) -> None:
    data = batch(3, rows=2, length=16)
    padded = Microbatch(
        *(torch.nn.functional.pad(x, (0, 8), value=v) for x, v in ((data.tokens, 0), (data.labels, NO_LABEL))),
        torch.arange(24).expand(2, 24).contiguous(),
    )
    trainer = build(QWEN, tmp_path)
    scores = trainer.score(padded)
    torch.testing.assert_close(scores[:, :16], trainer.score(data), atol=1e-5, rtol=0)
    assert (scores[:, 16:] == 0).all()
    loss = trainer.update([padded])["loss"]
    trainer.close()
    assert loss == pytest.approx(-scores.sum().item() / 32, abs=1e-5)


class WeightedLoss(BaseLoss):
    """Sum of weights times log-probabilities: what a policy gradient looks like."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """No options."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """Nothing to keep."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        *,
        weights: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs = compute_logprobs(logits, labels)
        loss = -(weights * log_probs).sum() / global_valid_tokens
        return loss, {"weight/mean": weights.sum() / global_valid_tokens, "weight/max": weights.max()}


def test_a_loss_gets_its_own_inputs(tmp_path: Path) -> None:
    settings = TrainSettings(tmp_path, num_steps=10, learning_rate=1e-3)
    trainer = trainer_config(QWEN, ParallelConfig(), settings, WeightedLoss.Config()).build()
    parts = [batch(0), batch(1, rows=2, length=24)]
    for part in parts:
        part.extras["weights"] = torch.rand(part.labels.shape, generator=torch.Generator().manual_seed(5))
    scores = [trainer.score(part) for part in parts]
    metrics = trainer.update(parts)
    trainer.close()
    count = 4 * 32 + 2 * 24
    expected = -sum((p.extras["weights"] * s).sum().item() for p, s in zip(parts, scores, strict=True)) / count
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    total = sum(p.extras["weights"].sum().item() for p in parts)
    assert metrics["weight/mean"] == pytest.approx(total / count, abs=1e-6)
    assert metrics["weight/max"] == pytest.approx(max(p.extras["weights"].max().item() for p in parts))


def test_microbatches_are_one_batch(tmp_path: Path) -> None:
    norms = []
    for cut in (1, 2, 4):
        trainer = build(QWEN, tmp_path / str(cut))
        data = batch(0)
        parts = [Microbatch(*(x[i::cut] for x in (data.tokens, data.labels, data.positions))) for i in range(cut)]
        norms.append(trainer.update(parts)["grad_norm"])
        trainer.close()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # 2 steps of warm-up, then from 1 to 0.1 over 4 steps
        (Schedule.linear, [0.5, 1.0, 1.0, 1 - 0.9 / 4, 1 - 0.9 / 2, 1 - 0.9 * 3 / 4]),
        (Schedule.cosine, [0.5, 1.0, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3))]),
    ],
)
def test_learning_rate(schedule: Schedule, expected: list[float], tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path, num_steps=6, learning_rate=1e-3, schedule=schedule)
    rates = [trainer.update([batch(step)])["learning_rate"] for step in range(6)]
    trainer.close()
    assert rates == pytest.approx([1e-3 * x for x in expected])


def test_a_loss_that_is_not_finite_stops_with_checkpoints_intact(tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path)
    trainer.update([batch(0)])
    trainer.save()
    before = {name: value.clone() for name, value in trainer.hf_state_dict()}
    with torch.no_grad():
        next(trainer.model_parts[0].parameters())[0] = float("nan")
    with pytest.raises(TrainingError, match=r"Step 2: the loss is not finite\. .* lower learning_rate \(now 0\.003\)"):
        trainer.update([batch(1)])
    trainer.close()
    trainer = build(QWEN, tmp_path)
    assert trainer.load() == 1
    assert all(torch.equal(before[name], value) for name, value in trainer.hf_state_dict())
    trainer.close()


def test_expert_load(tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path)
    balanced = trainer.update([batch(0)])["worst_expert_load"]
    assert 1.0 <= balanced < 3.0
    with torch.no_grad():  # equal router logits for all experts: topk then takes the same two for every token
        for block in trainer.model_parts[0].layers.values():
            block.moe.router.gate.weight.zero_()
    assert trainer.update([batch(1)])["worst_expert_load"] == pytest.approx(8 / 2)
    trainer.close()
