"""The tools on real files in real sandboxes, byte by byte."""

from __future__ import annotations

import pytest

from composer.contract import SandboxLimits, Tool
from envs.tools.files import EditLine, ReadFile
from envs.tools.finish import Finish
from envs.tools.listing import ListFiles
from envs.tools.shell import Run

FILES = {
    "main.py": b"def f(a, b):\n    return a - b\n",
    "crlf.py": b"one\r\ntwo\r\nthree",
    "open.txt": b"first\nlast",
    "utf8.txt": "naïve\n漢字\u2028same line\x0b\n🙂\n".encode(),
    "bom.txt": b"\xef\xbb\xbfa\nb\n",
    "cr.txt": b"a\rb\nc\n",
    "empty.txt": b"",
    "binary.bin": b"\x7fELF\0\1",
    "latin.txt": b"caf\xe9\n",
    "large.txt": b"x" * (2**20 + 1),
    "dir/sub/deep.txt": b"d",
    "dir/.hidden/x": b"h",
    ".git/config": b"g",
}


@pytest.fixture(scope="module")
def call(runner, backend):
    """Call a tool in a fresh sandbox; returns what the model sees, and a file afterwards."""

    def run(tool, arguments, path=None):
        async def work():
            sandbox = await backend.start(FILES, SandboxLimits())
            try:
                result = await tool.call(arguments, sandbox)
                return result, await sandbox.read(path) if path else None
            finally:
                await sandbox.stop()

        return runner.run(work())

    return run


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("main.py", "def f(a, b):\n    return a - b"),
        ("./dir/sub/deep.txt", "d"),
        ("crlf.py", "one\r\ntwo\r\nthree"),
        ("utf8.txt", "naïve\n漢字\u2028same line\x0b\n🙂"),
        ("empty.txt", ""),
    ],
)
def test_read_file(call, path, shown):
    result, _ = call(ReadFile(), {"path": path})
    assert (result.content, result.ok, result.ends_episode) == (shown, True, False)


@pytest.mark.parametrize("tool", [ReadFile(), EditLine()])
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("nowhere.py", "error: no such file: nowhere.py"),
        ("main.py/x", "error: no such file: main.py/x"),
        ("dir", "error: dir is a directory"),
        ("binary.bin", "error: binary.bin is a binary file"),
        ("latin.txt", "error: latin.txt is not UTF-8 text"),
        ("large.txt", "error: large.txt is larger than 1048576 bytes"),
        ("/etc/shadow", "error: no"),
        ("../../../../nowhere", "error: no such file: ../../../../nowhere"),
        ("a" * 5000, "error: "),
    ],
)
def test_files_that_cannot_be_used_are_a_result(call, tool, path, shown):
    more = {"line": 1, "text": "x"} if tool.name == "edit_line" else {}
    result, _ = call(tool, {"path": path, **more})
    assert not result.ok and result.content.startswith(shown)


@pytest.mark.parametrize(
    ("path", "line", "text", "after"),
    [
        ("main.py", 2, "    return a * b", b"def f(a, b):\n    return a * b\n"),
        ("main.py", 1, "def g(a, b):\n", b"def g(a, b):\n    return a - b\n"),
        ("main.py", 2, "    c = 1\n    return c", b"def f(a, b):\n    c = 1\n    return c\n"),
        ("main.py", 2, "", b"def f(a, b):\n\n"),
        ("crlf.py", 2, "2", b"one\r\n2\r\nthree"),
        ("crlf.py", 1, "1\n1b", b"1\r\n1b\r\ntwo\r\nthree"),
        ("crlf.py", 3, "3\r\n4", b"one\r\ntwo\r\n3\r\n4"),
        ("open.txt", 2, "end", b"first\nend"),
        ("open.txt", 2, "a\nb", b"first\na\nb"),
        ("utf8.txt", 3, "é", "naïve\n漢字\u2028same line\x0b\né\n".encode()),
        ("cr.txt", 2, "C", b"a\rb\nC\n"),
        ("bom.txt", 2, "B", b"\xef\xbb\xbfa\nB\n"),
    ],
)
def test_edit_line(call, path, line, text, after):
    result, content = call(EditLine(), {"path": path, "line": line, "text": text}, path)
    assert (result.content, result.ok, content) == ("ok", True, after)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"path": "main.py", "line": 0, "text": ""}, "error: main.py has 2 lines, no line 0"),
        ({"path": "main.py", "line": 3, "text": ""}, "error: main.py has 2 lines, no line 3"),
        ({"path": "empty.txt", "line": 1, "text": ""}, "error: empty.txt has 0 lines, no line 1"),
        ({"path": "main.py", "line": -1, "text": ""}, "error: main.py has 2 lines, no line -1"),
        ({"path": "main.py", "line": "2", "text": ""}, "error: line: '2' is not of type 'integer'"),
        ({"path": "main.py", "line": True, "text": ""}, "error: line: True is not of type 'integer'"),
        ({"path": "main.py", "line": 2.5, "text": ""}, "error: line: 2.5 is not of type 'integer'"),
        ({"path": "main.py", "line": 2}, "error: 'text' is a required property"),
        ({"path": "", "line": 2, "text": ""}, "error: path: '' should be non-empty"),
        ({"path": "a\0b", "line": 2, "text": ""}, "error: path: 'a\\x00b' does not match"),
        (
            {"path": "main.py", "line": 2, "text": "", "force": 1},
            "error: Additional properties are not allowed ('force' was unexpected)",
        ),
        ({"path": "/usr/bin/env", "line": 1, "text": ""}, "error: /usr/bin/env is a binary file"),
        ({"path": "/etc/passwd", "line": 1, "text": ""}, "error: no permission to write /etc/passwd"),
    ],
)
def test_wrong_edits_are_told_and_change_nothing(call, arguments, shown):
    result, content = call(EditLine(), arguments, "main.py")
    assert not result.ok and result.content.startswith(shown)
    assert content == FILES["main.py"]


