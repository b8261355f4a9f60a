"""The examples in docstrings are true."""

import doctest

import pytest

from composer.models import sizes
from composer.pretrain import packing, sources


@pytest.mark.parametrize("module", [packing, sizes, sources], ids=lambda m: m.__name__)
def test_examples(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
