"""The default harness's tools on files, in real sandboxes, against what an agent may leave lying around."""

from __future__ import annotations

import pytest

from composer.contract import SandboxLimits
from envs.tools.edit import SearchReplace
from envs.tools.files import ReadFile, WriteFile
from envs.tools.grep import Grep
from envs.tools.listing import Glob, ListDir, ListFiles

FILES = {
    "main.py": b"def f(a, b):\n    return a - b\n\n\ndef g(a, b):\n    return a - b\n",
    "crlf.py": b"one\r\ntwo\r\nthree\r\n",
    "mixed.txt": b"one\r\ntwo\nthree",
    "open.txt": b"first\nlast",
    "empty.txt": b"",
    "binary.bin": b"\x7fELF needle \0\1\n",
    "latin.txt": b"needle caf\xe9\n",
    "large.txt": b"x" * (2**20 + 1) + b"\n",
    "src/app/views.py": "import os\n\n# naïve needle\nclass View:  # NEEDLE\n    pass\n".encode(),
    "src/app/views_test.py": b"import views\n",
    "src/lib/deep/er/util.py": b"needle = 1\n",
    ".github/ci.yml": b"on: needle\n",
    ".git/config": b"needle\n",
    "src/.git/config": b"needle\n",
}
FORKS = """
import os, time
try:
    while os.fork():
        pass
    os.close(1)
    os.close(2)
    time.sleep(600)
except OSError:
    pass
"""
TWICE = "ok, replaced 2 times"
MESS = """
mkfifo pipe src/pipe
ln -s /dev/zero endless
ln -s src link
ln -s nowhere dead
ln -s . loop
mkdir closed && echo needle > closed/x && chmod 000 closed
printf 'needle\\n' > "$(printf 'new\\nline.py')"
printf 'needle\\n' > "$(printf 'not\\377utf8.py')"
printf 'needle\\n' > '-delete'
printf 'needle\\n' > 'quote"; touch hacked; ".py'
"""


@pytest.fixture(scope="module")
def call(runner, backend):
    """Call a tool in a fresh sandbox with a mess in it; returns what the model sees, and a file afterwards."""

    def run(tool, arguments, path=None, before=MESS):
        async def work():
            sandbox = await backend.start(FILES, SandboxLimits())
            try:
                made = await sandbox.shell(before)
                assert made.exit_code == 0, made.output
                result = await tool.call(arguments, sandbox)
                return result, await sandbox.read(path) if path else None
            finally:
                await sandbox.stop()

        return runner.run(work())

    return run


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"path": "open.txt"}, "1\tfirst\n2\tlast"),
        ({"path": "crlf.py"}, "1\tone\n2\ttwo\n3\tthree"),
        ({"path": "main.py", "offset": 5}, "5\tdef g(a, b):\n6\t    return a - b"),
        ({"path": "main.py", "offset": 2, "limit": 2}, "2\t    return a - b\n3\t\n... and 3 more lines"),
        ({"path": "main.py", "limit": 99}, "1\tdef f(a, b):\n2\t    return a - b\n3\t\n4\t\n... and 2 more lines"),
        ({"path": "empty.txt"}, "(no lines)"),
        ({"path": "main.py", "offset": 7}, "error: main.py has 6 lines, no line 7"),
        ({"path": "main.py", "offset": 0}, "error: offset: 0 is less than the minimum of 1"),
        ({"path": "pipe"}, "error: no permission to read pipe"),
        ({"path": "endless"}, "error: endless is larger than 8388608 bytes"),
        ({"path": "dead"}, "error: no such file: dead"),
        ({"path": "large.txt"}, f"1\t{'x' * 2000}... (1048577 characters)"),
    ],
)
def test_read_file_by_numbered_lines(call, arguments, shown):
    assert call(ReadFile(numbered=True, max_lines=4), arguments)[0].content == shown


def test_long_lines_are_fewer(call):
    # A line with its number and a tab is 1007 characters, and 65 of them are less than 65536.
    thousand = "python3 -c \"open('long.txt', 'w').write(('x' * 1003 + '\\n') * 200)\""
    result, _ = call(ReadFile(numbered=True), {"path": "long.txt", "offset": 100}, before=thousand)
    lines = result.content.split("\n")
    assert len(lines) == 66 and lines[0] == f"100\t{'x' * 1003}"
    assert lines[-1] == "... and 36 more lines"


def test_reading_behind_the_end_leniently(call):
    arguments = {"path": "open.txt", "offset": 9, "why": "to see"}
    assert call(ReadFile(numbered=True, strict=False), arguments)[0].content == "(no lines)"
    assert call(ReadFile(numbered=True), arguments)[0].content.startswith("error: Additional properties")


