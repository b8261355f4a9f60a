"""What the probe's facts mean: a laptop shows nothing, a bare container nearly everything."""

import pytest

from envs.sandbox.realism.tells import TELLS, judge, parse, score

LAPTOP = {
    "marks": "",
    "env.container": "",
    "env.USER": "ada",
    "env.LANG": "en_GB.UTF-8",
    "env.TERM": "xterm-256color",
    "env.SHELL": "/bin/bash",
    "env.HOME": "/home/ada",
    "env.PATH": "/home/ada/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games",
    "env.names": "HOME LANG PATH SHELL TERM USER",
    "pid1.name": "systemd",
    "pid1.command": "/sbin/init splash",
    "pid1.start_s": "0",
    "pid2.name": "kthreadd",
    "processes": "312",
    "uptime_s": "86400",
    "parent.name": "gnome-terminal-",
    "parent.pid": "4711",
    "tty": "/dev/pts/0",
    "loginuid": "1000",
    "oom_score_adj": "0",
    "limit.file": "unlimited",
    "limit.cpu": "unlimited",
    "ns.pid": "pid:[4026531836]",
    "ns.user": "user:[4026531837]",
    "uid_map": "0 0 4294967295",
    "cgroup": "0::/init.scope 0::/user.slice/user-1000.slice/session-2.scope",
    "root.mount": "ext4 /dev/nvme0n1p2",
    "root.subpath": "/",
    "sys.class": "yes",
    "sys.options": "rw,nosuid,nodev,noexec,relatime",
    "dev": "190",
    "block_devices": "9",
    "uid": "1000",
    "capabilities": "000001ffffffffff",
    "no_new_privileges": "0",
    "seccomp": "0",
    "setuid_root": "yes",
    "hostname": "ada-xps",
    "machine_id": "0123456789abcdef0123456789abcdef",
    "timezone": "/etc/localtime",
    "passwd.self": "ada:x:1000:1000:Ada,,,:/home/ada:/bin/bash",
    "passwd.lines": "48",
    "etc.owner": "0",
    "home.writable": "yes",
    "home.history": "500",
    "home.gitconfig": "ada@example.com",
    "home.entries": "60",
    "net.interfaces": "enp0s31f6 lo wlp2s0",
    "net.routes": "3",
    "net.loopback": "2",
    "net.resolver": "127.0.0.53",
    "files.dates": "12",
    "logs": "40",
    "manuals": "1800",
    "package_list": "90000",
    "boot": "12",
    "tools.missing": "",
    "kernel": "6.8.0-45-generic Linux version 6.8.0-45-generic (buildd@lcy02)",
    "hypervisor": "",
    "cmdline": "BOOT_IMAGE=/boot/vmlinuz-6.8.0-45-generic root=UUID=0 ro quiet splash",
    "cpu_quota": "max 100000",
    "memory_limit": "max",
}


def shown(**changes: str) -> dict[str, str]:
    return {v.tell.name: v.shown for v in judge({**LAPTOP, **changes}) if v.shown}


def test_a_laptop_shows_nothing() -> None:
    assert shown() == {}
    assert score(judge(LAPTOP)) == (0, 39)


@pytest.mark.parametrize(
    ("fact", "value", "tell", "seen"),
    [
        ("marks", "/.dockerenv", "marker files", "/.dockerenv"),
        ("env.container", "docker", "$container", "docker"),
        ("env.TERM", "", "thin environment", "no TERM"),
        ("env.HOME", "/", "thin environment", "no HOME"),
        ("pid1.name", "sleep", "first process", "sleep: /sbin/init splash"),
        ("processes", "3", "few processes", "3 processes"),
        ("pid2.name", "bash", "no kernel threads", "PID 2 is no kthreadd"),
        ("pid1.start_s", "3600", "late first process", "PID 1 started 3600 s after the machine"),
        ("ns.pid", "pid:[4026532211]", "PID namespace", "pid:[4026532211]"),
        ("ns.user", "user:[4026532210]", "user namespace", "user:[4026532210]"),
        ("uid_map", "1000 0 1", "user map", "1000 0 1"),
        ("cgroup", "11:pids:/docker/0123", "control group", "11:pids:/docker/0123"),
        ("root.mount", "overlay overlay", "root file system", "overlay overlay"),
        ("root.subpath", "/var/root", "root of a subfolder", "/var/root"),
        ("mounts.masked", "/etc/hosts /proc/keys", "masked files", "/etc/hosts /proc/keys"),
        ("mounts.sources", "lowerdir=/oldroot/skel", "the host's paths", "lowerdir=/oldroot/skel"),
        ("sys.class", "", "/sys", "/sys is not there"),
        ("sys.options", "ro,nosuid", "/sys", "/sys is read-only"),
        ("dev", "14", "few devices", "14 entries in /dev"),
        ("uid", "0", "root", "it runs as root"),
        ("capabilities", "0000000000000000", "capabilities", "CapBnd=0000000000000000"),
        ("no_new_privileges", "1", "no new privileges", "NoNewPrivs=1"),
        ("seccomp", "2", "seccomp", "Seccomp=2"),
        ("hostname", "3f2a9c0d1e4b", "host name", "3f2a9c0d1e4b"),
        ("machine_id", "", "machine id", "/etc/machine-id is empty"),
        ("home.history", "", "home", "home has no history"),
        ("home.history", "0", "home", "home has no history"),
        ("passwd.self", "", "unknown user", "the user is not in /etc/passwd"),
        ("etc.owner", "65534", "owner of /etc", "it is 65534"),
        ("net.interfaces", "lo", "network interfaces", "only lo"),
        ("net.routes", "0", "no route", "0 routes"),
        ("net.resolver", "", "no resolver", "no name server"),
        ("files.dates", "61", "files of one day", "61 % of one day"),
        ("files.dates", "", "files of one day", "100 % of one day"),
        ("tools.missing", "sudo vi", "missing tools", "sudo vi"),
        ("kernel", "6.1.0-fc-v1 Linux", "kernel", "6.1.0-fc-v1"),
        ("cmdline", "console=ttyS0 reboot=k panic=1", "kernel command line", "reboot=k"),
        ("cpu_quota", "50000 100000", "processor quota", "50000 100000"),
        ("memory_limit", "536870912", "memory limit", "536870912"),
        ("env.PATH", "/opt/python/bin:/usr/bin", "odd search path", "/opt/python/bin"),
        ("env.names", "HOME PYTHONDONTWRITEBYTECODE", "odd variables", "PYTHONDONTWRITEBYTECODE"),
        ("parent.pid", "0", "no parent", "the shell's parent is PID 0"),
        ("tty", "not a tty", "no terminal", "the shell has no terminal"),
        ("limit.file", "131072", "limit of file size", "131072"),
    ],
)
def test_each_fact_is_told_by_its_tell_alone(fact: str, value: str, tell: str, seen: str) -> None:
    assert shown(**{fact: value}) == {tell: seen}


def test_a_memory_limit_beyond_any_machine_is_none() -> None:
    assert shown(memory_limit="9223372036854771712") == {}


def test_nothing_known_shows_nearly_everything() -> None:
    found, of = score(judge({}))
    assert of == 39 and found >= 20


def test_names_are_used_once() -> None:
    assert len({tell.name for tell in TELLS}) == len(TELLS)


def test_lines_without_a_tab_are_noise() -> None:
    assert parse("bash: x\nuid\t1000\n\tempty\nhosts\t\n") == {"uid": "1000", "hosts": ""}
