"""`env=swe_jsonl` as it is written, on a real engine: a repository with a history in an image's /testbed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from composer.cli import main

SHOP = "def total(prices):\n    return sum(prices)\n"
INSTANCE = {
    "instance_id": "acme__shop-1",
    "repo": "acme/shop",
    "problem_statement": "total() forgets the fee",
    "patch": "--- a/shop.py\n+++ b/shop.py\n@@ -1,2 +1,2 @@\n def total(prices):\n-    return sum(prices)\n"
    "+    return sum(prices) + 2\n",
    "test_patch": "--- a/test_shop.py\n+++ b/test_shop.py\n@@ -2,4 +2,7 @@\n \n \n def test_none():\n"
    "     assert total([]) in (0, 2)\n+\n+def test_fee():\n+    assert total([1]) == 3\n",
    "FAIL_TO_PASS": ["test_shop.py::test_fee"],
    "PASS_TO_PASS": ["test_shop.py::test_none"],
    "image": "composer-test-swe:1",
}
TEST = "from shop import total\n\n\ndef test_none():\n    assert total([]) in (0, 2)\n"
DOCKERFILE = "FROM composer-test-swe-base:1\nCOPY repository /testbed\nWORKDIR /testbed\n"


@pytest.fixture
def image(docker_engine: str, docker_image: str, tmp_path: Path) -> Iterator[str]:
    """The repository before the fix, in an image; its history goes on to the fix."""
    repository = tmp_path / "context" / "repository"
    repository.mkdir(parents=True)
    (repository / "shop.py").write_text(SHOP)
    (repository / "test_shop.py").write_text(TEST)
    as_somebody = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["commit", "--quiet", "-m", "base"],
        ["commit", "--quiet", "--allow-empty", "-m", "the fix"],
        ["checkout", "--quiet", "HEAD~"],
    ):
        subprocess.run([*as_somebody, *command], check=True)
    base = subprocess.check_output([*as_somebody, "rev-parse", "HEAD"], text=True).strip()
    (tmp_path / "context" / "Dockerfile").write_text(DOCKERFILE)
    client = docker.APIClient(docker_engine, timeout=300)
    client.import_image_from_file(docker_image.removeprefix("tarball:"), "composer-test-swe-base", "1")
    for line in client.build(path=str(tmp_path / "context"), tag=INSTANCE["image"], decode=True, rm=True):
        assert "error" not in line, line
    yield base
    for name in (INSTANCE["image"], "composer-test-swe-base:1"):
        client.remove_image(name, force=True)
    client.close()


@pytest.mark.docker
@pytest.mark.slow
def test_an_issue_of_a_repository_in_an_image(image: str, docker_engine: str, tmp_path: Path) -> None:
    path = tmp_path / "instances.jsonl"
    path.write_text(json.dumps(INSTANCE | {"base_commit": image}))
    arguments = [f"env.taskset.args.path={path}", "env.taskset.args.evaluation_share=0.0", f"run_root={tmp_path}"]
    assert main(["tasks", "check", "env=swe_jsonl", f"env.sandbox.args.host={docker_engine}", *arguments]) == 1
    found = json.loads((tmp_path / "tasks-swe_jsonl.json").read_text())["tasks"]
    [task] = [t for t in found if t["split"] == "train"]
    assert (task["id"], task["verdict"], task["reason"]) == ("swe/train/acme__shop-1", "ok", "")
    # There is nothing to evaluate with: one instance, and no share of it.
    assert (task["untouched"], task["reference"]) == ([0.0] * 5, [1.0] * 5)