@pytest.mark.parametrize(
    ("path", "content", "after"),
    [
        ("new/folder/a.py", "x = 1\n", b"x = 1\n"),
        ("open.txt", "é\r\n", "é\r\n".encode()),
        ("empty.txt", "", b""),
        ("link/app/views.py", "y", b"y"),
    ],
)
def test_write_file(call, path, content, after):
    result, written = call(WriteFile(), {"path": path, "content": content}, path)
    assert (result.content, result.ok, written) == ("ok", True, after)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("src", "error: cannot write src: Is a directory"),
        ("main.py/x", "error: cannot write main.py/x: File exists"),
        ("/etc/passwd", "error: no permission to write /etc/passwd"),
        ("pipe", "error: cannot write pipe: No such device or address"),
        ("closed/x", "error: no permission to write closed/x"),
        ("a" * 300, f"error: cannot write {'a' * 300}: File name too long"),
    ],
)
def test_files_that_cannot_be_written(call, path, shown):
    result, _ = call(WriteFile(), {"path": path, "content": "x"})
    assert (result.content, result.ok) == (shown, False)


@pytest.mark.parametrize(
    ("path", "old", "new", "more", "shown", "after"),
    [
        ("open.txt", "first", "1st", {}, "ok", b"1st\nlast"),
        ("open.txt", "first\nlast", "", {}, "ok", b""),
        ("main.py", "g(a, b):\n    return a - b", "g():\n    x", {}, "ok", FILES["main.py"][:-26] + b"g():\n    x\n"),
        (
            "main.py",
            "a - b",
            "a",
            {"replace_all": True},
            "ok, replaced 2 times",
            FILES["main.py"].replace(b" - b", b""),
        ),
        ("crlf.py", "one\ntwo\n", "1\n2\n3\n", {}, "ok", b"1\r\n2\r\n3\r\nthree\r\n"),
        ("crlf.py", "two\r\n", "", {}, "ok", b"one\r\nthree\r\n"),
        ("mixed.txt", "two\nthree", "2", {}, "ok", b"one\r\n2"),
        ("mixed.txt", "one", "1", {}, "ok", b"1\r\ntwo\nthree"),
        ("src/app/views.py", "naïve", "naive", {}, "ok", FILES["src/app/views.py"].replace(b"\xc3\xaf", b"i")),
    ],
)
def test_search_replace(call, path, old, new, more, shown, after):
    result, content = call(SearchReplace(), {"path": path, "old_text": old, "new_text": new, **more}, path)
    assert (result.content, result.ok, content) == (shown, True, after)


@pytest.mark.parametrize(
    ("path", "old", "new", "shown"),
    [
        (
            "main.py",
            "return a - b",
            "x",
            "error: old_text is 2 times in main.py, at lines 2, 6: add lines around it, or set replace_all",
        ),
        ("main.py", "def f(a,b):", "x", "error: old_text is not in main.py; the nearest is line 1: def f(a, b):"),
        ("main.py", "def g(a, b):\n}", "x", "error: old_text is not in main.py; the nearest is line 5: def g(a, b):"),
        ("main.py", "import numpy as np", "x", "error: old_text is not in main.py"),
        ("main.py", "b\n", "b\n", "error: old_text and new_text are the same"),
        ("main.py", "", "x", "error: old_text: '' should be non-empty"),
        ("nowhere.py", "a", "b", "error: no such file: nowhere.py"),
        ("binary.bin", "a", "b", "error: binary.bin is a binary file"),
        ("latin.txt", "needle", "b", "error: latin.txt is not UTF-8 text"),
        ("pipe", "a", "b", "error: no permission to read pipe"),
    ],
)
def test_replacements_that_cannot_be_made_change_nothing(call, path, old, new, shown):
    result, content = call(SearchReplace(), {"path": path, "old_text": old, "new_text": new}, "main.py")
    assert (result.content, result.ok, content) == (shown, False, FILES["main.py"])


def test_a_lenient_search_replace_minds_no_white_space(call):
    lenient = SearchReplace(strict=False)
    old, new = "class View:  # NEEDLE \npass", "class View:\n    x = 1"
    result, content = call(lenient, {"path": "src/app/views.py", "old_text": old, "new_text": new}, "src/app/views.py")
    assert not result.ok, "the indentation inside of a block counts"
    old = "  class View:  # NEEDLE \n      pass"
    arguments = {"path": "src/app/views.py", "old_text": old, "new_text": "  class View:\n      x = 1"}
    assert not call(SearchReplace(), arguments)[0].ok
    result, content = call(lenient, arguments, "src/app/views.py")
    assert (result.content, result.ok) == ("ok, up to white space", True)
    assert content == "import os\n\n# naïve needle\nclass View:\n    x = 1\n".encode()
    # What is there exactly is not looked for again.
    arguments = {"path": "main.py", "old_text": "    return a - b", "new_text": "x"}
    assert "2 times in main.py" in call(lenient, arguments)[0].content


