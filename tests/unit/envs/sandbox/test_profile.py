"""Profiles: what their files may hold, and what they add to the lower layer of sandboxes."""

import configparser
import dataclasses
import json
import os
import platform
import py_compile
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.sandbox.realism.load import load_profile
from envs.sandbox.realism.network import Network, _attribute
from envs.sandbox.realism.profile import Profile, dress, fakes, spread_dates, write_fakes


@pytest.fixture
def skel(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "home/dev").mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    return tmp_path


@pytest.mark.parametrize("name", ["developer", "plain"])
def test_ours_can_be_read_and_travel_as_json(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert Profile.from_dict(json.loads(json.dumps(dataclasses.asdict(profile)))) == profile


def test_a_profile_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("hostname: box\nprocesses: [a, b]\nnetwork: {address: 192.168.1.7/16}\n")
    profile = load_profile(str(tmp_path / "mine.yaml"), user="ada")
    assert (profile.user, profile.hostname, profile.processes) == ("ada", "box", ("a", "b"))
    assert profile.network == Network(address="192.168.1.7/16")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hostnam: x\n", "no key 'hostnam'; the keys are name, user, hostname"),
        ("processes: kthreadd\n", "processes must be a list of texts"),
        ("processes: [1]\n", "processes must be a list of texts"),
        ("files: {a: 1}\n", "files must map paths to texts"),
        ("network: {adress: x}\n", "adress"),
        ("- a\n", "must hold keys and values"),
        ("a: [\n", "is no YAML"),
        ("", "must hold keys and values"),
    ],
)
def test_what_is_wrong_with_one_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_profile(str(path))
    assert str(caught.value).startswith(f"profile='{path}'") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"profile='develper' cannot be read .*: give developer, plain, or a YAML file"
    ):
        load_profile("develper")


def test_dressing(skel: Path) -> None:
    profile = Profile(
        full_name="Ada Byron",
        email="ada@example.com",
        machine_id=True,
        users=("daemon", "bin"),
        folders=("src", "/sys/class/net/eth0"),
        files={"notes/a.txt": "a\n", "/boot/config-{release}": "b\n", ".local/bin/tool": "#!/bin/sh\n"},
        num_cached=30,
    )
    dress(skel, "/home/dev", profile)
    git = configparser.ConfigParser()
    git.read(skel / "home/dev/.gitconfig")
    assert dict(git["user"]) == {"name": "Ada Byron", "email": "ada@example.com"}
    assert len(bytes.fromhex((skel / "etc/machine-id").read_text())) == 16
    assert (skel / "etc/passwd").read_text().splitlines()[1:] == [
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin",
        "bin:x:2:2:bin:/usr/sbin:/usr/sbin/nologin",
    ]
    assert (skel / "home/dev/src").is_dir() and (skel / "sys/class/net/eth0").is_dir()
    assert (skel / "home/dev/notes/a.txt").read_text() == "a\n"
    assert (skel / f"boot/config-{platform.release()}").read_text() == "b\n"
    assert os.access(skel / "home/dev/.local/bin/tool", os.X_OK)
    assert len([p for p in (skel / "home/dev/.cache").rglob("*") if p.is_file()]) == 30


def test_a_plain_one_adds_nothing(skel: Path) -> None:
    before = sorted(skel.rglob("*"))
    dress(skel, "/home/dev", Profile())
    assert sorted(skel.rglob("*")) == before
    assert fakes(Profile()) == []


def test_fakes_say_what_the_profile_says(tmp_path: Path) -> None:
    profile = Profile(kernel_command="BOOT_IMAGE=/boot/vmlinuz-{release} quiet", hides_hypervisor=True)
    write_fakes(tmp_path / "fakes", profile)
    assert sorted(fakes(profile)) == sorted(path.name for path in (tmp_path / "fakes").iterdir())
    assert (tmp_path / "fakes/cmdline").read_text() == f"BOOT_IMAGE=/boot/vmlinuz-{platform.release()} quiet\n"
    shown = (tmp_path / "fakes/cpuinfo").read_text()
    assert "hypervisor" not in shown
    assert shown.count("processor") == Path("/proc/cpuinfo").read_text().count("processor")


def test_dates_are_spread_and_compiled_files_still_fit(skel: Path) -> None:
    for i in range(60):
        (skel / f"etc/{i}").touch()
    module = skel / "home/dev/module.py"
    module.write_text("VALUE = 41\n")
    compiled = Path(py_compile.compile(str(module), doraise=True) or "")
    code = compiled.read_bytes()[16:]
    spread_dates(skel, Profile(age_days=300))
    days = {int(path.stat().st_mtime // 86400) for path in (skel / "etc").iterdir()}
    assert len(days) > 40
    assert all(0 < time.time() - path.stat().st_mtime < 301 * 86400 for path in skel.rglob("*"))
    look = "import module; print(module.VALUE, module.__cached__)"
    shown = subprocess.run(
        [sys.executable, "-v", "-c", look], cwd=module.parent, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("41 ")
    assert f"code object from '{compiled}'" in shown.stderr and compiled.read_bytes()[16:] == code


def test_netlink_attributes_are_padded() -> None:
    # struct rtattr: length without padding (u16), type (u16), payload, zeros up to a multiple of 4
    assert _attribute(3, b"eth0\0") == b"\x09\x00\x03\x00eth0\x00\x00\x00\x00"
    assert _attribute(1, b"veth") == b"\x08\x00\x01\x00veth"
