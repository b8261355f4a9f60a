"""What the probe's facts tell: each tell with why it gives a sandbox away, and what would hide it.

The first 39 are the tells by which backends are compared; the others (`is_further`) are looked at as well. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

Facts = Mapping[str, str]
_ALL_CAPABILITIES = re.compile(r"0*1ff+f+$")
_INITIAL_PID_NAMESPACE, _INITIAL_USER_NAMESPACE = "pid:[4026531836]", "user:[4026531837]"
"""Inode numbers that Linux gives them (include/linux/proc_ns.h)."""


class Remedy(StrEnum):
    """Who could hide a tell."""

    PROFILE = "a fuller profile (env.sandbox.args.profile)"
    IMAGE = "an image with more in it"
    BACKEND = "another backend, or a way of this one that is not there yet"
    NEVER = "nothing here: it is what keeps the sandbox shut"
    MACHINE = "another machine: a sandbox shares the host's kernel"


@dataclass(frozen=True)
class Tell:
    """One thing that a program could notice."""

    name: str
    shows: Callable[[Facts], str]
    """What gives the sandbox away, in a few words; empty if nothing does."""
    remedy: Remedy
    is_further: bool = False


@dataclass(frozen=True)
class Verdict:
    """A tell, looked at."""

    tell: Tell
    shown: str
    """Empty: it does not give the sandbox away."""


def parse(output: str) -> dict[str, str]:
    r"""What probe.sh printed.

    Example:
        >>> parse("uid\t1000\nnoise\nhostname\tdevbox\n")
        {'uid': '1000', 'hostname': 'devbox'}
    """
    rows = (line.partition("\t") for line in output.splitlines())
    return {name: value.strip() for name, tab, value in rows if name and tab}


def judge(facts: Facts) -> list[Verdict]:
    """Look at every tell."""
    return [Verdict(tell, tell.shows(facts)) for tell in TELLS]


def score(verdicts: list[Verdict]) -> tuple[int, int]:
    """How many of the tells by which backends are compared show, and how many there are."""
    compared = [v for v in verdicts if not v.tell.is_further]
    return sum(bool(v.shown) for v in compared), len(compared)


def _number(facts: Facts, name: str, otherwise: int = 0) -> int:
    found = re.match(r"\d+", facts.get(name, ""))
    return int(found[0]) if found else otherwise


def _fewer(name: str, least: int, what: str) -> Callable[[Facts], str]:
    return lambda f: f"{_number(f, name)} {what}" if _number(f, name) < least else ""


def _given(name: str) -> Callable[[Facts], str]:
    return lambda f: f.get(name, "")


def _absent(name: str, said: str) -> Callable[[Facts], str]:
    return lambda f: "" if f.get(name) else said


def _thin_environment(f: Facts) -> str:
    missing = [v for v in ("USER", "LANG", "TERM", "SHELL") if not f.get(f"env.{v}")]
    if f.get("env.HOME", "/") == "/":
        missing.append("HOME")
    return f"no {', '.join(missing)}" if missing else ""


def _system_files(f: Facts) -> str:
    if not f.get("sys.class"):
        return "/sys is not there"
    return "/sys is read-only" if f.get("sys.options", "").startswith("ro") else ""


def _first_process(f: Facts) -> str:
    return (
        "" if f.get("pid1.name") in ("systemd", "init") else f"{f.get('pid1.name')}: {f.get('pid1.command', '')[:60]}"
    )


def _cgroup(f: Facts) -> str:
    found = re.search(r"\S*(docker|libpod|kubepods|containerd|machine|composer)\S*", f.get("cgroup", ""))
    return found[0] if found else ""


def _root_mount(f: Facts) -> str:
    kind = f.get("root.mount", "")
    return "" if kind.startswith(("ext4", "xfs", "btrfs")) else kind or "no root mount is seen"


def _home(f: Facts) -> str:
    lacks = [what for what in ("writable", "history", "gitconfig") if f.get(f"home.{what}", "0") in ("", "0")]
    return f"home has no {', '.join(lacks)}" if lacks else ""


def _interfaces(f: Facts) -> str:
    names = f.get("net.interfaces", "").split()
    return "" if any(name[0] in "ew" for name in names) else f"only {' '.join(names) or 'none'}"


def _kernel(f: Facts) -> str:
    found = re.search(r"fc-|firecracker|gvisor|linuxkit|microsoft|^4\.4\.0 ", f.get("kernel", ""), re.IGNORECASE)
    return f.get("kernel", "").split(" ")[0] if found else ""


def _command_line(f: Facts) -> str:
    found = re.search(r"firecracker|reboot=k|panic=1|init=\S*", f.get("cmdline", ""))
    return found[0] if found else ""


def _memory_limit(f: Facts) -> str:
    limit = f.get("memory_limit", "")
    return limit if limit.isdecimal() and len(limit) < 16 else ""


def _started_late(f: Facts) -> str:
    late = _number(f, "pid1.start_s")
    return f"PID 1 started {late} s after the machine" if late > 30 else ""


def _search_path(f: Facts) -> str:
    usual = re.compile(r"/(usr/)?(local/)?s?bin|/usr/(local/)?games|/snap/bin")
    odd = [p for p in f.get("env.PATH", "").split(":") if not usual.fullmatch(p) and not p.startswith("/home/")]
    return " ".join(odd)


def _odd_variables(f: Facts) -> str:
    return " ".join(
        n for n in f.get("env.names", "").split() if re.search(r"PYTHONDONTWRITE|SANDBOX|DOCKER|COMPOSER", n)
    )


TELLS: tuple[Tell, ...] = (
    # Marks and the environment
    Tell("marker files", _given("marks"), Remedy.BACKEND),
    Tell("$container", _given("env.container"), Remedy.BACKEND),
    Tell("thin environment", _thin_environment, Remedy.PROFILE),
    # Processes
    Tell("first process", _first_process, Remedy.PROFILE),
    Tell("few processes", _fewer("processes", 20, "processes"), Remedy.PROFILE),
    Tell(
        "no kernel threads", lambda f: "" if f.get("pid2.name") == "kthreadd" else "PID 2 is no kthreadd", Remedy.NEVER
    ),
    Tell("late first process", _started_late, Remedy.NEVER),
    # Namespaces, control groups, mounts, devices
    Tell(
        "PID namespace",
        lambda f: "" if f.get("ns.pid") == _INITIAL_PID_NAMESPACE else f.get("ns.pid", "?"),
        Remedy.NEVER,
    ),
    Tell(
        "user namespace",
        lambda f: "" if f.get("ns.user") == _INITIAL_USER_NAMESPACE else f.get("ns.user", "?"),
        Remedy.BACKEND,
    ),
    Tell(
        "user map", lambda f: "" if f.get("uid_map") == "0 0 4294967295" else f.get("uid_map") or "none", Remedy.BACKEND
    ),
    Tell("control group", _cgroup, Remedy.BACKEND),
    Tell("root file system", _root_mount, Remedy.BACKEND),
    Tell(
        "root of a subfolder",
        lambda f: "" if f.get("root.subpath") == "/" else f.get("root.subpath", "?"),
        Remedy.BACKEND,
    ),
    Tell("masked files", _given("mounts.masked"), Remedy.BACKEND),
    Tell("the host's paths", _given("mounts.sources"), Remedy.BACKEND),
    Tell("/sys", _system_files, Remedy.PROFILE),
    Tell("few devices", _fewer("dev", 40, "entries in /dev"), Remedy.NEVER),
    # Rights
    Tell("root", lambda f: "it runs as root" if f.get("uid") == "0" else "", Remedy.BACKEND),
    Tell(
        "capabilities",
        lambda f: "" if _ALL_CAPABILITIES.match(f.get("capabilities", "")) else f"CapBnd={f.get('capabilities')}",
        Remedy.NEVER,
    ),
    Tell("no new privileges", lambda f: "NoNewPrivs=1" if f.get("no_new_privileges") == "1" else "", Remedy.NEVER),
    Tell("seccomp", lambda f: "" if f.get("seccomp", "0") == "0" else f"Seccomp={f['seccomp']}", Remedy.NEVER),
    # Who and where
    Tell(
        "host name",
        lambda f: (
            f.get("hostname", "?") if re.fullmatch(r"|[0-9a-f]{12}|localhost|\(none\)", f.get("hostname", "")) else ""
        ),
        Remedy.PROFILE,
    ),
    Tell("machine id", _absent("machine_id", "/etc/machine-id is empty"), Remedy.PROFILE),
    Tell("time zone", _absent("timezone", "no /etc/localtime"), Remedy.PROFILE),
    Tell("home", _home, Remedy.PROFILE),
    Tell("unknown user", _absent("passwd.self", "the user is not in /etc/passwd"), Remedy.PROFILE),
    Tell("owner of /etc", lambda f: "" if f.get("etc.owner") == "0" else f"it is {f.get('etc.owner')}", Remedy.BACKEND),
    # Network
    Tell("network interfaces", _interfaces, Remedy.PROFILE),
    Tell("no route", _fewer("net.routes", 1, "routes"), Remedy.PROFILE),
    Tell("no resolver", _absent("net.resolver", "no name server"), Remedy.PROFILE),
    # Traces of use
    Tell(
        "files of one day",
        lambda f: f"{_number(f, 'files.dates', 100)} % of one day" if _number(f, "files.dates", 100) > 60 else "",
        Remedy.PROFILE,
    ),
    Tell("few logs", _fewer("logs", 3, "logs"), Remedy.PROFILE),
    Tell("no manuals", _fewer("manuals", 50, "manual pages"), Remedy.IMAGE),
    Tell("missing tools", _given("tools.missing"), Remedy.IMAGE),
    # The machine
    Tell("kernel", _kernel, Remedy.MACHINE),
    Tell("hypervisor", _given("hypervisor"), Remedy.MACHINE),
    Tell("kernel command line", _command_line, Remedy.MACHINE),
    Tell(
        "processor quota",
        lambda f: f.get("cpu_quota", "") if re.match(r"\d", f.get("cpu_quota", "")) else "",
        Remedy.BACKEND,
    ),
    Tell("memory limit", _memory_limit, Remedy.BACKEND),
    # Further ones
    Tell("odd search path", _search_path, Remedy.PROFILE, True),
    Tell("odd variables", _odd_variables, Remedy.PROFILE, True),
    Tell(
        "no parent", lambda f: "the shell's parent is PID 0" if f.get("parent.pid") == "0" else "", Remedy.BACKEND, True
    ),
    Tell(
        "no terminal",
        lambda f: "" if f.get("tty", "").startswith("/dev/") else "the shell has no terminal",
        Remedy.BACKEND,
        True,
    ),
    Tell(
        "no login",
        lambda f: "loginuid is not set" if f.get("loginuid") in ("4294967295", "", None) else "",
        Remedy.BACKEND,
        True,
    ),
    Tell(
        "first to be killed",
        lambda f: f"oom_score_adj={f['oom_score_adj']}" if f.get("oom_score_adj", "0") != "0" else "",
        Remedy.NEVER,
        True,
    ),
    Tell(
        "limit of file size",
        lambda f: f.get("limit.file", "") if f.get("limit.file", "unlimited") != "unlimited" else "",
        Remedy.NEVER,
        True,
    ),
    Tell(
        "limit of processor time",
        lambda f: f.get("limit.cpu", "") if f.get("limit.cpu", "unlimited") != "unlimited" else "",
        Remedy.NEVER,
        True,
    ),
    Tell("no set-uid programs", _absent("setuid_root", "su is not root's"), Remedy.BACKEND, True),
    Tell("few users", _fewer("passwd.lines", 10, "users in /etc/passwd"), Remedy.PROFILE, True),
    Tell("no package list", _fewer("package_list", 100, "lines of installed packages"), Remedy.IMAGE, True),
    Tell("nothing in /boot", _fewer("boot", 1, "entries in /boot"), Remedy.PROFILE, True),
    Tell("few files at home", _fewer("home.entries", 8, "entries at home"), Remedy.PROFILE, True),
    Tell("no disks", _fewer("block_devices", 1, "block devices"), Remedy.BACKEND, True),
    Tell(
        "loopback is down",
        lambda f: "127.0.0.1 is not reachable" if _number(f, "net.loopback") == 0 else "",
        Remedy.PROFILE,
        True,
    ),
)
