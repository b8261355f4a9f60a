"""The output buffer of a program, against slicing the whole output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.programs import OutputBuffer


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 50))
def test_the_first_and_the_last_half_are_kept(chunks: list[bytes], cap: int) -> None:
    buffer = OutputBuffer(cap)
    for chunk in chunks:
        buffer.add(chunk)
    whole = b"".join(chunks)
    if len(whole) <= cap:
        assert (buffer.value(), buffer.truncated) == (whole, False)
    else:
        head = cap // 2
        assert (buffer.value(), buffer.truncated) == (whole[:head] + whole[len(whole) - (cap - head) :], True)


def test_memory_stays_bounded() -> None:
    buffer = OutputBuffer(100)
    for _ in range(1000):
        buffer.add(b"x" * 65536)
    assert len(buffer._tail) < 3 * 65536
    assert buffer.value() == b"x" * 100
