"""How fast the trainer is beside transformers: the same model, the same batches, in turn, in one process."""

import time
from pathlib import Path

import pytest
import torch

from composer.compose import compose
from composer.models.huggingface import export
from composer.pretrain.tokenizer import train_tokenizer
from tests.integration.models.small import batch, build

pytestmark = pytest.mark.usefixtures("one_process")

ROWS, LENGTH, ROUNDS = 4, 160, 12


def test_a_step_costs_at_most_twice_a_step_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of SFT in the quickstart: forward, backward, clipping and AdamW, on one core.

    The trainer also counts tokens, experts' loads and metrics; torchtitan's own wrappers once made it half as fast.
    """
    from transformers import AutoModelForCausalLM

    model = compose().model
    train_tokenizer([Path(torch.__file__).read_text()], model.vocab_size, tmp_path / "tokenizer")
    trainer = build(model, tmp_path, num_steps=200)
    try:
        export(trainer, model, tmp_path / "hf", tmp_path / "tokenizer")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3, fused=True)

        def our_step(seed: int) -> None:
            trainer.update([batch(seed, ROWS, LENGTH, model.vocab_size)])

        def their_step(seed: int) -> None:
            data = batch(seed, ROWS, LENGTH, model.vocab_size)
            logits = theirs(data.tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()

        seconds = {our_step: 0.0, their_step: 0.0}
        for seed in range(ROUNDS + 2):
            for step in seconds:
                started = time.process_time()
                step(seed)
                if seed >= 2:  # the first two warm up
                    seconds[step] += time.process_time() - started
    finally:
        trainer.close()
    tokens = ROUNDS * ROWS * LENGTH
    with capsys.disabled():
        print(
            f"\ntraining, tokens per CPU-second: {tokens / seconds[our_step]:,.0f}, "
            f"transformers {tokens / seconds[their_step]:,.0f}"
        )
    assert seconds[our_step] < 2 * seconds[their_step]
