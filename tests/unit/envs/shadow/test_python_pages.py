"""Python's own documentation as pages."""

from __future__ import annotations

import bisect

from envs.shadow.pages import Pages
from envs.shadow.python_pages import python_pages


def test_modules_and_topics_are_found_by_what_they_say() -> None:
    pages = {page.url: page for page in python_pages()}
    module = pages["https://docs.python.org/3/library/bisect.html"]
    assert module.title == "bisect: Bisection algorithms."
    assert bisect.__doc__ is not None and bisect.__doc__.strip() in module.text
    assert "bisect_right(a, x, lo=0, hi=None, *, key=None)\n\nReturn the index" in module.text
    assert "https://docs.python.org/3/library/json.decoder.html" in pages, "modules in packages too"
    assert pages["https://docs.python.org/3/reference/with.html"].title == 'The "with" statement'
    assert not [url for url in pages if "/_" in url or "/test" in url], "nothing private"
    found = Pages(pages.values()).search("where to insert an item in a sorted list", 3)
    assert found[0].url == module.url
