"""Tools `semantic_search` and `web_search`: they run outside of the sandbox, against a shadow of the product's backend.

The sandbox needs no network for them and gets none. What the backend answers is shown to the model; that it does not
answer is an error of the machine (`ToolError`), after which the episode has no reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.contract import Sandbox, ToolResult
from composer.errors import ToolError
from envs.shadow.client import ShadowClient, TooLargeError, UnknownWorkspaceError
from envs.shadow.python_pages import CORPUS
from envs.shadow.server import TOKEN_ENV
from envs.tools.base import CheckedTool, parameters, refuse, require_positive, text, with_optional
from envs.tools.episode import EpisodeState
from envs.tools.listing import show_name
from envs.tools.text_files import plural

_BATCH_CHARACTERS = 2**20
"""Of files that are sent in one request: other episodes' requests come between."""
_QUERY = 1000
_MAX_SHOWN = 4000
"""Characters of one result."""


@dataclass
class _Workspace:
    """What the backend was given of an episode's files."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    hashes: dict[str, bytes] = field(default_factory=dict)
    is_indexed: bool = False


class SemanticSearch(CheckedTool):
    """Finds the passages of the repository's files that say what a question asks, as the files are now.

    Files go to the backend when they are new or have changed. Binary files, large ones and .git are left out.
    """

    name = "semantic_search"
    description = "Find code by what it does. Ask in words; answers with the passages that fit best."
    parameters = with_optional(
        parameters(query=text("what to look for, in words", max_length=_QUERY)),
        path=text("look only in this folder or file", max_length=4000),
    )

    def __init__(
        self,
        backend: str = "",
        token_env: str = TOKEN_ENV,
        max_results: int = 5,
        max_file_bytes: int = 256 * 2**10,
        max_indexed_bytes: int = 8 * 2**20,
        max_collected_bytes: int = 64 * 2**20,
        timeout_s: float = 60.0,
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose the backend and what it is given.

        Args:
            backend: address of a backend; "": the one that ships with the product, which the first call starts.
            token_env: variable with the token of the backend at `backend`.
            max_results: passages that one call shows.
            max_file_bytes: larger files are left out.
            max_indexed_bytes: of all files; those beyond it, in the order of their paths, are left out.
            max_collected_bytes: a repository of more, .git included, is not searched.
            timeout_s: wall time of one request to the backend.
            name: see `CheckedTool`.
            description: see `CheckedTool`.
            strict: see `CheckedTool`.

        Raises:
            ValueError: a value is too small, or as of `ShadowClient` or `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(
            max_results=max_results,
            max_file_bytes=max_file_bytes,
            max_indexed_bytes=max_indexed_bytes,
            max_collected_bytes=max_collected_bytes,
        )
        self.max_results, self.max_file_bytes, self.max_indexed_bytes = max_results, max_file_bytes, max_indexed_bytes
        self.max_collected_bytes = max_collected_bytes
        self._client = ShadowClient(backend, token_env, timeout_s=timeout_s)
        self._workspaces: EpisodeState[_Workspace] = EpisodeState(_Workspace)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the passages, the best first."""
        try:
            files = await sandbox.files(self.max_collected_bytes)
        except OSError as error:
            return refuse(f"the repository cannot be searched: {error.strerror or error}")
        texts, num_left_out = await asyncio.to_thread(self._texts, files)
        workspace = self._workspaces.of(sandbox)
        request = {"workspace": workspace.id, "query": arguments["query"], "limit": self.max_results}
        if under := _relative(arguments.get("path", ""), sandbox.workdir):
            request["under"] = under
        try:
            answer = await self._ask(workspace, texts, request)
        except TooLargeError:
            return refuse("the repository is too large to be searched")
        shown = [
            _passage(result) for result in _results(answer, path=str, start_line=int, text=str)[: self.max_results]
        ]
        if num_left_out:
            shown.append(f"({plural(num_left_out, 'large file')} left out)")
        return ToolResult("\n\n".join(shown) or "(nothing found)")

    async def _ask(self, workspace: _Workspace, texts: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            try:
                await self._index(workspace, texts)
                return await self._client.post("/search", request)
            except UnknownWorkspaceError:  # forgotten, or the backend was started anew
                workspace.is_indexed = False
        raise ToolError("the shadow backend forgot a workspace right after it was indexed: give it more room")

    async def _index(self, workspace: _Workspace, texts: dict[str, str]) -> None:
        """Give the backend what has changed."""
        known = workspace.hashes if workspace.is_indexed else {}
        hashes = {path: hashlib.sha256(content.encode()).digest() for path, content in texts.items()}
        changed = {path: texts[path] for path, digest in hashes.items() if known.get(path) != digest}
        removed = [path for path in known if path not in hashes]
        if workspace.is_indexed and not changed and not removed:
            return
        replace, workspace.is_indexed = not workspace.is_indexed, False
        for files in list(_batches(changed)) or [{}]:
            payload = {"workspace": workspace.id, "files": files, "removed": removed, "replace": replace}
            await self._client.post("/index", payload)
            replace, removed = False, []
        workspace.hashes, workspace.is_indexed = hashes, True

    def _texts(self, files: Mapping[str, bytes]) -> tuple[dict[str, str], int]:
        """The text files to search, and how many were too large or too many."""
        texts: dict[str, str] = {}
        num_left_out, left = 0, self.max_indexed_bytes
        for path, content in sorted(files.items()):
            if ".git" in path.split("/"):
                continue
            if len(content) > min(left, self.max_file_bytes):
                num_left_out += b"\0" not in content
                continue
            try:
                path.encode()
                decoded = content.decode()
            except UnicodeError:
                continue
            if "\0" not in decoded:
                texts[path] = decoded
                left -= len(content)
        return texts, num_left_out


class WebSearch(CheckedTool):
    """Searches pages that stand for the web, or what a backend of the user's own searches."""

    name = "web_search"
    description = "Search the web. Answers with the addresses of pages and what they say."
    parameters = parameters(query=text("what to look for", max_length=_QUERY))

    def __init__(
        self,
        backend: str = "",
        corpus: str = "",
        token_env: str = TOKEN_ENV,
        max_results: int = 5,
        timeout_s: float = 60.0,
        *,
        name: str = "",
        description: str = "",
        strict: bool = True,
    ) -> None:
        """Choose what is searched: `backend`, `corpus`, or Python's documentation, which needs no network.

        Args:
            backend: address of a backend; "": the one that ships with the product, which the first call starts.
            corpus: folder of pages (envs/shadow/pages.py) for that one; "": Python's documentation.
            token_env: variable with the token of the backend at `backend`.
            max_results: pages that one call shows.
            timeout_s: wall time of one request to the backend.
            name: see `CheckedTool`.
            description: see `CheckedTool`.
            strict: see `CheckedTool`.

        Raises:
            ValueError: both are given, the corpus is no folder, or as of `ShadowClient` or `CheckedTool`.
        """
        super().__init__(name=name, description=description, strict=strict)
        require_positive(max_results=max_results)
        if corpus and not Path(corpus).is_dir():
            raise ValueError(f"`corpus` must be a folder of pages, but is {corpus!r} instead")
        self.max_results = max_results
        self._client = ShadowClient(backend, token_env, corpus if backend or corpus else CORPUS, timeout_s)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> ToolResult:
        """Answer with the pages, the best first."""
        request = {"query": arguments["query"], "limit": self.max_results}
        try:
            answer = await self._client.post("/web", request)
        except (UnknownWorkspaceError, TooLargeError) as error:
            raise ToolError(f"the shadow backend refuses a search of the web: {error}") from error
        shown = [
            f"{result['title']}\n{result['url']}\n{result['text'][:_MAX_SHOWN]}"
            for result in _results(answer, title=str, url=str, text=str)[: self.max_results]
        ]
        return ToolResult("\n\n".join(shown) or "(nothing found)")


def _relative(path: str, workdir: str) -> str:
    """A path as the index knows it: relative to the working directory; empty for all of it."""
    parts = [part for part in path.removeprefix(workdir).split("/") if part not in ("", ".")]
    return "/".join(parts)


def _batches(files: Mapping[str, str]) -> Iterator[dict[str, str]]:
    batch: dict[str, str] = {}
    size = 0
    for path, content in files.items():
        if batch and size + len(content) > _BATCH_CHARACTERS:
            yield batch
            batch, size = {}, 0
        batch[path] = content
        size += len(content)
    if batch:
        yield batch


def _results(answer: Mapping[str, Any], **fields: type) -> list[dict[str, Any]]:
    """The results of an answer.

    Raises:
        ToolError: they are not what they have to be.
    """
    results = answer.get("results")
    if not isinstance(results, list) or not all(
        isinstance(result, dict) and all(isinstance(result.get(name), kind) for name, kind in fields.items())
        for result in results
    ):
        raise ToolError(f"the shadow backend answers no results with {', '.join(fields)}: {str(answer)[:200]}")
    return results


def _passage(result: Mapping[str, Any]) -> str:
    lines = result["text"][:_MAX_SHOWN].split("\n")
    first = result["start_line"]
    numbered = [f"{first + i}\t{line}" for i, line in enumerate(lines)]
    name = show_name(result["path"].encode(errors="replace"))
    return "\n".join([f"{name}:{first}-{first + len(lines) - 1}", *numbered])
