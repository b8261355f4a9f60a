"""Byte-level BPE: trained on the mix where none is given, and read back with plain errors.

Every byte is a token, so any text can be written and read back exactly; digits stand alone, so that numbers are spelled
the same way wherever they occur.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from composer.errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Ids 0, 1, 2: the end of a document and padding; a turn's start; a turn's end, which ends a generation."""
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Ids 3 to 6: single tokens that are text all the same, so decoding shows them."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Learn merges from `texts` and save a folder that `transformers.AutoTokenizer` loads.

    Raises:
        TokenizerError: `vocab_size` has no room for the bytes and special tokens, or the texts are too few to fill it.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fixed = len(alphabet) + len(SPECIAL_TOKENS) + len(MARKERS)
    if vocab_size < fixed:
        raise TokenizerError(f"model.vocab_size={vocab_size}: a byte-level tokenizer needs at least {fixed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *MARKERS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise TokenizerError(
            f"model.vocab_size={vocab_size}: the mix is too small, only "
            f"{tokenizer.get_vocab_size()} tokens could be learned; lower it or add sources"
        )
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": TURN_END,
                "pad_token": END_OF_TEXT,
                "additional_special_tokens": [TURN_START],
                "clean_up_tokenization_spaces": False,
                "model_max_length": 2**30,
            },
            indent=1,
        )
    )


class Encoder:
    """A tokenizer folder for reading corpora: quick to load (no transformers), and blind to special tokens in texts."""

    def __init__(self, folder: Path) -> None:
        """Read the folder.

        Raises:
            TokenizerError: it cannot be read, or has no end token.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
        except Exception as error:  # the tokenizers library raises plain Exception
            raise TokenizerError(
                f"model.tokenizer={str(folder)!r}: cannot be read ({error}); give a Hugging Face "
                "tokenizer folder, or null to train one on the mix"
            ) from error
        self._tokenizer.encode_special_tokens = True
        end, pad = (self._id(config.get(key)) for key in ("eos_token", "pad_token"))
        if end is None:
            raise TokenizerError(
                f"model.tokenizer={str(folder)!r}: its tokenizer_config.json names no eos_token; add it"
            )
        self.pad_id = end if pad is None else pad
        """What fills rows up."""
        document_end = self._tokenizer.token_to_id(END_OF_TEXT)
        self.document_end_id = end if document_end is None else document_end
        """What ends a document of the corpus."""

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; a special token's name in it is spelled out in ordinary tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _id(self, token: str | dict[str, str] | None) -> int | None:
        content = token["content"] if isinstance(token, dict) else token
        return None if content is None else self._tokenizer.token_to_id(content)


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """Read a tokenizer folder.

    Args:
        folder: with `tokenizer.json` and `tokenizer_config.json`.
        vocab_size: of the model; ids must stay below it.

    Raises:
        TokenizerError: it cannot be read, is not a fast tokenizer, has no end token, or has too many tokens.
    """
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise TokenizerError(
            f"model.tokenizer={str(folder)!r}: there is no such folder; give a Hugging Face tokenizer "
            "folder, or null to train one on the mix"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise TokenizerError(
            f"model.tokenizer={str(folder)!r}: cannot be read ({str(error).splitlines()[0]}); give a "
            "Hugging Face tokenizer folder, or null to train one on the mix"
        ) from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise TokenizerError(f"model.tokenizer={str(folder)!r}: needs a tokenizer.json and an eos_token")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise TokenizerError(
            f"model.vocab_size={vocab_size}: the tokenizer in {folder} has {len(tokenizer)} tokens; "
            f"raise it to at least {len(tokenizer)}"
        )
    return tokenizer
