"""Lines survive kills and full disks whole; readers see whole lines only."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from composer.tracking.journal import Journal, decode_number, encode_number


def test_records_come_back_in_order_from_any_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    for step in range(3):
        journal.append({"step": step})
    records, end = journal.read(0)
    assert records == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert end == (tmp_path / "j.jsonl").stat().st_size == 3 * len('{"step":0}\n')
    assert journal.read(11) == ([{"step": 1}, {"step": 2}], end)
    assert journal.read(end) == ([], end)
    assert journal.count(11) == 2


def test_reading_stops_at_the_limit_but_makes_progress(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    for step in range(3):
        journal.append({"step": step})
    assert journal.read(0, max_bytes=1) == ([{"step": 0}], 11)
    assert journal.read(0, max_bytes=12) == ([{"step": 0}, {"step": 1}], 22)


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"step":0}\n{"ste')
    journal = Journal(path)
    assert journal.read(0) == ([{"step": 0}], 11)
    journal.append({"step": 1})
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


def test_garbage_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'\x00\xff\n[1]\n{"step":1}\n')
    assert Journal(path).read(0) == ([{"step": 1}], path.stat().st_size)


def test_no_file_is_an_empty_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none.jsonl")
    assert journal.read(0) == ([], 0)
    assert journal.count(0) == 0


def test_a_file_that_became_shorter_is_read_from_the_start(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append({"step": 0})
    assert journal.read(999) == ([{"step": 0}], 11)


def test_what_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    # A real limit of the kernel: the write is cut short at 25 bytes, in the middle of the third line.
    program = (
        "import resource, sys; from pathlib import Path; from composer.tracking.journal import Journal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in range(3):\n"
        "    try: journal.append({'step': step}); print('ok')\n"
        "    except OSError as error: print('refused')\n"
    )
    path = tmp_path / "j.jsonl"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ok", "ok", "refused"]
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


@pytest.mark.parametrize("number", [0.1, -3.0, math.inf, -math.inf])
def test_numbers_survive(number: float) -> None:
    assert decode_number(encode_number(number)) == number


def test_nan_survives_as_json() -> None:
    assert encode_number(math.nan) == "NaN"
    assert math.isnan(decode_number("NaN"))
