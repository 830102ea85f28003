"""Runs one engine: keeps its server alive, follows the policy head, and reports to etcd and the router."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.engine.departure import Departure, LeaveStep, Quiet
from elastic_rl.engine.fetch_failures import FETCH_ERRORS, NO_EVIDENCE, FetchFailures, others_serve, read_evidence
from elastic_rl.engine.host_model import HostModel
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.engine.record import EngineRecord
from elastic_rl.engine.router import RouterClient
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.engine.server.health import Health, HealthLimits
from elastic_rl.engine.server.health_monitor import HealthMonitor
from elastic_rl.engine.server.probe import Load
from elastic_rl.engine.server.sglang_server import EngineServer, SGLangServer, StagedUpdate
from elastic_rl.engine.update_turns import PoolSlots, UpdateTurn
from elastic_rl.errors import (
    ChunkCorrupt,
    ChunkMissing,
    Compacted,
    DeadlineExceeded,
    ElasticRLError,
    EngineFailed,
    EtcdUnavailable,
    Fenced,
    NodeUnavailable,
    RouterUnavailable,
)
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import Compare
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Engine, EngineState, Severity, Version
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import stacks
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.job_secrets import dcs_security, engine_access, engine_key_file, engine_tls
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)

FOLDER_VERSION = 1
"""Version of weights that belong to no stream: those of the folder of the pool's model."""
_TICK_S = 0.1
"""The server's processes and the drain flag are checked at least this often; a new head arrives by a watch."""
_RECORD_INTERVAL_S = 0.5
_LOAD_INTERVAL_S = 5.0
"""A new load is written so often at most: that of a busy engine changes with each probe, and each change is a write to
etcd of every engine."""
_TURN_S = 0.05
"""How often an engine that waits for its turn to update looks whether it has come."""
_TURN_RETRY_S = (0.1, 2.0)
"""First and longest pause of such an engine after a failure of etcd."""
_ROUTER_TIMEOUT_S = 30.0
_ROUTE_TRY_S = 5.0
"""Limit of one attempt to join the router; there is no limit on their number."""
_MONITOR_END_S = 2.0
_LOOK_FOR_OTHERS_S = 2.0
"""How often an engine that leaves with requests in flight looks whether another one of its pool serves."""
_RETRY_S = (0.2, 30.0)
"""First and longest pause after a version that could not be fetched or staged; a newer version is tried at once."""
_FAILURES_TO_REPORT = 5
"""Failed fetches, one after the other, that make an event; most single failures are gone with the next attempt."""


@dataclass(frozen=True)
class ReportedLoad:
    """The load of an engine as its record has it."""

    running: int = 0
    waiting: int = 0
    token_usage: float | None = None
    known: bool = False

    def after(self, load: Load | None) -> ReportedLoad:
        """What the record is to have after a probe. The share of the KV cache is rounded: each change is a write."""
        if load is None:
            return replace(self, known=False)
        usage = load.token_usage
        return ReportedLoad(load.running, load.waiting, None if usage is None else round(20 * usage) / 20, known=True)


class _Leaves(Exception):
    """The engine is to leave in the middle of a pull, which may take minutes."""