def test_list_files(call):
    everything = "bom.txt cr.txt crlf.py dir/sub/deep.txt empty.txt large.txt latin.txt main.py open.txt utf8.txt"
    names = sorted([*everything.split(), "binary.bin"])
    assert call(ListFiles(), {"path": "."})[0].content == "\n".join(names)
    assert call(ListFiles(), {"path": "dir"})[0].content == "sub/deep.txt"
    assert call(ListFiles(max_files=2), {"path": "."})[0].content == "binary.bin\nbom.txt\n... and 9 more"
    assert call(ListFiles(), {"path": "nowhere"})[0].content == "error: no such folder: nowhere"
    assert call(ListFiles(), {"path": "main.py"})[0].content == "error: no such folder: main.py"
    result, content = call(ListFiles(), {"path": "-delete"}, "main.py")
    assert result.content == "error: no such folder: -delete" and content


def test_folders_that_cannot_be_looked_into_hide_no_others(runner, backend):
    async def work():
        sandbox = await backend.start({"a/x": b"", "locked/y": b"", "no entry/z": b""}, SandboxLimits())
        try:
            await sandbox.shell("chmod 000 locked; chmod 444 'no entry'; ln -s a link; ln -s nowhere dead")
            paths = (".", "a", "link", "locked", "dead", "no entry")
            return [(await ListFiles().call({"path": path}, sandbox)).content for path in paths]
        finally:
            await sandbox.stop()

    assert runner.run(work()) == [
        "a/x\nno entry/z",
        "x",
        "x",
        "error: no permission to list locked",
        "error: no such folder: dead",
        "error: no permission to list no entry",
    ]


def test_run_keeps_the_shell_and_says_how_a_command_ended(runner, backend):
    async def work():
        sandbox = await backend.start(FILES, SandboxLimits())
        try:
            commands = [
                "cd dir; x=1",
                "pwd; echo $x",
                "ls nowhere; exit_code() { return 3; }; exit_code",
                "printf 'a\\xff'",
            ]
            shown = [(await Run().call({"command": c}, sandbox)) for c in commands]
            slow = await Run(timeout_s=0.5).call({"command": "echo before; sleep 60"}, sandbox)
            return shown, slow
        finally:
            await sandbox.stop()

    (silent, place, failed, binary), slow = runner.run(work())
    assert (silent.content, silent.ok) == ("", True)
    assert place.content == f"{backend.workdir}/dir\n1"
    assert failed.content.endswith("No such file or directory\n[exit code 3]") and not failed.ok
    assert binary.content == "a\ufffd"
    assert slow.content == "before\n[stopped after 0.5 s]" and not slow.ok


def test_finish_ends_the_episode(call):
    result, _ = call(Finish(), {})
    assert result.ends_episode and result.ok and result.content == ""
    assert not call(Finish(), {"answer": 1})[0].ends_episode


def test_all_keep_the_contract():
    for tool in (ReadFile(), EditLine(), ListFiles(), Run(), Finish()):
        assert isinstance(tool, Tool)
        assert tool.parameters["required"] == list(tool.parameters["properties"])
