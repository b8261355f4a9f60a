"""Ranks as forked processes: torchtitan is imported once, and a rank that hangs is killed at the deadline."""

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(world: int, function: Callable[[], Any], folder: Path, timeout_s: float = 120.0) -> list[Any]:
    """Call `function` in `world` forked ranks; returns their results in order, or fails with the first traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank_main(rank, world, port, function, folder)
        children[pid] = rank
    deadline, codes = time.monotonic() + timeout_s, {}
    try:
        while len(codes) < world and not any(codes.values()) and time.monotonic() < deadline:
            for pid in children:
                if pid not in codes and os.waitpid(pid, os.WNOHANG)[0]:
                    codes[pid] = 0 if (folder / f"rank{children[pid]}.pickle").exists() else 1
            time.sleep(0.05)
    finally:
        for pid in children:
            if pid not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    errors = [path.read_text() for path in sorted(folder.glob("rank*.error"))]
    assert not errors, errors[0]
    assert len(codes) == world, f"ranks did not finish in {timeout_s:g} s"
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(world)]


def _rank_main(rank: int, world: int, port: int, function: Callable[[], Any], folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        result = pickle.dumps(function())
        (folder / f"rank{rank}.pickle").write_bytes(result)
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)
