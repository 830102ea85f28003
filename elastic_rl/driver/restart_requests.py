"""Restart requests by the leader or an operator, as the process that runs the part reads and acknowledges them."""

from __future__ import annotations

from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.decoding import decode_bytes, readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import RestartRequest


def open_requests(etcd: EtcdClient, keys: Keys) -> dict[str, RestartRequest]:
    """Requests that were not carried out yet, by target."""
    found = [request for request, _ in readable(etcd.range(keys.restarts_prefix())[0], RestartRequest)]
    return {request.target: request for request in found if request.open}


def acknowledge(etcd: EtcdClient, keys: Keys, request: RestartRequest, *guards: Compare) -> None:
    """Records that a request was carried out. A later request for the same target stays open; one that was withdrawn
    stays as it is. Raises Fenced when a guard does not hold."""
    def change(raw: bytes | None) -> bytes | None:
        found = decode_bytes(raw, RestartRequest) if raw else None
        return raw if found is None else found.observed(request.generation).encode()

    etcd.update(keys.restart(request.target), change, guards=guards)
