"""The etcd member that ``elastic-rl up`` starts: what it answers on its port, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.host import etcd_server
from elastic_rl.host.processes import spawn
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etcd")


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    port = free_port()
    process = spawn(etcd_server.command(etcd_server.find_binary(), folder / "data", "127.0.0.1", port, free_port()),
                    log=folder / "log")
    try:
        wait_until(lambda: etcd_server.healthy(f"127.0.0.1:{port}"), what="etcd",
                   alive=lambda: process.poll() is None)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def test_etcd_has_no_http_gateway_for_web_pages(endpoint: str) -> None:
    with EtcdClient([endpoint]) as etcd:
        etcd.put("/key", b"ours")
        body = '{"key": "L2tleQ==", "value": "eA=="}'  # /key and x, in base64
        for path in ("put", "range"):
            answer = http_client.request("POST", f"http://{endpoint}/v3/kv/{path}", content=body, timeout=10,
                                headers={"Content-Type": "text/plain", "Origin": "https://evil.example"})
            assert answer.status_code == 404, answer.text
        kv = etcd.get("/key")
    assert kv is not None and kv.value == b"ours"


def test_etcd_refuses_other_host_names(endpoint: str) -> None:
    port = endpoint.rpartition(":")[2]

    def status(host: str) -> int:
        return http_client.request("GET", f"http://{endpoint}/health", headers={"Host": host}, timeout=10).status_code

    assert status(f"rebound.example:{port}") == 421, "DNS rebinding"
    assert status(f"localhost:{port}") == status(endpoint) == 200


def test_data_are_in_use_while_etcd_runs(folder: Path, tmp_path: Path, endpoint: str) -> None:
    assert etcd_server.data_in_use(folder / "data")
    assert not etcd_server.data_in_use(tmp_path), "no etcd has ever run there"
    database = tmp_path / "member" / "snap" / "db"
    database.parent.mkdir(parents=True)
    database.touch()
    assert not etcd_server.data_in_use(tmp_path), "that of an etcd that has ended"
