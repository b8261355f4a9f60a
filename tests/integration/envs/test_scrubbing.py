"""A repository whose history holds the fix in every place that git has for it, scrubbed in a real sandbox."""

from __future__ import annotations

import pytest

from composer.contract import SandboxLimits
from envs.tasks.scrub import setup_command

SECRET = "the-fix-is-42"
"""Stands in every object that must be gone."""
BUILD = r"""
set -eu
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b trunk . && git config user.name keeper
mkdir -p src && printf '__pycache__/\n*.egg-info\n' > .gitignore
echo 'def f(): raise NotImplementedError' > src/f.py && echo fixture > src/data.orig
git add -A && git commit -qm first
echo '# second' >> src/f.py && git commit -qam second
base=$(git rev-parse HEAD)
fix() { echo "# the-fix-is-42 $1" > src/f.py; git commit -qam "the-fix-is-42 $1"; }
fix loose_on_a_branch && git branch solution
git tag -a v2 -m 'the-fix-is-42' && git update-ref refs/remotes/origin/trunk HEAD
git bundle create -q fix.bundle HEAD
cp fix.bundle .git/fix.bundle
git reset -q --hard "$base" && fix only_in_the_reflog && git reset -q --hard "$base"
fix packed && git update-ref refs/pull/1/head HEAD && git reset -q --hard "$base"
git repack -qa && git prune-packed -q
echo 'the-fix-is-42 stashed' >> src/f.py && git stash -q
git notes add -m 'the-fix-is-42 in a note' HEAD
echo 'the-fix-is-42 dangling' | git hash-object -w --stdin > .git/lost-id
echo 'the-fix-is-42 staged' > src/new.py && git add src/new.py && git rm -q --cached src/new.py && rm src/new.py
git worktree add -q ./other solution
git replace "$base" solution && git replace -d "$base" >/dev/null && git replace "$base^" solution
echo "$base solution" > .git/ORIG_HEAD && git rev-parse solution > .git/FETCH_HEAD
mkdir -p .git/modules && git clone -q --bare . .git/modules/lib
mkdir -p lib && echo 'gitdir: ../.git/modules/lib' > lib/.git
git clone -q --bare --no-hardlinks . "$HOME/mirror.git"
echo 'the-fix-is-42 borrowed' | git --git-dir="$HOME/mirror.git" hash-object -w --stdin>/dev/null
echo "$HOME/mirror.git/objects" >> .git/objects/info/alternates
git clone -q --bare --no-hardlinks . ./backup && cp -R .git .git.bak && cp fix.bundle old.bin
mkdir -p notes .history .idea/shelf target site
echo solution | git pack-objects -q --revs --stdout > notes/cache.dat
git archive -o src.tar.gz solution && git archive -o src.zip solution
git format-patch -q -1 solution --stdout > a.patch
for f in src/.f.py.un~ .history/f_2024.py .idea/shelf/f.patch target/f.py site/f.html; do echo the-fix-is-42 > $f; done
printf '#!/bin/sh\ntouch "$HOME/ran"\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout
mkdir -p .mypy_cache/3.11 src/__pycache__ build/lib src/f.egg-info node_modules/.cache
for f in .mypy_cache/3.11/f.data.json src/__pycache__/f.cpython-311.pyc build/lib/f.py src/.f.py.swp src/f.py.orig \
    src/f.egg-info/PKG-INFO .coverage node_modules/.cache/x; do echo the-fix-is-42 > $f; done
printf '#!/bin/sh\ntouch "$HOME/ran"\n' > "$HOME/spy" && chmod +x "$HOME/spy" && git config core.fsmonitor "$HOME/spy"
echo "$base"
"""
"""Prints the base commit."""


@pytest.fixture(scope="module")
def scrubbed(runner, backend):
    """One sandbox with such a repository, scrubbed; a call runs a command line in it."""
    sandboxes = {}

    def make(history: str):
        if history not in sandboxes:
            sandbox = runner.run(backend.start({}, SandboxLimits()))
            built = runner.run(sandbox.exec(["sh", "-c", BUILD]))
            assert built.exit_code == 0, built.output.decode()
            seen = runner.run(
                sandbox.exec(["sh", "-c", "git log --all --format=%s; git fsck --lost-found 2>&1; rm ~/ran"])
            )
            assert seen.exit_code == 0, "the repository's config runs programs"
            assert seen.output.count(SECRET.encode()) >= 3 and b"dangling" in seen.output, "there is something to hide"
            done = runner.run(sandbox.exec(["sh", "-c", setup_command(history)]))
            assert done.exit_code == 0, done.output.decode()
            sandboxes[history] = sandbox, built.output.decode().split()[-1]
        sandbox, base = sandboxes[history]

        def run(command: str) -> str:
            done = runner.run(sandbox.exec(["sh", "-c", command], env={"BASE": base}))
            assert not done.timed_out
            return done.output.decode(errors="replace")

        return run

    return make


