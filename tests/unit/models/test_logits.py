"""Log-probabilities and entropies, with gradients, against torch's own softmax in float64."""

import pytest
import torch
from torch import Tensor

from composer.models import logits as module
from composer.models.logits import label_log_probs, log_probs_and_entropy
from composer.types import NO_LABEL

VOCABULARY = 50
LABELS = torch.tensor([[3, NO_LABEL, 0, 49], [NO_LABEL, 7, 7, 1]])


def made(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 4, VOCABULARY, generator=generator)).to(dtype)


def plain(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By definition: the logarithm of softmax, and -sum p log p."""
    p = (logits / temperature).softmax(-1)
    known = LABELS != NO_LABEL
    chosen = p.gather(-1, torch.where(known, LABELS, 0)[..., None])[..., 0].log()
    return torch.where(known, chosen, 0.0), -(p * p.log()).sum(-1)


@pytest.fixture(params=[2**25, 3 * VOCABULARY], ids=["one block", "blocks of three rows"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", request.param)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_values_and_gradients(temperature: float) -> None:
    ours, truth = made().requires_grad_(), made(torch.float64).requires_grad_()
    weights = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1))
    found = log_probs_and_entropy(ours, LABELS, temperature, entropy_has_gradient=True)
    expected = plain(truth, temperature)
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part, wanted.float(), atol=1e-5, rtol=1e-5)
    sum((w * x).sum() for w, x in zip(weights, found, strict=True)).backward()
    sum((w * x).sum() for w, x in zip(weights, expected, strict=True)).backward()
    torch.testing.assert_close(ours.grad, truth.grad.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(label_log_probs(made(), LABELS, temperature), found[0].detach())


@pytest.mark.usefixtures("blocks")
def test_the_entropy_alone_has_a_gradient_where_it_is_asked_for() -> None:
    ours, truth = made().requires_grad_(), made(torch.float64).requires_grad_()
    log_probs_and_entropy(ours, LABELS, entropy_has_gradient=True)[1].sum().backward()
    plain(truth, 1.0)[1].sum().backward()
    assert truth.grad.abs().max() > 0.1
    torch.testing.assert_close(ours.grad, truth.grad.float(), atol=1e-6, rtol=1e-4)
    assert not log_probs_and_entropy(made().requires_grad_(), LABELS)[1].requires_grad


def test_bfloat16_logits_are_divided_in_float32() -> None:
    logits = made(torch.bfloat16)
    log_probs, entropy = log_probs_and_entropy(logits.requires_grad_(), LABELS, 0.7)
    wanted = plain(logits.detach().double(), 0.7)
    torch.testing.assert_close(log_probs, wanted[0].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, wanted[1].float(), atol=1e-5, rtol=1e-5)
    log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_an_impossible_token_costs_no_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -300.0]]]).requires_grad_()  # its probability is 0 in float32
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([[0]]), entropy_has_gradient=True)
    (log_probs + entropy).sum().backward()
    assert entropy.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert logits.grad.flatten().tolist() == pytest.approx([0.5, -0.5, 0.0])
