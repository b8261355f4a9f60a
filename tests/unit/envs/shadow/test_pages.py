"""Pages that stand for the web, from files of every kind."""

from __future__ import annotations

from pathlib import Path

from envs.shadow.pages import Page, PageHit, Pages, read_folder, read_page

HTML = b"""<!doctype html><html><head><title> How to
 retry </title><link rel="canonical" href="https://docs.example.com/retry"><style>p {color: red}</style></head>
<body><nav><a href="/">Home</a></nav><h1>Retry</h1><p>Wait <b>longer</b> each&nbsp;time &amp; stop.</p>
<script>alert("hidden")</script><ul><li>one<li>two</ul></body></html>"""


def test_an_html_page() -> None:
    page = read_page(HTML, "a/retry.html")
    assert (page.url, page.title) == ("https://docs.example.com/retry", "How to retry")
    assert page.text == "Retry\nWait longer each\xa0time & stop.\none\ntwo"
    assert read_page(b"<p>Only text", "x.html") == Page("x.html", "Only text", "Only text")
    assert read_page(b"</p></script>after<b", "x.htm").text.startswith("after")


def test_markdown_and_text() -> None:
    header = b"---\r\nurl: https://example.com/a?b=c:d\r\ntitle: A title\r\n---\r\n# Heading\r\n\r\nbody\r\n"
    assert read_page(header, "a.md") == Page("https://example.com/a?b=c:d", "A title", "# Heading\n\nbody\n")
    assert read_page(b"\n## Heading\nbody", "b/c.md") == Page("b/c.md", "Heading", "\n## Heading\nbody")
    assert read_page(b"---\nno header\n", "d.txt") == Page("d.txt", "---", "---\nno header\n")
    assert read_page(b"", "e.txt") == Page("e.txt", "e.txt", "")
    assert read_page(b"caf\xe9", "f.txt").text == "caf\ufffd"


def test_a_folder_is_searched(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "retry.html").write_bytes(HTML)
    (corpus / "deep/cache.md").write_text("# Caches\n\nAn entry is evicted when the cache is full.\n")
    (corpus / "picture.png").write_bytes(b"cache")
    (tmp_path / "outside.md").write_text("cache secret\n")
    (corpus / "link.md").symlink_to(tmp_path / "outside.md")
    (corpus / "dead.md").symlink_to(tmp_path / "nowhere.md")
    pages = Pages(read_folder(corpus))
    assert len(pages) == 2
    (hit,) = pages.search("when are cache entries evicted", 5)
    assert isinstance(hit, PageHit) and hit.score > 0
    assert (hit.url, hit.title) == ("deep/cache.md", "Caches")
    assert "An entry is evicted" in hit.text
    assert [h.url for h in pages.search("retry", 5)] == ["https://docs.example.com/retry"]
    assert pages.search("secret", 5) == []
    assert len(Pages()) == 0 and Pages().search("x", 5) == []
