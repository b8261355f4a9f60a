from decimal import Decimal

from composer_solution import call

ENTRIES = [
    {"amount": "10.005"},
    {"amount": "0.01", "currency": "EUR"},
    {"amount": "-3", "currency": "USD"},
    {"amount": "2.675", "currency": "USD"},
]


def balance(entries, currency):
    return Decimal(str(call("ledger.balance", entries, currency)))


def test_sums_by_currency():
    assert balance(ENTRIES, "EUR") == Decimal("10.02")
    assert balance(ENTRIES, "USD") == Decimal("-0.32")


def test_half_goes_to_even():
    assert balance([{"amount": "0.125"}], "EUR") == Decimal("0.12")
    assert balance([{"amount": "0.135"}], "EUR") == Decimal("0.14")


def test_nothing_is_zero():
    assert balance([], "CHF") == 0


def test_what_was_there_still_works():
    assert call("ledger.currencies", ENTRIES) == ["EUR", "USD"]
