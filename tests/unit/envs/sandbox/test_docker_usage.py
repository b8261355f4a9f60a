"""What a container has used, read from control groups of both versions as a container of its own namespace has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from envs.sandbox.docker import usage

V1 = {
    "memory/memory.max_usage_in_bytes": "123456\n",
    "memory/memory.limit_in_bytes": "536870912\n",
    "cpuacct/cpuacct.usage": "2500000000\n",
}
V2 = {
    "memory.peak": "654321\n",
    "memory.current": "4096\n",
    "memory.max": "536870912\n",
    "pids.peak": "7\n",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\nnr_periods 0\n",
}


def tree(top: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def look(top: Path, shell: str = "sh") -> dict[str, int]:
    shown = subprocess.run([shell, "-c", usage.command(str(top)).decode()], capture_output=True, check=True)
    assert shown.stderr == b""
    return usage.parse(shown.stdout)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V1, (123456, 2.5)),
        (V2, (654321, 1.5)),
        # Before Linux 5.19 there is no peak.
        ({name: text for name, text in V2.items() if name != "memory.peak"}, (4096, 1.5)),
        # Version 1 with the processor in one group with its accounting, whose cpu.stat counts throttling alone.
        (V1 | {"cpu/cpu.stat": "nr_periods 0\n", "cpu.stat": "nr_periods 3\n"}, (123456, 2.5)),
        # Both mounted side by side: what limits is version 1.
        (V1 | {"unified/cpu.stat": "usage_usec 9\n", "unified/memory.peak": "9\n"}, (123456, 2.5)),
        # Hidden by a profile: folders without a file.
        ({"memory/x": ""}, None),
    ],
)
def test_both_versions(tmp_path: Path, files: dict[str, str], expected: tuple[int, float] | None, shell: str) -> None:
    values = look(tree(tmp_path, files), shell)
    assert usage.of_groups(values) == expected
    assert values["processes"] >= 2


def test_what_is_no_number_is_nothing() -> None:
    assert usage.parse(b"memory.peak max\nx\n\nmemory.current 5\nprocesses 3 4\n") == {"memory.current": 5}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        # As Docker 20.10 answers with version 1, and with version 2.
        (
            {
                "memory_stats": {"usage": 10, "max_usage": 30, "limit": 99},
                "cpu_stats": {"cpu_usage": {"total_usage": 500_000_000}},
            },
            (30, 0.5),
        ),
        (
            {"memory_stats": {"usage": 10, "limit": 99}, "cpu_stats": {"cpu_usage": {"total_usage": 250_000_000}}},
            (10, 0.25),
        ),
        # Of a container that has just ended.
        ({"memory_stats": {}, "cpu_stats": {"cpu_usage": {"total_usage": 0}}}, (0, 0.0)),
        ({}, (0, 0.0)),
    ],
)
def test_what_an_engine_answers(stats: dict, expected: tuple[int, float]) -> None:
    assert usage.of_engine(stats) == expected
