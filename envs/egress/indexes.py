"""Package indexes as they were on a date: what came later is taken out of their answers, and its files are refused.

PyPI's simple index in JSON (PEP 691) has the moment of each upload since PEP 700; in HTML it has none. So JSON is asked
for, and HTML is made of it where a program knows no other. npm's documents have `time`, their short form has not: the
long one is asked for. A file may be fetched once an answer has named it, and if it is old enough; what has no date is
as if it were new. Addresses of an index that are not read here cannot be dated, and are refused.
"""

from __future__ import annotations

import html
import json
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any

from envs.egress.policy import read_date

PYPI_JSON = "application/vnd.pypi.simple.v1+json"
_PYPI_HTML = "text/html"
_PYPI_PROJECT = re.compile(r"/simple/[A-Za-z0-9._-]+/?")
_NPM_PACKAGE = re.compile(r"/(@[a-z0-9._~-]+/)?[a-z0-9._~-]+", re.IGNORECASE)
_NPM_FILE = re.compile(r"/(@[a-z0-9._~-]+/)?[a-z0-9._~-]+/-/[A-Za-z0-9._~-]+\.tgz", re.IGNORECASE)
_PRERELEASE = re.compile(r"^[^+]*-")
_MOST_FILES = 2_000_000


class UndatedError(ValueError):
    """An answer of an index that cannot be read, and so not be brought back to a date."""


class Files:
    """The files that answers of indexes have named, by URL, with the moments of their uploads."""

    def __init__(self) -> None:
        """Empty."""
        self._uploaded: dict[str, str] = {}

    def add(self, url: str, uploaded: str) -> None:
        """Remember a file."""
        if len(self._uploaded) < _MOST_FILES:
            self._uploaded[_file_url(url)] = uploaded

    def is_from_before(self, url: str, date: str) -> bool:
        """Whether it was named, and uploaded before `date`."""
        return _is_before(self._uploaded.get(_file_url(url)), date)


def kind_of(index: str, path: str) -> str:
    """What a plain path of an index is: `answer`, `file`, or `` if it can have no date."""
    if index == "pypi" and _PYPI_PROJECT.fullmatch(path):
        return "answer"
    if index == "npm" and _NPM_FILE.fullmatch(path):
        return "file"
    if index == "npm" and _NPM_PACKAGE.fullmatch(path):
        return "answer"
    return "file" if index == "pypi_files" else ""


def accepted(index: str) -> str:
    """The header `Accept` with which an answer comes with its dates."""
    return PYPI_JSON if index == "pypi" else "application/json"


def bring_back(index: str, url: str, body: bytes, date: str, files: Files, wanted: str) -> tuple[bytes, str]:
    """An index's answer as it was.

    Args:
        index: `pypi` or `npm`.
        url: of the answer.
        body: JSON.
        date: what was uploaded from then on is left out.
        files: learns of all files, older and newer.
        wanted: the program's own header `Accept`.

    Returns:
        The answer and its content type.

    Raises:
        UndatedError: it cannot be read.
    """
    try:
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise UndatedError("an index's answer is no JSON object")
        if index == "npm":
            _bring_back_npm(answer, url, date, files)
            return json.dumps(answer).encode(), "application/json"
        _bring_back_pypi(answer, url, date, files)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UndatedError(f"an index's answer cannot be read: {e}") from e
    if PYPI_JSON in wanted:
        return json.dumps(answer).encode(), PYPI_JSON
    return _as_html(answer).encode(), _PYPI_HTML


def _bring_back_pypi(answer: dict[str, Any], url: str, date: str, files: Files) -> None:
    kept = []
    for file in answer["files"]:
        uploaded = file.get("upload-time")
        files.add(urllib.parse.urljoin(url, file["url"]), uploaded or "")
        if _is_before(uploaded, date):
            kept.append(file)
    answer["files"] = kept
    if "versions" in answer:
        names = [file["filename"] for file in kept]
        answer["versions"] = [version for version in answer["versions"] if _has_file(version, names)]
    # Serial numbers tell how much has happened since.
    if isinstance(answer.get("meta"), dict):
        answer["meta"].pop("_last-serial", None)


def _has_file(version: str, names: Iterable[str]) -> bool:
    """Whether one of the files is of the version: `name-version-…whl` or `name-version.tar.gz`."""
    return any(re.search(rf"-{re.escape(version)}(-|\.tar\.|\.zip$|\.tgz$|\.egg$)", name) for name in names)


def _bring_back_npm(answer: dict[str, Any], url: str, date: str, files: Files) -> None:
    times = answer["time"]
    for version, description in answer["versions"].items():
        tarball = description.get("dist", {}).get("tarball")
        if isinstance(tarball, str):
            files.add(urllib.parse.urljoin(url, tarball), str(times.get(version, "")))
    kept = [version for version in answer["versions"] if _is_before(times.get(version), date)]
    answer["versions"] = {version: answer["versions"][version] for version in kept}
    answer["time"] = {version: times[version] for version in kept}
    tags = {tag: version for tag, version in answer.get("dist-tags", {}).items() if version in kept}
    if kept and "latest" not in tags:
        stable = [version for version in kept if not _PRERELEASE.match(version)] or kept
        tags["latest"] = max(stable, key=lambda version: read_date(times[version]))
    answer["dist-tags"] = tags
    # The text is that of the newest version.
    for name in ("readme", "readmeFilename", "_rev"):
        answer.pop(name, None)


def _is_before(uploaded: Any, date: str) -> bool:
    try:
        return read_date(str(uploaded)) < read_date(date)
    except ValueError:
        return False


def _file_url(url: str) -> str:
    """Without fragment and query; a wheel's metadata (PEP 658) has the date of the wheel, as signatures have."""
    plain = url.partition("#")[0].partition("?")[0]
    for ending in (".metadata", ".asc", ".provenance"):
        plain = plain.removesuffix(ending)
    return plain


def _as_html(answer: dict[str, Any]) -> str:
    """A simple index's page (PEP 503) with the attributes of PEP 592 and PEP 658."""
    name = html.escape(str(answer.get("name", "")))
    lines = [f"<!DOCTYPE html><html><head><title>Links for {name}</title></head><body><h1>Links for {name}</h1>"]
    for file in answer["files"]:
        fragment = "".join(f"#{kind}={value}" for kind, value in list(file.get("hashes", {}).items())[:1])
        attributes = f'href="{html.escape(file["url"] + fragment)}"'
        if python := file.get("requires-python"):
            attributes += f' data-requires-python="{html.escape(python)}"'
        if yanked := file.get("yanked"):
            attributes += f' data-yanked="{html.escape(yanked if isinstance(yanked, str) else "")}"'
        metadata = file.get("core-metadata", file.get("data-dist-info-metadata"))
        if metadata:
            told = "".join(f"{k}={v}" for k, v in list(metadata.items())[:1]) if isinstance(metadata, dict) else "true"
            attributes += f' data-core-metadata="{html.escape(told)}"'
        lines.append(f"<a {attributes}>{html.escape(file['filename'])}</a><br>")
    return "\n".join([*lines, "</body></html>"])
