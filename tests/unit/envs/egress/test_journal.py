"""The log of requests."""

from __future__ import annotations

import json
from pathlib import Path

from envs.egress.journal import Journal, file_name, shown_url


def test_a_line_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.jsonl"
    log = Journal(str(path))
    assert not path.parent.exists()
    log.write({"a": 1})
    log.write({"b": "ü\n"})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"b": "ü\n"}]
    assert path.stat().st_mode & 0o777 == 0o600


def test_trouble_stops_nothing_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = Journal(str(tmp_path / "file" / "log.jsonl"))
    log.write({"a": 1})
    log.write({"a": 2})
    assert log.num_lost == 2
    (tmp_path / "file").unlink()
    log.write({"a": 3})
    assert (tmp_path / "file" / "log.jsonl").read_text() == '{"a":3}\n'
    log.close()


def test_a_full_disk_stops_nothing() -> None:
    log = Journal("/dev/full")
    log.write({"a": 1})
    assert log.num_lost == 1


def test_values_of_a_query_are_lengths() -> None:
    assert shown_url("https", "a.org", 443, "/p?key=secret&b=&c") == "https://a.org/p?key=<6>&b=<0>&c=<0>"
    assert shown_url("http", "a.org", 8080, "/p") == "http://a.org:8080/p"
    assert len(shown_url("http", "a.org", 80, "/" + "p" * 10_000)) == 4096


def test_names_of_logs() -> None:
    assert file_name("run 1/x", 7) == "run-1-x.7.jsonl"
