"""Which servers may be registered: by their URL, and by what they report about themselves."""

from __future__ import annotations

import pytest

from elastic_rl.coordinator.operations.external_engines import normalized_url
from elastic_rl.coordinator.problems import Problem
from elastic_rl.engine.external_server import incompatibility, is_local_address
from elastic_rl.engine.loader import LOADER

QWEN = ["Qwen2ForCausalLM"]
MODEL, SERVER = {"architectures": QWEN}, {"custom_weight_loader": [LOADER], "tp_size": 2, "dp_size": 1, "nnodes": 1}


@pytest.mark.parametrize("url", ["http://Host:30000", "http://host:30000/", "HTTP://host:30000"])
def test_url_of_a_server_is_normalized(url: str) -> None:
    assert normalized_url(url) == "http://host:30000"
    assert normalized_url("http://[::1]:30000/") == "http://[::1]:30000"


@pytest.mark.parametrize("url", [
    "", "host:30000", "https://host:30000", "ftp://host:1", "http://host", "http://:30000", "http://host:0",
    "http://host:99999", "http://host:x", "http://me:pass@host:1", "http://host:1/path", "http://host:1?x=1",
    "http://host:1#x", "http://[::1:30000", "http://h\u00f6st:1", "http://ho\nst:1"])
def test_invalid_server_url_is_refused(url: str) -> None:
    with pytest.raises(Problem) as refused:
        normalized_url(url)
    assert (refused.value.status, refused.value.kind) == (422, "invalid")


def test_incompatibility_names_what_a_server_lacks() -> None:
    assert incompatibility(MODEL, SERVER, QWEN) == ""
    assert "not a" in incompatibility({"architectures": ["LlamaForCausalLM"]}, SERVER, QWEN)
    for loaders in (None, [], ["other.load"]):
        assert LOADER in incompatibility(MODEL, {**SERVER, "custom_weight_loader": loaders}, QWEN)
    assert "dp_size=2" in incompatibility(MODEL, {**SERVER, "dp_size": 2}, QWEN)


def test_only_addresses_of_this_host_are_local() -> None:
    assert is_local_address("127.0.0.1") and is_local_address("localhost")
    assert not is_local_address("192.0.2.1") and not is_local_address("no.such.host.invalid")
