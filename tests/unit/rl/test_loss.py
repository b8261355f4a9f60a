"""The policy-gradient loss, against values worked out by hand and finite differences."""

import math

import pytest
import torch

from composer.rl.loss import policy_loss
from composer.schema import AlgorithmConfig, LossKind


def algorithm(**kwargs):
    return AlgorithmConfig(name="t", num_steps=1, learning_rate=1.0, clip_low=0.2, clip_high=0.3, **kwargs)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def loss_of(log_probs, sampler, advantages, mask, n, config, entropy=None):
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return policy_loss(log_probs, entropy, sampler, advantages, torch.tensor([mask]), n, config)


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_its_gradient_is_reinforce():
    log_probs = row(-1.0, -2.0, -3.0).requires_grad_()
    loss, metrics = loss_of(log_probs, row(-1.0, -2.0, 0.0), row(0.5, -1.5, 9.0), [True, True, False], 2, algorithm())
    assert loss.item() == pytest.approx(-(0.5 - 1.5) / 2)
    loss.backward()
    assert log_probs.grad.tolist() == [[-0.25, 0.75, 0.0]]
    assert metrics["kl_k3"].item() == 0.0
    assert metrics["ratio"].item() == 1.0


def test_clipping_bounds_only_the_side_that_would_gain():
    up, down = math.log(2.0), math.log(0.5)
    log_probs = row(up, up, down, down).requires_grad_()
    advantages = row(1.0, -1.0, 1.0, -1.0)
    loss, metrics = loss_of(log_probs, row(0, 0, 0, 0), advantages, [True] * 4, 4, algorithm())
    # min(2, 1.3), min(-2, -1.3), min(0.5, 0.8), min(-0.5, -0.8)
    assert loss.item() == pytest.approx(-(1.3 - 2.0 + 0.5 - 0.8) / 4)
    assert metrics["clip_fraction"].item() == 0.5
    loss.backward()
    assert log_probs.grad.flatten().tolist() == pytest.approx([0.0, 0.5, -0.125, 0.0])


def test_cispo_caps_the_weight_but_keeps_every_gradient():
    log_probs = row(math.log(4.0), math.log(0.5)).requires_grad_()
    config = algorithm(loss=LossKind.cispo, importance_cap=2.0)
    loss, metrics = loss_of(log_probs, row(0.0, 0.0), row(1.0, 1.0), [True, True], 2, config)
    loss.backward()
    assert log_probs.grad.flatten().tolist() == pytest.approx([-1.0, -0.25])  # -weight / 2
    assert metrics["clip_fraction"].item() == 0.5


def test_k3_is_r_minus_one_minus_log_r():
    _, metrics = loss_of(row(math.log(2.0)), row(0.0), row(0.0), [True], 1, algorithm())
    assert metrics["kl_k3"].item() == pytest.approx(2 - 1 - math.log(2))


def test_the_entropy_term_lowers_the_loss():
    entropy = row(0.7, 5.0)
    loss, metrics = loss_of(
        row(0.0, 0.0), row(0.0, 0.0), row(0.0, 0.0), [True, False], 1, algorithm(entropy_coefficient=0.1), entropy
    )
    assert loss.item() == pytest.approx(-0.07)
    assert metrics["entropy"].item() == pytest.approx(0.7)


def test_splitting_a_batch_changes_nothing():
    torch.manual_seed(0)
    log_probs, sampler, advantages = (torch.randn(4, 6, dtype=torch.float64) * 0.3 for _ in range(3))
    mask = torch.rand(4, 6) > 0.3
    n = mask.sum()
    zeros = torch.zeros_like(log_probs)
    whole, _ = policy_loss(log_probs, zeros, sampler, advantages, mask, n, algorithm())
    parts = [
        policy_loss(log_probs[i], zeros[i], sampler[i], advantages[i], mask[i], n, algorithm())[0]
        for i in (slice(0, 1), slice(1, 4))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_a_broken_sample_stays_finite():
    loss, metrics = loss_of(row(0.0), row(-1e4), row(-1.0), [True], 1, algorithm())
    assert math.isfinite(loss.item()) and math.isfinite(metrics["kl_k3"].item())
