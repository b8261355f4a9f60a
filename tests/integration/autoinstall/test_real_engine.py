"""The client against a real engine: vLLM's own OpenAI server with a tiny model of random weights, which says nonsense.

So this shows that requests and answers fit, and that a model that is of no use drops a repository cleanly. It does not
show that a model can install anything.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.integration.autoinstall.repositories import SHOP, write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def tiny_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from composer.pretrain.tokenizer import train_tokenizer
    from composer.rollout.chat import install_template

    torch.manual_seed(0)
    text = [content for content in SHOP.values() if content] * 4
    train_tokenizer(text, 512, folder)
    install_template(folder, "hermes")
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=16384, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "16384", "--max-num-seqs", "4", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(2**27)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process is enough, and ends as one
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 500
            while not _answers(port):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_nonsense_from_a_real_engine_drops_the_repository(server, tmp_path):
    shop = write_files(tmp_path / "shop", SHOP)
    words = ["autoinstall", "env=coding", f"autoinstall.repositories=[{shop}]", f"autoinstall.output={tmp_path}/out"]
    for agent in ("proposer", "installer"):
        settings = {"url": server, "model": "tiny", "native_tools": "false", "max_turn_tokens": 64}
        words += [f"autoinstall.{agent}.{key}={value}" for key, value in settings.items()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-m", "composer", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{shop}: dropped, the proposer named 0 fit commands of 10: it called no tool in 4 turns one after another"
    )
    [path] = (tmp_path / "out" / "dropped").glob("*/environment.yaml")
    record = yaml.safe_load(path.read_text())
    assert record["models"] == "as the endpoint names them, unverified"
    proposer = record["agents"]["proposer"]
    assert proposer["answered_as"] == ["tiny"] and proposer["num_turns"] == 4 and proposer["num_tokens"] > 4 * 500
