"""The tokenizer of a run: the given one, or one learned from the mix and from sessions as the harness writes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from composer.errors import CorpusError
from composer.pretrain.mix import Codebase, Mix, sample_text
from composer.pretrain.tokenizer import load_tokenizer, train_tokenizer
from composer.schema import Config, PhaseKind

SAMPLE_BYTES = 2**21
"""How much of the mix a tokenizer is learned from."""


def prepare_tokenizer(config: Config, folder: Path, session_texts: Sequence[str]) -> None:
    """Make `folder` the run's tokenizer; one that is there already stays.

    Args:
        config: `model.tokenizer`, else the tokenizer of `model.checkpoint`, is copied; without either one is learned.
        folder: appears whole or not at all.
        session_texts: sessions to learn from beside the mix, so that tool calls become few tokens.

    Raises:
        TokenizerError: the given tokenizer cannot be read or does not fit the model.
        CorpusError: nothing to learn from.
    """
    if folder.exists():
        return
    model = config.model
    half = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(half, ignore_errors=True)
    given = model.tokenizer or model.checkpoint
    if given is not None:
        load_tokenizer(given, model.vocab_size).save_pretrained(half)
    else:
        train_tokenizer(chain(_mix_texts(config), session_texts), model.vocab_size, half)
    half.replace(folder)


def _mix_texts(config: Config) -> chain[str]:
    phases = {n: p for n, p in config.mix.phases.items() if p.kind is PhaseKind.pretrain}
    if not phases:
        raise CorpusError(
            "model.tokenizer=None: there is no pretraining phase to learn a tokenizer from; give model.tokenizer"
        )
    codebase = Codebase(config.mix)
    texts = []
    for name, phase in phases.items():
        mix = Mix(f"mix.phases.{name}.sources", phase.sources, codebase, phase.seq_len, config.seed)
        texts.append(sample_text(mix, SAMPLE_BYTES // len(phases)))
    return chain.from_iterable(texts)