def test_list_dir(call):
    result, _ = call(ListDir(), {"path": "."})
    assert result.content.split("\n") == [
        ".github/",
        "closed/",
        "src/",
        "-delete",
        "binary.bin",
        "crlf.py",
        "empty.txt",
        "large.txt",
        "latin.txt",
        "main.py",
        "mixed.txt",
        "new\\nline.py",
        "not\\xffutf8.py",
        "open.txt",
        'quote"; touch hacked; ".py',
        "dead@",
        "endless@",
        "link@",
        "loop@",
        "pipe",
    ]
    assert call(ListDir(), {"path": "link/app"})[0].content == "views.py\nviews_test.py"
    assert call(ListDir(max_entries=1), {"path": "src"})[0].content == "app/\n... and 2 more"
    assert call(ListDir(), {"path": "closed"})[0].content == "error: no permission to list closed"
    assert call(ListDir(), {"path": "main.py"})[0].content == "error: no such folder: main.py"
    assert call(ListDir(), {"path": "bare"}, before="mkdir bare")[0].content == "(empty folder)"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"pattern": "*.yml"}, [".github/ci.yml"]),
        ({"pattern": "views*.py"}, ["src/app/views.py", "src/app/views_test.py"]),
        ({"pattern": "src/*.py"}, ["(no files)"]),
        ({"pattern": "src/**/u*.py"}, ["src/lib/deep/er/util.py"]),
        ({"pattern": "**/*.{yml,bin}"}, [".github/ci.yml", "binary.bin"]),
        ({"pattern": "app/*", "path": "src"}, ["app/views.py", "app/views_test.py"]),
        ({"pattern": "config"}, ["(no files)"]),
        ({"pattern": "n*.py"}, ["new\\nline.py", "not\\xffutf8.py"]),
        ({"pattern": "pipe"}, ["(no files)"]),
        ({"pattern": "-delete"}, ["-delete"]),
        ({"pattern": "$(touch hacked)*"}, ["(no files)"]),
        ({"pattern": "*", "path": "nowhere"}, ["error: no such folder: nowhere"]),
        ({"pattern": "*", "path": "closed"}, ["error: no permission to list closed"]),
    ],
)
def test_glob(call, arguments, shown):
    assert call(Glob(), arguments)[0].content.split("\n") == shown


def test_a_long_list_says_how_much_is_left_out(call):
    assert call(Glob(max_files=1), {"pattern": "*.py"})[0].content == "crlf.py\n... and 7 more"
    many = "for i in $(seq 1000 1999); do : > $i.txt; done"
    result, _ = call(ListFiles(), {"path": "."}, before=f"mkdir many; cd many; {many}")
    lines = result.content.split("\n")
    assert len(lines) == 201 and lines[-1] == "... and 811 more"
    result, _ = call(ListFiles(), {"path": "."})
    assert "new\\nline.py" in result.content and "pipe" not in result.content


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            {"pattern": "needle"},
            [
                "-delete:1:needle",
                ".github/ci.yml:1:on: needle",
                "new\\nline.py:1:needle",
                "not\\xffutf8.py:1:needle",
                'quote"; touch hacked; ".py:1:needle',
                "src/app/views.py:3:# naïve needle",
                "src/lib/deep/er/util.py:1:needle = 1",
            ],
        ),
        (
            {"pattern": "NEEDLE", "case_insensitive": True, "path": "src/app"},
            ["views.py:3:# naïve needle", "views.py:4:class View:  # NEEDLE"],
        ),
        ({"pattern": "needle", "path": "src/app/views.py"}, ["views.py:3:# naïve needle"]),
        (
            {"pattern": "needle", "glob": "*.py", "path": "src"},
            ["app/views.py:3:# naïve needle", "lib/deep/er/util.py:1:needle = 1"],
        ),
        ({"pattern": "needle", "glob": "src/lib/**"}, ["src/lib/deep/er/util.py:1:needle = 1"]),
        (
            {"pattern": "^import (os|views)$", "path": "src"},
            ["app/views.py:1:import os", "app/views_test.py:1:import views"],
        ),
        ({"pattern": "two", "path": "crlf.py"}, ["crlf.py:2:two"]),
        ({"pattern": "needle", "max_results": 1}, ["-delete:1:needle", "... and more"]),
        ({"pattern": "x", "path": "large.txt"}, [f"large.txt:1:{'x' * 300}..."]),
        ({"pattern": "nowhere at all"}, ["(no matches)"]),
        ({"pattern": "-e"}, ["(no matches)"]),
        ({"pattern": "needle", "path": "closed"}, ["error: no permission to search closed"]),
        ({"pattern": "needle", "path": "pipe"}, ["error: no permission to search pipe"]),
        ({"pattern": "needle", "path": "nowhere"}, ["error: no such file or folder: nowhere"]),
        ({"pattern": "a\nb"}, ["error: pattern holds a line break, and lines are searched one by one"]),
        ({"pattern": "x", "glob": "!*.py"}, ["error: glob: '!*.py' does not match '^[^!\\\\u0000][^\\\\u0000]*$'"]),
    ],
)
def test_grep(call, arguments, shown):
    assert call(Grep(program=""), arguments)[0].content.split("\n") == shown


