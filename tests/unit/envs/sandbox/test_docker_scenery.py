"""What a profile adds to Docker sandboxes: a first process that any shell runs, dates, a time zone."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import py_compile
import subprocess
import zoneinfo
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from envs.sandbox.docker import prepared, scenery
from envs.sandbox.docker.commands import _with_one_output
from envs.sandbox.docker.once import Once
from envs.sandbox.realism.load import load_profile
from envs.sandbox.realism.profile import Profile

DEVELOPER = load_profile("developer")


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize("profile", [DEVELOPER, Profile(), Profile(processes=("a'b", "$(c)"), devices=("x y",))])
def test_the_first_script_is_one_for_any_shell(profile: Profile, shell: str) -> None:
    parsed = subprocess.run([shell, "-n"], input=scenery.first_script(profile), capture_output=True)
    assert (parsed.returncode, parsed.stderr) == (0, b"")


def test_names_in_the_first_script_are_no_commands(tmp_path: Path) -> None:
    profile = Profile(first_process="a$(touch x)b", processes=("$(touch y)", "'; touch z; '"))
    script = scenery.first_script(profile).decode()
    # With files of ours in the place of the kernel's and the image's.
    script = script.replace("/proc/self/comm", "names").replace(scenery.PIPE, "/dev/null")
    script = script.replace(">names", ">>names").replace("printf %s", "printf '%s\\n'")
    subprocess.run(["sh", "-c", script, "init", "--deserialize", "0"], cwd=tmp_path, timeout=10, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"names"}
    names = (tmp_path / "names").read_text().splitlines()
    assert sorted(names) == sorted(["a$(touch x)b", "$(touch y)", "'; touch z; '"])


def test_it_is_ready_when_it_has_another_name() -> None:
    for name in ("systemd", "init", "a-name-of-more-than-15-bytes"):
        profile = Profile(first_process=name)
        assert scenery.first_program(profile).rpartition("/")[2] != scenery.name_of_first(profile)
    assert scenery.name_of_first(Profile(first_process="0123456789abcdefgh")) == "0123456789abcde"


def test_sys_is_covered_where_a_profile_has_folders_there() -> None:
    assert scenery.covers_sys(DEVELOPER) and not scenery.covers_sys(Profile())
    assert not scenery.covers_sys(Profile(folders=("/system", "sys", "/boot")))
    assert scenery.lies_in_image("/boot/grub") and scenery.lies_in_image(".ssh")
    assert not any(scenery.lies_in_image(path) for path in ("/sys/class", "/proc/x", "/dev/x", "/tmp/x"))


def test_the_time_zone_is_one_without_a_difference() -> None:
    zone = zoneinfo.ZoneInfo.from_file(io.BytesIO(prepared._utc()))
    for year in (1970, 2026, 2090):
        moment = datetime(year, 7, 1, 12, tzinfo=zone)
        assert (moment.utcoffset(), moment.tzname(), moment.dst()) == (timedelta(0), "UTC", timedelta(0))


def test_bytecode_still_fits_its_source_that_has_another_date(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text("x = 1\n")
    compiled = Path(py_compile.compile(str(source), doraise=True) or "")
    assert prepared._source_of(str(compiled)) == str(source)
    now = prepared._date("/usr/local/m.py", DEVELOPER, 1_700_000_000)
    assert 1_700_000_000 - 380 * 86400 <= now < 1_700_000_000 - 86400 // 2
    stamped = prepared._stamped(compiled.read_bytes(), now)
    # What importlib itself compares (PEP 552).
    assert int.from_bytes(stamped[8:12], "little") == now and len(stamped) == len(compiled.read_bytes())
    assert stamped[:8] == importlib.util.MAGIC_NUMBER + bytes(4) and stamped[12:] == compiled.read_bytes()[12:]
    checked = compiled.read_bytes()[:4] + b"\1\0\0\0" + compiled.read_bytes()[8:]
    assert prepared._stamped(checked, now) == checked  # by a hash of the source


def test_dates_differ_by_path_and_not_by_time_of_making() -> None:
    dates = [prepared._date(f"/etc/{n}", DEVELOPER, 1_700_000_000) for n in range(100)]
    assert len({date // 86400 for date in dates}) > 50
    assert dates == [prepared._date(f"/etc/{n}", DEVELOPER, 1_700_000_000) for n in range(100)]


@pytest.mark.parametrize("changed", [replace(DEVELOPER, hostname="other"), replace(DEVELOPER, network=None), Profile()])
def test_another_profile_is_another_image(changed: Profile) -> None:
    from envs.sandbox.docker.container import Settings

    described = {
        tuple(prepared.describe(p, Settings("/w", p))) for p in (DEVELOPER, changed, load_profile("developer"))
    }
    assert len(described) == 2


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_one_stream_for_both_outputs(shell: str, tmp_path: Path) -> None:
    def run(argv: list[str], env: dict[str, str] | None = None) -> tuple[int, bytes]:
        words = list(_with_one_output(argv, env or {}))
        result = subprocess.run(
            [shell, *words[1:]], stdout=subprocess.PIPE, env={"PATH": "/bin:/usr/bin"} | (env or {})
        )
        return result.returncode, result.stdout

    (tmp_path / "text").write_text("no program")
    assert run(["sh", "-c", "echo 1; echo 2 >&2; echo 3"]) == (0, b"1\n2\n3\n")
    assert run(["printf", "%s|", "a b", "$x", "*", ""]) == (0, b"a b|$x|*||")
    code, said = run(["no-such-program"])
    assert code == 127 and b"no-such-program" in said and b"not found" in said
    code, said = run([str(tmp_path / "text")])
    assert code == 126 and b"ermission denied" in said
    assert run(["sh", "-c", "kill -9 $$"])[0] == -9  # the program itself, with no shell around it
    code, said = run(["env"], {"D.e": "a b", "F": "1"})
    assert code == 0 and {b"D.e=a b", b"F=1"} <= set(said.splitlines())
    for argv in (["-x"], ["a=b"]):
        assert _with_one_output(argv, {}) == argv


def test_once_makes_a_value_once_and_forgets_failures() -> None:
    async def scenario() -> None:
        once: Once[str, int] = Once()
        made = []

        async def make() -> int:
            made.append(1)
            await asyncio.sleep(0.01)
            if len(made) == 1:
                raise ValueError("first")
            return len(made)

        results = await asyncio.gather(*(once.get("a", make) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, ValueError) for result in results) and len(made) == 1
        assert await asyncio.gather(*(once.get("a", make) for _ in range(5))) == [2] * 5
        waiting = asyncio.ensure_future(once.get("b", make))
        await asyncio.sleep(0)
        waiting.cancel()  # it is made for the next all the same
        assert await once.get("b", make) == 3
        once.forget("a")
        assert await once.get("a", make) == 4 and once.keys() == {"a", "b"}

    asyncio.run(scenario())
