"""The policy trainer with the real torchtitan, against transformers on its own export."""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from composer.pretrain.tokenizer import train_tokenizer
from composer.rl.packing import pack
from composer.rl.trainer import PolicyTrainer
from composer.schema import AlgorithmConfig, Family, ModelConfig, ParallelConfig
from composer.types import Sample
from tests.integration.models.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_process")

MODEL = ModelConfig(
    name="test",
    family=Family.qwen3_moe,
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=32,
    max_context=256,
    tie_embeddings=True,
    init_std=0.08,
)
LARGE = dataclasses.replace(MODEL, name="large-vocabulary", vocab_size=32768)
"""Its logits are made in eight pieces of the sequence."""
ALGORITHM = AlgorithmConfig(
    name="test", num_steps=4, learning_rate=1e-2, warmup_steps=0, kl_coefficient=0.1, entropy_coefficient=0.01
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer([Path(argparse.__file__).read_text()], 320, folder)
    return folder


@pytest.fixture
def make(tmp_path):
    made = []

    def build(model=MODEL, **changes):
        algorithm = dataclasses.replace(ALGORITHM, **changes)
        made.append(PolicyTrainer(model, ParallelConfig(), algorithm, tmp_path / "rl", seed=1))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


@pytest.fixture
def trainer(make):
    return make()


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, 320, (n,), generator=generator).tolist() for n in (24, 17, 9, 30)]


def samples(score, advantages=(1.0, -1.0, 0.5, -0.5), shift=0.0):
    """As a generator would send them whose log-probabilities are `score` of the ids, plus `shift`."""
    made = []
    for ids, advantage in zip(sequences(), advantages, strict=True):
        mask = [i >= 4 for i in range(len(ids))]
        log_probs = [0.0, *(p + shift for p in score(ids))]
        made.append(
            Sample(ids, mask, log_probs, [advantage if m else 0.0 for m in mask], group_id="g", policy_version=0)
        )
    return made


def rows_of(made, budget=4096):
    [rows] = pack(made, 1, budget, pad_id=0)
    return rows


def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def log_softmax(model, token_ids, temperature=1.0):
    """Transformers' distributions at each position, and the log-probabilities of the tokens that follow."""
    log_p = (model(torch.tensor([token_ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return log_p, log_p.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def hand_made_loss(model, made, temperature=1.0, entropy_coefficient=ALGORITHM.entropy_coefficient):
    """The clipped loss and the entropy from transformers, one sequence at a time."""
    loss, tokens = 0.0, 0
    for sample in made:
        log_p, target = log_softmax(model, sample.token_ids, temperature)
        mask = torch.tensor(sample.loss_mask[1:])
        ratio = (target - torch.tensor(sample.log_probs[1:])).exp()
        a = torch.tensor(sample.advantages[1:])
        clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        entropy = -(log_p.exp() * log_p).sum(-1)
        objective = torch.minimum(ratio * a, clipped * a) + entropy_coefficient * entropy
        loss = loss - objective[mask].sum()
        tokens += int(mask.sum())
    return loss / tokens


def test_loss_and_gradient_equal_transformers_however_the_batch_is_split(trainer, tokenizer, tmp_path):
    made = samples(trainer.score, shift=0.1)
    trainer.export(tmp_path / "exported", tokenizer)
    model = reference(tmp_path / "exported")
    expected = hand_made_loss(model, made)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    rows = rows_of(made, budget=32)
    assert len(rows) > 1, "several passes"
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert metrics["ratio/mean"] == pytest.approx(torch.tensor(-0.1).exp().item(), abs=1e-4)


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=lambda m: m.name)
def test_the_entropy_bonus_has_a_gradient(model, make, tokenizer, tmp_path):
    trainer = make(model, entropy_coefficient=0.5, max_grad_norm=1e9)
    made = samples(lambda ids: [-1.0] * (len(ids) - 1), advantages=(0.0,) * 4)
    trainer.export(tmp_path / "exported", tokenizer)
    theirs = reference(tmp_path / "exported")
    expected = hand_made_loss(theirs, made, entropy_coefficient=0.5)
    expected.backward()

    metrics = trainer.update(rows_of(made, budget=64))
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["entropy/mean"] == pytest.approx(-expected.item() / 0.5, abs=1e-5)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    ours = trainer._trainer.model_parts[0].lm_head.weight.grad
    assert wanted["model.embed_tokens.weight"].abs().max() > 1e-3
    torch.testing.assert_close(ours, wanted["model.embed_tokens.weight"], atol=1e-6, rtol=1e-3)
    norm = torch.nn.utils.get_total_norm(wanted.values())
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=lambda m: m.name)
def test_ratios_are_those_of_the_distribution_that_was_sampled_from(model, make, tokenizer, tmp_path):
    trainer = make(model, temperature=0.6, max_grad_norm=1e9)
    trainer.export(tmp_path / "exported", tokenizer)
    theirs = reference(tmp_path / "exported")
    sampled_at = lambda ids: log_softmax(theirs, ids, 0.6)[1].tolist()  # noqa: E731
    made = samples(sampled_at)
    expected = hand_made_loss(theirs, made, temperature=0.6)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None])

    for ids, found in zip(sequences(), trainer.reference_score(sequences()), strict=True):
        assert found == pytest.approx(sampled_at(ids), abs=1e-5)
    plain = log_softmax(theirs, sequences()[0])[1].tolist()
    assert trainer.score(sequences()[0]) == pytest.approx(plain, abs=1e-5), "a probe is scored at temperature 1"
    metrics = trainer.update(rows_of(made))
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5) and metrics["kl_k3/mean"] < 1e-6
    assert metrics["clip_fraction/mean"] == 0
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_an_update_follows_the_advantages(trainer):
    made = samples(trainer.score)
    before = [sum(trainer.score(s.token_ids)[3:]) for s in made]
    trainer.update(rows_of(made))
    after = [sum(trainer.score(s.token_ids)[3:]) for s in made]
    gains = [a - b for a, b in zip(after, before, strict=True)]
    assert gains[0] > 0 > gains[1]


