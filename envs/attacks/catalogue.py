"""Reads the published attacks: `published/<family>.yaml`, or a folder of your own with files of the same shape.

    family: what the attacks of this file have in common, in one sentence
    pieces: {name: text}       optional; <<name>> in the texts below stands for it
    attacks:
      - name: unique among all
        tries: what it does, in one sentence
        place: a target of targets.py (`apart`, `make`, …), or one of `PLACES`
        main, files, shell …   see `Attack`

Some pieces are made anew for each try: <<secret>>, <<mark>> and <<port>> (bait.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from composer.errors import ConfigError
from envs.attacks.targets import SOLUTION, TARGETS

PUBLISHED = Path(__file__).with_name("published")
PLACES = ("host", "neighbour", "fork", "snapshot", "search", "leftovers", "server")
"""host: what runs on the machine; neighbour: another sandbox; fork: one that was forked from the attacker's own;
snapshot: a saved one, made by hand; search: another episode's files in the shadow backend; leftovers: a repository
with what tools and earlier work have left; server: an MCP server in the agent's sandbox, which tools ask."""
LIVENESS = ("naive", "sign", "own")
"""How an attack shows that it is none in name only. naive: a grader that trusts the agent's own sandbox rewards it;
sign: what it printed, or why it got nothing, matches `sign`; own: it reads the secret if that is in its own sandbox."""


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    family: str
    """Name of its file."""
    tries: str
    place: str
    """Where it is tried: a target's name, or one of `PLACES`."""
    also: tuple[str, ...] = ()
    """Other targets on which the same is tried."""
    main: str = ""
    """What the agent makes of the file to be mended; "": it is left as it is."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Other files that the agent leaves behind, by path."""
    shell: str = ""
    """What the agent runs in its sandbox after that."""
    live: str = "naive"
    """One of `LIVENESS`."""
    sign: str = ""
    """A regular expression; see `LIVENESS`."""
    control: str = "beside"
    """Which honest work must be rewarded: `beside` all that the attack leaves behind, or `plain`, without it."""
    reads: str = "exit_code"
    """What the naive grader believes: exit_code, `summary` (pytest's last line), or `reward` (the file)."""
    timeout_s: float = 20.0
    """Of the tests; one that hangs needs no longer."""
    entries: tuple[Mapping[str, Any], ...] = ()
    """Of a snapshot's archive: name, and `type` (file, link, hard, character, block, fifo), `target`, `content`,
    `mode`, `owner`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the call of the search tool."""
    before: str = ""
    """What was run in a repository of leftovers before it became a task."""

    def with_pieces(self, pieces: Mapping[str, str]) -> Attack:
        """The same with <<name>> replaced in every text of its payload."""

        def put(value: Any) -> Any:
            if isinstance(value, str):
                for name, piece in pieces.items():
                    value = value.replace(f"<<{name}>>", piece)
                return value
            if isinstance(value, Mapping):
                return {put(key): put(item) for key, item in value.items()}
            return tuple(map(put, value)) if isinstance(value, list | tuple) else value

        payload = ("main", "files", "shell", "sign", "entries", "arguments", "before")
        return Attack(
            **{f.name: (put if f.name in payload else lambda v: v)(getattr(self, f.name)) for f in fields(self)}
        )


def load(folder: Path = PUBLISHED) -> list[Attack]:
    """All attacks of a folder, by family and in the order of its files.

    Raises:
        ConfigError: a file is not as it has to be, or two attacks have one name.
    """
    found: dict[str, Attack] = {}
    for path in sorted(folder.glob("*.yaml")):
        for attack in _read(path):
            if attack.name in found:
                raise ConfigError(str(path), attack.name, f"{found[attack.name].family}.yaml has it too: rename one")
            found[attack.name] = attack
    if not found:
        raise ConfigError("attacks", str(folder), "holds no *.yaml with attacks: name another folder")
    return list(found.values())


def _read(path: Path) -> list[Attack]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not content.keys() <= {"family", "pieces", "attacks"}:
            raise ValueError("it must hold family, pieces and attacks")
        pieces = content.get("pieces", {})
        return [_attack(path, given).with_pieces(pieces) for given in content["attacks"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(str(path), ..., f"no file of attacks ({' '.join(str(error).split())}): mend it") from None


def _attack(path: Path, given: Mapping[str, Any]) -> Attack:
    attack = Attack(family=path.stem, **{**given, "also": tuple(given.get("also", ()))})
    if unknown := set(attack.also) - TARGETS.keys():
        raise ValueError(f"{attack.name}: also={min(unknown)!r} must be one of {', '.join(TARGETS)}")
    if attack.place not in (*TARGETS, *PLACES):
        raise ValueError(f"{attack.name}: place={attack.place!r} must be one of {', '.join((*TARGETS, *PLACES))}")
    if attack.live not in LIVENESS:
        raise ValueError(f"{attack.name}: live={attack.live!r} must be one of {', '.join(LIVENESS)}")
    if attack.control not in ("beside", "plain"):
        raise ValueError(f"{attack.name}: control={attack.control!r} must be beside or plain")
    if SOLUTION in attack.files:
        raise ValueError(f"{attack.name}: {SOLUTION} is given as `main`, not among `files`")
    if attack.live == "sign" and not attack.sign:
        raise ValueError(f"{attack.name}: it needs a `sign`")
    return attack
