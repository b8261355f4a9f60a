"""Passages: where texts are cut, what is shown of them, and which are found."""

from __future__ import annotations

from envs.shadow.passages import Passage, PassageIndex, _cut


def text(num_lines: int, **special: str) -> str:
    """Lines "filler 1", "filler 2", ..., but for those given as `_<number>=...`."""
    return "".join(f"{special.get(f'_{i}', f'filler {i}')}\n" for i in range(1, num_lines + 1))


def test_where_texts_are_cut() -> None:
    def cuts(num_lines: int) -> list[tuple[int, int]]:
        return [(p.start, p.end) for p in _cut("a", num_lines)]

    assert cuts(1) == [(1, 1)]
    assert cuts(40) == [(1, 40)]
    assert cuts(41) == [(1, 40), (31, 41)]
    assert cuts(100) == [(1, 40), (31, 70), (61, 100)]
    assert cuts(101) == [(1, 40), (31, 70), (61, 100), (91, 101)]
    assert list(_cut("a", 1)) == [Passage("a", 1, 1)]


def test_the_lines_around_what_was_asked_for_are_shown() -> None:
    index = PassageIndex()
    index.put("src/config.py", text(100, _50="def parse_config(path):"))
    (hit,) = index.search("how is the config parsed", 1)
    # Line 50 is the 20th of the passage 31-70; three lines before it are shown, and six after it.
    assert (hit.name, hit.start, hit.end) == ("src/config.py", 47, 56)
    assert hit.text.split("\n")[3] == "def parse_config(path):"
    assert hit.text.split("\n")[0] == "filler 47" and hit.text.endswith("filler 56")


def test_the_ends_of_a_text_and_lone_lines() -> None:
    index = PassageIndex()
    index.put("start", text(30, _1="needle"))
    index.put("end", text(35, _35="thread"))
    index.put("lone", "hay")
    index.put("empty", "")
    found = [index.search(query, 1)[0] for query in ("needle", "thread", "hay", "empty")]
    assert [(h.name, h.start, h.end) for h in found] == [
        ("start", 1, 10),
        ("end", 26, 35),
        ("lone", 1, 1),
        ("empty", 1, 1),
    ]
    assert found[3].text == "" and index.search("nothing", 5) == []


def test_no_passage_overlaps_with_a_better_one() -> None:
    index = PassageIndex()
    index.put("a", text(100, _35="needle"))  # in 1-40 and in 31-70
    index.put("b", text(100, _5="needle", _95="needle"))
    hits = index.search("needle", 10)
    assert sorted((h.name, h.start) for h in hits) == [("a", 31), ("b", 2), ("b", 91)]
    assert len(index.search("needle", 10, one_each=True)) == 2
    assert len(index.search("needle", 1)) == 1


def test_names_count_and_folders_narrow() -> None:
    index = PassageIndex()
    for name in ("lib/http/retry.py", "lib/http2/other.py", "docs/retry.md"):
        index.put(name, "nothing of it\n")
    assert {h.name for h in index.search("retry", 10)} == {"lib/http/retry.py", "docs/retry.md"}
    assert [h.name for h in index.search("retry", 10, under="lib/")] == ["lib/http/retry.py"]
    assert [h.name for h in index.search("nothing", 10, under="lib/http")] == ["lib/http/retry.py"]
    assert [h.name for h in index.search("retry", 10, under="docs/retry.md")] == ["docs/retry.md"]
    assert index.search("retry", 10, under="nowhere") == []


def test_texts_come_and_go() -> None:
    index = PassageIndex()
    index.put("a", text(100))
    assert (len(index), index.num_passages) == (1, 3)
    index.put("a", "needle\nhay\n")
    assert (len(index), index.num_passages, index.num_characters) == (1, 1, 9)
    assert index.search("filler", 5) == []
    index.remove("a")
    index.remove("a")
    assert (len(index), index.num_passages, index.num_characters) == (0, 0, 0)


def test_lines_are_counted_as_editors_do() -> None:
    index = PassageIndex()
    index.put("a", "one\u2028same\x0bline\rstill\ntwo needle\n")
    (hit,) = index.search("needle", 1)
    assert (hit.start, hit.end) == (1, 2)


def test_the_better_text_wins() -> None:
    index = PassageIndex()
    index.put(
        "server/retry_policy.py",
        "class RetryPolicy:\n    def next_delay(self, attempt):\n        return 2 ** attempt\n",
    )
    index.put("server/policy.py", "class CachePolicy:\n    def evict(self, key):\n        return key\n")
    index.put("README.md", "This project has a retry button in its game.\n")
    assert index.search("how long do we wait before the next retry attempt", 3)[0].name == "server/retry_policy.py"
    assert index.search("evicting from the cache", 3)[0].name == "server/policy.py"