def test_the_reference_stays_where_rl_started_also_after_a_resume(tmp_path, tokenizer):
    trainer = PolicyTrainer(MODEL, ParallelConfig(), ALGORITHM, tmp_path / "a", seed=1)
    trainer.export(tmp_path / "exported", tokenizer)
    trainer.close()

    model = dataclasses.replace(MODEL, checkpoint=str(tmp_path / "exported"))
    first = PolicyTrainer(model, ParallelConfig(), ALGORITHM, tmp_path / "rl", seed=1)
    ids = sequences()[0]
    start = first.score(ids)
    first.update(rows_of(samples(first.score)))
    first.save()
    moved = first.score(ids)
    assert max(abs(a - b) for a, b in zip(start, moved, strict=True)) > 1e-3
    assert first.reference_score([ids])[0] == pytest.approx(start, abs=1e-6)
    assert first.score(ids) == pytest.approx(moved, abs=1e-6), "scoring the reference leaves the policy alone"
    first.close()

    second = PolicyTrainer(model, ParallelConfig(), ALGORITHM, tmp_path / "rl", seed=1)
    assert second.version == 1
    assert second.score(ids) == pytest.approx(moved, abs=1e-6)
    assert second.reference_score([ids])[0] == pytest.approx(start, abs=1e-6)
    second.close()


@pytest.mark.parametrize("parallel", [ParallelConfig(data_parallel_shard=2), ParallelConfig(tensor_parallel=2)])
def test_two_ranks_keep_the_same_reference(tmp_path: Path, parallel: ParallelConfig) -> None:
    def scores() -> list[list[float]]:
        trainer = PolicyTrainer(MODEL, parallel, ALGORITHM, tmp_path / "rl", seed=1)
        ids = sequences()[0]
        start = trainer.score(ids)
        trainer.update(rows_of([Sample(ids, [True] * len(ids), [-1.0] * len(ids), [1.0] * len(ids), "g", 0)]))
        reference = trainer.reference_score([ids])[0].tolist()
        found = [start, reference, trainer.score(ids), trainer.reference_score([ids])[0].tolist()]
        trainer.close()
        return found

    for start, reference, moved, again in run_ranks(2, scores, tmp_path):
        assert reference == again == pytest.approx(start, abs=1e-6)
        assert max(abs(a - b) for a, b in zip(start, moved, strict=True)) > 1e-3


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=lambda m: m.name)
def test_the_reference_is_scored_in_microbatches_that_the_ranks_share(model, tokenizer, tmp_path: Path) -> None:
    """Two ranks, micro-batches of 64 tokens: no rank computes what the other does, nor makes logits of more at once."""
    lengths = [60, 9, 33, 17, 24, 48, 2, 41, 12, 29]
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(10, 320, (n,), generator=generator).tolist() for n in lengths]
    algorithm = dataclasses.replace(ALGORITHM, microbatch_tokens=64)

    def scores() -> tuple[list[np.ndarray], list[int], int]:
        parallel = ParallelConfig(data_parallel_shard=2)
        trainer = PolicyTrainer(model, parallel, algorithm, tmp_path / "rl", seed=1)
        trainer.export(tmp_path / "exported", tokenizer)
        part = trainer._trainer.model_parts[0]
        scored, logits = [], []
        part.register_forward_pre_hook(lambda _, args: scored.append(args[0].numel()))
        part.lm_head.register_forward_hook(lambda _, args, out: logits.append(out.numel()))
        found = trainer.reference_score(ids)
        trainer.close()
        return found, scored, max(logits)

    ranks = run_ranks(2, scores, tmp_path)
    theirs = reference(tmp_path / "exported")
    for found, scored, logits in ranks:
        for sequence, values in zip(ids, found, strict=True):
            with torch.no_grad():
                assert values == pytest.approx(log_softmax(theirs, sequence)[1].tolist(), abs=1e-5)
        assert max(scored) <= 64 and len(scored) > 1
        assert logits <= 64 * model.vocab_size // (8 if model is LARGE else 1)
    filled = sum(n - 1 for n in lengths)
    assert filled <= sum(sum(scored) for _, scored, _ in ranks) < 2 * filled, "each sequence once, and some padding"
