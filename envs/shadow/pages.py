"""A folder of pages that stands for the web: HTML, Markdown and plain text, found by what they say.

The address of an HTML page is its `<link rel="canonical" href=...>`, its title its `<title>`. Others may begin with

    ---
    url: https://docs.example.com/retry
    title: How to retry
    ---

A page without an address has its path below the folder for one, a page without a title its first line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from envs.shadow.passages import PassageIndex

SUFFIXES = frozenset({".html", ".htm", ".md", ".txt", ".rst"})
MAX_PAGE_BYTES = 2**21
_HEADER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_SILENT = frozenset({"script", "style", "noscript", "template", "title", "nav"})
_BLOCK = re.compile(r"address|article|blockquote|br|d[dlt]|div|h[1-6]|li|[ou]l|p|pre|section|table|tr")


@dataclass(frozen=True)
class Page:
    """One page as text."""

    url: str
    title: str
    text: str


@dataclass(frozen=True)
class PageHit:
    """A page that fits a query, and its lines that fit best."""

    url: str
    title: str
    score: float
    text: str


class Pages:
    """Pages that can be searched."""

    def __init__(self, pages: Iterable[Page] = ()) -> None:
        """Index them. Of pages with one address, the last counts.

        Raises:
            OSError: as `read_folder`.
        """
        self._pages: dict[str, Page] = {}
        self._index = PassageIndex()
        for page in pages:
            self._pages[page.url] = page
            self._index.put(page.url, f"{page.title}\n{page.text}")

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pages)

    def search(self, query: str, most: int) -> list[PageHit]:
        """The pages that fit best, each once."""
        hits = self._index.search(query, most, one_each=True)
        return [PageHit(hit.name, self._pages[hit.name].title, hit.score, hit.text) for hit in hits]


def read_folder(folder: Path) -> Iterator[Page]:
    """The pages of a folder. Links that lead out of it are not followed.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    for path in _files(folder):
        yield read_page(path.read_bytes()[:MAX_PAGE_BYTES], path.relative_to(folder).as_posix())


def read_page(content: bytes, path: str) -> Page:
    """A page from a file's bytes; `path` below the folder tells its kind, and is its address if it names none."""
    source = content.decode(errors="replace").replace("\r\n", "\n")
    if path.endswith((".html", ".htm")):
        reader = _HtmlReader()
        reader.feed(source)
        reader.close()
        text = "\n".join(line for line in map(str.strip, "".join(reader.text).split("\n")) if line)
        return Page(reader.url or path, " ".join("".join(reader.title).split()) or _first_line(text) or path, text)
    header = _HEADER.match(source)
    text = source[header.end() :] if header else source
    pairs = (line.partition(":") for line in (header[1] if header else "").split("\n"))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return Page(fields.get("url") or path, fields.get("title") or _first_line(text) or path, text)


def _first_line(text: str) -> str:
    return next((line.strip().lstrip("# ") for line in text.split("\n") if line.strip()), "")[:200]


def _files(folder: Path) -> list[Path]:
    top = folder.resolve(strict=True)
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in found if path.resolve().is_relative_to(top))


class _HtmlReader(HTMLParser):
    """The text of a page, a line for every block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.title: list[str] = []
        self.url = ""
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") == "canonical":
            self.url = given.get("href") or self.url
        if tag in _SILENT:
            self._inside.append(tag)
        if _BLOCK.fullmatch(tag):
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass
        if _BLOCK.fullmatch(tag):
            self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text.append(data)
        elif self._inside[-1] == "title":
            self.title.append(data)
