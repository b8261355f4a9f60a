"""Finds and reads data sets that are files of JSON lines, or of one JSON list, plain or compressed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

from composer.errors import ConfigError
from envs.tasks.files import decompressed, read_file

MAX_RECORDS_BYTES = 2**30
"""Of a data set's file, and of what it holds if it is compressed."""


def installed_file(distribution: str, *names: str) -> Path:
    """The first of these files that came with an installed package, which is not imported.

    Raises:
        ConfigError: the package is not installed, or has no such file.
    """
    remedy = f"install {distribution} (`pip install {distribution}`), or name the path of its {names[0]}"
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise ConfigError("env.taskset.args.path", "", remedy) from None
    for name in names:
        for file in files:
            if file.name == name and (path := Path(str(file.locate()))).is_file():
                return path
    raise ConfigError("env.taskset.args.path", "", f"the installed {distribution} has no {names[0]}: {remedy}")


def read_records(path: Path, fields: Collection[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, or of a JSON list; a name that ends in .gz says that it is compressed.

    Args:
        path: the file.
        fields: texts that every object must have.

    Raises:
        ConfigError: it cannot be read, is empty, or something in it is no such object.
    """

    def wrong(what: str) -> ConfigError:
        return ConfigError("env.taskset.args.path", str(path), what)

    try:
        content = read_file(path, MAX_RECORDS_BYTES)
        if path.suffix == ".gz":
            content = decompressed(content, MAX_RECORDS_BYTES, path)
    except (OSError, EOFError, zlib.error) as error:
        raise wrong(f"it cannot be read ({getattr(error, 'strerror', None) or error})") from None
    records, what, number = [], "line", 0
    try:
        if content.lstrip()[:1] == b"[" and isinstance(everything := _list(content), list):
            found, what = list(enumerate(everything, start=1)), "record"
        else:
            found = []
            for number, line in enumerate(content.splitlines(), start=1):
                if line.strip():
                    found.append((number, json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise wrong(f"line {number} is no JSON ({error})") from None
    for number, record in found:
        if not isinstance(record, dict):
            raise wrong(f"{what} {number} is no JSON object")
        for field in fields:
            if not isinstance(record.get(field), str):
                raise wrong(f"{what} {number} has no text {field!r}")
        records.append(record)
    if not records:
        raise wrong("it is empty")
    return records


def _list(content: bytes) -> Any:
    """The whole as one value; None if it is several, one a line."""
    try:
        return json.loads(content)
    except ValueError:
        return None
