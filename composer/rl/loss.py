"""The policy-gradient loss of one microbatch. Pure torch: tensors in, a scalar and its diagnostics out.

    ratio_t = exp(log pi_theta(t) - log pi_sampler(t))

    clipped:  L = -sum_t min(ratio_t A_t, clip(ratio_t, 1 - low, 1 + high) A_t) / N
              PPO (arXiv 1707.06347), with DAPO's separate bounds (arXiv 2503.14476)
    cispo:    L = -sum_t stop_gradient(min(ratio_t, cap)) A_t log pi_theta(t) / N
              MiniMax-M1 (arXiv 2506.13585)

N is the number of generated tokens of the whole step over all ranks and microbatches, so neither splitting a batch nor
the length of an episode changes a token's weight. The sampler's own log-probabilities stand in the ratio: they hold
both the staleness of the weights and the numerical mismatch between the two engines. All of them are those of
softmax(logits / temperature), the distribution that tokens are sampled from.

Shapes: B rows, T positions; a position refers to its *target* token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer.schema import AlgorithmConfig, LossKind

MAX_LOG_RATIO = 10.0
"""exp(10) is beyond every clip; the bound keeps a broken sample from turning the loss into infinity."""


def policy_loss(
    log_probs: Tensor,
    entropy: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    num_tokens: Tensor | float,
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one microbatch and its diagnostics.

    Args:
        log_probs: [B, T] float, log pi_theta of the target tokens, with gradient.
        entropy: [B, T] float, entropy of pi_theta at each position, in nats; with gradient if its coefficient is not 0.
        sampler_log_probs: [B, T] float, log-probabilities recorded when the tokens were sampled.
        advantages: [B, T] float.
        loss_mask: [B, T] bool, true at generated tokens.
        num_tokens: N above.
        algorithm: clip bounds, loss kind and entropy coefficient.

    Returns:
        The scalar loss, and sums over this microbatch divided by N (so that adding microbatches gives the step's mean):
        `kl_k3` = mean of (r - 1 - ln r) with r the ratio (Schulman's estimator of KL(sampler || theta)),
        `clip_fraction`, `entropy`, `ratio`.
    """
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    log_ratio = torch.where(loss_mask, log_probs - sampler_log_probs, zero).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    if algorithm.loss is LossKind.clipped:
        bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        objective = torch.minimum(ratio * advantages, bounded * advantages)
        clipped = bounded * advantages < ratio * advantages
    else:
        bounded = ratio.clamp(max=algorithm.importance_cap)
        objective = bounded.detach() * advantages * log_probs
        clipped = bounded < ratio
    entropy = torch.where(loss_mask, entropy, zero)
    loss = -torch.where(loss_mask, objective, zero).sum() / num_tokens
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropy.sum() / num_tokens
    with torch.no_grad():
        diagnostics = {
            "kl_k3": torch.where(loss_mask, ratio - 1 - log_ratio, zero).sum() / num_tokens,
            "clip_fraction": (clipped & loss_mask).sum() / num_tokens,
            "entropy": entropy.sum() / num_tokens,
            "ratio": torch.where(loss_mask, ratio, zero).sum() / num_tokens,
        }
    return loss, diagnostics
