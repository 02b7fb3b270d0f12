"""What a charge request is: its body, its amount in minor units, its idempotency key."""

import re
from decimal import Decimal
from functools import lru_cache
from typing import Annotated

from iso4217 import Currency
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST_ID = 2**63 - 1
LARGEST_AMOUNT_MINOR = 10**18 - 1
"""18 digits: below SQLite's 64-bit integers, far above any real payment."""

_AMOUNT = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,4}))?", re.ASCII)
_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
_QUOTED = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"', re.ASCII)
_ESCAPED = re.compile(r'\\(["\\])')


@lru_cache(maxsize=512)
def currency_exponent(code: str) -> int:
    """Count of decimals of an ISO 4217 currency.

    Raises ValueError when the code is unknown or has no minor unit (gold, test codes): nobody can be charged in it.
    """
    exponent = Currency(code).exponent if code.isascii() and code.isupper() else None
    if exponent is None:
        raise ValueError("not an ISO 4217 currency that payments can be made in")
    return exponent


def minor_units(amount: str, currency: str) -> int:
    """`"19.99"`, `"EUR"` → 1999: an exact count of the currency's smallest unit.

    Raises ValueError for anything but a positive plain decimal within the currency's decimals and 18 digits.
    """
    exponent = currency_exponent(currency)
    match = _AMOUNT.fullmatch(amount)
    if match is None:
        raise ValueError("not a plain decimal: digits, and at most 4 decimals after a point")
    whole, decimals = match.group(1), match.group(2) or ""
    if len(decimals) > exponent:
        raise ValueError(f"more decimals than {currency} has, which is {exponent}")
    minor = int(whole + decimals.ljust(exponent, "0"))
    if minor == 0:
        raise ValueError("not above zero")
    if minor > LARGEST_AMOUNT_MINOR:
        raise ValueError("larger than this provider moves: 18 digits, decimals included")
    return minor


def decimal_text(minor: int, currency: str) -> str:
    """1999, `"EUR"` → `"19.99"`, always with all decimals of the currency. Exact at any size."""
    exponent = currency_exponent(currency)
    if exponent == 0:
        return str(minor)
    digits = str(minor).rjust(exponent + 1, "0")
    return f"{digits[:-exponent]}.{digits[-exponent:]}"


class ChargeRequest(BaseModel):
    """Body of `POST /payments/charge`. Money is a decimal string: a JSON number may have passed through a float."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    order_id: Annotated[int, Field(ge=1, le=LARGEST_ID)]
    currency: str
    amount: str

    @field_validator("currency")
    @classmethod
    def _known_currency(cls, value: str) -> str:
        try:
            currency_exponent(value)
        except ValueError as error:
            raise PydanticCustomError("currency", "{why}", {"why": str(error)}) from error
        return value

    @field_validator("amount")
    @classmethod
    def _exact_amount(cls, value: str, info: ValidationInfo) -> str:
        currency = info.data.get("currency")
        if currency is None:
            return value
        try:
            minor_units(value, currency)
        except ValueError as error:
            raise PydanticCustomError("amount", "{why}", {"why": str(error)}) from error
        return value

    @property
    def amount_minor(self) -> int:
        return minor_units(self.amount, self.currency)

    @property
    def amount_decimal(self) -> Decimal:
        return Decimal(self.amount)

    @property
    def fingerprint(self) -> str:
        """What "the same body" means for a repeated key: `19.9` and `19.90` EUR are the same money."""
        return f"{self.order_id} {self.amount_minor} {self.currency}"


def parse_idempotency_key(values: list[str]) -> str:
    """The key from the header's values: bare, or a quoted structured-field string (RFC 9651 §3.3.3).

    Raises ValueError, worded for the caller, unless there is exactly one of 1..255 visible ASCII characters.
    """
    if not values:
        raise ValueError("is missing")
    if len(values) > 1:
        raise ValueError("is given more than once")
    text = values[0].strip()
    if text.startswith('"'):
        quoted = _QUOTED.fullmatch(text)
        if quoted is None:
            raise ValueError("is not a well-formed quoted string")
        text = _ESCAPED.sub(r"\1", quoted.group(1))
    if _VISIBLE.fullmatch(text) is None:
        raise ValueError("is not 1 to 255 visible ASCII characters")
    return text
