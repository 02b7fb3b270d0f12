"""Money is a decimal string at every boundary and never a float (field report F31)."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.money import MAX_AMOUNT, exponent, format_amount, format_stored_amount, parse_amount, parse_positive_amount

CURRENCIES = st.sampled_from(["EUR", "JPY", "KWD", "CLF", "USD", "ISK"])


@st.composite
def amounts(draw: st.DrawFn) -> tuple[Decimal, str]:
    currency = draw(CURRENCIES)
    minor = draw(st.integers(0, int(MAX_AMOUNT)))
    return Decimal(minor).scaleb(-exponent(currency)), currency


@given(amounts())
def test_every_amount_survives_the_way_through_its_text(amount_and_currency: tuple[Decimal, str]) -> None:
    amount, currency = amount_and_currency
    assert parse_amount(format_amount(amount, currency), currency) == amount


@given(amounts())
def test_the_text_has_exactly_the_currencys_decimals(amount_and_currency: tuple[Decimal, str]) -> None:
    amount, currency = amount_and_currency
    _, _, fraction = format_amount(amount, currency).partition(".")
    assert len(fraction) == exponent(currency)


@given(st.lists(amounts().filter(lambda pair: pair[1] == "EUR"), max_size=20))
def test_sums_of_texts_are_exact(pairs: list[tuple[Decimal, str]]) -> None:
    texts = [format_amount(amount, "EUR") for amount, _ in pairs]
    cents = sum(int(text.replace(".", "")) for text in texts)
    assert sum((parse_amount(text, "EUR") for text in texts), Decimal(0)) == Decimal(cents) / 100


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused_with_a_value_error(text: str) -> None:
    with suppress(ValueError):
        amount = parse_amount(text, "EUR")
        assert amount.is_finite()
        assert amount >= 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 ",
        "-1",
        "+1",
        "1e3",
        "1E3",
        "NaN",
        "Infinity",
        ".5",
        "5.",
        "1,000",
        "01",
        "0x1",
        "\uff11",
        "1_0",
        "1\n",
        "1\0",
    ],
)
def test_f31_what_is_no_plain_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="decimal amount"):
        parse_amount(text, "EUR")


@pytest.mark.parametrize("value", [19.99, 19, None, True, Decimal(1), b"1", ["1"]])
def test_f31_what_is_no_string_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="decimal strings"):
        parse_amount(value, "EUR")


@pytest.mark.parametrize(("text", "currency"), [("1.999", "EUR"), ("1.0", "JPY"), ("1.0001", "KWD")])
def test_f31_more_decimals_than_the_currency_has_are_refused(text: str, currency: str) -> None:
    with pytest.raises(ValueError, match="decimals"):
        parse_amount(text, currency)


@pytest.mark.parametrize("code", ["", "eur", "EURO", "ZZZ", "XAU", "XXX", "XTS", "E\0R"])
def test_codes_nobody_can_be_charged_in_are_refused(code: str) -> None:
    with pytest.raises(ValueError, match="EUR"):
        exponent(code)


def test_absurd_and_zero_amounts_are_refused() -> None:
    with pytest.raises(ValueError, match="split the order"):
        parse_amount("1000000000000", "EUR")
    with pytest.raises(ValueError, match="more than zero"):
        parse_positive_amount("0.00", "EUR")


@pytest.mark.parametrize("amount", [Decimal("NaN"), Decimal("Infinity"), Decimal("0.001")])
def test_what_has_no_canonical_text_is_refused(amount: Decimal) -> None:
    with pytest.raises(ValueError, match=r"finite|fraction"):
        format_amount(amount, "EUR")


def test_zero_has_no_sign() -> None:
    assert format_amount(Decimal("-0"), "EUR") == "0.00"


@pytest.mark.parametrize(
    ("amount", "currency", "shown"),
    [
        ("19.9900", "EUR", "19.99"),
        ("19.0000", "EUR", "19.00"),
        ("1900.0000", "JPY", "1900"),
        ("19.9900", "ZZZ", "19.99"),
        ("1900.0000", "ZZZ", "1900"),
        ("1E+3", "ZZZ", "1000"),
        ("1.5000", "JPY", "1.5"),
        ("0.0000", "ZZZ", "0"),
        ("999999999999999.9999", "ZZZ", "999999999999999.9999"),
    ],
)
def test_a_stored_amount_is_shown_whatever_became_of_its_currency(amount: str, currency: str, shown: str) -> None:
    assert format_stored_amount(Decimal(amount), currency) == shown


@given(st.decimals(min_value=0, max_value=10**15, places=4, allow_nan=False), st.sampled_from(["EUR", "JPY", "ZZZ"]))
def test_a_stored_amount_loses_nothing(amount: Decimal, currency: str) -> None:
    assert Decimal(format_stored_amount(amount, currency)) == amount


@pytest.mark.parametrize("amount", ["NaN", "Infinity"])
def test_a_stored_amount_that_is_no_number_is_refused(amount: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        format_stored_amount(Decimal(amount), "EUR")
