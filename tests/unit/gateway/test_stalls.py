"""No request, however large, holds up the event loop that serves all episodes of a process."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from composer.gateway.record import EpisodeRecord
from composer.gateway.server import Gateway
from composer.rollout.chat import Chat
from composer.rollout.harness import HarnessLimits
from tests.unit.gateway.policy import Line, Policy

MOST_CPU_S = 0.5
"""Of this process, from one turn of its loop to the next. It is below 0.1, to which the load of others adds nothing."""
LARGEST = 2**24 - 1000
USER = {"role": "user", "content": "hi"}
PATHS = ("/v1/chat/completions", "/v1/messages/count_tokens")


def filled(piece: str, count: int = 0) -> str:
    return ",".join([piece] * (count or LARGEST // (len(piece) + 1)))


BODIES = {
    "one text": json.dumps({"messages": [{"role": "user", "content": "a shell says " * (LARGEST // 14)}]}),
    "empty messages": f'{{"messages":[{filled(json.dumps({"role": "user", "content": ""}))}]}}',
    "many texts": f'{{"messages":[{filled(json.dumps({"role": "user", "content": "a shell " * 999}))}]}}',
    "as many as fit": f'{{"messages":[{filled(json.dumps({"role": "user", "content": "a"}), 4000)}]}}',
    "lists": f'{{"messages":[{json.dumps(USER)}],"x":[{filled("[]")}]}}',
}


@pytest.mark.parametrize("what", BODIES)
def test_the_loop_goes_on(chat: Chat, what: str) -> None:
    chat.encode_plain("once")

    async def go() -> float:
        gateway, worst = Gateway(), 0.0
        await gateway.start()
        record = EpisodeRecord(chat, HarnessLimits(max_turns=99, max_turn_tokens=8, max_model_len=4096))
        answers: list[Line] = ["ok"] * 99
        record.open(Policy(chat, answers), "e")

        async def beat() -> None:
            nonlocal worst
            before = time.process_time()
            while True:
                await asyncio.sleep(0.005)
                now = time.process_time()
                worst, before = max(worst, now - before), now

        beating = asyncio.create_task(beat())
        with gateway.serving(record) as key:
            headers = {"x-api-key": key, "content-type": "application/json"}
            async with aiohttp.ClientSession(gateway.url, headers=headers) as session:
                for path in PATHS:
                    async with session.post(path, data=BODIES[what].encode()) as response:
                        assert response.status in (200, 400), await response.text()
        beating.cancel()
        await gateway.stop()
        assert record.failure is None
        return worst

    assert asyncio.run(go()) < MOST_CPU_S
