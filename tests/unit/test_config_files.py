"""YAML files that say something else than they seem to."""

from pathlib import Path

import pytest

from composer.config_files import check_file
from composer.errors import ConfigError


def check(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return dict(check_file(path, "group"))


@pytest.mark.parametrize(
    ("text", "key", "value", "remedy"),
    [
        ("a: on", "group.a", "on", "write true, or 'on'"),
        ("a: Off", "group.a", "Off", "write false, or 'Off'"),
        ("a:\n  b:\n    c: yes", "group.a.b.c", "yes", "line 3"),
        ("a: NO", "group.a", "NO", "write false, or 'NO'"),
        ("a: [x, no]", "group.a[1]", "no", "write false"),
        ("on: 1", "group.on", "on", "write true, or 'on'"),
        ("a: 010", "group.a", "010", "octal: write 10"),
        ("a: -007", "group.a", "-007", "octal"),
        ("a: 0b11", "group.a", "0b11", "binary: write 3"),
        ("a: 12:30:45", "group.a", "12:30:45", "base 60: write '12:30:45'"),
        ("a: 1:30.5", "group.a", "1:30.5", "base 60"),
        ("a: 1\nb: 2\na: 3", "group.a", "3", "stands twice, also on line 1"),
        ("a:\n  x: 1\n  x: 1", "group.a.x", "1", "stands twice"),
        ("1: a\n1: b", "group.1", "b", "stands twice"),
        ("defaults:\n  - overide /model: tiny", "defaults.overide /model", "tiny", "did you mean `override`?"),
        ("defaults:\n  - optionall model: tiny", "defaults.optionall model", "tiny", "did you mean `optional`?"),
    ],
)
def test_traps(tmp_path: Path, text: str, key: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, text)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert remedy in str(caught.value)
    assert "a.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "\ta: 1", "- a", "just text", "a: *nowhere", "a: &x [*x]\nb: !!int z"]
)
def test_what_is_no_config_file(tmp_path: Path, text: str) -> None:
    if text.startswith("a: &x"):  # Well-formed for a composer, and no reason to loop for ever.
        assert check(tmp_path, text)
        return
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, text)
    assert str(tmp_path / "a.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        dict(check_file(tmp_path / "a.yaml", ""))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a: 0\nb: 0.5\nc: 1e-4\nd: 1.0e-4\ne: 0x1f\nf: null\ng: true\nh: 1_000",
        "a: 'on'\nb: \"010\"",
        "a: 10:00 in words\nb: https://x:80/y",
        "a: &x {b: 1}\nc: *x\nd:\n  <<: *x",
        "a: nobody\nb: once",
    ],
)
def test_what_is_meant_passes(tmp_path: Path, text: str) -> None:
    check(tmp_path, text)


def test_lines_of_keys(tmp_path: Path) -> None:
    lines = check(tmp_path, "# comment\na:\n  b: 1\nc: [1]\n")
    assert {k: v.rpartition("line ")[2] for k, v in lines.items()} == {"a": "2", "a.b": "3", "c": "4"}
