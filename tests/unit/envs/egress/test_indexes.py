"""Indexes brought back to a date; expected answers are written by hand."""

from __future__ import annotations

import json

import pytest

from envs.egress.indexes import PYPI_JSON, Files, UndatedError, bring_back, kind_of

URL = "https://pypi.org/simple/demo/"
DATE = "2024-01-01"


def pypi(*files: tuple[str, str | None], versions: tuple[str, ...] = ()) -> bytes:
    found = [
        {"filename": name, "url": f"https://files.example/{name}", "hashes": {"sha256": "ab"}}
        | ({"upload-time": time} if time else {})
        for name, time in files
    ]
    return json.dumps(
        {"meta": {"api-version": "1.1", "_last-serial": 7}, "name": "demo", "files": found, "versions": list(versions)}
    ).encode()


def test_later_and_undated_files_of_pypi_are_not_there() -> None:
    files = Files()
    body = pypi(
        ("demo-1.0.tar.gz", "2023-12-31T23:59:59.999999Z"),
        ("demo-1.0.1.tar.gz", "2024-01-01T00:00:00Z"),
        ("demo-0.9-py3-none-any.whl", "2024-01-01T00:30:00+01:00"),
        ("demo-0.8-py3-none-any.whl", None),
        versions=("0.8", "0.9", "1.0", "1.0.1"),
    )
    text, kind = bring_back("pypi", URL, body, DATE, files, f"{PYPI_JSON}, text/html;q=0.1")
    answer = json.loads(text)
    assert kind == PYPI_JSON
    assert [file["filename"] for file in answer["files"]] == ["demo-1.0.tar.gz", "demo-0.9-py3-none-any.whl"]
    assert answer["versions"] == ["0.9", "1.0"]
    assert answer["meta"] == {"api-version": "1.1"}
    assert files.is_from_before("https://files.example/demo-1.0.tar.gz?x=1#sha256=ab", DATE)
    assert files.is_from_before("https://files.example/demo-0.9-py3-none-any.whl.metadata", DATE)
    for name in ("demo-1.0.1.tar.gz", "demo-0.8-py3-none-any.whl", "other-1.0.tar.gz"):
        assert not files.is_from_before(f"https://files.example/{name}", DATE)
    assert files.is_from_before("https://files.example/demo-1.0.1.tar.gz", "2024-01-02")


def test_relative_addresses_of_files_are_resolved() -> None:
    files = Files()
    answer = {"files": [{"filename": "d-1.tar.gz", "url": "../../p/d-1.tar.gz", "upload-time": "2020-01-01T00:00:00Z"}]}
    bring_back("pypi", URL, json.dumps(answer).encode(), DATE, files, PYPI_JSON)
    assert files.is_from_before("https://pypi.org/p/d-1.tar.gz", DATE)


def test_html_is_made_of_json_and_escaped() -> None:
    answer = {
        "name": "demo",
        "files": [
            {
                "filename": "demo-1.0-py3-none-any.whl",
                "url": "https://files.example/demo-1.0-py3-none-any.whl",
                "hashes": {"sha256": "ab"},
                "upload-time": "2020-01-01T00:00:00Z",
                "requires-python": ">=3.8",
                "yanked": 'a "reason"',
                "core-metadata": {"sha256": "cd"},
            }
        ],
    }
    text, kind = bring_back("pypi", URL, json.dumps(answer).encode(), DATE, Files(), "text/html")
    assert kind == "text/html"
    assert (
        '<a href="https://files.example/demo-1.0-py3-none-any.whl#sha256=ab" data-requires-python="&gt;=3.8" '
        'data-yanked="a &quot;reason&quot;" data-core-metadata="sha256=cd">demo-1.0-py3-none-any.whl</a>'
    ) in text.decode()


def test_npm_versions_and_tags_are_those_of_the_date() -> None:
    times = {
        "created": "2019-01-01T00:00:00.000Z",
        "modified": "2024-09-01T00:00:00.000Z",
        "1.0.0": "2020-01-01T00:00:00.000Z",
        "1.1.0": "2023-01-01T00:00:00.000Z",
        "2.0.0-rc.1": "2023-06-01T00:00:00.000Z",
        "2.0.0": "2024-06-01T00:00:00.000Z",
    }
    versions = {v: {"dist": {"tarball": f"https://npm.example/demo/-/demo-{v}.tgz"}} for v in times if v[0].isdigit()}
    tags = {"latest": "2.0.0", "next": "2.0.0-rc.1"}
    body = json.dumps({"versions": versions, "time": times, "dist-tags": tags, "readme": "of 2.0.0"}).encode()
    files = Files()
    answer = json.loads(bring_back("npm", "https://npm.example/demo", body, DATE, files, "")[0])
    assert list(answer["versions"]) == ["1.0.0", "1.1.0", "2.0.0-rc.1"] == list(answer["time"])
    assert answer["dist-tags"] == {"latest": "1.1.0", "next": "2.0.0-rc.1"}
    assert "readme" not in answer
    assert files.is_from_before("https://npm.example/demo/-/demo-1.1.0.tgz", DATE)
    assert not files.is_from_before("https://npm.example/demo/-/demo-2.0.0.tgz", DATE)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"files": [{}]}', b'{"files": 3}', b"\xff"])
@pytest.mark.parametrize("index", ["pypi", "npm"])
def test_what_cannot_be_read_cannot_be_dated(index: str, body: bytes) -> None:
    with pytest.raises(UndatedError):
        bring_back(index, URL, body, DATE, Files(), PYPI_JSON)


@pytest.mark.parametrize(
    ("index", "path", "kind"),
    [
        ("pypi", "/simple/demo/", "answer"),
        ("pypi", "/simple/demo", "answer"),
        ("pypi", "/simple/", ""),
        ("pypi", "/pypi/demo/json", ""),
        ("pypi_files", "/packages/ab/demo-1.whl", "file"),
        ("npm", "/demo", "answer"),
        ("npm", "/@scope/demo", "answer"),
        ("npm", "/demo/-/demo-1.0.0.tgz", "file"),
        ("npm", "/@scope/demo/-/demo-1.0.0.tgz", "file"),
        ("npm", "/demo/1.0.0", ""),
        ("npm", "/-/v1/search", ""),
    ],
)
def test_kinds_of_addresses(index: str, path: str, kind: str) -> None:
    assert kind_of(index, path) == kind
