"""Parts that torchtitan demands of a `Trainer` and that one stepped from outside has no use for; tracked state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer

from composer.models.logits import label_log_probs


class NoLoader(BaseDataLoader):
    """torchtitan insists on a data loader; batches come through `update` and their cursors through `track`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options of its own."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        """Ignore everything."""

    def __iter__(self) -> Iterator[Any]:
        """Nothing."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class NoTokenizer(BaseTokenizer):
    """torchtitan insists on a tokenizer; ours lives with the corpus."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options of its own."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        """Ignore everything."""
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Never called."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Never called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Never called."""
        raise NotImplementedError


class LastMetrics(MetricsProcessor):
    """Keeps the numbers of the last step instead of printing them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """No options of its own."""

    last: dict[str, float] = {}

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Keep loss, gradient norm before clipping, and learning rate."""
        rates = [v for k, v in (extra_metrics or {}).items() if k.startswith("lr/")]
        self.last = {"loss": global_avg_loss, "grad_norm": grad_norm, "learning_rate": rates[0]}
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()


class CollectLogProbs(BaseLoss):
    """Instead of a loss: keeps the labels' log-probabilities of each piece of the sequence that it is shown."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """What the logits are divided by."""

        temperature: float = 1.0

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """Nothing was shown yet."""
        self.temperature = config.temperature
        self.parts: list[torch.Tensor] = []

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Keep [B, l] of logits [B, l, V] and labels [B, l]; the loss is 0."""
        self.parts.append(label_log_probs(pred, labels, self.temperature))
        return self.parts[-1].new_zeros(()), {}

    @classmethod
    def in_chunks(
        cls, hidden: torch.Tensor, labels: torch.Tensor, lm_head: torch.nn.Module, num_chunks: int, temperature: float
    ) -> torch.Tensor:
        """Log-probabilities [B, L] of labels from hidden states [B, L, D], whose logits exist a piece at a time.

        torchtitan's wrapper cuts the sequence and keeps the last layer gathered between the pieces.
        """
        wrapper = ChunkedLossWrapper.Config(loss_fn=cls.Config(temperature=temperature), num_chunks=num_chunks).build()
        wrapper.set_lm_head(lm_head)
        wrapper(hidden, labels)
        return torch.cat(wrapper.loss_fn.parts, dim=1)


class JsonState:
    """A `Stateful` whose state goes into the checkpoint as one string.

    Distributed checkpoints match state key by key, so a state whose keys change while training could not be loaded.
    """

    def __init__(self, inner: Any) -> None:
        """Wrap `inner`, whose own state is JSON-ready."""
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        """One key."""
        return {"json": json.dumps(self.inner.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse."""
        self.inner.load_state_dict(json.loads(state_dict["json"]))
