"""Money, keys and the meaning of a body at the payment provider."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from payment_provider.charges import (
    LARGEST_AMOUNT_MINOR,
    ChargeRequest,
    currency_exponent,
    decimal_text,
    minor_units,
    parse_idempotency_key,
)

CURRENCIES = st.sampled_from(["EUR", "USD", "JPY", "KWD", "CLF"])


@given(minor=st.integers(1, LARGEST_AMOUNT_MINOR), currency=CURRENCIES)
def test_every_amount_survives_the_way_through_text_exactly(minor: int, currency: str) -> None:
    text = decimal_text(minor, currency)
    assert minor_units(text, currency) == minor
    assert Decimal(text) == Decimal(minor).scaleb(-currency_exponent(currency))


@given(text=st.text(max_size=12), currency=CURRENCIES)
def test_no_text_is_accepted_that_decimal_reads_differently(text: str, currency: str) -> None:
    try:
        minor = minor_units(text, currency)
    except ValueError:
        return
    assert Decimal(text) == Decimal(decimal_text(minor, currency)) > 0


@pytest.mark.parametrize(
    ("amount", "currency"),
    [
        ("0", "EUR"),
        ("0.00", "EUR"),
        ("-1", "EUR"),
        ("+1", "EUR"),
        ("1e3", "EUR"),
        ("NaN", "EUR"),
        ("Infinity", "EUR"),
        ("1,00", "EUR"),
        (".5", "EUR"),
        ("5.", "EUR"),
        ("01.00", "EUR"),
        (" 1", "EUR"),
        ("1\n", "EUR"),
        ("1\x00", "EUR"),
        ("\u0661", "EUR"),
        ("", "EUR"),
        ("1.001", "EUR"),
        ("1.0", "JPY"),
        ("1.0001", "KWD"),
        ("9" * 17, "EUR"),
        ("9" * 400, "EUR"),
    ],
)
def test_f31_amounts_outside_the_currency_are_refused(amount: str, currency: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        minor_units(amount, currency)


@pytest.mark.parametrize("code", ["XXX", "XAU", "XTS", "eur", "EU", "EURO", "ABC", "", "\u0395UR", "EUR\x00"])
def test_currencies_that_nobody_can_pay_in_are_refused(code: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        currency_exponent(code)


def test_two_spellings_of_the_same_money_are_the_same_body() -> None:
    short = ChargeRequest(order_id=1, amount="19.9", currency="EUR")
    assert short.fingerprint == ChargeRequest(order_id=1, amount="19.90", currency="EUR").fingerprint
    assert short.fingerprint != ChargeRequest(order_id=1, amount="19.91", currency="EUR").fingerprint


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("abc-1", "abc-1"),
        ('"abc-1"', "abc-1"),
        (' "abc-1" ', "abc-1"),
        (r'"a\"b\\c"', r'a"b\c'),
        ("k" * 255, "k" * 255),
        ('"' + "k" * 255 + '"', "k" * 255),
    ],
)
def test_f43_a_key_is_bare_or_a_quoted_structured_string(header: str, key: str) -> None:
    assert parse_idempotency_key([header]) == key


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ['""'],
        ["a", "a"],
        ["a b"],
        ['"a b"'],
        ['"abc'],
        ['"a"b"'],
        [r'"a\b"'],
        ["k" * 256],
        ["a\x00"],
        ["é"],
        ['"a";p=1'],
    ],
)
def test_f43_malformed_keys_are_refused(values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^is "):
        parse_idempotency_key(values)
