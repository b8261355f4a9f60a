"""What is read out of an archive, and what is refused; errors as shells and programs say them."""

from __future__ import annotations

import errno
import io
import tarfile

import pytest

from envs.sandbox.docker.container import Settings
from envs.sandbox.docker.files import archive, collected, errno_of, error_of
from envs.sandbox.docker.shell import quoted
from envs.sandbox.realism.profile import Profile


def packed(*entries: tuple[str, bytes, bytes, str]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, type, content, linkname in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = type, linkname, len(content)
            tar.addfile(info, io.BytesIO(content))
    buffer.seek(0)
    return buffer


FILES = (
    ("./", tarfile.DIRTYPE, b"", ""),
    ("./a", tarfile.REGTYPE, b"12", ""),
    ("./d/link", tarfile.SYMTYPE, b"", "/etc/passwd"),
    ("./d/hard", tarfile.LNKTYPE, b"", "./a"),
    ("./d/pipe", tarfile.FIFOTYPE, b"", ""),
    ("./d/na\udcffme", tarfile.REGTYPE, b"", ""),
)


def test_regular_files_are_taken_and_nothing_else() -> None:
    assert collected(packed(*FILES), "/w", 100) == {"a": b"12", "d/hard": b"12", "d/na\udcffme": b""}


def test_names_and_contents_are_bounded() -> None:
    # "a" 1 + 2, "d/hard" 6 + 2, "d/na?me" 7: 18 bytes.
    assert len(collected(packed(*FILES), "/w", 18)) == 3
    for most in (17, 2, 0):
        with pytest.raises(OSError, match="large") as error:
            collected(packed(*FILES), "/w", most)
        assert error.value.errno == errno.EFBIG


def test_a_path_that_cannot_be_written_again_is_refused() -> None:
    # "/w/" and the NUL take 4 of Linux's 4096 bytes.
    assert len(collected(packed(("./" + "x" * 4092, tarfile.REGTYPE, b"", "")), "/w", 2**20)) == 1
    with pytest.raises(OSError, match="large"):
        collected(packed(("./" + "x" * 4093, tarfile.REGTYPE, b"", "")), "/w", 2**20)


def test_an_archive_that_lies_about_its_sizes_is_refused_before_it_is_believed() -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**40
    with pytest.raises(OSError, match="large"):
        collected(io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(2**22)), "/w", 100)


@pytest.mark.parametrize("data", [b"", b"nonsense" * 100, packed(*FILES).getvalue()[:1100]])
def test_what_is_no_archive_is_no_archive(data: bytes) -> None:
    with pytest.raises(ValueError, match="no archive of /w"):
        collected(io.BytesIO(data), "/w", 100)


def test_files_are_packed_with_their_folders_inside_the_working_directory() -> None:
    file, size = archive({"a/b/c": b"1", "/etc/x": b"2", "../up": b"3"}, "/home/dev/project")
    assert len(file.getvalue()) == size  # type: ignore[attr-defined]
    with tarfile.open(fileobj=file) as tar:
        found = {info.name: (info.isdir(), f"{info.mode:o}") for info in tar}
    assert found == {
        "home/dev/project": (True, "755"),
        "home/dev/project/a": (True, "755"),
        "home/dev/project/a/b": (True, "755"),
        "home/dev/project/a/b/c": (False, "644"),
        "etc/x": (False, "644"),
        "home/dev/up": (False, "644"),
    }


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (b"sh: 1: cannot open /x: No such file\n", errno.ENOENT),
        (b"bash: line 3: /x: No such file or directory\n", errno.ENOENT),
        (b"sh: can't open '/x': Permission denied\n", errno.EACCES),
        (b"sh: 9: cannot create /etc/x: Read-only file system\n", errno.EROFS),
        (b"head: error writing 'standard output': No space left on device\n", errno.ENOSPC),
        (b"mkdir: cannot create directory 'a: b': Not a directory\n", errno.ENOTDIR),
        (b"sh: x: Symbolic link loop", errno.ELOOP),
        (b"something else", 0),
        (b"", 0),
    ],
)
def test_errors_are_known_by_their_last_words(said: bytes, number: int) -> None:
    assert errno_of(said) == number


def test_exit_codes_say_what_is_in_the_way() -> None:
    assert isinstance(error_of(121, b"", "p"), IsADirectoryError)
    assert isinstance(error_of(122, b"", "p"), PermissionError)
    assert error_of(153, b"", "p").errno == errno.EFBIG
    assert error_of(1, b"", "p").errno == errno.EIO


def test_a_word_stays_one_word() -> None:
    assert quoted("it's") == b"'it'\\''s'"
    assert quoted("\udcff") == b"'\xff'"


@pytest.mark.parametrize(
    ("workdir", "sizes"),
    [
        ("/home/dev/project", {"/home/dev": 655360, "/tmp": 262144, "/dev/shm": 131072}),
        ("/home", {"/home": 655360, "/tmp": 262144, "/dev/shm": 131072}),
        ("/srv/x", {"/srv/x": 524288, "/home/dev": 131072, "/tmp": 262144, "/dev/shm": 131072}),
    ],
)
def test_the_places_add_up_to_the_disk(workdir: str, sizes: dict[str, int]) -> None:
    settings = Settings(workdir, Profile())
    assert settings.places(2**20) == sizes
    assert sum(settings.places(10**7).values()) <= 10**7
    assert "/dev/shm" not in settings.kept_places and set(settings.kept_places) < set(sizes)
