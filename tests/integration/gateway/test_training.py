"""Two steps of RL with agents of others, all of it real: the run, vLLM, the trainer, sandboxes, the agents' clients.

A random model says nothing of use; its episodes are recorded, told apart by a grader that looks at the text alone, and
trained on. The recorded tokens are then scored by transformers with the weights that the first step began with.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml

from composer.rollout.chat import Chat, install_template
from composer.types import Group
from tests.integration.rollout.small_models import log_probs

REPOSITORY = Path(__file__).parents[3]
PACKAGES = sysconfig.get_path("purelib")
"""What has the agents here; a run of yours gives them a folder of their own, as conf/env says."""
GRADER = """
from composer.contract import Grade


class Letters:
    name = "letters"

    async def grade(self, task, files, backend, trajectory):
        said = "".join(m.content for m in trajectory.messages if m.role == "assistant")
        return Grade(sum(c in "aeiou " for c in said) / max(1, len(said)))
"""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "expert_ffn_size": 32,
    "max_context": 4096,
}
MINI = """
agent:
  system_template: You work in a shell.
  instance_template: "{{task}}"
  step_limit: 3
  cost_limit: 0
  mode: yolo
model:
  observation_template: "{{output.output}}"
  format_error_template: "{{error}}"
"""
# A random model calls no tool, and the examples' loops would end with their first turn: here they go on.
GO_ON = {
    "openai_sdk": (
        "    if not answer.tool_calls:\n        break\n",
        '    if not answer.tool_calls:\n        messages.append({"role": "user", "content": "Go on."})\n',
    ),
    "anthropic_sdk": (
        "    if not results:\n        break\n",
        '    results = results or [{"type": "text", "text": "Go on."}]\n',
    ),
}
COMMANDS = {
    "mini_swe_agent": [
        *("python3", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately", "--config", "/tmp/agent/mini.yaml"),
        *("--model", "openai/{model}", "--output", "/tmp/agent/trajectory.json", "--task", "{request}"),
    ],
    "openai_agents": ["python3", "/tmp/agent/agent.py", "{request}"],
    "openai_sdk": ["python3", "/tmp/agent/agent.py", "{request}"],
    "anthropic_sdk": ["python3", "/tmp/agent/agent.py", "{request}"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, as transformers saves it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from composer.pretrain.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    train_tokenizer([Path(json.__file__).read_text(), Path(os.__file__).read_text()], SIZES["vocab_size"], folder)
    install_template(folder, "hermes")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=64, moe_intermediate_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.1,
        rope_theta=10000.0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def env_of(name: str, folder: Path) -> None:
    """The env of conf/env with this machine's packages, short limits, and a grader that looks at the text."""
    env = yaml.safe_load((REPOSITORY / "conf" / "env" / f"{name}.yaml").read_text())
    env["agent"]["command"] = COMMANDS[name]
    env["agent"]["environment"]["PYTHONPATH"] = "/opt/agent"
    if name == "mini_swe_agent":
        env["agent"]["files"] = {"config": {"path": "/tmp/agent/mini.yaml", "text": MINI}}
    if name in GO_ON:
        file = env["agent"]["files"]["agent"]
        for old, new in (GO_ON[name], ("range(50)", "range(3)")):
            assert file["text"].count(old) == 1
            file["text"] = file["text"].replace(old, new)
    env["sandbox"]["args"]["folders"] = [f"{PACKAGES}:/opt/agent"]
    env["taskset"] = {"_target_": "envs.tasks.micro.MicroTaskset", "args": {"verbs_per_operator": 2}}
    env["graders"] = {"letters": {"_target_": "text_grader.Letters"}}
    env |= {"max_turns": 4, "max_turn_tokens": 24, "episode_timeout_s": 120.0}
    (folder / "env").mkdir()
    (folder / "env" / "tried.yaml").write_text(yaml.safe_dump(env))
    (folder / "text_grader.py").write_text(GRADER)


MODULES = {
    "mini_swe_agent": "minisweagent",
    "openai_agents": "agents",
    "openai_sdk": "openai",
    "anthropic_sdk": "anthropic",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_agent_trains(name: str, checkpoint: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{MODULES[name]}, which {name} needs, is not installed (extra `test`)")
    env_of(name, tmp_path)
    overrides = [
        *("--config-dir", str(tmp_path), "env=tried", "stages=[rl]", "plugins=[text_grader]"),
        *(f"model.{key}={value}" for key, value in SIZES.items()),
        *(f"model.checkpoint={checkpoint}", "generator.max_model_len=4096", "generator.max_num_seqs=8"),
        *("algorithm.num_steps=2", "algorithm.groups_per_step=1", "algorithm.group_size=3", "algorithm.warmup_steps=0"),
        *("algorithm.max_staleness=0", "algorithm.min_start_average=0", "algorithm.checkpoint_every=2"),
        f"run_root={tmp_path / 'runs'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "composer", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [ledger] = (tmp_path / "runs").glob("*/*/stages/rl/ledger.jsonl")
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2]
    groups = [Group.from_dict(e["data"]) for e in events if e["event"] == "group"]
    episodes = [t for g in groups for t in g.trajectories]
    assert len(episodes) == 6 and all(t.turns for t in episodes), [t.error for t in episodes]
    assert len({t.reward for t in groups[0].trajectories}) > 1, "there is something to learn from"

    # What was recorded is what the model was given: the first step's tokens have these log-probabilities in its words.
    chat = Chat.load(checkpoint)
    for t in groups[0].trajectories:
        for path in t.paths:
            scored = [0.0, *log_probs(checkpoint, path.token_ids)]
            for mask, sampled, score in zip(path.loss_mask, path.log_probs, scored, strict=True):
                assert not mask or sampled == pytest.approx(score, abs=1e-3)
        first = chat.decode(t.turns[0].prompt_ids)
        assert "<|im_start|>user\n" in first and t.messages[-1].role == "assistant"
    if name == "mini_swe_agent":  # it leaves out its turns without a call, so each of them is a path of its own
        assert all(len(t.paths) == len(t.turns) == 3 for t in episodes)
    if name in GO_ON:
        assert all(len(t.paths) == 1 and len(t.turns) == 3 for t in episodes)
    metrics = [json.loads(line) for line in (ledger.parents[2] / "metrics.jsonl").read_text().splitlines()]
    found = [m["metrics"] for m in metrics if "train/grad_norm" in m["metrics"]]
    assert len(found) == 2 and found[0]["train/grad_norm"] > 0
    assert all(m["mismatch/p90"] < 1e-3 for m in found)
