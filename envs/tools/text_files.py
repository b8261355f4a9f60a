"""Text files of a sandbox as tools use them: what cannot be read or written as text is a refusal, in the model's words.

Tools take any path: what is reachable is decided by the sandbox, which has nothing in it to protect.
"""

from __future__ import annotations

import re

from composer.contract import Sandbox
from envs.tools.base import text

MAX_FILE_BYTES = 2**20
LINE = re.compile(rb"[^\n]*\n|[^\n]+")
"""A line with its ending; the last one may have none. `bytes.splitlines` also splits at lone carriage returns."""
PATH = text("path relative to the repository")


class Refusal(Exception):
    """Why a file cannot be used, in words for the model."""


async def read_text(path: str, sandbox: Sandbox, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a UTF-8 text file.

    Raises:
        Refusal: there is none, it is no text, or it is too large.
        SandboxError: the sandbox failed.
    """
    try:
        content = await sandbox.read(path, max_bytes=max_bytes + 1)
    except FileNotFoundError:
        raise Refusal(f"no such file: {path}") from None
    except IsADirectoryError:
        raise Refusal(f"{path} is a directory") from None
    except PermissionError:
        raise Refusal(f"no permission to read {path}") from None
    if len(content) > max_bytes:
        raise Refusal(f"{path} is larger than {max_bytes} bytes")
    if b"\0" in content:
        raise Refusal(f"{path} is a binary file")
    try:
        content.decode()
    except UnicodeDecodeError:
        raise Refusal(f"{path} is not UTF-8 text") from None
    return content


async def write_text(path: str, content: bytes, sandbox: Sandbox) -> None:
    """Write a file, making its folders.

    Raises:
        Refusal: it cannot be written.
        SandboxError: the sandbox failed.
    """
    try:
        await sandbox.write(path, content)
    except PermissionError:
        raise Refusal(f"no permission to write {path}") from None
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror or error}") from None


def encode(text: str, what: str) -> bytes:
    """A text of the model's as UTF-8.

    Raises:
        Refusal: it holds half of a surrogate pair; `what` names it.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Refusal(f"{what} is not valid UTF-8") from None


def plural(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> plural(1, "line"), plural(2, "line")
        ('1 line', '2 lines')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
