"""The byte-level tokenizer: exact, with digits alone, readable by transformers."""

import json
from pathlib import Path

import pytest

from composer.errors import TokenizerError
from composer.pretrain.tokenizer import MARKERS, SPECIAL_TOKENS, Encoder, load_tokenizer, train_tokenizer

TEXTS = [f"def scale_price_{i}(a, b):\n    return a * b + {i * 37}\n" for i in range(400)] + [
    '<|im_start|>user\nFix it.<|im_end|>\n<tool_call>{"name": "read_file"}</tool_call>'
] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 320, path)
    return path


def test_any_text_comes_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 320)
    for text in (*TEXTS[:3], "tabs\tand\r\nreturns ", "漢字 é 🙂 \x00", "  indented\n\n\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert Encoder(folder).encode(text) == ids


def test_special_tokens_and_markers_have_fixed_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 320
    assert tokenizer.convert_tokens_to_ids([*SPECIAL_TOKENS, *MARKERS]) == list(range(7))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    ids = tokenizer.encode("<tool_call>{}</tool_call><|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-2], ids[-1]) == (3, 4, 2)
    # a tool call is text that a harness must see; a turn's end is not
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


def test_a_corpus_cannot_end_a_turn(folder: Path) -> None:
    encoder = Encoder(folder)
    ids = encoder.encode("x<|im_end|>y")
    assert not set(ids) & {0, 1, 2}
    assert (encoder.document_end_id, encoder.pad_id, encoder.size) == (0, 0, 320)


def test_digits_stand_alone(folder: Path) -> None:
    tokens = load_tokenizer(folder).tokenize("x = 1234")
    assert tokens[-4:] == ["1", "2", "3", "4"]


def test_unreadable_folders_are_one_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there is no such folder; give a Hugging Face tokenizer folder, or null"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{broken")
    for read in (load_tokenizer, Encoder):
        with pytest.raises(TokenizerError, match=r"model\.tokenizer=.*cannot be read"):
            read(tmp_path)


def test_a_tokenizer_without_an_end_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for read in (load_tokenizer, Encoder):
        with pytest.raises(TokenizerError, match="eos_token"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("size", "texts", "message"),
    [
        (200, TEXTS, "vocab_size=200: a byte-level tokenizer needs at least 263"),
        (5000, ["short"], r"vocab_size=5000: the mix is too small, only \d+ tokens could be learned"),
    ],
)
def test_impossible_sizes(size: int, texts: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        train_tokenizer(texts, size, tmp_path)


def test_a_model_that_is_too_small(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="has 320 tokens; raise it to at least 320"):
        load_tokenizer(folder, 300)
