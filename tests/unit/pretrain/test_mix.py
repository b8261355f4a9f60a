"""The mix: shares, held-out documents, resuming, and messages for what is missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from composer.compose import compose
from composer.errors import CorpusError
from composer.pretrain.mix import Codebase, Mix, look_at_sources, sample_text
from composer.pretrain.sources import docstrings, held_out, open_source
from composer.schema import MixConfig, SourceConfig, SourceKind, Stage

STDLIB = SourceConfig(kind=SourceKind.stdlib_code)
KEY = "mix.phases.base.sources"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty files of 1 to 60 numbered lines."""
    root = tmp_path / "parent" / "texts"
    (root / "sub").mkdir(parents=True)
    for i in range(60):
        (root / "sub" / f"{i:02d}.txt").write_text("".join(f"file {i} line {n}\n" for n in range(i + 1)))
    return root


def files(folder: Path, weight: float = 1.0) -> SourceConfig:
    return SourceConfig(kind=SourceKind.files, path=str(folder), pattern="**/*.txt", weight=weight)


def test_pieces_of_a_file_join_to_the_file(folder: Path) -> None:
    documents = open_source("s", files(folder), piece_bytes=50)
    assert len(documents) == 60
    for document in documents:
        pieces = [document.read(n) for n in range(document.num_pieces)]
        assert "".join(p.text for p in pieces) == Path(document.origin).read_text()
        assert all(p.text.endswith("\n") for p in pieces if p.text)
        assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_shares_of_tokens_follow_the_weights(folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": "x" * 40}) + "\n" for _ in range(30)))
    sources = {
        "files": files(folder, weight=3),
        "lines": SourceConfig(kind=SourceKind.jsonl, path=str(lines), text_field="body", weight=1),
    }
    mix = Mix(KEY, sources, Codebase(MixConfig(name="m")), seq_len=16, seed=0)
    texts = list(sample_text(mix, 20_000))
    assert mix.tokens()["files"] / mix.tokens()["lines"] == pytest.approx(3, rel=0.02)
    assert mix.epochs()["lines"] > 2
    assert sum(len(t) for t in texts) == sum(mix.tokens().values())


def test_the_order_comes_from_the_seed_and_resumes(folder: Path) -> None:
    def mix(seed: int) -> Mix:
        return Mix(KEY, {"a": files(folder), "b": STDLIB}, Codebase(MixConfig(name="m")), seq_len=16, seed=seed)

    def texts(stream: Mix, count: int) -> list[str]:
        found = []
        for _ in range(count):
            name, piece = stream.next()
            stream.count(name, len(piece.text))
            found.append(piece.text)
        return found

    whole = texts(mix(1), 300)
    assert texts(mix(1), 300) == whole
    assert texts(mix(2), 300) != whole
    first = mix(1)
    assert texts(first, 170) == whole[:170]
    second = mix(1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert texts(second, 130) == whole[170:]


def test_an_epoch_reads_every_piece_once(folder: Path) -> None:
    codebase = MixConfig(name="m", codebase=files(folder), codebase_share=0.2)
    mix = Mix(KEY, {"a": files(folder)}, Codebase(codebase, 16), seq_len=16, seed=0)
    count = sum(bool(document.read(number).text) for document, number in mix._places["a"])
    epochs = [[mix.next()[1].text for _ in range(count)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert mix.epochs() == {"a": 2.0}


def test_the_codebase_is_never_read(folder: Path) -> None:
    config = MixConfig(name="m", codebase=files(folder), codebase_share=0.2)
    codebase = Codebase(config)
    assert 5 <= len(codebase.documents) <= 20
    secret = {line for p in codebase.pieces() for line in p.text.splitlines()}
    again = [p.text for p in Codebase(config).pieces()]
    assert again == [p.text for p in codebase.pieces()]
    # the same folder from its parent, under other names, is the same files
    mix = Mix(KEY, {"a": files(folder.parent)}, codebase, seq_len=16, seed=0)
    seen = {line for _ in range(2 * len(mix._places["a"])) for line in mix.next()[1].text.splitlines()}
    assert seen and not seen & secret


def test_the_prose_of_a_held_out_module_is_held_out_too() -> None:
    codebase = Codebase(MixConfig(name="m", codebase_share=0.3))
    held = {d.name for d in codebase.documents}
    mix = Mix(KEY, {"p": SourceConfig(kind=SourceKind.stdlib_prose)}, codebase, seq_len=64, seed=0)
    read = {d.name.split(":")[0] for d, _ in mix._places["p"]}
    assert read and not read & held
    assert all(mix.next()[1].text.strip() for _ in range(30))


def test_long_texts_are_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    text = "".join(f"line {i}\n" for i in range(1000)) + "the end"
    path.write_text(json.dumps({"text": text}))
    mix = Mix(KEY, {"x": SourceConfig(kind=SourceKind.jsonl, path=str(path))}, Codebase(MixConfig(name="m")), 16, 0)
    pieces = []
    while mix.epochs()["x"] < 1:
        pieces.append(mix.next()[1])
    assert "".join(p.text for p in pieces) == text
    assert max(len(p.text) for p in pieces) < 2 * 16 * 4 + 10
    assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_held_out_depends_on_the_name_alone() -> None:
    names = [f"module_{i}.py" for i in range(4000)]
    chosen = {n for n in names if held_out(n, 0.1)}
    assert len(chosen) == pytest.approx(400, abs=60)
    assert chosen <= {n for n in names if held_out(n, 0.2)}
    assert not held_out("asyncio/events.py", 0.1)  # a value that must not change between versions


def test_docstrings_by_hand() -> None:
    source = '"""About shapes."""\nclass Box:\n    """A box."""\n    def size(self):\n        "Its size."\n'
    assert docstrings(source) == "About shapes.\n\nBox\n\nA box.\n\nsize\n\nIts size.\n"
    assert docstrings("def broken(:\n") == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            SourceConfig(kind=SourceKind.files, path="/nowhere/at/all"),
            r"mix\.phases\.base\.sources\.x\.path='/nowhere/at/all' is not there: correct mix.* names a folder of",
        ),
        (SourceConfig(kind=SourceKind.jsonl), r"sources\.x\.path=None: give a file of JSON lines"),
        (
            SourceConfig(kind=SourceKind.files, path="/proc/self/fd", pattern="*.nothing"),
            r"sources\.x\.path=.*no files with content match pattern='\*\.nothing'; correct path or pattern",
        ),
        (SourceConfig(kind=SourceKind.sessions), r"sources\.x\.kind='sessions': only phases of kind sft have sessions"),
    ],
    ids=["missing", "not given", "empty", "sessions"],
)
def test_what_is_missing_is_one_plain_sentence(source: SourceConfig, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        Mix(KEY, {"x": source}, Codebase(MixConfig(name="m")), seq_len=16, seed=0)


def jsonl(path: Path, content: bytes) -> SourceConfig:
    path.write_bytes(content)
    return SourceConfig(kind=SourceKind.jsonl, path=str(path))


@pytest.mark.parametrize(
    "line",
    [b'{"texts": "typo"}', b'{"text": 3}', b'{"text": null}', b"[1]", b"3", b"{", b"\x7fELF\0\xff", b"[" * 100_000],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: bytes) -> None:
    first, second = open_source("s", jsonl(tmp_path / "d.jsonl", b'\n{"text": "fine"}\r\n  \n' + line), 64)
    assert first.read(0).text == "fine"
    with pytest.raises(CorpusError, match="line 4 is not a JSON object with the key 'text'"):
        second.read(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no lines"),
        (b"\n  \n", "holds no lines"),
        (b'{"body": "x"}\n', r"line 1 is not a JSON object.*correct the line or s\.text_field"),
        ('{"text": "x"}\n'.encode("utf-16"), "line 1 is not a JSON object"),
    ],
    ids=["empty", "blank", "another key", "UTF-16"],
)
def test_what_is_no_file_of_json_lines_is_refused_when_it_is_opened(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        open_source("s", jsonl(tmp_path / "d.jsonl", content), 64)


def test_half_a_surrogate_pair_is_no_reason_to_stop(tmp_path: Path) -> None:
    [document] = open_source("s", jsonl(tmp_path / "d.jsonl", b'{"text": "a\\ud800b"}'), 64)
    assert document.read(0).text == "a?b"


NO_TEXT = {
    "a.so": b"\x7fELF\x02\x01\x01" + bytes(50),
    "b.png": b"\x89PNG\r\n\x1a\n" + bytes(8),
    "c.gz": b"\x1f\x8b\x08plain letters",
    "d.txt": "Text.".encode("utf-16"),
    "e.txt": b"text with one \0 in it",
}


def test_files_that_are_no_text_are_left_out_and_counted(folder: Path) -> None:
    for name, content in NO_TEXT.items():
        (folder / name).write_bytes(content)
    (folder / "long.txt").write_text("x" + "ä" * 10_000)  # a character is cut where the look at the beginning ends
    warnings: list[str] = []
    documents = open_source("s", replace(files(folder), pattern="**/*"), 50, warnings.append)
    assert len(documents) == 61 and not {d.name for d in documents} & NO_TEXT.keys()
    assert warnings == ["s.pattern='**/*': 5 of 66 files are binary or not in UTF-8 and are left out, such as a.so"]


def test_a_folder_without_any_text_is_refused(tmp_path: Path) -> None:
    for name, content in NO_TEXT.items():
        (tmp_path / name).write_bytes(content)
    source = SourceConfig(kind=SourceKind.files, path=str(tmp_path))
    with pytest.raises(CorpusError, match=r"all 5 files are binary or not in UTF-8, such as a\.so.*correct path or"):
        open_source("s", source, 50)


@pytest.mark.parametrize(
    ("kind", "message"), [(SourceKind.files, "is not a folder of text"), (SourceKind.jsonl, "is not a file of JSON")]
)
def test_a_file_is_no_folder_and_the_other_way_round(tmp_path: Path, kind: SourceKind, message: str) -> None:
    path = tmp_path
    if kind is SourceKind.files:
        path = tmp_path / "file"
        path.touch()
    with pytest.raises(CorpusError, match=message):
        open_source("s", SourceConfig(kind=kind, path=str(path)), 50)


def test_a_source_that_goes_away_while_it_is_read(folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "d.jsonl"
    documents = [*open_source("s", files(folder), 50), *open_source("t", jsonl(lines, b'{"text": "x"}'), 50)]
    for path in (folder / "sub" / "00.txt", lines):
        path.unlink()
    for document in (documents[0], documents[-1]):
        with pytest.raises(
            CorpusError, match="was there at the start and cannot be read now .*give it back and resume"
        ):
            document.read(0)


def test_every_source_is_looked_at_before_a_run(folder: Path) -> None:
    (folder / "a.so").write_bytes(NO_TEXT["a.so"])
    config = compose()
    phase = config.mix.phases["pretrain"]
    sources = {"mine": replace(files(folder), pattern="**/*"), "code": STDLIB}
    phases = config.mix.phases | {"pretrain": replace(phase, sources=sources)}
    config = replace(config, mix=replace(config.mix, phases=phases))
    assert [w.partition(":")[0] for w in look_at_sources(config)] == ["mix.phases.pretrain.sources.mine.pattern='**/*'"]
    missing = replace(config, mix=replace(config.mix, codebase=files(folder / "nowhere")))
    with pytest.raises(CorpusError, match=r"mix\.codebase\.path='.*' is not there"):
        look_at_sources(missing)
    assert look_at_sources(replace(missing, stages=[Stage.rl])) == []


def test_files_without_text_end_with_a_message(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("\n\n")
    mix = Mix(KEY, {"x": files(tmp_path)}, Codebase(MixConfig(name="m")), seq_len=16, seed=0)
    with pytest.raises(CorpusError, match=r"mix\.phases\.base\.sources\.x: holds no text"):
        mix.next()
