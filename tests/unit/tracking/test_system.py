"""Memory and CPU of a real process tree of known size."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from composer.tracking.system import ProcessTree, SystemSampler, read_gpus

MIB = 2**20
ROOT = Path(__file__).parents[3]
HOLD = "import sys; held = b'x' * ({mib} * 2**20); print('ready', flush=True); sys.stdin.read()"


def hold(mib: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(mib=mib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_memory_of_children_is_counted() -> None:
    tree = ProcessTree()
    before = tree.memory_bytes()
    child = hold(mib=200)
    try:
        assert 200 * MIB < tree.memory_bytes() - before < 240 * MIB
    finally:
        child.communicate()
    assert tree.memory_bytes() - before < 20 * MIB


def test_pages_shared_by_forked_processes_count_once() -> None:
    program = (
        "import os, sys; held = bytearray(b'x') * (100 * 2**20)\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "for _ in range(4): os.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        tree = ProcessTree(process.pid)
        assert len(tree.processes()) == 5
        sample = tree.sample()
        assert 100 * MIB < sample["memory_bytes"] < 160 * MIB
        assert sample["resident_bytes"] > 450 * MIB, "resident memory counts the shared pages once a process"
    finally:
        process.communicate()


def test_a_process_in_its_parents_memory_counts_once() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from envs.sandbox import linux\n"
        "held = bytes(range(256)) * 2**18\n"
        "linux.start_sleepers(['sleeper'] * 10)\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout and parent.stdout.readline() == "ready\n"
        assert len(psutil.Process(parent.pid).children()) == 10
        tree = ProcessTree(parent.pid)
        assert len(tree.processes()) == 1
        assert 64 * 2**20 < tree.memory_bytes() < 2 * 64 * 2**20
        for child in psutil.Process(parent.pid).children():
            child.kill()
        parent.communicate()


def test_a_grandchild_whose_parent_died_is_still_ours() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = psutil.Process(int(parent.stdout.readline()))
    tree = ProcessTree()
    try:
        assert grandchild in tree.processes()
        parent.communicate()
        assert grandchild.ppid() != parent.pid
        assert grandchild in tree.processes()
    finally:
        grandchild.kill()


def test_cpu_is_percent_of_one_core() -> None:
    tree = ProcessTree()
    tree.sample()
    cpu, wall = time.process_time(), time.monotonic()
    while time.process_time() - cpu < 0.3:
        pass
    expected = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
    assert tree.sample()["cpu_percent"] == pytest.approx(expected, rel=0.25)


def test_cpu_time_from_before_the_first_sample_is_not_counted() -> None:
    cpu = time.process_time()
    while time.process_time() - cpu < 0.5:
        pass
    tree = ProcessTree()
    time.sleep(0.1)
    assert tree.sample()["cpu_percent"] < 200, "0.5 s and more of CPU in 0.1 s would be 500"


def test_the_sampler_finds_a_peak_between_its_samples() -> None:
    samples: list[dict[str, float]] = []
    sampler = SystemSampler(samples.append, every_s=60.0, peak_every_s=0.05)
    time.sleep(0.3)
    child = hold(mib=150)
    time.sleep(0.5)
    child.communicate()
    sampler.stop()
    first, last = samples
    assert last["system/peak_memory_bytes"] == sampler.peak_bytes
    assert sampler.peak_bytes - first["system/memory_bytes"] > 140 * MIB
    assert last["system/memory_bytes"] < sampler.peak_bytes - 100 * MIB
    assert last["system/num_processes"] >= 1


def test_gpus_as_nvidia_smi_prints_them() -> None:
    # Two lines of `nvidia-smi --query-gpu=index,utilization.gpu,memory.used,power.draw --format=csv,noheader,nounits`;
    # a partitioned GPU has no utilisation.
    assert read_gpus("0, 87, 1024, 312.51\n1, [N/A], 3, 71.20\n") == {
        "gpu_0_utilization_percent": 87.0,
        "gpu_0_memory_bytes": 1024 * 2**20,
        "gpu_0_power_watts": 312.51,
        "gpu_1_memory_bytes": 3 * 2**20,
        "gpu_1_power_watts": 71.2,
    }
    assert read_gpus("") == {}
    assert read_gpus("No devices were found\n") == {}


@pytest.mark.gpu
def test_the_sampler_sees_the_gpu() -> None:
    samples: list[dict[str, float]] = []
    SystemSampler(samples.append, every_s=60.0).stop()
    assert samples[-1]["system/gpu_0_memory_bytes"] >= 0
