"""Small repositories that do not work on a bare machine, and what a developer runs in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PYTEST = "python3 -m pytest -p no:cacheprovider"

SHOP = {
    "README.md": "# Shop\nNeeds SHOP_CURRENCY, settings.ini (by make_settings.py), and the bank's client `bankgate`.\n",
    "make_settings.py": """import sys
from pathlib import Path

Path("settings.ini").write_text(Path("settings.template").read_text().replace("@FEE@", sys.argv[1]))
""",
    "settings.template": "[shop]\nfee = @FEE@\n",
    "shop/__init__.py": "",
    "shop/settings.py": """import configparser
import os


def fee():
    \"\"\"The fee in cents.\"\"\"
    parser = configparser.ConfigParser()
    if not parser.read("settings.ini"):
        raise FileNotFoundError("settings.ini")
    return parser.getint("shop", "fee")


def currency():
    \"\"\"The currency's name.\"\"\"
    return os.environ["SHOP_CURRENCY"]
""",
    "shop/orders.py": """import bankgate

from shop.settings import currency, fee


def total(prices):
    \"\"\"The sum of prices and the fee.\"\"\"
    return sum(prices) + fee()


def receipt(prices):
    \"\"\"A line for the customer.\"\"\"
    return f"{total(prices)} {currency()}"


def pay(prices, card):
    \"\"\"Whether the bank takes the card for these prices.\"\"\"
    return bankgate.Client().charge(card, total(prices))


def cheapest(prices):
    \"\"\"The lowest price, 0 if there is none.\"\"\"
    return min(prices) if prices else 0
""",
    "shop/__main__.py": """import sys

from shop.orders import receipt

print("to pay:", receipt([int(word) for word in sys.argv[1:]]))
""",
    "tests/__init__.py": "",
    "tests/test_settings.py": """from shop import settings


def test_fee():
    assert settings.fee() == 25


def test_currency():
    assert len(settings.currency()) == 3
""",
    "tests/test_orders.py": """from shop.orders import cheapest, pay, receipt, total


def test_total():
    assert total([100, 200]) == 325


def test_receipt():
    assert receipt([100]).startswith("125 ")


def test_pay_takes_good_cards():
    assert pay([100], "4111-good") is True


def test_pay_refuses_bad_cards():
    assert pay([100], "4111-bad") is False


def test_cheapest():
    assert cheapest([3, 1, 2]) == 1
    assert cheapest([]) == 0
""",
}

BANKGATE = """class Client:
    def charge(self, card, cents):
        return cents > 0 and not card.endswith("bad")
"""


def command(line: str, *lines: str, why: str = "it works", **more: Any) -> dict[str, Any]:
    return {"command": line, "lines": list(lines), "why": why, **more}


SHOP_COMMANDS = [
    command(f"{PYTEST} -q", "7 passed"),
    command(f"{PYTEST} -v tests/test_settings.py", "test_fee PASSED", "test_currency PASSED"),
    command(f"{PYTEST} -v tests/test_orders.py", "test_pay_takes_good_cards PASSED", "5 passed"),
    command("python3 -m shop 100 200", "to pay: 325 EUR"),
    command("python3 -m shop", "to pay: 25"),
    command(f"{PYTEST} -q -k receipt", "1 passed, 6 deselected"),
    command(f"{PYTEST} -q -k pay", "2 passed, 5 deselected"),
    command(f"{PYTEST} -q tests/test_orders.py::test_total", "1 passed"),
    command(f"{PYTEST} -q tests/test_settings.py::test_fee", pattern="^1 passed"),
    command("python3 -c 'from shop.orders import total; print(total([1000]) * 2)'", "2050"),
]

CALC = {
    "Makefile": "calc: calc.c\n\t$(CC) -O1 -o calc calc.c\n\ncheck: calc\n\tsh check.sh\n\n.PHONY: check\n",
    "config.h.in": "#define BASE @BASE@\n",
    "calc.c": """#include <stdio.h>
#include <stdlib.h>
#include "config.h"

int main(int argc, char **argv) {
    long sum = 0;
    for (int i = 1; i < argc; i++) sum += strtol(argv[i], NULL, BASE);
    printf("sum: %ld\\n", sum);
    return 0;
}
""",
    "check.sh": 'set -e\n[ "$(./calc 1 2)" = "sum: 3" ]\n[ "$(./calc 10 20)" = "sum: 30" ]\necho "2 checks hold"\n',
}

CALC_COMMANDS = [
    command("make -s check", "2 checks hold"),
    command("make -s -B && ./calc 4 5", "sum: 9"),
    command("make -s -B && ./calc 40 50 60", "sum: 150"),
]


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return folder
