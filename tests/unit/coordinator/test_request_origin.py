"""Checks of Host, Origin and Sec-Fetch-Site: which requests may come from our own page, and which may not."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api.request_origin import ServedHosts, check_origin, host_name
from elastic_rl.coordinator.problems import Problem

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z0-9]{1,6}){0,3}", fullmatch=True).filter(
    lambda name: not name.replace(".", "").isdecimal())
PORTS = st.integers(1, 65535)
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PATCH", "DELETE"])


def is_refused(method: str, headers: dict[str, str], *, cookie: bool = False) -> bool:
    try:
        check_origin(method, Headers(headers), cookie=cookie)
    except Problem as problem:
        assert (problem.status, problem.kind) == (403, "cross-site")
        return True
    return False


def is_served(hosts: ServedHosts, header: str) -> bool:
    try:
        hosts.check(Headers({"host": header}))
    except Problem as problem:
        assert (problem.status, problem.kind) == (421, "unknown-host")
        return False
    return True


# -- hosts -------------------------------------------------------------------------------------------------------------
@given(NAMES, st.one_of(st.none(), PORTS))
def test_host_name_is_without_port_and_in_lower_case(name: str, port: int | None) -> None:
    assert host_name(name.upper() + (f":{port}" if port else "")) == name


@pytest.mark.parametrize("header", ["", " ", ":80", "a b", "a/b", "a@b", "[::1", "::1", "a:b", "a:80:80", "a?b", "a#b",
                                    "[zz]"])
def test_malformed_host_is_no_name(header: str) -> None:
    assert host_name(header) == ""


@given(st.ip_addresses(), st.one_of(st.none(), PORTS))
def test_every_address_is_served(address: object, port: int | None) -> None:
    host = f"[{address}]" if ":" in str(address) else str(address)
    assert is_served(ServedHosts([]), host + (f":{port}" if port else ""))


@given(NAMES, NAMES)
def test_only_configured_names_are_served(served: str, requested: str) -> None:
    hosts = ServedHosts([served])
    assert is_served(hosts, requested) == (requested == served)
    assert is_served(ServedHosts([f"*.{served}"]), f"{requested}.{served}")
    longer = f"{served}.{requested}0"
    assert is_served(ServedHosts([f"*.{served}"]), longer) == longer.endswith(f".{served}")


def test_settings_name_the_served_hosts() -> None:
    hosts = ServedHosts.from_config(CoordinatorConfig(host="gpu-1.lab", advertise_host="rl.lab", allowed_hosts=["x.y"]))
    for name in ("localhost", socket.gethostname(), "gpu-1.lab:8400", "RL.lab.", "x.y"):
        assert is_served(hosts, name), name
    for name in ("gpu-2.lab", "localhost.evil", "0.0.0.0.evil", ""):
        assert not is_served(hosts, name), name


# -- origins -----------------------------------------------------------------------------------------------------------
@given(METHODS, NAMES, PORTS, NAMES, PORTS, st.booleans())
def test_origin_of_another_host_or_port_is_refused(method: str, host: str, port: int, other: str, other_port: int,
                                                   cookie: bool) -> None:
    own, foreign = f"{host}:{port}", f"{other}:{other_port}"
    assert not is_refused(method, {"host": own, "origin": f"http://{own}"}, cookie=cookie)
    assert is_refused(method, {"host": own, "origin": f"http://{foreign}"}, cookie=cookie) == (own != foreign)


@pytest.mark.parametrize(("host", "origin", "refused"), [
    ("rl.lab", "https://rl.lab", False), ("rl.lab", "http://rl.lab", False), ("rl.lab:443", "https://rl.lab", False),
    ("rl.lab", "https://rl.lab:443", False), ("rl.lab", "https://rl.lab:80", True),
    ("rl.lab:80", "https://rl.lab", True), ("[::1]:8400", "http://[::1]:8400", False),
    ("RL.lab", "http://rl.LAB", False), ("rl.lab", "null", True),
    ("rl.lab", "ftp://rl.lab", True), ("rl.lab", "http://rl.lab@evil", True), ("rl.lab", "http://rl.lab.evil", True),
    ("rl.lab", "", True), ("", "http://", True), ("rl.lab", "http://[", True), ("rl.lab", "rl.lab", True)])
def test_origin_is_compared_with_the_host(host: str, origin: str, refused: bool) -> None:
    assert is_refused("POST", {"host": host, "origin": origin}) == refused


@given(METHODS, st.booleans())
def test_fetch_metadata_of_another_site_is_refused(method: str, cookie: bool) -> None:
    for site, refused in (("cross-site", True), ("same-site", True), ("", True), ("new-word", True),
                          ("same-origin", False), ("none", False)):
        assert is_refused(method, {"host": "h", "sec-fetch-site": site}, cookie=cookie) == refused


@given(METHODS)
def test_change_with_a_cookie_has_to_say_where_it_comes_from(method: str) -> None:
    assert is_refused(method, {"host": "h"}, cookie=True) == (method not in ("GET", "HEAD"))
    assert not is_refused(method, {"host": "h"}, cookie=False)
