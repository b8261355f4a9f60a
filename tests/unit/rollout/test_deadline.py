"""Deadlines that stand still while the framework is at work."""

from __future__ import annotations

import asyncio

import pytest

from composer.rollout.deadline import Deadline, not_counted


def test_time_counts_outside_of_pauses_only() -> None:
    async def play() -> Deadline:
        async with Deadline(0.3) as deadline:
            for _ in range(3):
                with not_counted():
                    await asyncio.sleep(0.2)
        return deadline

    deadline = asyncio.run(play())
    assert not deadline.expired
    assert 0.2 < deadline.left_s <= 0.3


def test_it_ends_what_takes_too_long_between_pauses() -> None:
    deadline = Deadline(0.2)

    async def play() -> None:
        async with deadline:
            with not_counted():
                await asyncio.sleep(0.3)
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        asyncio.run(play())
    assert deadline.expired
    assert deadline.left_s <= 0


def test_pauses_at_the_same_time_count_once() -> None:
    async def pause(for_s: float) -> None:
        with not_counted():
            await asyncio.sleep(for_s)

    async def play() -> Deadline:
        async with Deadline(1.0) as deadline:
            await asyncio.gather(pause(0.1), pause(0.3), pause(0.2))
            await asyncio.sleep(0.2)
        return deadline

    assert 0.7 < asyncio.run(play()).left_s <= 0.8


def test_outside_of_a_deadline_nothing_is_paused() -> None:
    async def play() -> None:
        with not_counted():
            pass
        async with Deadline(0.2):
            pass
        with not_counted():  # nor after it
            await asyncio.sleep(0.01)

    asyncio.run(play())


def test_a_task_that_outlives_the_deadline_may_end_its_pause() -> None:
    async def late() -> str:
        with not_counted():
            await asyncio.sleep(0.2)
        return "ended"

    async def play() -> str:
        async with Deadline(5.0):
            task = asyncio.ensure_future(late())
            await asyncio.sleep(0.05)
        return await task

    assert asyncio.run(play()) == "ended"
