"""Tasks of Harbor and Terminal-Bench on a real engine, from their Dockerfiles, with `env=harbor` as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from composer.compose import compose
from composer.contract import SandboxLimits
from composer.instantiate import instantiate
from composer.rollout.episode import EnvSettings, Rubric
from composer.rollout.taskcheck import CheckSettings, check_taskset
from composer.types import Split
from envs.sandbox.docker import DockerBackend

TEST_FILE = "from pathlib import Path\n\n\ndef test_it():\n    assert Path('/app/hello.txt').read_text() == 'hi\\n'\n"
HARBOR = {
    "task.toml": "",
    "instruction.md": "Write hello.txt.",
    "environment/Dockerfile": "FROM {base}\nWORKDIR /app\nCOPY README /app/\n",
    "environment/README": "r\n",
    "tests/test.sh": "mkdir -p /logs/verifier\nif python3 -m pytest -p no:cacheprovider /tests/test_state.py >&2 && "
    '[ "$(cat README)" = "$(cat /tests/README)" ]\nthen echo 1; else echo 0; fi > /logs/verifier/reward.txt\n',
    "tests/test_state.py": TEST_FILE,
    "tests/README": "r\n",
    "solution/solve.sh": "cp /solution/hello.txt /app/hello.txt\n",
    "solution/hello.txt": "hi\n",
}
BENCH = {
    "task.yaml": "instruction: Write hello.txt.\n",
    "Dockerfile": "FROM {base}\nWORKDIR /app\n",
    "run-tests.sh": "python3 -m pytest -p no:cacheprovider -rA $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": TEST_FILE,
    "solution.sh": "echo hi > hello.txt\n",
}


@pytest.fixture(scope="module")
def base(docker_engine: str, docker_image: str) -> Iterator[str]:
    """An image by name, for Dockerfiles."""
    client = docker.APIClient(docker_engine, timeout=300)
    name = "composer-test-harbor:1"
    client.import_image_from_file(docker_image.removeprefix("tarball:"), *name.split(":"))
    yield name
    client.remove_image(name, force=True)
    client.close()


@pytest.mark.docker
@pytest.mark.slow
def test_tasks_are_fit_and_their_places_can_be_written_to(docker_engine: str, base: str, tmp_path: Path) -> None:
    for name, files in {"harbor": HARBOR, "bench": BENCH}.items():
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(content.replace("{base}", base))
    config = compose(
        [
            "env=harbor",
            f"env.taskset.args.path={tmp_path}",
            "env.taskset.args.evaluation_share=0.0",
            f"env.sandbox.args.host={docker_engine}",
        ]
    )
    taskset = instantiate(config.env.taskset, key="env.taskset")
    graders = {name: instantiate(target, key=f"env.graders.{name}") for name, target in config.env.graders.items()}
    limits = EnvSettings.from_config(config.env, 4096).limits

    async def scenario() -> tuple[dict[str, tuple[str, str]], str]:
        backend = instantiate(config.env.sandbox, key="env.sandbox", run_label="harbor")
        try:
            settings = CheckSettings(num_tasks=2, rounds=1, limits=limits)
            done = await check_taskset(taskset, Rubric(graders), backend, settings)
            sandbox = await backend.start({}, limits, image=taskset.task(Split.TRAIN, 0).image)
            shown = await sandbox.shell(
                "pwd; for d in /tests /logs /solution; do echo x > $d/x && stat -c '%U %a' $d; done; "
                "df --output=size,target -k /tests | tail -n1; touch /usr/x /x 2>&1 | grep -c 'Read-only'"
            )
            # What lies there is part of a snapshot.
            copy = await sandbox.fork()
            kept = await copy.shell("cat /tests/x /logs/x /solution/x")
            found = {t.id: (str(t.verdict), t.reason) for t in done.tasks if t.split is Split.TRAIN}
            return found, (shown.output + kept.output).decode()
        finally:
            await backend.close()

    found, shown = asyncio.run(scenario())
    assert found == {"harbor/train/harbor": ("ok", ""), "harbor/train/bench": ("ok", "")}
    size = f"{limits.disk_bytes // 16 // 1024} /tests"
    assert [" ".join(line.split()) for line in shown.splitlines()] == ["/app", *["dev 755"] * 3, size, "2", *"xxx"]


@pytest.mark.parametrize(
    "writable",
    [["tests"], ["/tmp/x"], ["/a/../b"], ["/home"], ["/home/dev/project/x"], ["/a", "/a/b"], ["/a"] * 5, "/tests"],
)
def test_folders_that_cannot_be_made_writable(writable: list[str]) -> None:
    with pytest.raises(ValueError, match="writable="):
        DockerBackend("x", writable=writable)


def test_the_places_add_up_to_the_disk() -> None:
    settings = DockerBackend("x", workdir="/app", writable=["/tests", "/logs/", "/solution", "/opt/x"])._settings
    places = settings.places(2**28)
    assert sum(places.values()) == 2**28 == SandboxLimits().disk_bytes
    assert places["/logs"] == places["/tests"] == 2**24 and min(places.values()) == 2**24
    assert set(settings.kept_places) == set(places) - {"/dev/shm"}
