"""A DCS node: one process a host that owns the shared-memory arena and a folder on disk, and serves their chunks over
TCP. What was on its disk when it ended, even by a kill, it has again after the next start under the same id.

    python -m elastic_rl.dcs.node.service --etcd host:port[,..] --id N [--secret FILE | --no-token] [--tls FOLDER]
                                          [--logs FOLDER] [--config FILE] [--key.sub=value ...]

``dcs.port`` 0 takes a free one. Logs go to stderr; ``--logs`` names the folder that it is redirected to, in which the
node then bounds the logs. Clients must present the token of ``dcs.token_file``, or the one that is derived from the
cluster's secret (``--secret``); a node that has neither starts with ``--no-token`` only, and admits everybody on this
host. SIGTERM and SIGINT end the node cleanly; exit status 2 means that it could not start, or that another process has
registered under its id.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.durable.store import DurableStore
from elastic_rl.dcs.durable.uploader import Uploader
from elastic_rl.dcs.fetch.fetcher import Fetcher, FetchSettings
from elastic_rl.dcs.node.open_versions import OpenVersions
from elastic_rl.dcs.node.pins import NodePins
from elastic_rl.dcs.node.registration import Registration
from elastic_rl.dcs.node.server import NodeServer
from elastic_rl.dcs.node.version_index import VersionIndex
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage import arena
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, PreflightFailed
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.etcd.records import DcsNode
from elastic_rl.etcd.witness import HostWitness
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.process import freeze_heap
from elastic_rl.telemetry import logs
from elastic_rl.telemetry.log_files import LogRotation

log = logging.getLogger(__name__)

_BEAT_S = 1.0
"""Time between two updates of the registration."""
_REPORTED = ("used_bytes", "disk_bytes", "disk_used_bytes", "chunks", "unsaved", "lost_chunks")
"""Numbers of the table that are in the record."""
_FAULT_CHARS = 300
"""Characters of what is wrong with its disk that are in the record."""
_FLUSH_S = 60.0
"""Longest time for which a node that is stopped continues to save chunks; well within the grace of its supervisor."""


def run(cfg: Config, endpoints: Sequence[str], node_id: str, stop: threading.Event, *, security: Security,
        logs_folder: Path | None = None) -> None:
    """Serves until ``stop`` is set. ``logs_folder``: where the logs are to be bounded. Raises PreflightFailed (memory,
    disk, port, a second node), ConfigError (no folder for the disk, neither a token nor TLS on a public address),
    EtcdUnavailable, and Conflict when another process took over its id."""
    keys, dcs, ttl_s = Keys(cfg.job), cfg.dcs, cfg.coordinator.lease_ttl_s
    with contextlib.ExitStack() as stack:
        if logs_folder is not None:
            stack.callback(LogRotation(logs_folder, cfg.telemetry).close)
        leftovers = _remove_leftovers()
        stack.callback(leftovers.close)
        etcd = stack.enter_context(EtcdClient.from_config(cfg.etcd, list(endpoints)))
        listener = stack.enter_context(_listen(dcs.host, dcs.port))
        security.require_for(listener.getsockname()[0])
        record = DcsNode(id=node_id, host=dcs.advertise_host or dcs.host,
                         port=dcs.advertise_port or listener.getsockname()[1], pid=os.getpid(), arena_path="",
                         arena_bytes=dcs.arena_bytes, machine=machine_id())
        Registration(etcd, keys, record, ttl_s).check_free()
        disk = _disk(cfg, node_id)
        if disk is not None:
            stack.callback(disk.close)
        memory = arena.ArenaFile.create(cfg.job, node_id, dcs.arena_bytes)
        stack.callback(memory.close)
        record = record.replace(arena_path=str(memory.path))
        # Waits for room end well before a client's timeout.
        table = ChunkTable(memory.view, disk=disk, orphan_grace_s=dcs.orphan_grace_s,
                           verify_every_s=dcs.verify_every_s, wait_s=dcs.io_timeout_s / 3)
        if disk is not None:
            log.info("%d chunks, %d bytes, are in %s", table.stat()["chunks"], disk.used_bytes, disk.folder)
            saver = table.saver()
            saver.start()
            stack.callback(saver.stop, _FLUSH_S)
        client = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        stack.callback(client.close)
        durable = _durable(cfg)
        fetcher = Fetcher(table, client, node_id, FetchSettings.from_config(dcs), durable)
        stack.callback(fetcher.close)
        pins = NodePins(etcd, keys, node_id, dcs.pin_ttl_s)
        stack.callback(pins.close)
        hello = {"job": cfg.job, "id": node_id, "arena_path": str(memory.path), "arena_bytes": memory.size}
        index = VersionIndex(disk.folder if disk is not None else None, grace_s=dcs.unknown_version_grace_s)
        server = NodeServer(table, fetcher, OpenVersions(table, fetcher, pins), index, hello, listener, dcs, security)
        server.start()
        stack.callback(server.stop)
        catalog, commits = index.summary()
        registration = Registration(etcd, keys, record.replace(catalog=catalog, commits=commits), ttl_s)
        stack.callback(registration.remove)
        registration.put()
        witness = HostWitness(etcd, keys, node_id, ttl_s=ttl_s)
        witness.announce("dcs", node_id, record.process)
        stack.callback(witness.start().close)
        if durable is not None:
            uploader = Uploader(etcd, keys, dcs, table, node_id, durable)
            uploader.start()
            stack.callback(uploader.close)
        log.info("node %s serves %s:%d, arena %s of %d bytes", node_id, record.host, record.port, memory.path,
                 memory.size)
        freeze_heap()
        while not stop.wait(_BEAT_S):
            leftovers.reclaim()
            try:
                usage, (catalog, commits) = table.usage(), index.summary()
                registration.beat(**{name: usage[name] for name in _REPORTED}, disk_room_bytes=_disk_room(disk),
                                  disk_fault=table.disk_fault()[:_FAULT_CHARS], catalog=catalog, commits=commits)
            except Conflict:
                raise
            except ElasticRLError as e:  # etcd is away: chunks are served meanwhile, and the next beat tries again
                log.warning("cannot update the registration: %s", e)
    log.info("node %s ended", node_id)


def _remove_leftovers() -> arena.Leftovers:
    leftovers = arena.Leftovers()
    for path in leftovers.removed:
        log.warning("removed %s, left by a dead node", path)
    if leftovers.nbytes:
        log.warning("%d bytes of these are freed when their readers are done", leftovers.nbytes)
    return leftovers


def _disk(cfg: Config, node_id: str) -> DiskFolder | None:
    if not cfg.dcs.disk_bytes:
        return None
    if not cfg.dcs.disk_dir:
        raise ConfigError("dcs.disk_dir names no folder for the node's chunks",
                          hint="name one with --dcs.disk_dir=FOLDER, or keep them in memory only: --dcs.disk_bytes=0")
    return DiskFolder(Path(cfg.dcs.disk_dir).expanduser() / node_id, cfg.dcs.disk_bytes, cfg.job)


def _disk_room(disk: DiskFolder | None) -> int:
    """Bytes that the node can still add to its disk, in steps of a 64th of its limit: others use the file system too,
    and not every change is worth a write to etcd."""
    if disk is None:
        return 0
    step = max(1, disk.limit_bytes // 64)
    return -(-disk.room() // step) * step


def _durable(cfg: Config) -> DurableStore | None:
    return DurableStore(cfg.dcs.durable_url, cfg.job) if cfg.dcs.durable_url else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as e:
        raise PreflightFailed(f"port {port} on {host} cannot be bound (dcs.port): {e.strerror}",
                              hint=f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or set another dcs.port"
                              ) from e


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic_rl.dcs.node.service",
                                     description="A node of the checkpoint service.")
    parser.add_argument("--etcd", required=True, help="host:port of the etcd members, comma-separated")
    parser.add_argument("--id", required=True, help="name of this node, the same after each start")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--secret", type=Path, help="the cluster's secret, which the clients' token is derived from")
    token.add_argument("--no-token", action="store_true", help="admit clients without a token, unless dcs.token_file "
                                                               "names one")
    parser.add_argument("--tls", type=Path, help="folder with this host's certificate, unless dcs.tls_cert names one")
    parser.add_argument("--logs", type=Path, help="folder of the logs of this host")
    parser.add_argument("--config", type=Path, help="the job's configuration; each key also as --key.sub=value")
    args, overrides = parser.parse_known_args(argv)
    logs.setup(f"dcs-{args.id}", "info")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        cfg = config.load(args.config, overrides)
        logs.setup(f"dcs-{args.id}", cfg.telemetry.log_level)
        security = Security.from_config(cfg, args.secret, required=not args.no_token,
                                        tls=TlsFolder(args.tls) if args.tls else None)
        run(cfg, args.etcd.split(","), args.id, stop, security=security, logs_folder=args.logs)
    except ElasticRLError as e:
        log.error("node %s cannot run: %s: %s", args.id, type(e).__name__, e)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
