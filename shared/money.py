"""Amounts of money: decimal strings at every boundary, Decimal inside, never float (field report F31)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from functools import cache

from iso4217 import raw_table

# NUMERIC(19,4) in the databases: 15 digits before the point, and ISO 4217 knows no currency with more than 4 after it.
MAX_AMOUNT = Decimal(999_999_999_999)
_AMOUNT = re.compile(r"(0|[1-9][0-9]{0,14})(\.[0-9]{1,10})?", re.ASCII)


@cache
def exponent(currency: str) -> int:
    """Return how many decimals the currency has: 2 for EUR, 0 for JPY, 3 for KWD (ISO 4217, list one).

    Raises ValueError for a code that is no currency, or one without minor units (gold, test codes).
    """
    entry = raw_table.get(currency)
    if entry is None:
        raise ValueError("not an ISO 4217 currency code; send three capital letters such as EUR")
    units = str(entry["CcyMnrUnts"])
    if not units.isdigit():
        raise ValueError("nobody can be charged in this currency; send one with minor units such as EUR")
    return int(units)


def parse_amount(text: object, currency: str) -> Decimal:
    """Return the amount that a decimal string tells, with exactly the currency's decimals.

    Accepts plain digits with an optional fraction: no sign, exponent, blank or other alphabet's digits; never a
    number of JSON, which may have been a float on its way. Raises ValueError with what to send instead.
    """
    places = exponent(currency)
    if not isinstance(text, str):
        raise ValueError('amounts are decimal strings; send "19.99", not a JSON number')
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError('not a decimal amount; send digits with an optional fraction, such as "19.99"')
    if len(match.group(2) or ".") - 1 > places:
        raise ValueError(f"{currency} has {places} decimals; send no more")
    amount = Decimal(text)
    if amount > MAX_AMOUNT:
        raise ValueError(f"larger than {MAX_AMOUNT}; split the order")
    return amount.quantize(Decimal(1).scaleb(-places))


def parse_positive_amount(text: object, currency: str) -> Decimal:
    """Return `parse_amount`, refusing zero. Raises ValueError with what to send instead."""
    amount = parse_amount(text, currency)
    if amount == 0:
        raise ValueError("must be more than zero")
    return amount


def format_amount(amount: Decimal, currency: str) -> str:
    """Return the canonical decimal string: exactly the currency's decimals, no exponent, no sign for zero.

    Raises ValueError for NaN, infinity, or an amount with more decimals than the currency has.
    """
    if not amount.is_finite():
        raise ValueError("an amount must be finite")
    quantum = Decimal(1).scaleb(-exponent(currency))
    rounded = amount.quantize(quantum)
    if rounded != amount:
        raise ValueError(f"{currency} has no such fraction")
    return format(abs(rounded) if rounded == 0 else rounded, "f")


def format_stored_amount(amount: Decimal, currency: str) -> str:
    """Return an amount that was accepted before: `format_amount`, whatever became of its currency since.

    Currencies leave ISO 4217 and change their decimals, and what was agreed stays so: a currency that is not listed any
    more, or has fewer decimals now, gets as many decimals as the amount needs. Raises ValueError for NaN and infinity.
    """
    if not amount.is_finite():
        raise ValueError("an amount must be finite")
    try:
        places = exponent(currency)
    except ValueError:
        places = 0
    _, _, fraction = format(amount, "f").partition(".")
    places = max(places, len(fraction.rstrip("0")))
    return format(abs(amount) if amount == 0 else amount, f".{places}f")


def total(amounts: Iterable[Decimal]) -> Decimal:
    """Return the exact sum."""
    return sum(amounts, Decimal(0))
