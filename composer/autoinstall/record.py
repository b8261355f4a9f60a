"""What is left of a repository: an environment's folder, or why there is none. Written whole or not at all.

    <output>/installed/<name>/environment.yaml   commands, verdicts, tries, mocks, models, seeds, times, versions
                              snapshot           of the machine, without the repository's files
                              install.sh         what the installer did that worked
                              repository/…       the files, as they were read
                              proposer.jsonl     what was said, a message a line
                              installer.jsonl
    <output>/dropped/<name>/                     the same without snapshot and repository; environment.yaml says why

Sandboxes start from it with `image: environment:<folder>` (`envs.sandbox.installed`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from composer.contract import SandboxBackend, Snapshot
from composer.errors import MachineError

FORMAT = 1
RECORD, SNAPSHOT, SCRIPT, FILES = "environment.yaml", "snapshot", "install.sh", "repository"
INSTALLED, DROPPED = "installed", "dropped"
_PARTIAL = ".partial-"


class Output:
    """The folder that environments go to. One command at a time has it."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made before `opened`."""
        self.folder = folder

    @contextlib.contextmanager
    def opened(self) -> Iterator[Output]:
        """Hold the folder, and remove what a killed command left half written.

        Raises:
            MachineError: it cannot be written, or another command holds it.
        """
        try:
            for name in (INSTALLED, DROPPED):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise MachineError(
                    f"autoinstall.output={str(self.folder)!r}: another command works there: wait, or name another"
                ) from None
            for left in self.folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield self
        finally:
            os.close(lock)

    def finished(self, name: str) -> str:
        """`INSTALLED` or `DROPPED` if a repository's environment was finished; else empty."""
        return next((kind for kind in (INSTALLED, DROPPED) if (self.folder / kind / name / RECORD).is_file()), "")

    def read(self, kind: str, name: str) -> dict[str, Any]:
        """What the record says.

        Raises:
            MachineError: it cannot be read.
        """
        path = self.folder / kind / name / RECORD
        try:
            return yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise MachineError(f"{path} cannot be read ({error}): remove its folder") from None

    async def write(
        self,
        kind: str,
        name: str,
        record: Mapping[str, Any],
        *,
        script: str = "",
        files: Mapping[str, bytes] | None = None,
        transcripts: Mapping[str, list[dict[str, Any]]] | None = None,
        snapshot: tuple[SandboxBackend, Snapshot] | None = None,
    ) -> Path:
        """Write a folder, whole or not at all.

        Args:
            kind: `INSTALLED` or `DROPPED`.
            name: of the environment.
            record: goes into environment.yaml.
            script: the install script.
            files: the repository's.
            transcripts: name of the agent -> messages.
            snapshot: of the machine, and the backend that has it.

        Returns:
            The folder.

        Raises:
            MachineError: it cannot be written.
            SandboxError: the snapshot is gone.
        """
        partial, final = self.folder / f"{_PARTIAL}{name}", self.folder / kind / name
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for path, content in (files or {}).items():
                place = partial / FILES / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            for agent, messages in (transcripts or {}).items():
                lines = "".join(f"{json.dumps(message)}\n" for message in messages)
                (partial / f"{agent}.jsonl").write_text(lines, encoding="utf-8")
            if script:
                (partial / SCRIPT).write_text(script, encoding="utf-8")
            if snapshot is not None:
                await snapshot[0].save(snapshot[1], partial / SNAPSHOT)
            text = yaml.safe_dump({"format": FORMAT, **record}, sort_keys=False, allow_unicode=True, width=110)
            (partial / RECORD).write_text(text, encoding="utf-8")
            partial.rename(final)
        except OSError as error:
            raise _unwritable(final, error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final


def _unwritable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path} cannot be written ({error.strerror or error}): free space, or change autoinstall.output"
    )
