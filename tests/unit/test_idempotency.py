"""How an Idempotency-Key header is read: bare or as a structured-field string (field report F43)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.idempotency import MOST_CHARACTERS, parse_key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ('"8e03978e"', "8e03978e"),
        (' "a b" ', "a b"),
        (r'"say \"no\" \\ yes"', r'say "no" \ yes'),
        ("order_7/EUR:1", "order_7/EUR:1"),
        ("k" * MOST_CHARACTERS, "k" * MOST_CHARACTERS),
    ],
)
def test_f43_a_bare_key_and_a_quoted_one_are_read(value: str, key: str) -> None:
    assert parse_key([value]) == key


def test_without_the_header_there_is_no_key() -> None:
    assert parse_key([]) is None


@pytest.mark.parametrize(
    "values",
    [
        *([value] for value in ("", " ", '""', '"', '"a', 'a"', '"a"b"', r'"\a"', "a b", "a,b", '"a";p=1', "a;p", "ä")),
        ["k" * (MOST_CHARACTERS + 1)],
        ['"' + "k" * (MOST_CHARACTERS + 1) + '"'],
        ["a", "a"],
        ["a\x00"],
        ['"a\x7f"'],
    ],
)
def test_f43_a_malformed_key_is_refused_by_the_name_of_its_header(values: list[str]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_key(values)
    assert refused.value.status == 400
    assert refused.value.fields[0].field == "Idempotency-Key"
    assert "Nothing was stored" in refused.value.detail


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=100))
def test_f43_every_printable_key_survives_its_quoted_form(key: str) -> None:
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_key([quoted]) == key
