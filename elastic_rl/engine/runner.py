"""The life of one engine: keeps a server, follows the policy head, and keeps etcd and the router true about it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

from elastic_rl.config import Stream
from elastic_rl.coordinator.membership.registry import ENGINE
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.engine.external_server import AttachedServer
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.engine.retry import RetryBackoff
from elastic_rl.engine.router import RouterClient
from elastic_rl.engine.server import Prepared, Server, SGLangServer
from elastic_rl.errors import (
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    DeadlineExceeded,
    ElasticRLError,
    EngineFailed,
    EtcdUnavailable,
    NodeUnavailable,
    StagingFailed,
    VersionNotFound,
)
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Engine, EngineState, Severity, Version
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import wait_until
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)

# A look at the processes, the drain flag and the head at least this often; the head itself comes by a watch.
_TICK_S = 0.1
_RECORD_LOOK_S = 0.5
_LOAD_LOOK_S = 5.0
_LOAD_TIMEOUT_S = 0.5
_ROUTER_TIMEOUT_S = 30.0
_RETRY_S = (0.2, 30.0)
"""First and longest pause after a version that could not be fetched or staged; a newer version is tried at once."""
_TELL_AFTER = 5
"""Failures to fetch in a row that make an event."""
# A pull that ended so changed nothing in the engine: it goes on with what it has and tries again.
_PULL_FAILED = (ArenaFull, ChunkCorrupt, ChunkMissing, NodeUnavailable, StagingFailed, EtcdUnavailable,
                VersionNotFound)


class EngineRunner:
    """Runs engine ``engine_id`` of a run until it is drained, stopped or dead. Plain: nothing in it knows of Ray.

    ``attach_to``: URL of a server that somebody else runs; it is used, and never started or ended.
    """

    def __init__(self, ctx: RunContext, engine_id: str, *, pool: str = "rollout", attach_to: str = "") -> None:
        self._ctx, self._id, self._pool = ctx, engine_id, pool
        self._cfg = ctx.config.engine
        self._life = EngineLifecycle()
        self._drain = threading.Event()
        self._stop = threading.Event()
        self._etcd = ctx.connect()
        self._member = Membership(self._etcd, ctx.keys, ENGINE, engine_id, ttl_s=ctx.config.coordinator.lease_ttl_s,
                                  epoch=ctx.epoch)
        self._started_at = time.time()
        self._pull_apply_s = self._pause_s = 0.0
        self._checksum = ""
        self._tick_at = self._alive_at = time.time()
        self._fetch_failures = 0  # in a row
        self._retry = RetryBackoff(*_RETRY_S)
        self._next_look = self._next_load = 0.0
        self._load = (0, 0)
        self._unwritten = False  # the last write failed: what etcd says is older than the truth
        self._adopted = bool(attach_to)
        self._server: Server = AttachedServer(attach_to, ctx.model_dir, cfg=self._cfg) if attach_to else SGLangServer(
            ctx.model_dir, cfg=self._cfg, device=ctx.config.device, host=ctx.host,
            log=ctx.config.cluster_dir / "logs" / f"engine-{engine_id}.log",
            # The same engine of the same run samples the same; no two engines share a seed.
            seed=zlib.crc32(f"{ctx.config.seed}/{engine_id}".encode()) & 0x7FFFFFFF)

    # -- asked from other threads ----------------------------------------------------------------------------------
    def ping(self) -> dict[str, Any]:
        """State of the runner, and the age of its last look at the server in seconds."""
        return {"id": self._id, "state": str(self._life.state), "version": self._life.version,
                "pid": self._server.pid, "url": self._server.url, "idle_s": time.time() - self._tick_at}

    def drain(self) -> None:
        """Asks ``run`` to leave the pool: no new requests, those in flight finish, the record goes."""
        self._drain.set()

    def stop(self) -> None:
        """Asks ``run`` to end at once, requests in flight or not."""
        self._stop.set()

    # -- the life --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Blocks until the engine's life is over. An engine's failure is told in etcd, not raised."""
        try:
            self._write()
            self._member.start()
            self._server.start(keep_waiting=lambda: not self._leaving)
            self._life = self._life.up()
            self._write()
            self._follow()
            self._leave()
        except EngineFailed as e:
            self._end(e.message)
        finally:
            self._server.close()
            self._member.close()
            self._etcd.close()

    @property
    def _leaving(self) -> bool:
        return self._drain.is_set() or self._stop.is_set()

    def _follow(self) -> None:
        dcs = self._ctx.config.dcs
        puller = Puller(self._etcd, self._ctx.keys, f"engine-{self._id}", io_timeout_s=dcs.io_timeout_s,
                        security=Security.from_config(dcs, self._ctx.config.cluster_dir / TOKEN_FILE))
        heads = puller.watch_head(Stream.POLICY)
        wanted: Version | None = None
        try:
            while not self._leaving:
                self._tick_at = time.time()
                self._member.progress(self._life.version, "follow")
                if not self._server.alive():
                    raise EngineFailed(self._server.lost)
                self._alive_at = time.time()
                try:
                    self._obey_record()
                    if wanted is None:
                        wanted = heads.get(_TICK_S)
                    elif not self._retry.is_due(time.monotonic()):
                        if (newer := heads.get(_TICK_S)) is not None:
                            wanted = newer
                            self._retry.try_now()
                    elif self._sync(puller, wanted):
                        wanted = None
                        self._retry.reset()
                    else:
                        self._retry.failed(time.monotonic())
                        wanted = puller.head(Stream.POLICY)  # the version that failed may have been released meanwhile
                except EtcdUnavailable as e:  # without etcd nothing new is decided, and the engine goes on serving
                    log.warning("engine %s: %s", self._id, e)
                    self._stop.wait(_TICK_S)  # a refusal comes at once, unlike the end of a budget
        finally:
            heads.close()
            puller.close()

    def _sync(self, puller: Puller, wanted: Version) -> bool:
        """Brings the engine to the version. False when it could not be fetched: the engine stays as it was."""
        if wanted.number <= self._life.version:
            return True
        began = time.monotonic()
        try:
            with traces.span("engine.sync", parent=traces.extract(wanted.meta.get("trace", {})), engine=self._id,
                             version=wanted.number), contextlib.ExitStack() as held:
                with traces.span("engine.pull", engine=self._id, version=wanted.number):
                    prepared = held.enter_context(self._prepared(puller, wanted))
                begun = self._life.begin(wanted.number)
                if not self._write(begun):  # before the first byte changes
                    return True             # it is to leave the pool
                self._life = begun
                self._member.progress(self._life.version, "apply")
                paused_at = time.monotonic()
                with traces.span("engine.apply", engine=self._id, version=wanted.number):
                    self._server.apply(prepared, wanted.number)
                self._pause_s = time.monotonic() - paused_at
                self._checksum = " ".join(prepared.checksums)
        except _PULL_FAILED as e:
            self._cannot_fetch(wanted, e)
            return False
        self._pull_apply_s = time.monotonic() - began
        if self._fetch_failures >= _TELL_AFTER:
            events.emit(self._etcd, self._ctx.keys, "engine.fetch_recovered", self._id,
                        f"engine {self._id} has version {wanted.number} now", version=wanted.number)
        self._fetch_failures = 0
        first = not self._life.version
        self._life = self._life.verified(wanted.number)
        if first:
            # Told to the router first: an engine that etcd calls ready takes requests.
            self._route()
        self._write()
        if first:
            events.emit(self._etcd, self._ctx.keys, "engine.ready", self._id,
                        f"engine {self._id} serves version {wanted.number}", version=wanted.number,
                        adopted=self._adopted, start_s=round(time.time() - self._started_at, 3))
        return True

    @contextlib.contextmanager
    def _prepared(self, puller: Puller, wanted: Version) -> Iterator[Prepared]:
        """The version in the engine's staged weights; what came of it to this host was staged while the rest came."""
        # A first pull is a whole one, and may take much longer than those that follow.
        phase = "pull" if self._life.version else "waiting for the first version"
        self._member.progress(self._life.version, phase)
        with self._server.preparing() as preparation:

            def stage(part: dict[str, Any]) -> None:
                self._member.progress(self._life.version, phase)
                preparation.add(part)

            with puller.pull(Stream.POLICY, wanted.number, on_part=stage) as pulled:
                prepared = preparation.finish(pulled.reference())
                pulled.confirm()  # what was staged was read from memory that the node kept in place
                yield prepared
                if "reference" in prepared.request:  # not staged, but loaded in the pause
                    try:
                        pulled.confirm()
                    except NodeUnavailable as e:
                        raise EngineFailed(f"the weights may have changed while they were loaded: {e.message}") from e

    def _cannot_fetch(self, wanted: Version, error: ElasticRLError) -> None:
        """Tells it once an episode, and not of a first failure, which the next try most often mends."""
        log.warning("engine %s cannot fetch version %d: %s", self._id, wanted.number, error)
        self._fetch_failures += 1
        if self._fetch_failures == _TELL_AFTER:
            events.emit(self._etcd, self._ctx.keys, "engine.cannot_fetch", self._id, severity=Severity.WARNING,
                        message=f"engine {self._id} cannot fetch version {wanted.number}: {type(error).__name__}: "
                                f"{error}", version=wanted.number)

    # -- the end ---------------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Drained or stopped: the record goes, and after a drain no request was lost."""
        if not self._stop.is_set():
            self._life = self._life.drain()
            self._write()
            self._unroute()
            self._member.progress(self._life.version, "waiting for the last request")
            try:
                wait_until(lambda: self._stop.is_set() or self._server.in_flight() == 0,
                           timeout_s=self._cfg.drain_timeout_s, what="the last request of the engine", poll_s=0.1)
            except DeadlineExceeded:
                events.emit(self._etcd, self._ctx.keys, "engine.drain_timeout", self._id, severity=Severity.WARNING,
                            message=f"engine {self._id} was stopped with requests in flight")
        else:
            self._unroute()
        self._server.stop()
        self._etcd.delete(self._ctx.keys.engine(self._id))
        events.emit(self._etcd, self._ctx.keys, "engine.stopped", self._id, f"engine {self._id} left the pool")

    def _end(self, reason: str) -> None:
        """Failed: dead, or quarantined when an update was under way. It never serves again; the driver replaces it."""
        if self._stop.is_set() or (self._drain.is_set() and self._life.state is EngineState.STARTING):
            self._unroute()
            self._etcd.delete(self._ctx.keys.engine(self._id))  # it was asked to go: nothing failed
            return
        detect_s = round(max(0.0, time.time() - self._alive_at), 3)
        alive = self._server.alive()
        self._life = self._life.torn(reason) if self._life.applying and alive else self._life.died(reason)
        if self._adopted:
            self._unroute()  # its server goes on, so no request may come to it any more
        self._server.stop()  # first: from here on no token of it can come
        try:
            self._write()
            # One that never took part leaves no gap: that it does not fit concerns only who asked for it.
            kind, severity = ("refused", Severity.WARNING) if self._adopted and not self._life.version else (
                str(self._life.state), Severity.ERROR)
            events.emit(self._etcd, self._ctx.keys, f"engine.{kind}", self._id, severity=severity,
                        message=f"engine {self._id}: {reason}", version=self._life.version,
                        applying=self._life.applying, detect_s=detect_s)
        finally:
            self._unroute()

    def _route(self) -> None:
        try:
            RouterClient(self._ctx.router_url).add(self._server.url, timeout_s=_ROUTER_TIMEOUT_S)
        except DeadlineExceeded as e:
            raise EngineFailed(e.message, hint=e.hint) from e

    def _unroute(self) -> None:
        if not self._ctx.router_url:
            return
        try:
            RouterClient(self._ctx.router_url).remove(self._server.url, timeout_s=_ROUTER_TIMEOUT_S)
        except (EngineFailed, DeadlineExceeded) as e:  # a router that is gone routes nothing
            log.warning("engine %s could not be taken out of the router: %s", self._id, e)

    # -- the record ------------------------------------------------------------------------------------------------
    def _obey_record(self) -> None:
        """Twice a second: whether the driver wrote DRAINING into the record, the leader QUARANTINED, or somebody took
        it away (a newer epoch did). Raises EngineFailed when it is quarantined."""
        if self._unwritten:
            self._write()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _RECORD_LOOK_S
        self._look_at_load(now)
        found = self._etcd.get(self._ctx.keys.engine(self._id))
        if found is None:
            self._stop.set()
            return
        record = Engine.decode(found.value)
        if record.state is EngineState.DRAINING:
            self._drain.set()
        elif record.state is EngineState.QUARANTINED:
            raise EngineFailed(record.reason)

    def _look_at_load(self, now: float) -> None:
        """Every few seconds: how many requests the engine has, for those who look at it. It decides nothing."""
        if now < self._next_load or self._life.state is not EngineState.READY:
            return
        self._next_load = now + _LOAD_LOOK_S
        load = self._server.load(timeout_s=_LOAD_TIMEOUT_S)
        if load is not None and load != self._load:
            self._load = load
            self._write()

    def _write(self, life: EngineLifecycle | None = None) -> bool:
        """Writes the record. The driver's wish to drain, or the leader's that it goes, stands in the same record and is
        never overwritten; false when it is there. Raises EtcdUnavailable, and Fenced when the epoch is over: the
        engine then ends."""
        life = life or self._life
        expelled = False

        def change(raw: bytes | None) -> bytes:
            nonlocal expelled
            before = Engine.decode(raw) if raw else None
            if before and before.state is EngineState.DRAINING:
                self._drain.set()
            if life.state in (EngineState.DEAD, EngineState.QUARANTINED):
                return self._record(life, life.state)
            if expelled := before is not None and before.state is EngineState.QUARANTINED:
                return raw or b""
            return self._record(life, EngineState.DRAINING if self._drain.is_set() else life.state)

        self._unwritten = True
        self._etcd.update(self._ctx.keys.engine(self._id), change,
                           guards=[fencing.epoch_guard(self._ctx.keys, self._ctx.epoch)])
        self._unwritten = False
        return not (self._drain.is_set() or expelled)

    def _record(self, life: EngineLifecycle, state: EngineState) -> bytes:
        server = self._server
        return Engine(id=self._id, pool=self._pool, state=state, epoch=self._ctx.epoch, host=self._ctx.host,
                      url=server.url if server.pid or self._adopted else "", pid=server.pid, version=life.version,
                      applying=life.applying, started_at=self._started_at, updated_at=time.time(),
                      pull_apply_s=self._pull_apply_s, pause_s=self._pause_s, layout=server.layout,
                      checksum=self._checksum, running=self._load[0], waiting=self._load[1],
                      adopted=self._adopted, reason=life.reason).encode()

