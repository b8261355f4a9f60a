"""Exported folders against transformers: same names, same logits. And back."""

import dataclasses
from pathlib import Path

import pytest
import torch

from composer.errors import ConfigError
from composer.models.huggingface import check_checkpoint, export
from composer.schema import ModelConfig
from tests.integration.models.small import DEEPSEEK, QWEN, batch, build

pytestmark = pytest.mark.usefixtures("one_process")

YARN = dataclasses.replace(DEEPSEEK, name="tiny-yarn", rope_factor=4.0, rope_original_context=32)
GROUPS = dataclasses.replace(DEEPSEEK, name="tiny-groups", router_groups=4, router_groups_used=2)
UNTIED = dataclasses.replace(QWEN, name="tiny-untied", tie_embeddings=False)


@pytest.mark.parametrize("model", [QWEN, UNTIED, DEEPSEEK, YARN, GROUPS], ids=lambda m: m.name)
def test_log_probs_equal_transformers(model: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = build(model, tmp_path)
    for step in range(3):  # so that norms and balancing biases are not at their start
        trainer.update([batch(step)])
    export(trainer, model, tmp_path / "hf")
    data = batch(9, rows=2, length=64)
    ours = trainer.score(data)
    trainer.close()
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        logits = theirs.eval()(input_ids=data.tokens).logits
    expected = logits.log_softmax(-1).gather(-1, data.labels[..., None])[..., 0]
    assert expected.std() > 0.3  # far from uniform: the comparison can fail
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=lambda m: m.name)
def test_a_folder_is_read_back_bit_for_bit(model: ModelConfig, tmp_path: Path) -> None:
    trainer = build(model, tmp_path / "a", seed=1)
    trainer.update([batch(0)])
    export(trainer, model, tmp_path / "hf")
    before = {name: value.clone() for name, value in trainer.hf_state_dict()}
    trainer.close()
    started = dataclasses.replace(model, checkpoint=str(tmp_path / "hf"))
    check_checkpoint(tmp_path / "hf", started)
    trainer = build(started, tmp_path / "b", seed=2)
    assert trainer.load() == 0
    after = dict(trainer.hf_state_dict())
    trainer.close()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    trainer = build(QWEN, tmp_path)
    export(trainer, QWEN, tmp_path / "hf")
    trainer.close()
    with pytest.raises(ConfigError, match=r"model\.checkpoint.*experts.0.down_proj.*instead of"):
        check_checkpoint(tmp_path / "hf", dataclasses.replace(QWEN, expert_ffn_size=64))
    with pytest.raises(ConfigError, match="missing"):
        check_checkpoint(tmp_path / "hf", dataclasses.replace(QWEN, num_experts=16))