def test_a_pattern_that_is_none_is_told(call):
    result, _ = call(Grep(program=""), {"pattern": "(a"})
    assert not result.ok and result.content.startswith("error: pattern: ") and "Unmatched (" in result.content


def test_a_search_that_does_not_end_is_ended(call):
    slow = "mkdir many; cd many; for i in $(seq 300); do mkdir -p $i/a/b/c; : > $i/a/b/c/x.txt; done"
    result, _ = call(Grep(program="", timeout_s=0.001), {"pattern": "x"}, before=slow)
    assert result.content == "error: searching . took longer than 0.001 s: name a smaller folder or a glob"
    result, _ = call(ListDir(timeout_s=0.001), {"path": "."}, before=slow)
    assert result.content == "error: listing . took too long"


def test_a_very_deep_tree(call):
    deep = """python3 -c "
import os
for _ in range(600):
    os.mkdir('abcdefghi')
    os.chdir('abcdefghi')
open('bottom.py', 'w').write('needle')
" """
    assert call(Grep(program=""), {"pattern": "^needle$", "glob": "*.py"}, before=deep)[0].content == "(no matches)"
    assert call(Glob(), {"pattern": "m*.py"}, before=deep)[0].content == "main.py"
    assert call(ListDir(), {"path": "abcdefghi"}, before=deep)[0].content == "abcdefghi/"
    result, _ = call(Glob(), {"pattern": "bottom.*"}, before=deep)
    assert result.content == "abcdefghi/" * 600 + "bottom.py"


def test_a_machine_without_the_programs_is_told_from_one_without_files(call):
    # As on one whose `find` knows no -printf.
    bare = "mkdir ~/bin && printf '#!/bin/sh\\nexit 1\\n' > ~/bin/find && chmod +x ~/bin/find"

    class Bare:
        def __init__(self, sandbox):
            self.sandbox = sandbox

        async def exec(self, argv, **more):
            return await self.sandbox.exec(argv, env={"PATH": "/home/dev/bin:/usr/bin:/bin"}, **more)

    def on_bare(tool, arguments):
        class OnBare:
            async def call(self, arguments, sandbox):
                return await tool.call(arguments, Bare(sandbox))

        return call(OnBare(), arguments, before=bare)[0].content

    needs = "error: listing . needs GNU find, sort and head, which do not run here"
    assert on_bare(Glob(), {"pattern": "*.py"}) == on_bare(ListDir(), {"path": "."}) == needs
    assert (
        on_bare(Grep(), {"pattern": "x"})
        == "error: searching needs ripgrep, or GNU find and grep, which do not run here"
    )


def test_what_a_sandbox_cuts_off_is_not_half_shown(runner, backend):
    names = {f"{'n' * 40}{i:03}.txt": b"needle\n" for i in range(50)}

    async def work():
        sandbox = await backend.start(names, SandboxLimits(output_bytes=300))
        try:
            listed = await ListFiles().call({"path": "."}, sandbox)
            found = await Grep(program="").call({"pattern": "needle"}, sandbox)
            return listed.content.split("\n"), found.content.split("\n")
        finally:
            await sandbox.stop()

    listed, found = runner.run(work())
    # Of 300 bytes the first 150 are whole: "50", a line break, and three names of 47 bytes with a NUL each.
    assert listed == [f"{'n' * 40}{i:03}.txt" for i in range(3)] + ["... and 47 more"]
    # "./", the name, a NUL, "1:needle" and a line break are 59 bytes.
    assert found == [f"{'n' * 40}{i:03}.txt:1:needle" for i in range(2)] + ["... and more"]


def test_a_machine_that_can_run_nothing_more(runner, backend):
    async def work():
        sandbox = await backend.start(FILES, SandboxLimits(num_processes=8))
        try:
            await sandbox.exec(["python3", "-c", FORKS])
            calls = [(ListDir(), {"path": "."}), (Grep(), {"pattern": "x"}), (ReadFile(), {"path": "open.txt"})]
            return [await tool.call(arguments, sandbox) for tool, arguments in calls]
        finally:
            await sandbox.stop()

    listed, found, read = runner.run(work())
    assert listed.content.startswith("error: listing . failed: ") and "fork" in listed.content
    assert found.content.startswith("error: searching . failed: ") and "fork" in found.content
    assert read.content == "first\nlast"
