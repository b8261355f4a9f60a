"""Signals that end a run: none is lost, and the process that they end does so with its own exit code."""

import contextlib
import signal
import subprocess
import sys

import pytest

from composer.interrupts import ENDING, no_lost_interrupt


@pytest.fixture(autouse=True)
def handlers():
    """As the command sets them."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_an_interrupt_that_got_lost_on_its_way_is_raised_at_the_end(number: signal.Signals) -> None:
    # `suppress` stands for a callback, whose errors Python ignores.
    with pytest.raises(KeyboardInterrupt), no_lost_interrupt(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)
    with no_lost_interrupt():
        pass
    assert signal.getsignal(number) is signal.default_int_handler


def test_what_an_interrupt_broke_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), no_lost_interrupt():
        with contextlib.suppress(KeyboardInterrupt):  # around an optional import, say
            signal.raise_signal(signal.SIGINT)
        raise ImportError("partially initialized module")


def test_an_interrupt_that_leads_nowhere_is_raised_again() -> None:
    # In a process of its own: pytest's timeouts use the same timer.
    code = """
import contextlib, signal, time
from composer.interrupts import no_lost_interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
began = time.monotonic()
try:
    with no_lost_interrupt(again_s=0.2):
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - began < 30)
with no_lost_interrupt(again_s=0.2):
    print(signal.getitimer(signal.ITIMER_REAL))
print(signal.getsignal(signal.SIGALRM) is signal.SIG_DFL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["interrupted True", "(0.0, 0.0)", "True"], done.stderr


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ImportError), no_lost_interrupt():
        raise ImportError("no such module")


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with no_lost_interrupt():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_at_the_end_changes_nothing(number: signal.Signals) -> None:
    for command, code in (("return 7", 7), ("signal.raise_signal(number)", 130)):
        program = f"""
import atexit, signal, sys
from composer.interrupts import as_process

number = signal.Signals({int(number)})

def command():
    signal.signal(number, signal.default_int_handler)
    {command}

atexit.register(signal.raise_signal, number)
code = as_process(command)
signal.raise_signal(number)
sys.exit(code)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("last", "code"), [("return 130", 130), ("sys.exit(2)", 2), ("sys.exit()", 0), ("sys.exit('why')", 1), ("1 / 0", 1)]
)
def test_a_process_does_all_that_is_registered_for_its_end_and_no_more(last: str, code: int) -> None:
    program = f"""
import atexit, sys
from composer.interrupts import as_process

class Crashing:
    def __del__(self):
        print("torn down", flush=True)

def command():
    global crashing
    crashing = Crashing()
    atexit.register(lambda: print("at its end"))
    {last}

sys.exit(as_process(command))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "at its end\n"), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (last == "1 / 0")
    assert ("why" in done.stderr) == ("why" in last)
