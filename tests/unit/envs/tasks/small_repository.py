"""A repository with tests, small enough to know all about it."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "README.md": "# Shop\n",
    "shop/__init__.py": "from shop.cart import Cart\nfrom shop.money import total\n",
    "shop/money.py": '''"""Sums of money."""


def total(prices, fee=2):
    """The sum and a fee."""
    # Never negative.
    return sum(prices) + fee


def cents(amount):
    return round(amount * 100)


def unused(a):
    return a + 1


def _hidden(a):
    return a + 1
''',
    "shop/cart.py": '''from shop.money import total


class Cart:
    """What somebody buys."""

    limit = 3

    def __init__(self):
        self.prices = []

    def add(self, price):
        if len(self.prices) >= self.limit:
            raise ValueError("the cart is full")
        self.prices.append(price)

    def sum(self):
        return total(self.prices)
''',
    "tests/__init__.py": "",
    "tests/data.txt": "5",
    "tests/test_money.py": """from pathlib import Path

import pytest

from shop import money as m
from shop.money import total as of


def expect(prices, expected):
    assert of(prices) == expected


def test_total():
    expect([1, 2], 5)


@pytest.mark.parametrize("amount", [1, 2])
def test_cents(amount):
    assert m.cents(amount) == amount * 100


def test_data():
    assert (Path(__file__).parent / "data.txt").read_text() == "5"
""",
    "tests/test_cart.py": """import pytest

from shop import Cart


class TestCart:
    @pytest.fixture
    def cart(self):
        return Cart()

    def test_add(self, cart):
        cart.add(1)
        assert cart.prices == [1]

    def test_sum(self, cart):
        cart.add(4)
        assert cart.sum() == 6

    def test_full(self, cart):
        for price in (1, 2, 3):
            cart.add(price)
        with pytest.raises(ValueError):
            cart.add(4)
""",
}


def write_repository(folder: Path, changes: dict[str, str] | None = None) -> Path:
    """Write it, with what no taskset should read beside it."""
    for path, content in {**FILES, ".git/HEAD": "x", "shop/__pycache__/a.pyc": "x", **(changes or {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder
