"""Which files of a repository an agent gets to see, by name, by .gitignore, and by a real git index."""

from __future__ import annotations

import subprocess

import pytest

from composer.types import Split
from envs.tasks.feature_deletion import FeatureDeletionTaskset
from envs.tasks.folder import FolderTaskset
from envs.tasks.repository import Repository
from envs.tasks.scrub import read_repository, scrub_files, setup_command, tracked_paths


def left(*paths: str, **contents: bytes) -> list[str]:
    return list(scrub_files({**dict.fromkeys(paths, b"x"), **contents}))


@pytest.mark.parametrize(
    "path",
    [
        *(".git/HEAD", "vendor/x/.git/objects/ab/cd", ".git", ".hg/store/a", "lib/.svn/wc.db"),
        *(".mypy_cache/3.11/f.data.json", "a/__pycache__/f.cpython-311.pyc", "f.pyc", ".pytest_cache/v/x", ".tox/py/a"),
        *("src/.f.py.un~", ".history/f_2024.py", ".idea/shelf/f.patch", "a/.idea/shelf/f.patch", ".f.py.~undo-tree~"),
        *(".coverage", ".coverage.host.123", "src/.f.py.swp", "src/.#f.py", "#f.py#", "web/node_modules/.cache/a"),
    ],
)
def test_what_always_goes(path):
    assert left("src/f.py", path) == ["src/f.py"]


@pytest.mark.parametrize(
    "path",
    [
        *(".gitignore", ".gitattributes", ".github/workflows/ci.yml", ".coveragerc", "docs/cache/index.md"),
        *("node_modules/left-pad/index.js", "tests/data/a.orig", "notes~", "build/rules.mk", "dist/index.html", "f.py"),
        *("git/HEAD", "x.pyc.txt", ".mypy_cache_notes", "swap.swp", "a.egg-info/PKG-INFO"),
    ],
)
def test_what_stays_where_nothing_says_that_it_is_not_kept(path):
    assert left(path) == [path]


def test_a_backup_beside_its_original_goes():
    assert left("a.py", "a.py.orig", "b.py.rej", "b.py", "c.py~", "d.orig") == ["a.py", "b.py", "c.py~", "d.orig"]


def test_built_files_go_where_gitignore_names_them():
    ignore = b"# built\n/build/\n*.egg-info\n!dist\ndist\nsrc/htmlcov\n"
    paths = ["build/lib/f.py", "x/build/f", "f.egg-info/PKG-INFO", "dist/a", "htmlcov/a", "f.py"]
    assert list(scrub_files({".gitignore": ignore, **dict.fromkeys(paths, b"x")})) == [
        *(".gitignore", "dist/a", "htmlcov/a", "f.py")
    ]


def test_a_bundle_of_history_goes_whatever_its_name():
    pack = b"PACK\0\0\0\2\0\0\0\1"
    files = {"data.bin": b"# v2 git bundle\n1234 refs/heads/x\n", "cache.dat": pack, "app.bundle": b"console.log(1)"}
    assert list(scrub_files(files | {"PACK": b"PACKAGES = 1"})) == ["app.bundle", "PACK"]


def test_a_repository_goes_whatever_its_name():
    bare = [f"old/backup/{p}" for p in ("HEAD", "config", "objects/pack/x.pack", "packed-refs", "hooks/a")]
    loose = [f".git.bak/{p}" for p in ("HEAD", "objects/ab/cd", "refs/heads/main", "index")]
    others = ["refs/HEAD", "objects/a", "src/objects/b.py", "src/refs/c.py", "old/f.py"]
    assert left(*bare, *loose, *others) == others


@pytest.fixture
def repository(tmp_path):
    """A real repository: some of what looks built or left over is kept by it."""

    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, timeout=30)

    kept = ["f.py", "build/rules.mk", "tests/data/a.py.orig", "tests/data/a.py", "long/" + "n" * 70 + "/é.py"]
    kept += [f"tests/data/repo/{p}" for p in ("HEAD", "objects/ab/c", "refs/heads/x")] + ["tests/data/a.tar.gz"]
    not_kept = ["dist/f.py", "build/lib/f.py", "f.egg-info/PKG-INFO", "f.py.rej", "new.py", "g.py~"]
    not_kept += ["target/doc/f.py", "site/f.html", "src.tar.gz", "f.zip", "fix.patch"]
    for path in (*kept, *not_kept):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    git("init", "-q")
    git("add", "-f", *kept)
    return tmp_path, kept, git


@pytest.mark.parametrize("version", [2, 3, 4])
def test_what_the_index_names_stays(repository, version):
    folder, kept, git = repository
    if version == 3:
        (folder / "later.py").write_text("x")
        git("add", "-N", "later.py")  # an extended flag, which version 2 has no room for
        kept = [*kept, "later.py"]
    elif version == 4:
        git("update-index", "--index-version", "4")
    index = (folder / ".git" / "index").read_bytes()
    assert index[7] == version
    if version == 4:
        assert tracked_paths(index) is None
        return
    assert tracked_paths(index) == frozenset(kept)
    assert sorted(read_repository(folder)) == sorted([*kept, "new.py"])


@pytest.mark.parametrize("index", [b"", b"DIRC", b"DIRC\0\0\0\2\xff\xff\xff\xffxxxx", b"PACK" + bytes(100)])
def test_a_damaged_index_says_nothing(index):
    assert tracked_paths(index) is None
    assert list(scrub_files({".git/index": index, "build/a": b"x"})) == ["build/a"]


def test_the_command_says_how_much_history_stays():
    assert setup_command("none").startswith("HISTORY=none\n") and "\nset -eu\n" in setup_command()
    with pytest.raises(ValueError, match="must be one of base, none"):
        setup_command("all")


def test_tasksets_of_repositories_show_none_of_it(tmp_path):
    task = tmp_path / "tasks" / "one"
    for path, text in {
        "request.md": "fix f",
        "files/f.py": "x",
        "files/.git/HEAD": "ref",
        "files/.mypy_cache/f.json": "answer",
        "tests/test_f.py": "x",
        "tests/.git/x": "kept: hidden",
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    (task / "task.yaml").write_text("split: train\n")
    made = FolderTaskset(str(tmp_path / "tasks")).task(Split.TRAIN, 0)
    assert (list(made.files), made.setup) == (["f.py"], "")
    (task / "task.yaml").write_text("split: train\nimage: some\n")
    assert FolderTaskset(str(tmp_path / "tasks")).task(Split.TRAIN, 0).setup == setup_command()
    (task / "task.yaml").write_text("split: train\nimage: some\nscrub: false\n")
    made = FolderTaskset(str(tmp_path / "tasks")).task(Split.TRAIN, 0)
    assert (sorted(made.files), made.setup) == ([".git/HEAD", "f.py"], "")


def test_repositories_of_generated_tasks_are_scrubbed(repository):
    folder, _, git = repository
    (folder / "f.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "test_f.py").write_text("from f import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    git("add", "test_f.py")
    assert not [p for p in Repository(str(folder)).files if p.startswith(("dist", "build/lib", ".git")) or "egg" in p]
    taskset = FeatureDeletionTaskset(str(folder), image="some", history="none")
    assert taskset.task(Split.TRAIN, 0).setup == setup_command("none")
    assert FeatureDeletionTaskset(str(folder)).task(Split.TRAIN, 0).setup == ""