@pytest.mark.parametrize("history", ["base", "none"])
def test_nothing_later_than_the_base_is_left(scrubbed, history):
    run = scrubbed(history)
    subjects = ["second", "first"] if history == "base" else ["Initial commit"]
    assert run("git log --all --format=%s").split("\n")[:-1] == subjects
    assert run("git rev-list --all --objects | wc -l") == run("git rev-list HEAD --objects | wc -l")
    assert run("git fsck --full --lost-found --unreachable --no-progress 2>&1") == ""
    assert run("git reflog --all; git stash list; git tag; git notes list 2>&1; git worktree list | wc -l") == "1\n"
    assert run("git for-each-ref --format='%(refname)'") == "refs/heads/trunk\n"
    # Every object, also what no ref leads to, and every file of git's and of the project's.
    assert SECRET not in run("git cat-file --batch-all-objects --batch")
    assert run(f"grep -rl {SECRET} . ~ 2>/dev/null") == ""
    assert run("ls -d backup .git.bak old.bin notes/cache.dat src.tar.gz src.zip a.patch 2>/dev/null") == ""
    assert run("ls ~/mirror.git/objects 2>&1 | head -c 3") == "ls:"
    names = "ORIG_HEAD FETCH_HEAD hooks logs modules worktrees objects/info/alternates fix.bundle info/grafts"
    assert run(f"cd .git && ls -d {names} 2>/dev/null") == ""


def test_history_up_to_the_base_stays_the_same(scrubbed):
    run = scrubbed("base")
    assert run("git rev-parse HEAD") == run("echo $BASE")
    assert run("git show HEAD^:src/f.py") == "def f(): raise NotImplementedError\n"
    assert run("git config user.name; git config core.fsmonitor") == "keeper\n"


def test_without_history_the_state_is_the_same(scrubbed):
    run = scrubbed("none")
    assert run("git show HEAD:src/f.py") == "def f(): raise NotImplementedError\n# second\n"
    assert run("git rev-list --count HEAD") == "1\n"


def test_the_repository_works_and_its_files_are_those_of_the_base(scrubbed):
    run = scrubbed("base")
    assert (
        run("git status --porcelain --ignored; git diff HEAD") == "?? lib/\n" or run("ls -A lib; git status -s") == ""
    )
    assert run("cat src/data.orig") == "fixture\n", "what the repository keeps stays, whatever its name"
    assert (
        run("echo x >> src/f.py && git -c user.email=a@b commit -qam work && git log --format=%s | head -1") == "work\n"
    )


def test_nothing_of_the_repositorys_own_was_run(scrubbed):
    assert scrubbed("base")("ls ~/ran 2>&1 | head -c 3") == "ls:"


@pytest.mark.parametrize(
    ("build", "left"),
    [
        # Without a commit there is no base.
        ("git init -q . && echo the-fix-is-42 > x && git add x && rm x", ""),
        # No repository at all: what it keeps cannot be known, so that only backups beside their originals go.
        ("mkdir build && echo 1 > build/in && echo 1 > a && echo 2 > a.orig && echo 3 > b.orig", "a b.orig build"),
        # A detached HEAD stays one.
        (
            "git init -q . && git config user.email a@b && git config user.name a && echo 1 > a && git add a && "
            "git commit -qm one && git checkout -q --detach",
            "a",
        ),
    ],
)
def test_other_folders(runner, backend, build, left):
    async def look():
        sandbox = await backend.start({}, SandboxLimits())
        try:
            done = [
                await sandbox.exec(["sh", "-c", command]) for command in (build, setup_command(), "ls; git log --all")
            ]
            return [d.exit_code for d in done[:2]], done[2].output.decode()
        finally:
            await sandbox.stop()

    codes, listed = runner.run(look())
    assert codes == [0, 0] and listed.split("\n\n")[0].split("\n")[: len(left.split())] == left.split(), listed
    assert SECRET not in listed


def test_what_cannot_be_removed_is_said(runner, backend):
    async def look():
        sandbox = await backend.start({"pkg/a.py": b"", "pkg/__pycache__/a.pyc": b"x"}, SandboxLimits())
        try:
            await sandbox.exec(["chmod", "a-w", "pkg"])
            return await sandbox.exec(["sh", "-c", setup_command()])
        finally:
            await sandbox.stop()

    done = runner.run(look())
    assert done.exit_code == 1 and b"cannot be removed: " in done.output and b"pkg/__pycache__" in done.output
