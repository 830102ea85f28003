"""Nodes that tests call over the wire, with exactly what a test gives, and publishers and pullers beside them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastic_rl.dcs import protocol
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.etcd.records import DcsNode
from support.dcs_nodes import Nodes
from support.waiting import wait_until

MIB = 1 << 20
CHUNK = 64 << 10


class Wire:
    """A client that sends exactly what a test gives it."""

    def __init__(self, node: DcsNode, *, timeout_s: float = 20, buffer_bytes: int = 0,
                 context: ssl.SSLContext | None = None) -> None:
        self.sock: socket.socket = socket.socket()
        if buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.sock.settimeout(timeout_s)
        self.sock.connect((node.host, node.port))
        if context is not None:
            self.sock = context.wrap_socket(self.sock)

    def send(self, payload: bytes = b"", **header: object) -> None:
        protocol.send(self.sock, header, payload)

    def answer(self) -> tuple[dict[str, Any], bytes]:
        header, payload = protocol.receive(self.sock)
        protocol.raise_failure(header)
        return header, bytes(payload)

    def call(self, payload: bytes = b"", **header: object) -> dict[str, Any]:
        self.send(payload, **header)
        return self.answer()[0]

    def get(self, digest: str, **more: object) -> tuple[dict[str, Any], bytes]:
        self.send(op="get", digest=digest, **more)
        return self.answer()

    def fetch(self, digests: Sequence[str], **more: object) -> dict[str, tuple[int, int]]:
        answer = self.call(op="fetch", digests=list(digests), prefer=[], **{"hold": False, **more})
        while "progress" in answer:
            answer = self.answer()[0]
        return {d: (offset, nbytes) for d, offset, nbytes in answer["chunks"]}

    def close(self) -> None:
        self.sock.close()


@dataclass(kw_only=True)
class Dcs(Nodes):
    """Nodes of one job, and their callers."""

    epoch: int
    closing: list[Callable[[], object]] = field(default_factory=list)

    def launch(self, node: str, **dcs: object) -> subprocess.Popen[bytes]:
        return super().launch(node, **{"arena_bytes": 4 * MIB, "disk_bytes": 64 * MIB, "orphan_grace_s": 0, **dcs})

    def start(self, node: str = "a", **dcs: object) -> DcsNode:
        return self.start_node(node, **dcs)

    def kill(self, node: str = "a") -> None:
        super().kill(node)

    def wire(self, node: DcsNode, *, hello: bool = True, **options: Any) -> Wire:
        wire = Wire(node, **options)
        self.closing.append(wire.close)
        if hello:
            wire.call(op="hello", job=self.keys.job)
        return wire

    def publisher(self, node: str = "a") -> Publisher:
        out = Publisher(self.etcd, self.keys, "policy", epoch=self.epoch, owner="test", chunk_bytes=CHUNK,
                        staging_ttl_s=5, io_timeout_s=20, node=node)
        self.closing.append(out.close)
        return out

    def puller(self, node: str = "a") -> Puller:
        out = Puller(self.etcd, self.keys, "test", io_timeout_s=20, node=node)
        self.closing.append(out.close)
        return out

    def assert_pulls(self, numbers: Sequence[int], node: str = "a") -> None:
        """Each version comes back bit for bit."""
        with contextlib.closing(self.puller(node)) as puller:
            for number in numbers:
                with puller.pull("policy", number) as pulled:
                    assert all(torch.equal(t, weights(number)[name]) for name, t in pulled.tensors()), number

    def digests(self, number: int) -> list[str]:
        """A version's chunks; the last one is its manifest."""
        with contextlib.closing(self.puller()) as puller, puller.pull("policy", number) as pulled:
            return [*pulled.manifest.chunks, pulled.version.manifest]

    def await_saved(self, wire: Wire) -> None:
        wait_until(lambda: not wire.call(op="stat")["unsaved"], what="the copies on disk")

    def file(self, digest: str, node_id: str = "a") -> Path:
        return self.folder / "disk" / node_id / digest[:2] / digest

    def log(self, node_id: str = "a") -> str:
        return (self.folder / f"{node_id}.log").read_text()

    def close(self) -> None:
        for close in reversed(self.closing):
            close()
        super().close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """About 200 KB, in four chunks."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(12_500, generator=generator) for name in "wxyz"}


def publish(publisher: Publisher, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert publisher.publish(weights(number).items(), meta={}).number == number
