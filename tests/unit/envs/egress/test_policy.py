"""Rules: what a config may say, and which one decides about a request."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.errors import ConfigError
from envs.egress.policy import decide, has_rule, is_public, plain_path, read_date, read_policy, split_address


def rules(*values: dict) -> dict:
    return {"rules": list(values)}


def test_a_config_becomes_a_policy() -> None:
    policy = read_policy(
        {
            "rules": [
                {"host": "pypi.org", "index": "pypi", "before": datetime.date(2024, 5, 1)},
                {"host": "*.example.com", "action": "deny"},
            ],
            "timeout_s": 5,
            "dropped_headers": ["cookie"],
        }
    )
    first, second = policy.rules
    assert (first.before, first.methods, first.action) == ("2024-05-01", ("GET", "HEAD"), "allow")
    assert second.methods == ("*",)
    assert (policy.timeout_s, policy.dropped_headers) == (5.0, ("cookie",))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([], "egress"),
        ({}, "egress.rules"),
        ({"rules": []}, "egress.rules"),
        (rules("pypi.org"), "egress.rules[0]"),  # type: ignore[arg-type]
        (rules({"path": "/"}), "egress.rules[0].host"),
        (rules({"host": "https://pypi.org"}), "egress.rules[0].host"),
        (rules({"host": "PyPI.org"}), "egress.rules[0].host"),
        (rules({"host": "*"}), "egress.rules[0].host"),
        (rules({"host": "a.*.org"}), "egress.rules[0].host"),
        (rules({"host": "pypi.org:443"}), "egress.rules[0].host"),
        (rules({"host": "pypi.org", "methods": "GET"}), "egress.rules[0].methods"),
        (rules({"host": "pypi.org", "methods": ["get"]}), "egress.rules[0].methods"),
        (rules({"host": "pypi.org", "methods": []}), "egress.rules[0].methods"),
        (rules({"host": "pypi.org", "action": "maybe"}), "egress.rules[0].action"),
        (rules({"host": "pypi.org", "path": "simple"}), "egress.rules[0].path"),
        (rules({"host": "pypi.org", "index": "conda"}), "egress.rules[0].index"),
        (rules({"host": "pypi.org", "index": "pypi"}), "egress.rules[0].index"),
        (rules({"host": "pypi.org", "before": "2024-01-01"}), "egress.rules[0].before"),
        (rules({"host": "pypi.org", "index": "pypi", "before": "May"}), "egress.rules[0].before"),
        (rules({"host": "pypi.org", "header": "X-Key"}), "egress.rules[0].header"),
        (rules({"host": "pypi.org", "header": "X: y", "header_env": "A"}), "egress.rules[0].header"),
        (rules({"host": "a.org"}, {"host": "b.org", "allow": True}), "egress.rules[1].allow"),
        ({**rules({"host": "a.org"}), "requests": 0}, "egress.requests"),
        ({**rules({"host": "a.org"}), "requests": True}, "egress.requests"),
        ({**rules({"host": "a.org"}), "timeout_s": "soon"}, "egress.timeout_s"),
        ({**rules({"host": "a.org"}), "addresses": {"a.org": "localhost"}}, "egress.addresses.a.org"),
        ({**rules({"host": "a.org"}), "organisation": " "}, "egress.organisation"),
        ({**rules({"host": "a.org"}), "dropped_headers": ["a b"]}, "egress.dropped_headers"),
    ],
)
def test_a_mistake_is_named_by_its_key(values: object, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_policy(values)
    assert caught.value.key == key


def test_the_first_rule_that_fits_decides() -> None:
    policy = read_policy(
        rules(
            {"host": "api.example.com", "path": "/v1/private*", "action": "deny"},
            {"host": "api.example.com", "path": "/v1/*", "methods": ["GET", "POST"]},
            {"host": "*.example.com"},
            {"host": "93.184.216.34"},
        )
    )

    def say(method: str, host: str, target: str) -> tuple[bool, str, int | None]:
        verdict = decide(policy, method, host, target)
        return verdict.is_allowed, verdict.reason, verdict.rule

    assert say("GET", "api.example.com", "/v1/private/x") == (False, "rule", 0)
    assert say("POST", "api.example.com", "/v1/x?y=/v1/private") == (True, "allowed", 1)
    assert say("GET", "api.example.com", "/v2/x") == (True, "allowed", 2)
    assert say("POST", "api.example.com", "/v2/x") == (False, "default", None)
    assert say("GET", "a.b.example.com", "/") == (True, "allowed", 2)
    assert say("GET", "example.com", "/") == (False, "default", None)
    assert say("GET", "notexample.com", "/") == (False, "default", None)
    assert say("GET", "93.184.216.34", "/") == (True, "allowed", 3)
    assert say("GET", "93.184.216.35", "/") == (False, "default", None)
    assert say("GET", "api.example.com", "/v1/%2e%2e/v1/private") == (False, "path", None)
    assert has_rule(policy, "x.example.com") and not has_rule(policy, "x.example.com", private=True)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a/b?c=/../d", "/a/b"),
        ("/a%20b/%C3%BC", "/a b/ü"),
        ("/simple/x-y.z/", "/simple/x-y.z/"),
        ("/@scope%2fname", "/@scope/name"),
        ("/@scope%2Fname/-/name-1.tgz", "/@scope/name/-/name-1.tgz"),
        ("/...", "/..."),
        ("/a/../b", None),
        ("/a/..", None),
        ("/a/./b", None),
        ("/a//b", None),
        ("/a/%2e%2E/b", None),
        ("/a%2fb", None),
        ("/a%5cb", None),
        ("/a\\b", None),
        ("/a/%252e%252e/b", None),
        ("/a%00", None),
        ("/%ff", None),
        ("http://other/", None),
        ("*", None),
        ("/@scope%2f..%2fx", None),
    ],
)
def test_paths_that_could_mean_another_have_no_plain_form(target: str, path: str | None) -> None:
    assert plain_path(target) == path


@given(st.text(alphabet="/.%2eEfF5cC\\a", max_size=20))
def test_a_plain_path_never_climbs(text: str) -> None:
    path = plain_path("/" + text)
    if path is not None:
        assert not {".", ".."} & set(path.split("/")) and "\\" not in path


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_addresses_of_this_network_are_not_public(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_dates_without_a_zone_are_utc() -> None:
    assert read_date("2024-05-01") == datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    assert read_date("2024-05-01T02:00:00+02:00") == read_date("2024-05-01")
    assert read_date("2024-05-01T00:00:00.123Z").microsecond == 123000


def test_addresses_may_have_a_port() -> None:
    assert split_address("10.0.0.7") == ("10.0.0.7", None)
    assert split_address("10.0.0.7:8443") == ("10.0.0.7", 8443)
    assert [split_address(text) for text in ("10.0.0.7:", "a:1", "10.0.0.7:0", "10.0.0.7:65536", "10.0.0.7:x")] == [
        None
    ] * 5
