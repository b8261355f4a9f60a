"""Tries the attacks on a backend of this machine and prints what came of each; ends with 1 if one of them got through.

python -m envs.attacks --backend bubblewrap
python -m envs.attacks --backend docker --image python:3.11 --only memory,endings
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from composer.contract import SandboxBackend
from composer.errors import ComposerError
from envs.attacks.catalogue import PUBLISHED, Attack, load
from envs.attacks.play import Player
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend


def _backend(name: str, image: str) -> SandboxBackend:
    if name == "docker":
        return DockerBackend("attacks", image) if image else DockerBackend("attacks")
    return BubblewrapBackend("attacks")


async def _try(attacks: Sequence[Attack], backend: SandboxBackend, name: str, verbose: bool) -> int:
    """Try all; how many did not come out as they must."""
    player, num_bad = Player(backend, name), 0
    try:
        for attack in attacks:
            began = time.monotonic()
            outcome = await player.play(attack)
            num_bad += not outcome.held
            word = "held" if outcome.held else "FELL" if outcome.gains else "proves nothing"
            print(f"{word:<15}{attack.family:<14}{attack.name}  ({time.monotonic() - began:.1f} s)", flush=True)
            for gain in outcome.gains:
                print(f"    {gain}")
            if verbose or not outcome.held:
                print(*(f"    {note}" for note in outcome.notes), sep="\n", flush=True)
    finally:
        await player.close()
        await backend.close()
    print(f"{len(attacks) - num_bad} of {len(attacks)} attacks held off")
    return num_bad


def main() -> None:
    """Try them, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.attacks", description="Try the published attacks on a backend."
    )
    parser.add_argument("--backend", choices=("bubblewrap", "docker"), default="bubblewrap")
    parser.add_argument("--image", default="", help="of Docker's sandboxes; needs python3 with pytest, and make")
    parser.add_argument("--folder", type=Path, default=PUBLISHED, help="attacks of your own, in the same shape")
    parser.add_argument("--only", default="", help="families or names, with commas between them")
    parser.add_argument("--verbose", action="store_true", help="show notes of those that held, too")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    try:
        attacks = [a for a in load(arguments.folder) if not wanted or wanted & {a.family, a.name}]
        backend = _backend(arguments.backend, arguments.image)
        sys.exit(min(1, asyncio.run(_try(attacks, backend, arguments.backend, arguments.verbose))))
    except ComposerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
