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
        ("a: 1\n'a': 2", "group.a", "2", "stands twice"),
        ("defaults:\n  - overide /model: tiny", "defaults.overide /model", "tiny", "did you mean `override`?"),
        ("a: &x [*x]", "group.a[0]", "*", "an anchor cannot hold itself"),
        ("a: &x\n  b: {c: *x}", "group.a.b.c", "*", "an anchor cannot hold itself"),
        ("a: &x\n  <<: *x", "group.a.<<", "*", "an anchor cannot hold itself"),
        ("1: a", "group.1", "a", "a key is a text: write '1'"),
        ("null: a", "group.null", "a", "a key is a text: write 'null'"),
        ("? [a, b]\n: c", "group.?", "c", "a key is a text"),
        ("defaults: x", "defaults", "x", "a list is expected"),
        ("defaults: {a: b}", "defaults", "...", "a list is expected"),
        ("defaults:\n  - 3", "defaults", "3", "each item is one `<group>: <option>`"),
        ("defaults:\n  - {}", "defaults", "...", "each item is one `<group>: <option>`"),
        ("defaults:\n  - {a: b, c: d}", "defaults", "...", "each item is one `<group>: <option>`"),
        ("defaults:\n  - _self_\n  - _self_", "defaults", "_self_", "stands twice"),
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
    "text", ["a: [1", "a: b: c", "\ta: 1", "- a", "just text", "a: *nowhere", "a: 1\n---\na: 2", "a: \0"]
)
def test_what_is_no_config_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, text)
    assert str(tmp_path / "a.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "package", "key", "wanted"),
    [
        ("algorithm: [1, 2]", "", "algorithm", "a group of keys"),
        ("[1, 2]", "algorithm", "", ""),
        ("phases: [a]", "mix", "mix.phases", "a group of keys"),
        ("stages: {a: b}", "", "stages", "a list"),
        ("phases:\n  x:\n    sources:\n      y: [1]", "mix", "mix.phases.x.sources.y", "a group of keys"),
    ],
)
def test_a_list_is_no_mapping(tmp_path: Path, text: str, package: str, key: str, wanted: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=rf"{wanted} is expected \(in .*a\.yaml, line" if key else "a config file holds"
    ):
        dict(check_file(tmp_path / "a.yaml", package))


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
