"""Commands, files and their edges: the persistent shell, programs, binary data, deadlines, symbolic links."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from composer.contract import ExecResult, SandboxLimits
from composer.errors import SandboxError
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.sandbox import BubblewrapSandbox

BINARY = bytes(range(256)) * 300
LIMITS = SandboxLimits(exec_timeout_s=20, output_bytes=4096)


@pytest.fixture
def sandbox(backend: BubblewrapBackend, run: Callable) -> Iterator[BubblewrapSandbox]:
    """A fresh sandbox."""
    sandbox = run(backend.start({"main.py": b"x = 1\n", "a/b/c.txt": b"c"}, LIMITS))
    yield sandbox
    run(sandbox.stop())


def test_start_puts_the_files_in_place(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.files()) == {"main.py": b"x = 1\n", "a/b/c.txt": b"c"}
    assert run(sandbox.shell("pwd; stat -c '%U %a' main.py a")).output == b"/home/dev/project\ndev 644\ndev 755\n"


def test_the_shell_keeps_its_state(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(sandbox.shell("cd a/b; X='two  words'; export Y=3; f() { echo f$1; }"))
    assert run(sandbox.shell('pwd; echo "$X"; env | grep ^Y; f 1')).output == (
        b"/home/dev/project/a/b\ntwo  words\nY=3\nf1\n"
    )


def test_where_the_shell_is_is_known_without_asking_it(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.directory()) == "/home/dev/project"
    run(sandbox.shell("ln -s a link; cd link/b; pwd() { echo ran >/tmp/ran; }; export X=kept"))
    assert run(sandbox.directory()) == "/home/dev/project/link/b"  # by the name that the shell has for it
    run(sandbox.shell("cd ..; mkdir 'it'\\''s \U0001f40d'; cd it*; mv ../../a ../../z"))
    assert run(sandbox.directory()) == "/home/dev/project/z/it's \U0001f40d"  # the shell still says a
    # One that does not answer, whatever it does: here it has been stopped.
    number = run(sandbox.shell("echo $$")).output.decode().strip()
    run(sandbox.shell("(sleep 0.3; kill -STOP $$) >/dev/null 2>&1 &"))
    run(asyncio.sleep(1.0))
    assert run(sandbox.directory()) == "/home/dev/project/z/it's \U0001f40d"
    run(sandbox.exec(["sh", "-c", f"kill -CONT {number}"]))
    assert run(sandbox.shell("echo $X; ls /tmp")).output == b"kept\n"


def test_the_shell_begins_where_it_is_told_to(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(sandbox.enter("/home/dev/project/a/b"))
    assert run(sandbox.directory()) == "/home/dev/project/a/b"
    assert run(sandbox.shell('echo "$PWD $_ ${OLDPWD-none}"; ls')).output.split()[0] == b"/home/dev/project/a/b"
    run(sandbox.enter("/tmp"))  # it has begun
    assert run(sandbox.shell("pwd")).output == b"/home/dev/project/a/b\n"


def test_a_shell_that_is_to_begin_nowhere_begins_in_the_working_directory(
    sandbox: BubblewrapSandbox, run: Callable
) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/folder"):
        run(sandbox.enter("/no/such/folder"))
    with pytest.raises(FileNotFoundError):
        run(sandbox.enter("/home/dev/project/main.py"))
    assert run(sandbox.shell("pwd")).output == b"/home/dev/project\n"


def test_exit_codes_and_streams_in_order(sandbox: BubblewrapSandbox, run: Callable) -> None:
    result = run(sandbox.shell("echo 1; echo 2 >&2; echo 3; (exit 7)"))
    assert (result.exit_code, result.output, result.timed_out, result.truncated) == (7, b"1\n2\n3\n", False, False)
    assert run(sandbox.shell("no-such-command")).exit_code == 127
    assert run(sandbox.shell("kill -9 $BASHPID")).exit_code == 137
    assert run(sandbox.shell("if then fi")).exit_code not in (0, 124)
    assert run(sandbox.shell("")).exit_code == 0
    assert run(sandbox.shell("cat <<X\nhere\nX\necho '\u00e9'")).output == "here\n\u00e9\n".encode()


def test_output_and_files_are_binary_safe(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(sandbox.write("data", BINARY))
    assert run(sandbox.read("data")) == BINARY
    assert run(sandbox.shell("head -c 256 data")).output == bytes(range(256))
    assert run(sandbox.exec(["head", "-c", "256"], stdin=BINARY)).output == bytes(range(256))
    assert run(sandbox.exec(["sha256sum"], stdin=BINARY)).output[:8] == run(sandbox.shell("sha256sum data")).output[:8]
    run(sandbox.write("na\udcffme", b"1"))
    assert run(sandbox.files())["na\udcffme"] == b"1"


def test_a_program_cannot_forge_its_end(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(
        sandbox.write(
            "forge.py",
            b"import os\nprint('0 /tmp', end='\\0', flush=True)\nfor fd in range(3, 256):\n"
            b"    try: os.write(fd, b'0 /tmp\\0')\n    except OSError: pass\n"
            b"    else: print('wrote to', fd)\nraise SystemExit(5)\n",
        )
    )
    result = run(sandbox.shell("python3 forge.py"))
    assert (result.exit_code, result.output) == (5, b"0 /tmp\x00")
    assert run(sandbox.shell("pwd")).output == b"/home/dev/project\n"
    # Whoever breaks the shell's own loop only loses the shell.
    assert run(sandbox.shell("printf() { :; }; echo 1", timeout_s=0.5)).timed_out
    assert run(sandbox.shell("printf 2")).output == b"2"


def test_a_command_may_close_its_streams(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.shell("exec 1>&- 2>&-; echo x; true")).exit_code == 0
    assert run(sandbox.shell("echo back")).output == b"back\n"
    assert run(sandbox.shell("cat")).output == b""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("exec sh -c 'sleep 0.2; exit 4'", 4),
        ("set -e; false", 1),
        ("sh -c 'kill -9 -1'", 137),
    ],
)
def test_a_shell_that_ends_is_replaced(sandbox: BubblewrapSandbox, run: Callable, command: str, code: int) -> None:
    run(sandbox.shell("cd a; X=1"))
    assert run(sandbox.shell(command)).exit_code == code
    assert run(sandbox.shell("echo $X; pwd")).output == b"\n/home/dev/project/a\n"


def test_a_command_past_its_deadline_is_killed_with_its_children(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(sandbox.shell("sleep 1000 & cd a"))
    began = time.monotonic()
    result = run(
        sandbox.shell(
            "echo begun; setsid sleep 2000 & (setsid sh -c 'sleep 2001; true' &); sleep 2002; echo no", timeout_s=0.5
        )
    )
    assert (result.timed_out, result.exit_code, result.output) == (True, 124, b"begun\n")
    assert time.monotonic() - began < 5
    # What an earlier command left running stays, as after Ctrl-C in a terminal.
    listing = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done | grep ^sleep; pwd"
    assert run(sandbox.shell(listing)).output == b"sleep 1000 \n/home/dev/project/a\n"


@pytest.mark.parametrize("command", ["while :; do :; done", "trap '' INT TERM HUP; while :; do sleep 1; done"])
def test_an_endless_loop_ends_at_its_deadline(sandbox: BubblewrapSandbox, run: Callable, command: str) -> None:
    assert run(sandbox.shell(command, timeout_s=0.3)).timed_out
    assert run(sandbox.shell("echo next")).output == b"next\n"


def test_exec_runs_programs_without_a_shell(sandbox: BubblewrapSandbox, run: Callable) -> None:
    assert run(sandbox.exec(["echo", "$HOME", "a  b"])).output == b"$HOME a  b\n"
    assert run(sandbox.exec(["sh", "-c", "echo $Z; pwd"], env={"Z": "1"})).output == b"1\n/home/dev/project\n"
    assert run(sandbox.exec(["no-such-program"])).exit_code == 127
    assert run(sandbox.exec(["/etc/passwd"])).exit_code == 126
    assert run(sandbox.exec(["sh", "-c", "kill -11 $$"])).exit_code == 139
    late = run(sandbox.exec(["sleep", "100"], timeout_s=0.2))
    assert (late.timed_out, late.exit_code) == (True, 124)
    assert run(sandbox.exec(["true"], stdin=BINARY)).exit_code == 0


def test_a_background_process_does_not_hold_a_command_up(sandbox: BubblewrapSandbox, run: Callable) -> None:
    began = time.monotonic()
    assert run(sandbox.exec(["sh", "-c", "sleep 50 & echo out"])).output == b"out\n"
    assert run(sandbox.shell("sleep 50 & echo out")).output == b"out\n"
    assert time.monotonic() - began < 5


def test_endless_output_is_cut_in_the_middle(sandbox: BubblewrapSandbox, run: Callable) -> None:
    result = run(sandbox.shell("echo first; yes | head -c 3000000; echo last"))
    assert result.truncated
    assert len(result.output) == 4096
    assert result.output.startswith(b"first\ny\n")
    assert result.output.endswith(b"y\nlast\n")
    assert run(sandbox.shell("yes", timeout_s=0.5)).timed_out
    assert run(sandbox.shell("echo fresh")).output.endswith(b"fresh\n")


def test_read_and_write_say_what_is_wrong(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(sandbox.shell("mkfifo pipe; touch closed; chmod 000 closed; ln -s loop loop"))
    for path, error in (
        ("none", FileNotFoundError),
        ("main.py/x", FileNotFoundError),
        ("loop", FileNotFoundError),
        ("a", IsADirectoryError),
        ("closed", PermissionError),
        ("pipe", PermissionError),
        ("a\0b", FileNotFoundError),
    ):
        with pytest.raises(error):
            run(sandbox.read(path))
    for path, error in (
        ("a", IsADirectoryError),
        ("/etc/passwd", PermissionError),
        ("/usr/x", PermissionError),
        ("closed", PermissionError),
        ("main.py/x", OSError),
    ):
        with pytest.raises(error):
            run(sandbox.write(path, b"1"))
    assert run(sandbox.read("/etc/hostname")) == b"devbox\n"
    assert run(sandbox.read("main.py", max_bytes=3)) == b"x ="
    with pytest.raises(OSError, match="File too large") as too_large:
        run(sandbox.files(max_bytes=5))
    assert too_large.value.errno == errno.EFBIG


def test_links_lead_nowhere_but_into_the_sandbox(sandbox: BubblewrapSandbox, run: Callable, tmp_path) -> None:  # noqa: ANN001
    secret = tmp_path / "secret"
    secret.write_text("host")
    run(
        sandbox.shell(
            f"ln -s {secret} one; ln -s ../../../../../../..{secret} two; ln -s / three; "
            f"ln -s /proc/1/root{secret} four; ln -s /proc/self/root{secret} five; ln -s {tmp_path} six"
        )
    )
    paths = ("one", "two", f"three{secret}", "four", "five", "six/secret", f"../../../..{secret}")
    for path in paths:
        with pytest.raises((FileNotFoundError, PermissionError)):
            run(sandbox.read(path))
    for path in paths:
        with contextlib.suppress(OSError):
            run(sandbox.write(path, b"escaped"))
    assert secret.read_text() == "host"
    assert list(tmp_path.iterdir()) == [secret]
    # Links are not followed when files are collected, inside the working directory either.
    run(sandbox.shell("rm -rf *; mkdir d; echo 1 > d/f; ln -s d e; ln -s d/f g; ln -s /etc h"))
    assert run(sandbox.files()) == {"d/f": b"1\n"}


def test_programs_of_two_sandboxes_talk_through_a_channel(backend: BubblewrapBackend, run: Callable) -> None:
    """Their standard input and output are the two ends; standard error is output; no other descriptor is open."""
    asks = 'read -r; echo "$REPLY?"; read -r; echo "heard $REPLY" >&2; ls /proc/self/fd >&2; exit 3'
    answers = "echo ready; read -r; echo 'yes: '\"$REPLY\"; cat; echo gone >&2"

    async def talk() -> list[ExecResult]:
        one, two = [await backend.start({}, LIMITS) for _ in range(2)]
        ours, theirs = socket.socketpair()
        results = await asyncio.gather(
            one.exec(["bash", "-c", asks], channel=ours), two.exec(["bash", "-c", answers], channel=theirs)
        )
        assert ours.fileno() == theirs.fileno() == -1
        # The next program has the usual streams again.
        assert (await one.exec(["cat"], stdin=b"plain")).output == b"plain"
        await one.stop()
        await two.stop()
        with pytest.raises(SandboxError):
            ours, theirs = socket.socketpair()
            with theirs:
                await one.exec(["true"], channel=ours)
        assert ours.fileno() == -1
        return results

    asked, answered = run(talk())
    assert (asked.exit_code, asked.output) == (3, b"heard yes: ready?\n0\n1\n2\n3\n")  # 3 is the listed directory
    assert (answered.exit_code, answered.output) == (0, b"gone\n")


@pytest.mark.parametrize("environment", [{}, {"PYTHONHASHSEED": "0"}], ids=["warm", "cold"])
def test_python_modules_start_as_in_a_new_interpreter(
    sandbox: BubblewrapSandbox, run: Callable, environment: dict[str, str]
) -> None:
    run(sandbox.write("envs/__init__.py", b"mine = 1\n"))
    served = (
        "import envs, os, signal, sys\n"
        "numbers = ('SIGPIPE', 'SIGXFSZ', 'SIGINT', 'SIGTERM')\n"
        "print(__name__, envs.mine, [signal.getsignal(getattr(signal, n)) for n in numbers])\n"
        "print(sys.argv[1:], sys.path[0] == os.getcwd(), sys.stdin.read(), flush=True)\n"
        "sys.exit({})\n"
    )
    arguments = ["python3", "-m", "composer_serve_0a", "x"]
    for code, shown in (("", 0), ("4", 4), ("'no'", 1)):
        run(sandbox.write("composer_serve_0a.py", served.format(code).encode()))
        result = run(sandbox.exec(arguments, stdin=b"in", env=environment))
        lines = result.output.decode().splitlines()
        assert result.exit_code == shown and lines[1] == "['x'] True in", result
        assert lines[0].startswith("__main__ 1 [<Handlers.SIG_IGN: 1>, <Handlers.SIG_IGN: 1>, <built-in")
        assert lines[2:] == (["no"] if shown == 1 else [])
    run(sandbox.write("composer_serve_0a.py", b"1 / 0\n"))
    result = run(sandbox.exec(arguments, env=environment))
    assert result.exit_code == 1 and result.output.endswith(b"ZeroDivisionError: division by zero\n")


def test_python_is_there_with_pytest(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(
        sandbox.write(
            "test_it.py",
            b"import sys, os\nfrom main import x\ndef test_x():\n    assert x == 1\n"
            b"def test_who():\n    assert os.getuid() == 1000 and os.getpid() < 100\n"
            b"    assert sys.executable == '/opt/python/bin/python3'\n"
            b"    assert os.environ['Q'] == '1' and 'SECRET' not in os.environ\n",
        )
    )
    arguments = ["python3", "-m", "pytest", "-q", "test_it.py"]
    warm = run(sandbox.exec(arguments, env={"Q": "1"}))
    cold = run(sandbox.exec(arguments, env={"Q": "1", "PYTHONHASHSEED": "0"}))
    for result in (warm, cold):
        assert result.exit_code == 0, result.output.decode()
        assert b"2 passed" in result.output
    run(sandbox.write("main.py", b"x = 2\n"))
    failed = run(sandbox.exec(arguments, env={"Q": "1"}))
    assert failed.exit_code == 1
    assert b"assert 2 == 1" in failed.output
    assert run(sandbox.exec(["python3", "-m", "pytest", "none.py"])).exit_code == 4


def test_runs_of_pytest_share_nothing(sandbox: BubblewrapSandbox, run: Callable) -> None:
    run(
        sandbox.write(
            "test_it.py",
            b"import builtins, json\ndef test_x():\n    assert not hasattr(builtins, 'left')\n"
            b"    builtins.left = json.left = 1\n",
        )
    )
    for _ in range(2):
        assert run(sandbox.exec(["python3", "-m", "pytest", "-q", "test_it.py"])).exit_code == 0


@pytest.mark.parametrize("environment", [{}, {"PYTHONHASHSEED": "0"}])
def test_pytest_inherits_no_descriptor_of_the_supervisor(
    sandbox: BubblewrapSandbox, run: Callable, environment: dict[str, str]
) -> None:
    run(sandbox.shell("true"))
    probe = (
        b"import os\ndef test_x():\n    links = {}\n    for fd in os.listdir('/proc/self/fd'):\n"
        b"        try: links[int(fd)] = os.readlink(f'/proc/self/fd/{fd}')\n        except OSError: pass\n"
        b"    print(links)\n    for link in links.values():\n"
        b"        assert 'socket' not in link and 'cgroup' not in link and not link.endswith('/proc')\n"
        b"    assert len({link for link in links.values() if 'pipe' in link}) == 1\n"  # its output
    )
    run(sandbox.write("test_it.py", probe))
    arguments = ["python3", "-m", "pytest", "-q", "-s", "test_it.py"]
    result = run(sandbox.exec(arguments, env=environment))
    assert result.exit_code == 0, result.output.decode()


def test_a_cancelled_call_makes_the_sandbox_unusable_but_stoppable(backend: BubblewrapBackend, run: Callable) -> None:
    async def scenario() -> None:
        sandbox = await backend.start({}, LIMITS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.shell("sleep 10"), 0.2)
        with pytest.raises(SandboxError, match="cancelled"):
            await sandbox.shell("true")
        await sandbox.stop()

    run(scenario())
