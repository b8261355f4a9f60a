"""What the actors decide by themselves."""

import pytest

from composer.compose import apply, compose
from composer.workers import has_prompt


@pytest.mark.parametrize(("share", "least", "most"), [(0, 0, 0), (0.25, 200, 300), (1, 1000, 1000)])
def test_so_many_groups_have_no_prompt(share: float, least: int, most: int) -> None:
    config = apply(compose(), [f"env.prompt_dropout={share}"])
    without = [name for name in map(str, range(1000)) if not has_prompt(config, name)]
    assert least <= len(without) <= most
    assert without == [name for name in map(str, range(1000)) if not has_prompt(config, name)]
    other = apply(config, ["seed=1"])
    assert share != 0.25 or without != [name for name in map(str, range(1000)) if not has_prompt(other, name)]
