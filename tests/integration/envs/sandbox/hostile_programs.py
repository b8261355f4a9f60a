"""Programs that try to use up, to break or to leave a sandbox, whatever its backend: command lines for bash.

None needs more than bash, coreutils and python3. What each should not bring about: that the sandbox's owner waits
longer than its deadline, that anything outside the sandbox notices, or that something of it is left when the sandbox
is stopped. A sandbox may be lost by one; then it has to be said so.
"""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

DEADLINE_S = 1.5
"""For one program; most do not end by themselves."""


@dataclass(frozen=True)
class HostileProgram:
    """One of them, with its numbers filled in."""

    name: str
    command: str


_SHELL = {
    "fork bomb": "bomb() {{ bomb | bomb & }}; bomb; sleep 9",
    "fork bomb that ignores signals": "trap '' TERM INT HUP QUIT; f() {{ f & f & sleep 60; }}; f",
    "children without end": "while :; do sleep {n} & done",
    "disk": "for i in $(seq {n}); do head -c {m}M /dev/zero >~/fill.$i; head -c {m}M /dev/zero >/tmp/fill.$i; done",
    "shared memory": "i=0; while head -c {m}M /dev/zero >/dev/shm/f$i; do i=$((i+1)); done; sleep 1",
    "holes": "truncate -s {m}G hole; cat hole hole hole >/dev/null; cp --sparse=never hole copy",
    "flood": "yes {word}",
    "flood of errors": "yes {word} >&2",
    "endless line": "tr '\\0' x </dev/zero",
    "binary flood": "cat /dev/urandom",
    "flood in the background": "yes {word} & yes {word} >&2 & disown -a; exit",
    "kill everything": "kill -9 -1; kill -9 1 2 3; kill -9 $PPID",
    "kill everything, again and again": "(setsid bash -c 'while :; do kill -9 -1; done' &); sleep {s}",
    "every signal to everyone": "for s in $(seq 64); do kill -$s -1; done",
    "stop everything": "kill -STOP -1; kill -STOP 1; kill -STOP $PPID; kill -STOP $$",
    "stop and go on": "(setsid bash -c 'while :; do kill -STOP $PPID -1; kill -CONT -1; done' &); sleep {s}",
    "stop oneself": "kill -STOP $$",
    "closed streams": "exec <&- >&- 2>&-; sleep {n}",
    "a daemon without streams": "(setsid sleep {n}000 </dev/null >&- 2>&- &); (setsid setsid sleep {n}001 &)",
    "a daemon that keeps the streams": "(setsid sleep {n}000 &); setsid sleep {n}001 & disown; exit {s}",
    "daemons": "for i in $(seq {n}); do (setsid bash -c 'trap \"\" TERM HUP; sleep 600' &); done",
    "nothing ends it": "trap '' $(seq 64); while :; do :; done",
    "another program in its place": "exec cat",
    "a shell that ends": "exit {n}",
    "no shell functions any more": "printf() {{ kill -9 $$; }}; read() {{ :; }}; eval() {{ :; }}; exec 1>&- 2>&-",
    "descriptors of the shell": "exec 197>&- 198<&- 199>&- 7>&- 8<&- 9>&-; echo x >&199; cat <&198",
    "long names": "n=$(printf 'x%.0s' $(seq 255)); for i in $(seq {n}); do mkdir $n && cd $n || break; done",
    "deep folders": "while mkdir d && cd d; do :; done",
    "links that go round": "ln -s b a; ln -s a b; ln -s . here; ls -R here/here/here; cat a; find -L . -name x",
    "links to everywhere": "for t in / /proc/1/root /proc/self/root /dev/zero /proc/kcore; do ln -s $t l$RANDOM; done",
    "pipes": "for i in $(seq {n}); do mkfifo p$i; (cat p$i >p$i &); done; cat p1",
    "empty files": "for i in $(seq {n}00); do : >/tmp/e$i; done; while :; do : >/tmp/$RANDOM$RANDOM; done",
    "odd names": "touch -- $'a\\nb' $'\\x01' '-rf' '*' ' ' $'\\xff\\xfe' '$(id)'; chmod 000 -- *",
    "no home any more": "rm -rf ~ /tmp/* / 2>/dev/null; mkdir -p ~/x; cd ~/x; rmdir ~/x",
    "closed folders": "mkdir -p a/b/c; chmod 000 a; chmod 000 ~ /tmp; chmod 000 .",
    "pokes": "for f in /proc/sysrq-trigger /proc/sys/kernel/panic /proc/sys/kernel/core_pattern /proc/1/mem "
    "/proc/1/oom_score_adj /sys/fs/cgroup/cgroup.procs /dev/kmsg /proc/self/uid_map; do echo {n} >$f; cat $f; done "
    "2>&1 | head -c 9999",
    "everything in /proc": "timeout 1 cat /proc/* /proc/[0-9]*/* /proc/sys/*/* 2>/dev/null | head -c 999999",
    "oom score": "for p in /proc/[0-9]*; do echo 1000 >$p/oom_score_adj; echo -1000 >/proc/self/oom_score_adj; done",
    "namespaces": "unshare -Ur true; unshare -m true; unshare -p -f true; mount -t tmpfs x /tmp; mknod /tmp/d b 8 0",
    "limits": "ulimit -n {n}; ulimit -u 1; ulimit -v {n}000; ulimit -f 0; ulimit -c unlimited; echo x >f",
    "clock": "date -s 1990-01-01; touch -d 1901-01-01 f; touch -d 2400-01-01 f; hostname x",
    "a great many words": "echo $(seq {n}0000); /usr/bin/true $(seq {n}00000)",
    "a huge variable": "export X=$(head -c {m}00000 /dev/zero | tr '\\0' x); /usr/bin/true; env | wc -c",
    "a file that changes while it is read": "(setsid bash -c "
    "'while :; do rm -f it; mkfifo it; rm -f it; echo >it; done' &)",
    "busy everywhere": "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done &); done; sleep {n}",
}
_PYTHON = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=({n},)).start()\n    except RuntimeError: time.sleep(0.01)",
    "memory": "x = []\nwhile True: x.append(bytearray(b'x' * {m} * 2**20))",
    "memory, slowly": "import time\nx = []\nfor _ in range(10**6): x.append(bytes(2**16)); time.sleep(0.0005)",
    "memory of many": "import os\nfor _ in range({n}): os.fork()\nx = bytearray(b'x' * {m} * 2**20)\n"
    "import time; time.sleep(9)",
    "memory without a file": "import os\nfds = []\nwhile True:\n    f = os.memfd_create('x'); fds.append(f)\n"
    "    os.write(f, bytes(2**20))",
    "descriptors": "import os\ntry:\n    while True: os.dup(1)\nexcept OSError as e: print(e)\n"
    "import time; time.sleep({s})",
    "pipes, full ones": "import os\nkeep = []\nwhile True:\n    r, w = os.pipe()\n"
    "    os.set_blocking(w, False); keep += [r, w]\n    try: os.write(w, bytes(2**16))\n    except OSError: pass",
    "sockets, full ones": "import socket\nkeep = []\nwhile True:\n    a, b = socket.socketpair(); keep += [a, b]\n"
    "    b.setblocking(False)\n    try:\n        while True: b.send(bytes(2**16))\n    except OSError: pass",
    "sockets by name": "import socket\nkeep = []\nfor i in range({n}000):\n    s = socket.socket(socket.AF_UNIX)\n"
    "    s.bind(chr(0) + 'composer%d' % i); s.listen(); keep.append(s)",
    "System V memory": "import ctypes\nc = ctypes.CDLL(None)\nn = 0\n"
    "while c.shmget(0, 2**20 * {m}, 0o1666) >= 0: n += 1\n"
    "while c.semget(0, 100, 0o1666) >= 0: n += 1\nwhile c.msgget(0, 0o1666) >= 0: n += 1\nprint(n)",
    "terminals": "import os\nkeep = []\ntry:\n    while True: keep.append(os.openpty())\nexcept OSError as e: print(e)",
    "keys": "import ctypes\nc = ctypes.CDLL(None)\nfor i in range({n}000):\n"
    "    c.syscall(248, b'user', b'k%d' % i, bytes(999), 999, -3)",
    "watches": "import ctypes\nc = ctypes.CDLL(None)\nprint([c.inotify_init() for _ in range({n}0)][-1])",
    "another process's memory": "import ctypes, os\nc = ctypes.CDLL(None)\n"
    "for p in os.listdir('/proc'):\n    if p.isdigit(): print(p, c.ptrace(16, int(p), 0, 0))",
    "system calls at random": "import ctypes, random\nc = ctypes.CDLL(None)\nrandom.seed({n})\n"
    "for _ in range(20000): c.syscall(random.randrange(450), *(random.choice([0, 1, -1, 4096]) for _ in range(6)))",
    "an end without an end": "import os, sys, time\nif os.fork(): os._exit({s})\nos.setsid()\n"
    "while True: sys.stdout.write('x'); time.sleep(0.001)",
    "stopped children": "import os, signal, time\nfor _ in range({n}):\n"
    "    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(9)",
    "zombies": "import os, time\nfor _ in range({n}):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(9)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "a crash": "import ctypes\nctypes.string_at(0)",
}


def hostile_programs(count: int, seed: int = 0) -> Iterator[HostileProgram]:
    """So many of them: all kinds in turn, in a shuffled order, with other numbers each time. The same for a seed."""
    dice = random.Random(seed)
    kinds = list(_SHELL.items())
    kinds += [(f"python: {name}", f"python3 -c {shlex.quote(code)}") for name, code in _PYTHON.items()]
    dice.shuffle(kinds)
    for name, template in itertools.islice(itertools.cycle(kinds), count):
        numbers = {"n": dice.choice([3, 17, 60]), "m": dice.choice([1, 5, 20]), "s": dice.choice([1, 2, 7])}
        yield HostileProgram(name, template.format(word="x" * dice.choice([1, 80, 5000]), **numbers))
