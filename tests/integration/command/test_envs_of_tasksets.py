"""`composer tasks check` of the env files of tasksets, as they stand, on real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer.cli import main

CART = "def total(a, b):\n    if a > 10:\n        return a - b\n    return a + b\n"
TEST = (
    "from shop.cart import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    "    assert total(11, 2) == 9\n    assert total(10, 2) == 12\n"
)
PROBLEM = {
    "task_id": "T/0",
    "prompt": 'def twice(n):\n    """ n, doubled. """\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\n",
}
RECORD = {
    "task_description": "The largest number.",
    "input_output_spec": "numbers (list of int) -> largest (int)",
    "code_sample": "def main_solution(numbers):\n    return max(numbers)\n",
    "input_generator": "def generate_inputs(rng):\n    return {'numbers': [rng.randint(0, 9) for _ in range(5)]}\n",
}


@pytest.mark.parametrize("env", ["humaneval", "codeio", "feature_deletion", "bug_injection"])
def test_its_tasks_are_ok(env: str, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name, text in (("shop/__init__.py", ""), ("shop/cart.py", CART), ("tests/test_cart.py", TEST)):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(PROBLEM))
    (tmp_path / "codeio.jsonl").write_text(json.dumps(RECORD))
    path = tmp_path / f"{env}.jsonl" if env in ("humaneval", "codeio") else repository
    arguments = [f"env.taskset.args.path={path}", "env.taskset.args.evaluation_share=0.0", f"run_root={tmp_path}"]
    assert main(["tasks", "check", f"env={env}", *arguments]) == 1  # there is nothing to evaluate with
    tasks = json.loads((tmp_path / f"tasks-{env}.json").read_text())["tasks"]
    verdicts = {t["verdict"] for t in tasks if t["id"].startswith(f"{env}/train/")}
    assert verdicts == {"ok"}
