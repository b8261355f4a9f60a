"""Entries of a ledger: dictionaries with `amount` (a decimal number as text) and, mostly, `currency`."""


def currencies(entries: list[dict[str, str]]) -> list[str]:
    """All currencies that occur, sorted."""
    return sorted({entry.get("currency", "EUR") for entry in entries})
