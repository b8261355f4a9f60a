"""Two tokenizers, one a template, trained on a few lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stand_in import small_tokenizer  # noqa: E402

TEXTS = [
    '{"name": "read_file", "arguments": {"path": "main.py"}}',
    '{"name": "edit_line", "arguments": {"path": "main.py", "line": 2, "text": "    return a * b"}}',
    "def scale_price(a, b):\n    return a - b\nscale_price fails its tests in main.py\nsystem user assistant\n",
    "Fix the repository. Tools: read_file(path), edit_line(path, line, text), finish().",
] * 20


@pytest.fixture(scope="session")
def compact_tokenizer():
    return small_tokenizer("compact", TEXTS)


@pytest.fixture(scope="session")
def hermes_tokenizer():
    return small_tokenizer("hermes", TEXTS)
