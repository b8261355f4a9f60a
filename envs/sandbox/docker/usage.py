"""What a container has used: from its control groups where they are in sight in it, else as the engine reads them.

Both versions of control groups are read by name, never by what the engine says of itself: in a control-group namespace
of its own a container finds its group at the top, and programs that were started in it later are in the same group.
"""

from __future__ import annotations

from typing import Any

GROUPS = "/sys/fs/cgroup"
_V1_PEAK, _V1_CPU = "memory/memory.max_usage_in_bytes", "cpuacct/cpuacct.usage"
_PEAKS = ("memory.peak", _V1_PEAK, "memory.current")
"""The first that is there; `memory.peak` came with Linux 5.19."""
_COMMAND = """\
for f in {files} {cpu}; do
    [ -r "{groups}/$f" ] && read -r v <"{groups}/$f" && printf '%s %s\\n' "$f" "$v"
done
[ -r {groups}/cpu.stat ] && while read -r n v; do printf '%s %s\\n' "$n" "$v"; done <{groups}/cpu.stat
set -- /proc/[0-9]*; printf 'processes %s\\n' $#"""


def command(groups: str = GROUPS) -> bytes:
    """A command of nothing but a shell's own that prints a name and a value a line."""
    return _COMMAND.format(files=" ".join(_PEAKS), cpu=_V1_CPU, groups=groups).encode()


def parse(shown: bytes) -> dict[str, int]:
    """What `command` printed, without what is no number."""
    rows = (line.partition(" ") for line in shown.decode(errors="replace").splitlines())
    return {name: int(value) for name, _, value in rows if value.strip().isdigit()}


def of_groups(values: dict[str, int]) -> tuple[int, float] | None:
    """Peak of the memory in bytes and CPU time in seconds; None: the control groups are out of sight.

    Example:
        >>> of_groups({"memory.peak": 4096, "usage_usec": 1500000, "processes": 3})
        (4096, 1.5)
    """
    peak = next((values[name] for name in _PEAKS if name in values), None)
    if peak is None:
        return None
    # cpu.stat exists in version 1 as well, and counts nothing there.
    return peak, values["usage_usec"] / 1e6 if "usage_usec" in values else values.get(_V1_CPU, 0) / 1e9


def of_engine(stats: dict[str, Any]) -> tuple[int, float]:
    """The same from the engine's answer. With control groups version 2 it knows no peak, only what is used now.

    Example:
        >>> of_engine({"memory_stats": {"usage": 4096}, "cpu_stats": {"cpu_usage": {"total_usage": 1500000000}}})
        (4096, 1.5)
    """
    memory = stats.get("memory_stats") or {}
    cpu = (stats.get("cpu_stats") or {}).get("cpu_usage") or {}
    return int(memory.get("max_usage") or memory.get("usage") or 0), int(cpu.get("total_usage") or 0) / 1e9
