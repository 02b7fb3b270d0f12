"""The Idempotency-Key header of our own API, so that a client may repeat a request whose answer it did not get.

Source of the rules: the IETF draft "The Idempotency-Key HTTP Header Field". Its value is a structured-field string
(RFC 8941: in quotes, with backslashes before quotes and backslashes); most clients send it bare, which is taken too,
and both forms of one key are the same key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import BadRequest, FieldError

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
MOST_CHARACTERS = 255
_REMEDY = f'send 1 to {MOST_CHARACTERS} printable ASCII characters, such as a UUID, bare or "in quotes"'

# RFC 8941, section 3.3.3; and what a bare key may have: nothing that a list or parameters are made of.
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_BARE = re.compile(r"[!#-+\--:<-~]+")


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's key, and the digest of what it asked for: the same key for anything else is a mistake."""

    key: str
    fingerprint: bytes


def parse_key(values: Sequence[str]) -> str | None:
    """Return the key that these header fields give, or None without any. Raises BadRequest naming the header."""
    if not values:
        return None
    if len(values) > 1:
        raise _malformed("was sent more than once")
    value = values[0].strip(" \t")
    quoted = _QUOTED.fullmatch(value)
    if quoted:
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    elif _BARE.fullmatch(value):
        key = value
    else:
        raise _malformed("is empty" if not value else "is malformed")
    if not 0 < len(key) <= MOST_CHARACTERS:
        raise _malformed("is too long" if key else "is empty")
    return key


def fingerprint(content: str) -> bytes:
    """Return the digest of a request in its canonical form."""
    return hashlib.sha256(content.encode()).digest()


def missing_key() -> BadRequest:
    """Return the refusal of a request without a key where one is required."""
    return _malformed("is missing")


def _malformed(what: str) -> BadRequest:
    message = f"the header {HEADER} {what}; {_REMEDY}. Nothing was stored"
    return BadRequest(message, [FieldError(HEADER, message)])
