"""``python -m elastic_rl.coordinator.service --config FILE --etcd HOST:PORT[,…] --replica ID --port P --tokens FILE
--secret FILE [--tls FOLDER] [--logs FOLDER]``: one replica.

Exit codes: 0 after SIGTERM or SIGINT (it resigns first, so that another replica leads at once), 2 when the preflight
checks or the configuration failed (a port is taken), 3 when etcd was unavailable or refused access at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.coordinator.api.app import make_app
from elastic_rl.coordinator.api.auth import TokenTable
from elastic_rl.coordinator.api.authentication import Authenticator
from elastic_rl.coordinator.api.change_stream import StreamLimit
from elastic_rl.coordinator.api.context import ReplicaContext
from elastic_rl.coordinator.api.forwarding import Forwarder
from elastic_rl.coordinator.api.listening import advertised, bind, make_server
from elastic_rl.coordinator.api.sessions import SessionStore
from elastic_rl.coordinator.cluster_reconciler import ClusterReconciler
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.etcd_maintenance import EtcdMaintenance
from elastic_rl.coordinator.jobs.job_scope import JobScope
from elastic_rl.coordinator.jobs.job_scopes import JobScopes, OpenScope
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.http_server import HttpServer
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.process import collect_garbage_rarely, freeze_heap
from elastic_rl.telemetry import logs, traces
from elastic_rl.telemetry.log_files import LogRotation

log = logging.getLogger(__name__)

EXIT_PREFLIGHT = 2
EXIT_NO_ETCD = 3
_API_RETRY_BUDGET_S = 2.0
_FORWARD_TIMEOUT_S = 5.0
_SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval. Requests are short and the leader's reconcile pass is long: with the default of 5 ms
a request that needs several switches waits for most of a pass."""


def main(argv: list[str] | None = None) -> int:
    args, overrides = _arguments(argv)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logs.setup(args.replica)
    try:
        cfg = config.load(args.config, overrides)
        logs.setup(args.replica, cfg.telemetry.log_level)
        traces.setup(cfg.telemetry.otlp_endpoint, "elastic-rl.coordinator")
        return asyncio.run(serve(cfg, args.etcd.split(","), args.replica, args.port, tokens_file=args.tokens,
                                 secret=args.secret, tls=TlsFolder(args.tls) if args.tls else None,
                                 logs_folder=args.logs))
    except (PreflightFailed, ConfigError) as e:
        log.error("%s", e)
        return EXIT_PREFLIGHT
    except EtcdUnavailable as e:
        log.error("%s", e)
        return EXIT_NO_ETCD


def _arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the arguments that are settings."""
    parser = argparse.ArgumentParser(prog="elastic_rl.coordinator.service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True,
                        help="the cluster's configuration; each key also as --key.sub=value")
    parser.add_argument("--etcd", required=True, help="host:port of each member, separated by commas")
    parser.add_argument("--replica", required=True, help="name of this replica, the same after each start")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="table with the digests of the admin API's tokens")
    parser.add_argument("--secret", type=Path, required=True, help="file with the cluster's secret")
    parser.add_argument("--tls", type=Path, help="folder with this host's certificate, for DCS nodes of jobs that name "
                                                 "none")
    parser.add_argument("--logs", type=Path, help="folder of the logs of this host, which the replica then bounds")
    return parser.parse_known_args(argv)


async def serve(cfg: Config, endpoints: list[str], replica: str, port: int, *, tokens_file: Path, secret: Path,
                tls: TlsFolder | None = None, logs_folder: Path | None = None) -> int:
    """Runs one replica until SIGTERM or SIGINT. ``tls``: this host's certificate. Raises PreflightFailed, ConfigError
    or EtcdUnavailable at the start."""
    cluster_secret = ClusterSecret.read(secret)
    listener = bind(cfg.coordinator.host, port)
    url = advertised(cfg.coordinator, listener.getsockname()[1], endpoints)
    keys, stopping = ClusterKeys(cfg.cluster_name), threading.Event()
    with contextlib.ExitStack() as cleanup:
        if logs_folder is not None:
            cleanup.callback(LogRotation(logs_folder, cfg.telemetry).close)
        cleanup.callback(listener.close)
        tokens = TokenTable(tokens_file)
        etcd = EtcdClient.from_config(cfg.etcd, endpoints)
        cleanup.callback(etcd.close)
        etcd.get(keys.leader_clock())  # raises EtcdUnavailable here, with every endpoint, and not later in a thread
        api_etcd = EtcdClient.from_config(cfg.etcd, endpoints,
                                           retry_budget_s=min(_API_RETRY_BUDGET_S, cfg.etcd.retry_budget_s))
        cleanup.callback(api_etcd.close)
        election = Election(etcd, keys, replica, url, cfg.coordinator.lease_ttl_s,
                            LeaderHealth(cfg.coordinator.reconcile_deadline_s))
        etcd_maintenance = EtcdMaintenance(etcd, cfg.etcd, is_leader=lambda: election.is_leader).start()
        cleanup.callback(etcd_maintenance.close)
        forwarder = Forwarder(replica, timeout_s=_FORWARD_TIMEOUT_S, tls_ca=cfg.coordinator.tls_ca)
        cleanup.callback(forwarder.close)
        sessions = SessionStore(api_etcd, keys, tokens, cfg.coordinator)

        def prepare(job: str, record: JobRecord) -> OpenScope:
            settings = job_settings.opened(record.settings, job, cluster_secret, cfg)
            security = Security.from_config(settings, secret, required=True, tls=tls)
            return lambda: JobScope.open(settings, context, etcd, url, security)

        scopes = JobScopes(etcd, keys, election, prepare)
        cluster_reconciler = ClusterReconciler(etcd, keys, election)
        context = ReplicaContext(cfg, api_etcd, election, Authenticator(keys.cluster, tokens, sessions), sessions,
                                 stopping, forwarder, StreamLimit(cfg.coordinator.max_streams), scopes)
        election.on_elected(scopes.wake)
        cleanup.callback(scopes.close)
        scopes.start()
        cleanup.callback(cluster_reconciler.stop)
        cluster_reconciler.start()
        election.start()
        cleanup.callback(election.stop)
        server = make_server(make_app(context), cfg.coordinator)
        if cfg.coordinator.sends_tokens_in_clear:
            log.warning("tokens reach %s in clear: set coordinator.tls_cert and coordinator.tls_key", url)
        log.info("replica %s (pid %d) of cluster %s serves %s", replica, os.getpid(), keys.cluster, url)
        freeze_heap()
        collect_garbage_rarely()
        await _listen(server, listener, stopping, election)
    log.info("replica %s has stopped", replica)
    return 0


async def _listen(server: HttpServer, listener: socket.socket, stopping: threading.Event, election: Election) -> None:
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, requested.set)

    async def stop_on_request() -> None:
        await requested.wait()
        stopping.set()
        try:
            await asyncio.to_thread(election.stop)
        except EtcdUnavailable as e:
            log.warning("cannot resign, leadership ends with the lease: %s", e)
        server.should_exit = True

    stopper = asyncio.create_task(stop_on_request())
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()


if __name__ == "__main__":
    sys.exit(main())
