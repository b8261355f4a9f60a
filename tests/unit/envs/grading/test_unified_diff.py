"""Diffs applied in memory give what `patch` and git would give."""

from __future__ import annotations

import difflib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.grading.unified_diff import apply_diff, parse_diff

FILES = {"a.py": b"one\ntwo\nthree\nfour\nfive\n", "b/c.txt": b"x\ny"}


def test_a_diff_of_several_files():
    diff = b"""diff --git a/a.py b/a.py
index 123..456 100644
--- a/a.py
+++ b/a.py
@@ -1,3 +1,4 @@ def f():
 one
-two
+TWO
+2
 three
@@ -5 +6 @@
-five
+FIVE
diff --git a/new.py b/new.py
new file mode 100644
index 000..789
--- /dev/null
+++ b/new.py
@@ -0,0 +1,2 @@
+--- a/no header
+new
diff --git a/b/c.txt b/b/c.txt
deleted file mode 100644
--- a/b/c.txt
+++ /dev/null
@@ -1,2 +0,0 @@
-x
-y
\\ No newline at end of file
diff --git a/empty b/empty
new file mode 100644
index 000..000
"""
    assert apply_diff(diff, FILES) == {
        "a.py": b"one\nTWO\n2\nthree\nfour\nFIVE\n",
        "new.py": b"--- a/no header\nnew\n",
        "b/c.txt": None,
        "empty": b"",
    }


def test_newlines_at_the_end():
    add = b"--- a/b/c.txt\n+++ b/b/c.txt\n@@ -1,2 +1,2 @@\n x\n-y\n\\ No newline at end of file\n+y\n"
    assert apply_diff(add, FILES) == {"b/c.txt": b"x\ny\n"}
    take = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-y\n+z\n\\ No newline at end of file\n"
    assert apply_diff(take, {"f": b"y\n"}) == {"f": b"z"}
    carriage = b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n"
    assert apply_diff(carriage, {"f": b"a\r\nb\r\n"}) == {"f": b"a\r\nc\r\n"}


def test_renames_and_names_in_quotes():
    diff = b"diff --git a/a.py b/d e.py\nsimilarity index 100%\nrename from a.py\nrename to d e.py\n"
    assert apply_diff(diff, FILES) == {"a.py": None, "d e.py": FILES["a.py"]}
    diff = b'--- "a/\\303\\251.txt"\n+++ "b/\\303\\251.txt"\n@@ -1 +1 @@\n-a\n+b\n'
    assert apply_diff(diff, {"é.txt": b"a\n"}) == {"é.txt": b"b\n"}
    diff = b"--- a/f\t2024-01-01\n+++ b/f\t2024-01-02\n@@ -1 +1 @@\n-a\n+b\n"
    assert apply_diff(diff, {"f": b"a\n"}) == {"f": b"b\n"}


def test_lines_that_have_moved_are_found_nearby_and_only_whole():
    diff = b"--- a/f\n+++ b/f\n@@ -2,2 +2,2 @@\n a\n-b\n+c\n"
    assert apply_diff(diff, {"f": b"0\n1\n2\na\nb\n"}) == {"f": b"0\n1\n2\na\nc\n"}
    assert apply_diff(diff, {"f": b"a\nb\n0\n0\n0\n0\na\nb\n"}) == {"f": b"a\nc\n0\n0\n0\n0\na\nb\n"}
    with pytest.raises(ValueError, match="hunk 1 of f does not fit"):
        apply_diff(diff, {"f": b"a\nB\n"})
    with pytest.raises(ValueError, match="it changes f, which is not there"):
        apply_diff(diff, {})


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        (b"", "it changes no file"),
        (b"just words\n", "it changes no file"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "line 1 begins a hunk of no file"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n", "its last hunk is cut"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n", "line 6 is one more than its hunk has"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n-c\n", "line 6 is one more than its hunk has"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n?b\n", "line 5 is no line of a hunk"),
        (b"diff --git a/x.png b/x.png\nBinary files a/x.png and b/x.png differ\n", "it changes a binary file"),
        (b"--- a/f\n+++ b/../f\n@@ -1 +1 @@\n-a\n+b\n", "it names '../f', which is outside"),
        (b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "it names '/etc/passwd', which is outside"),
        (b"diff --git a/x b/y\nrename from x\nrename to ../y\n", "it names '../y', which is outside"),
    ],
)
def test_what_is_refused(diff, message):
    with pytest.raises(ValueError, match=message):
        parse_diff(diff)


LINES = st.lists(st.sampled_from(["a\n", "b\n", "--- x\n", "+++ y\n", "@@ -1 +1 @@\n", "\n", " \n"]), max_size=12)


@given(old=LINES, new=LINES, context=st.integers(0, 3))
def test_what_difflib_writes_is_read(old, new, context):
    lines = list(difflib.unified_diff(old, new, "a/f", "b/f", n=context))
    if not lines:
        assert old == new
        return
    assert apply_diff("".join(lines).encode(), {"f": "".join(old).encode()}) == {"f": "".join(new).encode()}


def test_a_long_file_with_many_changes():
    dice = random.Random(0)
    old = [f"line {i}\n" for i in range(500)]
    new = [line.upper() if dice.random() < 0.1 else line for line in old if dice.random() > 0.1]
    diff = "".join(difflib.unified_diff(old, new, "a/f", "b/f"))
    assert apply_diff(diff.encode(), {"f": "".join(old).encode()}) == {"f": "".join(new).encode()}


def test_the_signature_of_a_mail_is_no_line():
    diff = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n-- \n2.39.5\n"
    assert apply_diff(diff, {"f": b"a\n"}) == {"f": b"b\n"}
