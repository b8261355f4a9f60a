"""What a run's processes use: CPU, memory, shared memory, GPUs; sampled for the whole process tree.

Memory is counted as PSS (proportional set size: a page that n processes share counts 1/n in each), summed over the
tree, so that forked workers and Ray's object store are not counted many times. Where a process's PSS cannot be read
(another user's), its resident minus shared memory is taken. The peak is the largest of the samples: what lives for less
than the sampling period may be missed, and pages of files in /dev/shm that no process has mapped are not in it.
GPUs are those of the driver's machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

PEAK_EVERY_S = 2.0
GROWTH = 1.01
"""Resident memory this much above all before may be a new peak."""
GPU_TIMEOUT_S = 5.0
GPU_QUERY = "index,utilization.gpu,memory.used,power.draw"
_GPU_VALUES = {"utilization_percent": 1.0, "memory_bytes": float(2**20), "power_watts": 1.0}
"""Names and scales of the query's values after the index; nvidia-smi counts memory in MiB."""


class ProcessTree:
    """A process and all its descendants, also those whose parent has died since they were first seen."""

    def __init__(self, pid: int | None = None) -> None:
        """Follow a process.

        Args:
            pid: the root; None: this process.
        """
        self._root = psutil.Process(pid or os.getpid())
        self._seen: dict[int, psutil.Process] = {}
        # What they have used until now is no part of the first sample.
        self._cpu_seconds = _cpu_seconds(self.processes())
        self._time = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Those alive now, without those that only share their parent's memory (a sandbox's sleepers)."""
        found: dict[int, psutil.Process] = {}
        for root in [self._root, *self._seen.values()]:
            if root.pid in found:
                continue
            try:
                if not root.is_running():
                    continue
                for process in (root, *root.children(recursive=True)):
                    found.setdefault(process.pid, process)
            except psutil.Error:
                continue
        self._seen = found
        return _without_twins(found)

    def memory_bytes(self) -> int:
        """PSS summed over the tree, in bytes. The kernel walks every page: 23 CPU-ms a GiB (measured)."""
        return sum(map(_proportional_bytes, self.processes()))

    def resident_bytes(self) -> int:
        """Resident memory summed over the tree, in bytes, shared pages once a process. Costs next to nothing."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def sample(self) -> dict[str, float]:
        """CPU since the last call (percent of one core), memory in bytes, number of processes and threads."""
        memory = resident = threads = 0
        cpu_seconds: dict[psutil.Process, float] = {}
        for process in self.processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    resident += process.memory_info().rss
                    threads += process.num_threads()
                memory += _proportional_bytes(process)
                cpu_seconds[process] = times.user + times.system
            except psutil.Error:
                continue
        now = time.monotonic()
        used = sum(seconds - self._cpu_seconds.get(process, 0.0) for process, seconds in cpu_seconds.items())
        percent = 100 * used / max(now - self._time, 1e-3)
        self._cpu_seconds, self._time = cpu_seconds, now
        return {
            "cpu_percent": percent,
            "memory_bytes": memory,
            "resident_bytes": resident,
            "num_processes": len(cpu_seconds),
            "num_threads": threads,
        }


class SystemSampler:
    """A daemon thread that samples until it is stopped; it never raises."""

    def __init__(
        self, log: Callable[[dict[str, float]], None], every_s: float, peak_every_s: float = PEAK_EVERY_S
    ) -> None:
        """Start sampling.

        Args:
            log: gets a sample, metric name -> value.
            every_s: seconds between samples.
            peak_every_s: seconds between looks at whether memory has grown; only then is it counted.
        """
        self.peak_bytes = 0
        """The most memory seen so far (see the head of this file)."""
        self.tree = ProcessTree()
        self._resident_high = 0
        self._log = log
        self._every_s = every_s
        self._peak_every_s = min(peak_every_s, every_s)
        self._has_gpus = shutil.which("nvidia-smi") is not None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, with a last sample if it takes no longer than a second."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _loop(self) -> None:
        following = time.monotonic()
        while True:
            stopping = self._stop.is_set()
            if stopping or time.monotonic() >= following:
                following = time.monotonic() + self._every_s
                sample = self._sample()
                self.peak_bytes = max(self.peak_bytes, int(sample["memory_bytes"]))
                sample["peak_memory_bytes"] = self.peak_bytes
                self._log({f"system/{name}": value for name, value in sample.items()})
                self._resident_high = max(self._resident_high, int(sample["resident_bytes"]))
            elif (resident := self.tree.resident_bytes()) > GROWTH * self._resident_high:
                self._resident_high = resident
                self.peak_bytes = max(self.peak_bytes, self.tree.memory_bytes())
            if stopping:
                return
            self._stop.wait(min(self._peak_every_s, max(0.01, following - time.monotonic())))

    def _sample(self) -> dict[str, float]:
        sample = self.tree.sample()
        sample["machine_cpu_percent"] = psutil.cpu_percent()
        sample["machine_memory_available_bytes"] = psutil.virtual_memory().available
        with contextlib.suppress(OSError):
            sample["shm_used_bytes"] = shutil.disk_usage("/dev/shm").used
        if self._has_gpus:
            sample.update(_sample_gpus())
        return sample


def _cpu_seconds(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """CPU time used so far, user and system, by each process that still lives."""
    used = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process] = times.user + times.system
    return used


def _without_twins(processes: Mapping[int, psutil.Process]) -> list[psutil.Process]:
    """Leave out children that run in their parent's memory (CLONE_VM), whose pages would count once for each.

    The kernel does not tell. But all numbers of one memory are equal at any time, and those of two hardly ever.
    """
    memory: dict[int, tuple[int, ...]] = {}
    parents: dict[int, int] = {}
    for pid, process in processes.items():
        with contextlib.suppress(psutil.Error):
            memory[pid], parents[pid] = tuple(process.memory_info()), process.ppid()
    return [p for pid, p in processes.items() if pid not in memory or memory[pid] != memory.get(parents[pid])]


def _proportional_bytes(process: psutil.Process) -> int:
    """PSS of one process; resident minus shared where it cannot be read; 0 once it is gone."""
    try:
        return process.memory_full_info().pss
    except psutil.AccessDenied:
        try:
            memory = process.memory_info()
            return max(0, memory.rss - memory.shared)
        except psutil.Error:
            return 0
    except (psutil.Error, OSError):
        return 0


def read_gpus(answer: str) -> dict[str, float]:
    """The numbers in what `nvidia-smi` with `GPU_QUERY` prints; a value that a GPU does not have is left out.

    Example:
        >>> read_gpus("0, 87, 1024, 312.5")
        {'gpu_0_utilization_percent': 87.0, 'gpu_0_memory_bytes': 1073741824.0, 'gpu_0_power_watts': 312.5}
    """
    sample: dict[str, float] = {}
    for line in answer.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        for (name, scale), value in zip(_GPU_VALUES.items(), values, strict=False):
            with contextlib.suppress(ValueError):
                sample[f"gpu_{index}_{name}"] = float(value) * scale
    return sample


def _sample_gpus() -> dict[str, float]:
    """Every GPU of this machine; empty where there is none. The driver's own program needs no Python binding."""
    try:
        command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_gpus(done.stdout) if done.returncode == 0 else {}
