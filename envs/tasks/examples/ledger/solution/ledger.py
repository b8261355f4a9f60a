"""Entries of a ledger: dictionaries with `amount` (a decimal number as text) and, mostly, `currency`."""

from decimal import ROUND_HALF_EVEN, Decimal


def currencies(entries: list[dict[str, str]]) -> list[str]:
    """All currencies that occur, sorted."""
    return sorted({entry.get("currency", "EUR") for entry in entries})


def balance(entries: list[dict[str, str]], currency: str) -> str:
    """The sum of the amounts in a currency, in whole cents."""
    amounts = [Decimal(entry["amount"]) for entry in entries if entry.get("currency", "EUR") == currency]
    return str(sum(amounts, Decimal(0)).quantize(Decimal("0.01"), ROUND_HALF_EVEN))
