"""Which servers may be registered: by their URL, and by what they report about themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.coordinator.operations import external_engines
from elastic_rl.coordinator.operations.external_engines import normalized_url, server_of
from elastic_rl.coordinator.problems import Problem
from elastic_rl.engine.server.external_server import incompatibility, is_local_address
from elastic_rl.engine.sglang.loader import LOADER
from elastic_rl.etcd.cluster_records import HostPhase

QWEN = ["Qwen2ForCausalLM"]
MODEL, SERVER = {"architectures": QWEN}, {"custom_weight_loader": [LOADER], "tp_size": 2, "dp_size": 1, "nnodes": 1}


@pytest.mark.parametrize("url", ["http://Host:30000", "http://host:30000/", "HTTP://host:30000"])
def test_url_of_a_server_is_normalized(url: str) -> None:
    assert normalized_url(url) == "http://host:30000"
    assert normalized_url("http://[::1]:30000/") == "http://[::1]:30000"
    assert normalized_url("HTTPS://10.0.0.9:30000/") == "https://10.0.0.9:30000"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"])
def test_loopback_address_has_one_spelling(host: str) -> None:
    assert normalized_url(f"http://{host}:30000") == "http://127.0.0.1:30000"


def test_ipv6_address_has_one_spelling() -> None:
    assert normalized_url("http://[2001:DB8:0:0::1]:30000") == "http://[2001:db8::1]:30000"
    assert normalized_url("http://[::ffff:10.0.0.9]:30000") == "http://10.0.0.9:30000"


@pytest.mark.parametrize("host", ["localhost.", "127.0.0.1.", "127.0.0.2", "127.1", "0x7f000001", "2130706433",
                                  "0177.0.0.1", "host.0x7f", "1.2.3.4.5", "0.0.0.0", "[::]", "0", "x.localhost",
                                  "224.0.0.1", "host..name", "ho%73t", "-host"])
def test_other_spellings_of_an_address_are_refused(host: str) -> None:
    with pytest.raises(Problem) as refused:
        normalized_url(f"http://{host}:30000")
    assert (refused.value.status, refused.value.kind) == (422, "invalid")


@pytest.mark.parametrize(("one", "other", "same"), [
    ("http://127.0.0.1:1", "http://localhost:1", True), ("http://127.0.0.1:1", "http://127.0.0.7:1", True),
    ("http://127.0.0.1:1", "http://[::1]:1", True), ("http://127.0.0.1:1", "http://127.0.0.1:2", False),
    ("http://10.0.0.1:1", "http://[::ffff:10.0.0.1]:1", True), ("http://10.0.0.1:1", "http://10.0.0.2:1", False),
    ("http://Host:1", "http://host:1", True), ("http://10.0.0.1:1", "https://10.0.0.1:1", True)])
def test_urls_of_one_server_are_recognized(one: str, other: str, same: bool) -> None:
    assert (server_of(one) == server_of(other)) is same


@pytest.mark.parametrize("url", [
    "", "host:30000", "ftp://host:1", "http://host", "http://:30000", "http://host:0",
    "http://host:99999", "http://host:x", "http://me:pass@host:1", "http://host:1/path", "http://host:1?x=1",
    "http://host:1#x", "http://[::1:30000", "http://h\u00f6st:1", "http://ho\nst:1"])
def test_invalid_server_url_is_refused(url: str) -> None:
    with pytest.raises(Problem) as refused:
        normalized_url(url)
    assert (refused.value.status, refused.value.kind) == (422, "invalid")


@pytest.mark.parametrize("url", ["http://me:secret@host:1", "me:secret@host:1", "http://me:se@cret@host:1",
                                 "http:/me:secret@host:1", "http://me:secret@[::1:1"])
def test_password_in_a_refused_url_is_not_shown(url: str) -> None:
    with pytest.raises(Problem, match="…@") as refused:
        normalized_url(url)
    assert "cret" not in str(refused.value.body("/")) and "me" not in refused.value.detail.partition("not ")[2]


def test_incompatibility_names_what_a_server_lacks() -> None:
    assert incompatibility(MODEL, SERVER, QWEN, updates=True) == ""
    assert "not a" in incompatibility({"architectures": ["LlamaForCausalLM"]}, SERVER, QWEN, updates=True)
    for loaders in (None, [], ["other.load"]):
        assert LOADER in incompatibility(MODEL, {**SERVER, "custom_weight_loader": loaders}, QWEN, updates=True)
    assert "dp_size=2" in incompatibility(MODEL, {**SERVER, "dp_size": 2}, QWEN, updates=True)
    assert incompatibility(MODEL, {**SERVER, "custom_weight_loader": None, "dp_size": 2}, QWEN, updates=False) == ""


def test_only_addresses_of_this_host_are_local() -> None:
    assert is_local_address("127.0.0.1") and is_local_address("localhost")
    assert not is_local_address("192.0.2.1") and not is_local_address("no.such.host.invalid")


@pytest.mark.parametrize(("phase", "refused"), [
    (HostPhase.READY, ""), (HostPhase.JOINING, ""), (HostPhase.SUSPECTED, ""), (HostPhase.CORDONED, "uncordon it"),
    (HostPhase.DRAINING, "uncordon it"), (HostPhase.LEFT, "start its agent"), (HostPhase.LOST, "start its agent")])
def test_host_that_takes_nothing_more_takes_no_external_engine(phase: HostPhase, refused: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engines, "get_host", lambda *_: SimpleNamespace(phase=phase))
    none: Any = None
    if not refused:
        external_engines.require_open_host(none, none, "b")
        return
    with pytest.raises(Problem) as problem:
        external_engines.require_open_host(none, none, "b")
    assert problem.value.status == 409 and f"host b {external_engines._CLOSED[phase]}" in str(problem.value.detail)
    assert refused in str(problem.value.detail)
