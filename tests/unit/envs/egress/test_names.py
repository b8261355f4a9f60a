"""The responder's packets, against those that RFC 1035 describes, put together by hand."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.egress.names import address_of, answer, is_name

HEAD = bytes.fromhex("abcd 0100 0001 0000 0000 0000")
"""Number, recursion desired, one question."""
NAME = b"\x04pypi\x03org\x00"


def test_a_name_has_an_address() -> None:
    response = answer(HEAD + NAME + b"\x00\x01\x00\x01")
    assert response is not None
    # The same number; an answer, recursion desired and available; one question and one record.
    assert response[:12] == bytes.fromhex("abcd 8180 0001 0001 0000 0000")
    assert response[12:26] == NAME + b"\x00\x01\x00\x01"
    assert response[26:38] == bytes.fromhex("c00c 0001 0001 0000012c 0004")
    assert str(ipaddress.IPv4Address(response[38:])) == address_of("pypi.org")


def test_there_is_no_other_record_than_an_ipv4_address() -> None:
    for kind in (28, 16, 15, 65, 255):  # AAAA, TXT, MX, HTTPS, ANY
        response = answer(HEAD + NAME + kind.to_bytes(2) + b"\x00\x01")
        assert response is not None
        assert response[2:8] == bytes.fromhex("8180 0001 0000")


def test_additional_records_of_a_question_are_let_go() -> None:
    query = (
        bytes.fromhex("abcd 0120 0001 0000 0000 0001") + NAME + bytes.fromhex("0001 0001 00 0029 04d0 00000000 0000")
    )
    response = answer(query)
    assert response is not None and response[:12] == bytes.fromhex("abcd 8180 0001 0001 0000 0000")


def test_names_of_no_internet_are_not_there_unless_a_rule_has_them() -> None:
    query = HEAD + b"\x05intra\x04corp\x08internal\x00\x00\x01\x00\x01"
    response = answer(query)
    assert response is not None and response[3] & 0xF == 3
    response = answer(query, lambda name: name == "intra.corp.internal")
    assert response is not None and response[3] & 0xF == 0


def test_other_operations_and_broken_questions_are_refused() -> None:
    status = answer(bytes.fromhex("abcd 1000 0001 0000 0000 0000") + NAME + b"\x00\x01\x00\x01")
    assert status is not None and status[3] & 0xF == 4
    for query in (HEAD, HEAD + b"\x04py", HEAD + b"\xc0\x0c\x00\x01\x00\x01", HEAD + NAME):
        response = answer(query)
        assert response is not None and response[3] & 0xF == 1
    assert answer(b"short") is None
    assert answer(bytes.fromhex("abcd 8100 0001 0000 0000 0000") + NAME) is None


@given(st.binary(max_size=80))
def test_no_packet_breaks_it(packet: bytes) -> None:
    response = answer(packet)
    assert response is None or response[:2] == packet[:2]


@given(st.text(alphabet="abcdefghij.", min_size=1, max_size=30))
def test_made_up_addresses_are_stable_and_public(name: str) -> None:
    address = ipaddress.IPv4Address(address_of(name))
    assert address in ipaddress.IPv4Network("104.16.0.0/12")
    assert address_of(name.upper()) == str(address)


@pytest.mark.parametrize(
    ("name", "real"),
    [("pypi.org", True), ("a-b.c_d.example.com", True), ("localhost", False), ("x.local", False), ("org", False),
     ("1.0.0.127.in-addr.arpa", False), ("a..b", False), ("-a.org", False), ("x" * 64 + ".org", False),
     ("1.2.3.4", False)],
)  # fmt: skip
def test_what_could_be_a_name_of_the_internet(name: str, real: bool) -> None:
    assert is_name(name) == real