class EngineRunner:
    """Runs engine ``engine_id`` of a run until it is drained, stopped or dead. Independent of Ray.

    ``external_url``: URL of a server that someone else runs; the runner uses it and never starts or ends it. ``gpus``:
    the GPUs of the server, as ``CUDA_VISIBLE_DEVICES`` has them; empty: those of this process.
    """

    def __init__(self, ctx: RunContext, engine_id: str, pool: str = ROLLOUT_POOL, *, external_url: str = "",
                 gpus: str = "") -> None:
        self._ctx, self._id, self._pool = ctx, engine_id, ctx.pool(pool)
        self._cfg, self._router_url = self._pool.engine, ctx.router_urls.get(pool, "")
        self._lifecycle = EngineLifecycle()
        self._drain, self._hurry = threading.Event(), threading.Event()
        self._stop = threading.Event()
        self._etcd = ctx.connect()
        self._member = Membership(self._etcd, ctx.keys, event_kinds.ENGINE, engine_id,
                                  ttl_s=ctx.config.coordinator.lease_ttl_s, epoch=ctx.epoch,
                                  heartbeats=heartbeats_here(ctx.config))
        self._record = EngineRecord(ctx, self._etcd, engine_id, self._member.incarnation)
        self._started_at = time.time()
        self._pull_apply_s = self._pause_s = 0.0
        self._unfetchable_version = 0
        self._checksum = ""
        self._alive_at = time.time()
        self._holds_device = False
        self._fetch_failures = FetchFailures(self._cfg.fetch_timeout_s, min_failures=_FAILURES_TO_REPORT)
        self._retry = RetryBackoff(*_RETRY_S)
        limit = self._pool.max_unavailable
        self._turn = UpdateTurn(PoolSlots(
            self._etcd, ctx.keys, pool, limit, holder=f"{engine_id}/{self._member.incarnation}",
            lease=lambda: self._member.lease)) if limit is not None else None
        """The turn to pause for an update; None where all may pause at once."""
        self._awaits_turn = False
        self._route_retry = RetryBackoff(*_RETRY_S)
        self._next_record = self._next_load = 0.0
        self._load = ReportedLoad()
        self._unwritten = False  # the last write failed: the record in etcd is outdated
        self._needs = 0
        """Oldest version with which the router may have the engine, which is behind; 0 while it is not."""
        self._joined = False
        """Whether the engine has been READY."""
        self._external = bool(external_url)
        self._access, paths = engine_access(ctx.config), JobPaths.of(ctx.config)
        self._model = HostModel(ctx, self._pool)
        self._server: EngineServer = ExternalServer(
            external_url, str(self._model.folder), cfg=self._cfg, updates=self._pool.stream is not None,
            access=self._access
        ) if external_url else SGLangServer(
            str(self._model.folder), cfg=self._cfg, has_weights=self._model.has_weights, device=ctx.config.device,
            host=ctx.host, log=paths.log(f"engine-{engine_id}"), deterministic=ctx.config.deterministic,
            reads_text=self._pool.reads_text,
            folder_version=0 if self._pool.stream else FOLDER_VERSION, shares_devices=self._pool.colocated,
            gpus=gpus, key_file=engine_key_file(ctx.config), tls=engine_tls(ctx.config),
            # The same engine of the same run samples the same; no two engines share a seed.
            seed=zlib.crc32(f"{ctx.config.seed}/{engine_id}".encode()) & 0x7FFFFFFF,
            tag=paths.file_tag(engine_id, secrets.token_hex(4)))
        self._monitor = HealthMonitor(
            self._server.probe, self._server.effort, on_frozen=self._on_frozen,
            limits=HealthLimits(self._cfg.frozen_after_s, self._cfg.busy_limit_s, gap_s=self._cfg.frozen_after_s / 2),
            interval_s=self._server.probe_interval_s, name=engine_id)

    # -- called from other threads ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Makes ``run`` leave the pool: no new requests, those in flight go on elsewhere or finish, the record is
        deleted."""
        self._drain.set()

    def hurry(self) -> None:
        """Has an engine that leaves give its requests back now: its host ends in a moment."""
        self._hurry.set()

    def stop(self) -> None:
        """Makes ``run`` end at once, with or without requests in flight."""
        self._stop.set()

    def write_stacks(self, why: str, pids: Iterable[int], *, report: bool = False) -> str:
        """Writes the stacks of processes of the engine, which hangs, to a file, and returns where that is; empty where
        it could not be done. ``report``: by an event, too. Bounded in time, but for etcd's answer."""
        part = f"engine-{self._id}"
        path = stacks.write_of_hang(JobPaths.of(self._ctx.config).hangs, part, pids, f"{part}: {why}")
        found = f"{path} on {self._ctx.host}" if path is not None else ""
        if found and report:
            with contextlib.suppress(ElasticRLError):
                self._record.emit(event_kinds.ENGINE_STACKS, f"engine {self._id}: {why}; its stacks: {found}",
                                  severity=Severity.WARNING, file=str(path))
        return found

    def _on_frozen(self, reason: str) -> None:
        """Called in the monitor's thread: the server answers nothing any more, and is killed."""
        found = ""
        try:
            found = self.write_stacks(reason, self._server.pids) if self._server.pids else ""
        finally:
            self._server.condemn(f"{reason}; its stacks: {found}" if found else reason)

    # -- main loop -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Blocks until the engine has ended. A failure of the engine is reported in etcd, not raised."""
        try:
            self._write_soon()
            self._member.start()
            self._before_launch()
            self._await_model()
            self._server.start(wait_while=lambda: not self._leaving)
            self._lifecycle = self._lifecycle.up()
            self._monitor.start()
            self._write_soon()
            if self._pool.stream is None:
                self._serve_folder()
            else:
                self._follow(self._pool.stream)
            self._leave()
        except EngineFailed as e:
            self._fail(str(e))
        except Fenced as e:  # the record, and perhaps this external server, belong to a newer epoch
            log.warning("engine %s ends: %s", self._id, e)
            self._unroute()
        except ElasticRLError as e:  # unexpected, but the driver must learn that this engine serves no longer
            self._fail(f"{type(e).__name__}: {e}")
        finally:
            self._end_server()
            self._server.close()
            self._monitor.join(_MONITOR_END_S)
            self._member.close()
            self._etcd.close()

    @property
    def _leaving(self) -> bool:
        return self._drain.is_set() or self._stop.is_set()

    def _await_model(self) -> None:
        """Returns when the folder of the model is on this host, or the engine is to leave. Raises EngineFailed and
        Fenced."""
        def pause(seconds: float) -> bool:
            self._member.progress(0, "waiting for the model")
            return self._stop.wait(seconds) or self._leaving

        if not self._model.is_here:
            self._member.progress(0, "waiting for the model")
        self._model.bring(self._etcd, pause)

    # -- for a subclass whose engine shares devices with the trainer --------------------------------------------------
    def _before_launch(self) -> None:
        """Returns when the server may be launched. Raises EngineFailed and Fenced."""

    def _lost_weights(self) -> bool:
        """Called again and again between two versions; whether the weights are gone since the last call. Raises
        EngineFailed, Fenced and EtcdUnavailable."""
        return False

    def _before_routing(self) -> None:
        """Called once a version is verified. Raises EngineFailed."""

    def _serve_folder(self) -> None:
        """Serves the weights of the model's folder, as their only version, until the engine leaves. Raises EngineFailed
        and Fenced."""
        try:
            with self._monitor.paused():  # the scheduler answers nothing else meanwhile
                self._checksum = self._server.checksum()  # the leader compares those of a pool
        except EngineFailed as e:  # whether it serves is for the monitor to say
            log.warning("engine %s: its weights are not compared with those of other engines: %s", self._id, e)
        self._lifecycle = self._lifecycle.begin(FOLDER_VERSION).verified(FOLDER_VERSION)
        self._write_soon()
        while not self._leaving:
            try:
                self._look_after()
            except EtcdUnavailable as e:  # it serves on
                log.warning("engine %s: %s", self._id, e)
            self._stop.wait(_TICK_S)

    def _look_after(self) -> None:
        """What an engine does in each tick, whatever it serves. Raises EngineFailed, Fenced and EtcdUnavailable."""
        self._member.progress(self._lifecycle.version, self._phase())
        if not self._server.alive():
            raise EngineFailed(self._server.failure)
        self._alive_at = time.time()
        self._check_record()
        self._join_router()
        if self._turn is not None and not self._awaits_turn and not self._is_away:
            self._turn.release()  # of an update that is over, where etcd or the router was away

    def _follow(self, stream: Stream) -> None:
        """Applies each new head until the engine leaves. Raises EngineFailed and Fenced."""
        dcs = self._ctx.config.dcs
        puller = Puller(self._etcd, self._ctx.keys, f"engine-{self._id}", io_timeout_s=dcs.io_timeout_s,
                        security=dcs_security(self._ctx.config))
        heads = puller.watch_head(stream)
        target: Version | None = None
        lost = False
        try:
            while not self._leaving:
                try:
                    self._look_after()
                    lost = self._lost_weights() or lost
                    if lost:  # no newer head may come before it is served
                        target, lost = puller.head(stream), False
                        self._retry.reset()
                    if target is None:
                        target = heads.get(_TICK_S)
                    elif not self._retry.is_due(time.monotonic()):
                        if (newer := heads.get(_TICK_S)) is not None:
                            target = newer
                            self._retry.try_now()
                    elif self._sync(puller, target):
                        target = None
                        self._retry.reset()
                    else:
                        self._retry.failed(time.monotonic())
                        target = puller.head(stream)  # the version that failed may have been released meanwhile
                except EtcdUnavailable as e:  # without etcd nothing new is decided, and the engine serves on
                    log.warning("engine %s: %s", self._id, e)
                    self._stop.wait(_TICK_S)  # etcd may refuse at once, without using up a retry budget
        finally:
            heads.close()
            puller.close()

    def _phase(self) -> str:
        """What the engine does, for people and for the hang detection of the leader."""
        if self._awaits_turn:
            return "waiting for other engines to update"
        if self._lifecycle.version and self._lifecycle.state is EngineState.SYNCING and not self._needs:
            return "waiting for the router"
        suspected = self._monitor.health.state is not Health.HEALTHY
        return "waiting for an answer of the server" if suspected else "follow"

    def _sync(self, puller: Puller, target: Version) -> bool:
        """Brings the engine to the version, unless it has a newer one or is to leave. False when the version could not
        be fetched, and the engine is unchanged."""
        if not self._lifecycle.accepts(target.number):
            return True
        try:
            return self._update(puller, target)
        finally:
            self._end_turn()

    def _update(self, puller: Puller, target: Version) -> bool:
        """See ``_sync``."""
        began = time.monotonic()
        if self._unfetchable_version not in (0, target.number):  # of another version nothing is known
            self._unfetchable_version = 0
            self._write_soon()
        try:
            with traces.span("engine.sync", parent=traces.extract(target.meta.get("trace")), engine=self._id,
                             version=target.number), contextlib.ExitStack() as held:
                with traces.span("engine.pull", engine=self._id, version=target.number):
                    update, pulled = held.enter_context(self._staged(puller, target))
                if self._turn is not None and self._lifecycle.state is EngineState.READY:
                    waits_since = time.monotonic()
                    if not self._await_turn(self._turn):
                        return True
                    began += time.monotonic() - waits_since
                    if "reference" in update.request:  # the node may have ended during the wait
                        pulled.confirm()
                if self._cfg.pause_mode == "drain" and (self._lifecycle.state is EngineState.READY or self._needs):
                    self._pause_requests()
                    if self._leaving:
                        return True
                begun = self._lifecycle.begin(target.number)
                if not self._write(begun):  # before the first byte changes
                    return True             # the engine is to leave the pool
                self._lifecycle = self._lifecycle.begin(target.number)  # the write may have said that it is given up
                self._member.progress(self._lifecycle.version, "apply")
                paused_at = time.monotonic()
                with traces.span("engine.apply", engine=self._id, version=target.number), self._monitor.paused():
                    self._server.apply(update, target.number)
                self._pause_s = time.monotonic() - paused_at
                self._checksum = " ".join(update.checksums)
        except _Leaves:
            return True
        except FETCH_ERRORS as e:
            self._on_fetch_failed(target, e)
            return False
        self._pull_apply_s = time.monotonic() - began
        if self._fetch_failures.count >= _FAILURES_TO_REPORT:
            self._record.emit(event_kinds.ENGINE_FETCH_RECOVERED, f"engine {self._id} has version {target.number} now",
                       version=target.number)
        self._fetch_failures.succeeded()
        self._unfetchable_version = 0
        self._lifecycle = self._lifecycle.verified(target.number)
        self._before_routing()
        if self._needs:  # first: the driver takes out of the router what its record calls behind
            self._write()
            self._join_router()
        elif not self._join_router():
            self._write()
        return True

    def _await_turn(self, turn: UpdateTurn) -> bool:
        """Returns when the engine may pause, or has no requests any more that a pause could interrupt, and with false
        when it is to leave. What is staged is kept meanwhile, also
        when newer versions come and while etcd is away. Raises EngineFailed and Fenced."""
        begun, retry = False, RetryBackoff(*_TURN_RETRY_S)
        self._awaits_turn = True
        try:
            while not self._leaving:
                try:
                    self._look_after()  # first: it sees an end of the server without etcd, too
                    if self._lifecycle.state is not EngineState.READY:  # it was given up
                        return True
                    if not begun:
                        turn.begin()
                        begun = True
                    if turn.take(time.monotonic()):
                        return True
                    retry.reset()
                    self._stop.wait(_TURN_S)
                except EtcdUnavailable as e:
                    log.warning("engine %s has a version staged, and waits for etcd to take its turn to update: %s",
                                self._id, e)
                    retry.failed(time.monotonic())
                    self._stop.wait(retry.left_s(time.monotonic()))
        finally:
            self._awaits_turn = False
        return False

    @property
    def _is_away(self) -> bool:
        """Whether the engine, which is to go on, is out of the router for an update. One that was given up does not
        count: it may be out for long, and the others must have their turns."""
        return self._lifecycle.state is EngineState.SYNCING and not self._leaving and not self._needs

    def _end_turn(self) -> None:
        """Frees the turn, unless the router has not taken the engine back yet. That of an engine that fails is free
        with its lease at the latest."""
        if self._turn is not None and not self._is_away:
            with contextlib.suppress(EtcdUnavailable):  # ``_look_after`` tries again
                self._turn.release()

    def _join_router(self) -> bool:
        """Makes, once the first version is verified, the engine READY when the router has it. One that is away is
        waited for without a limit, while the engine follows the head, and so is a version with which an engine that
        was behind may join. False when nothing changed."""
        if self._lifecycle.state is not EngineState.SYNCING or not self._lifecycle.version or self._needs:
            return False
        if not self._route_retry.is_due(time.monotonic()):
            return False
        try:
            # Before the record: an engine that etcd calls ready takes requests.
            RouterClient(self._router_url, access=self._access).add(self._server.url, timeout_s=_ROUTE_TRY_S)
        except (RouterUnavailable, DeadlineExceeded) as e:
            log.warning("engine %s waits for the router: %s", self._id, e)
            self._route_retry.failed(time.monotonic())
            return False
        self._lifecycle = self._lifecycle.routed()
        self._write()
        if self._needs and self._lifecycle.state is EngineState.SYNCING:  # the leader has given it up meanwhile
            self._unroute()
            return True
        if self._joined:  # it was out for an update, or behind
            return True
        self._joined = True
        self._record.emit(event_kinds.ENGINE_READY, f"engine {self._id} serves version {self._lifecycle.version}",
                   version=self._lifecycle.version, external=self._external,
                   start_s=round(time.time() - self._started_at, 3))
        return True

    @contextlib.contextmanager
    def _staged(self, puller: Puller, target: Version) -> Iterator[tuple[StagedUpdate, Pulled]]:
        """The version in the engine's staged weights, and on this host. Parts are staged while further parts are being
        pulled."""
        # A first pull is a whole one, and may take much longer than those that follow.
        phase = "pull" if self._lifecycle.version else "waiting for the first version"
        self._member.progress(self._lifecycle.version, phase)
        with self._server.stage() as session:

            def on_part(part: dict[str, Any]) -> None:
                if self._leaving:
                    raise _Leaves
                self._member.progress(self._lifecycle.version, phase)
                session.add(part)

            with puller.pull(target.stream, target.number, on_part=on_part) as pulled:
                update = session.finish(pulled.reference())
                pulled.confirm()  # what was staged was read from memory that the node kept in place
                yield update, pulled
                if "reference" in update.request and self._lifecycle.applying:  # not staged, but loaded in the pause
                    try:
                        pulled.confirm()
                    except NodeUnavailable as e:
                        now = self._lifecycle
                        if self._external or now.version or now.state is not EngineState.SYNCING:
                            raise EngineFailed(f"the weights may have changed while they were loaded: {e.message}"
                                               ) from e
                        self._lifecycle = now.unconfirmed()  # nobody was sent to it yet: it loads again
                        self._write_soon()
                        raise

    def _on_fetch_failed(self, target: Version, error: ElasticRLError) -> None:
        """Counts the failure, and reports a row of them once, and at once that no sound copy of the version was found:
        who has the weights need not wait then. Raises EngineFailed when it is this engine that cannot fetch, and not
        the checkpoint service that does not serve."""
        log.warning("engine %s cannot fetch version %d: %s", self._id, target.number, error)
        unfetchable = target.number if isinstance(error, ChunkCorrupt | ChunkMissing) else 0
        if unfetchable != self._unfetchable_version:
            self._unfetchable_version = unfetchable
            self._write_soon()
        failures, now = self._fetch_failures, time.monotonic()
        cause = f"{type(error).__name__}: {error}"
        failures.failed(now)
        if isinstance(error, NO_EVIDENCE):
            failures.excused()
        if failures.count == _FAILURES_TO_REPORT:
            self._record.emit(event_kinds.ENGINE_CANNOT_FETCH,
                              f"engine {self._id} cannot fetch version {target.number}: {cause}",
                              severity=Severity.WARNING, version=target.number)
        if not failures.overdue(now):
            return
        try:
            found = read_evidence(self._etcd, self._ctx.keys, self._as_record(self._lifecycle, self._lifecycle.state))
        except Compacted:
            return
        if not found.blames_engine:
            log.warning("engine %s has failed for %.0f s, but only %d of %d other engines are ahead of it%s: it waits",
                        self._id, failures.lasted_s(now), found.ahead, found.peers,
                        "" if found.nodes else ", and no checkpoint node is registered")
            return
        reason = (f"cannot fetch a newer version than {self._lifecycle.version} for {failures.lasted_s(now):.0f} s, "
                  f"while {found.ahead} of {found.peers} other engines can; the last error: {cause}")
        self._record.emit(event_kinds.ENGINE_CANNOT_FETCH, f"engine {self._id} {reason}", severity=Severity.ERROR,
                   version=target.number, failing_s=round(failures.lasted_s(now), 3))
        if self._lifecycle.version:
            self._finish_requests()
        raise EngineFailed(reason)

    # -- end -------------------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Ends a drained or stopped engine and deletes its record. A drain loses no request in flight."""
        handed_over = 0
        if not self._stop.is_set():
            handed_over = self._finish_requests()
        else:
            self._unroute()
        self._end_server()
        if not self._external:
            self._unroute()  # again: an addition that the router still had in its queue may have come after the removal
        if self._record.delete():
            others = f"; other engines go on with {handed_over} requests" if handed_over else ""
            self._record.emit(event_kinds.ENGINE_STOPPED, f"engine {self._id} left the pool{others}",
                              handed_over=handed_over)

    def _finish_requests(self) -> int:
        """Takes the engine out of the router for good, and ends the requests that it has: other engines go on with
        them, or they are finished here within a limit (``departure``), also while etcd is away or the server does not
        answer. Returns how many were handed over. Raises EngineFailed for a server that has ended, and Fenced."""
        departure = Departure(time.monotonic(), self._cfg.drain_timeout_s, may_abort=not self._external)
        if self._hurry.is_set():
            departure.hurry(time.monotonic())
        self._lifecycle = self._lifecycle.drain()
        self._write_soon()
        # A router that does not answer must not take the time in which the requests are handed over.
        self._unroute(min(_ROUTER_TIMEOUT_S, max(_ROUTE_TRY_S, departure.left_s(time.monotonic()) / 2)))
        look_at, others, in_flight = 0.0, False, 1
        while not self._stop.is_set():
            self._member.progress(self._lifecycle.newest, "waiting for the last request")
            is_known = True
            try:
                in_flight = self._server.in_flight()
            except EngineFailed as e:
                self._require_server(e)
                is_known, in_flight = False, max(1, in_flight)  # there may be some
            now, handed_over = time.monotonic(), departure.handed_over
            if self._hurry.is_set():
                departure.hurry(now)
            if (in_flight or self._unwritten) and now >= look_at and departure.left_s(now):
                look_at = now + _LOOK_FOR_OTHERS_S
                if self._unwritten:  # the driver adds an engine to the router that its record calls ready
                    self._write_soon()
                others = self._hands_over and self._others_serve()
                now = time.monotonic()  # without etcd a look takes long
            step = departure.step(now, in_flight, can_hand_over=others and is_known)
            if step is LeaveStep.ABORT:
                try:
                    self._server.abort_requests()
                except EngineFailed as e:  # they go on here, and a later step asks again
                    self._require_server(e)
                    departure.handed_over = handed_over
            elif step is LeaveStep.GIVE_UP:
                log.warning("engine %s is stopped with requests in flight", self._id)
                with contextlib.suppress(EtcdUnavailable):
                    self._record.emit(
                        event_kinds.ENGINE_DRAIN_TIMEOUT, f"engine {self._id} was stopped with requests in flight",
                        severity=Severity.WARNING)
            if step in (LeaveStep.DONE, LeaveStep.GIVE_UP):
                break
            self._stop.wait(_TICK_S)
        return departure.handed_over

    def _require_server(self, error: EngineFailed) -> None:
        """After a call of a server that leaves: logs the error, which ends nothing while the server runs. Raises
        EngineFailed where it has ended, and its requests with it."""
        if not self._server.alive():
            raise error
        log.warning("engine %s goes on leaving: %s", self._id, error)

    @property
    def _hands_over(self) -> bool:
        """Whether the clients of the engine go on from the tokens that an aborted request has."""
        return self._cfg.drain_mode == "hand_over" and not self._ctx.config.deterministic

    def _others_serve(self) -> bool:
        """Whether another engine of the pool serves; false without etcd."""
        try:
            return others_serve(self._etcd, self._ctx.keys, self._pool.name, self._id)
        except EtcdUnavailable:
            return False

    def _pause_requests(self) -> None:
        """Takes the engine out of the router, unless it is already, until it joins that again with a new version, and
        waits, within a limit, for the requests that it has. Raises EngineFailed and EtcdUnavailable."""
        if self._lifecycle.state is EngineState.READY:
            self._lifecycle = self._lifecycle.unrouted()
            self._write()
            self._unroute()
        if not self._await_idle(self._cfg.drain_timeout_s, lambda: self._leaving, settles=True):
            log.warning("engine %s updates with requests in flight, and gives them back: they took longer than "
                        "engine.drain_timeout_s=%g", self._id, self._cfg.drain_timeout_s)

    def _await_idle(self, limit_s: float, is_over: Callable[[], bool], *, settles: bool = False) -> bool:
        """Whether the requests in flight ended within this time, or the wait for them is over. ``settles``: the router
        may have sent one just before it forgot the engine. Raises EngineFailed."""
        quiet = Quiet()

        def is_idle() -> bool:
            self._member.progress(self._lifecycle.newest, "waiting for the last request")
            if is_over():
                return True
            in_flight = self._server.in_flight()
            return quiet.observe(time.monotonic(), in_flight) if settles else not in_flight

        try:
            wait_until(is_idle, timeout_s=limit_s, what="the last request of the engine", poll_s=0.1)
        except DeadlineExceeded:
            return False
        return True

    def _fail(self, reason: str) -> None:
        """Marks the engine dead, or quarantined when an update was under way. It never serves again; the driver
        replaces it."""
        if self._stop.is_set() or (self._drain.is_set() and self._lifecycle.state in (
                EngineState.STARTING, EngineState.RELEASED)):
            self._unroute()
            self._record.delete()  # it was to leave: nothing failed
            return
        detect_s = round(max(0.0, time.time() - self._alive_at, self._monitor.health.silent_s), 3)
        alive = self._server.alive()
        torn = self._lifecycle.applying and alive
        self._lifecycle = self._lifecycle.torn(reason) if torn else self._lifecycle.died(reason)
        if self._external:
            self._unroute()  # the server lives on, so requests must stop coming to it
        self._end_server()  # first, so that it produces no token after this
        try:
            self._write()
            # A server that never joined the pool leaves no gap: only the operator who registered it has to know.
            kind, severity = (event_kinds.ENGINE_REFUSED, Severity.WARNING) if (
                self._external and not self._lifecycle.version) else (
                event_kinds.ENGINE_QUARANTINED if torn else event_kinds.ENGINE_DEAD, Severity.ERROR)
            self._record.emit(kind, f"engine {self._id}: {reason}", severity=severity, detect_s=detect_s,
                       version=self._lifecycle.version, applying=self._lifecycle.applying)
        except (EtcdUnavailable, Fenced) as e:  # the leader finds that its process has ended, or knows no such engine
            log.warning("engine %s ends unreported: %s", self._id, e)
        finally:
            self._unroute()

    def _end_server(self) -> None:
        self._monitor.close()  # what answers no probe from here on is not frozen
        self._holds_device &= not self._server.stop()

    def _unroute(self, timeout_s: float = _ROUTER_TIMEOUT_S) -> None:
        """Removes the server from the router, unless another runner has taken the same external server over."""
        if not self._router_url or (self._external and self._record.superseded()):
            return
        try:
            RouterClient(self._router_url, access=self._access).remove(self._server.url, timeout_s=timeout_s)
        except (RouterUnavailable, DeadlineExceeded) as e:  # a router that is down routes nothing
            log.warning("engine %s could not be removed from the router: %s", self._id, e)

    # -- etcd ------------------------------------------------------------------------------------------------------
    def _check_record(self) -> None:
        """Twice a second, unless it is written so often: follows a change of the record by the driver (DRAINING, or out
        of the router since it is behind), the leader (QUARANTINED, or behind) or a newer driver (deleted). Raises
        Fenced, and EngineFailed for a quarantined engine."""
        if self._unwritten:
            self._write()
        now = time.monotonic()
        self._update_load(now)
        if now < self._next_record:
            return
        self._next_record = now + _RECORD_INTERVAL_S
        exists, record = self._record.read()
        if not exists:
            self._stop.set()
        elif record is None:
            self._write()  # it is this runner's to write
        elif record.state is EngineState.DRAINING:
            self._drain.set()
        elif record.state is EngineState.QUARANTINED:
            raise EngineFailed(record.reason)
        else:
            self._note_straggler(record)

    def _update_load(self, now: float) -> None:
        """Writes what load the engine had at the last probe, or at once that this was not answered, or is again."""
        if self._lifecycle.state is not EngineState.READY:
            return
        load = self._load.after(self._server.load)
        if load.known != self._load.known or (load != self._load and now >= self._next_load):
            self._load, self._next_load = load, now + _LOAD_INTERVAL_S
            self._write()

    def _write_soon(self) -> None:
        """Writes the record; without etcd ``_look_after`` does it later. Raises Fenced."""
        try:
            self._write()
        except EtcdUnavailable as e:
            log.warning("engine %s: its record is not written yet: %s", self._id, e)

    def _write(self, lifecycle: EngineLifecycle | None = None, guards: Sequence[Compare] = ()) -> bool:
        """Writes the record; false when the driver or the leader has asked for something in it. Raises EtcdUnavailable,
        Conflict when one of the ``guards`` does not hold, and Fenced when the epoch is over: the engine then ends."""
        lifecycle = lifecycle or self._lifecycle
        state = EngineState.DRAINING if self._drain.is_set() and not lifecycle.state.ended else lifecycle.state
        self._unwritten = True
        written = self._record.write(self._as_record(lifecycle, state), guards)
        self._unwritten, self._next_record = False, time.monotonic() + _RECORD_INTERVAL_S
        if written.state is EngineState.DRAINING:
            self._drain.set()
        self._note_straggler(written)
        return written.state not in (EngineState.DRAINING, EngineState.QUARANTINED)

    def _note_straggler(self, record: Engine) -> None:
        """Takes note of what the leader and the driver say of an engine that is behind."""
        straggler = record.straggler
        self._needs = straggler.needs if straggler is not None else 0
        if record.state is EngineState.SYNCING and self._lifecycle.state is EngineState.READY:
            self._lifecycle = self._lifecycle.given_up()

    def _as_record(self, lifecycle: EngineLifecycle, state: EngineState) -> Engine:
        server = self._server
        return Engine(id=self._id, pool=self._pool.name, state=state, epoch=self._ctx.epoch, host=self._ctx.host,
                      url=server.url if server.pid or self._external else "", pid=server.pid,
                      version=lifecycle.version, applying=lifecycle.applying, started_at=self._started_at,
                      updated_at=time.time(), pull_apply_s=self._pull_apply_s, pause_s=self._pause_s,
                      unfetchable_version=self._unfetchable_version,
                      layout=server.layout, checksum=self._checksum, running=self._load.running,
                      slots=0 if self._external else self._cfg.max_running_requests,
                      waiting=self._load.waiting, token_usage=self._load.token_usage, load_known=self._load.known,
                      incarnation=self._member.incarnation, external=self._external, holds_device=self._holds_device,
                      reason=lifecycle.reason)
