"""Gets chunks from other nodes: does what a ``FetchScheduler`` says, with a thread and a connection for each transfer.

Callers that want the same chunk share one transfer of it. What arrives is received in place in a fresh region of the
arena, verified there, and sealed; a delta is received aside and put together in such a region. Nothing that is under a
digest already is ever written to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from elastic_rl.dcs.codecs import delta as delta_codec
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.fetch.actions import Action, Ask, Failure, Get, Limits, Look, Lost, Recall
from elastic_rl.dcs.fetch.scheduler import FetchScheduler
from elastic_rl.dcs.fetch.transfers import ConnectionPool, WorkerPool
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.tiers import Chunk
from elastic_rl.errors import (
    AccessDenied,
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
)
from elastic_rl.etcd.records import DcsNode

log = logging.getLogger(__name__)

_OWNER = -1
"""Under which the table knows the regions that are being received; connections count upwards from 1."""
_MALFORMED = (KeyError, TypeError, ValueError)
"""What an answer that makes no sense ends in."""


Arrived = Callable[[Chunk], None]
"""Told of each chunk that is here, in the thread that waits; cheap."""


class Peers(Protocol):
    """What is needed of a ``HubClient``."""

    def nodes(self) -> list[DcsNode]: ...

    def open(self, node: DcsNode, *, as_node: str = "") -> NodeConnection: ...


class ColdStore(Protocol):
    """Where chunks are that no node has any more."""

    def read_chunk(self, digest: str) -> bytes:
        """The chunk's bytes, verified. Raises ChunkMissing, ChunkCorrupt, and what else says that it cannot be had."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A chunk to be got."""

    digest: str
    nbytes: int = 0
    """0: not known."""
    base: str = ""
    """A chunk to get a delta against, if it is here."""


@dataclass(eq=False)
class _Waiter:
    holder: int | None
    left: set[str]
    chunks: dict[str, Chunk] = field(default_factory=dict)
    untold: list[Chunk] = field(default_factory=list)
    error: ElasticRLError | None = None


@dataclass(eq=False)
class _Job:
    wanted: Wanted
    waiters: set[_Waiter]
    region: int = -1
    """Allocated ahead for it, and not in use by a transfer; -1: none."""


@dataclass(eq=False)
class _Flight:
    """One transfer."""

    job: _Job
    region: int = -1
    region_nbytes: int = 0
    connection: NodeConnection | None = None
    cancelled: bool = False


class _Cancelled(Exception):
    """Another transfer of the chunk was faster, or nobody wants it any more."""


class Swarm:
    """See the module. Thread-safe."""

    def __init__(self, table: ChunkTable, hub: Peers, own_id: str, limits: Limits, *, delta: bool = True,
                 durable: ColdStore | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``limits.durable`` says whether there is a ``durable``. ``delta``: whether to ask for deltas."""
        self._table, self._hub, self._own_id = table, hub, own_id
        self._limits, self._delta, self._durable, self._clock = limits, delta, durable, clock
        self._changed = threading.Condition()
        self._schedule = FetchScheduler(limits, own_id)
        self._jobs: dict[str, _Job] = {}
        self._flights: dict[int, _Flight] = {}
        self._nodes: dict[str, DcsNode] = {}
        self._unlisted: ElasticRLError | None = None  # why the nodes could not be listed the last time
        self._pool = ConnectionPool(lambda node: hub.open(node, as_node=own_id), most_idle=2 * limits.parallel)
        self._crew = WorkerPool("fetch")

    def close(self) -> None:
        """Ends every transfer; those who wait for one get NodeUnavailable."""
        with self._changed:
            for digest in list(self._jobs):
                self._fail(digest, NodeUnavailable("this node is ending"))
        self._pool.close()
        self._crew.close()

    # -- callers -----------------------------------------------------------------------------------------------------
    def obtain(self, wanted: Sequence[Wanted], prefer: Sequence[str], holder: int | None,
               arrived: Arrived) -> dict[str, Chunk]:
        """Gets the chunks; each is marked as used, and held for ``holder`` unless None, the moment it is here. Those
        that turn out to be here already are left out. ``arrived`` is told of each soon after.

        Raises ChunkMissing, ChunkCorrupt, ArenaFull, DiskFull, and EtcdUnavailable when no node is known and none can
        be found.
        """
        waiter = _Waiter(holder, set())
        try:
            self._enlist(wanted, prefer, waiter)
            waits = True
            while waits:
                waits = self._wait(waiter)
                for chunk in self._untold(waiter):
                    arrived(chunk)
        finally:
            with self._changed:
                self._withdraw(waiter)
        if waiter.error is not None:
            raise waiter.error
        return waiter.chunks

    def _wait(self, waiter: _Waiter) -> bool:
        """Waits for something to happen; False when there is nothing left to wait for. Whoever waits also sees to what
        is due by time alone."""
        with self._changed:
            self._dispatch()
            if waiter.left and waiter.error is None:
                now = self._clock()
                self._changed.wait(min(self._schedule.wake_at(now) - now, 1.0))
            return bool(waiter.left) and waiter.error is None

    def _untold(self, waiter: _Waiter) -> list[Chunk]:
        with self._changed:
            out, waiter.untold = waiter.untold, []
            return out

    def _enlist(self, wanted: Sequence[Wanted], prefer: Sequence[str], waiter: _Waiter) -> None:
        new: list[_Job] = []
        with self._changed:
            for want in wanted:
                job = self._jobs.get(want.digest)
                if job is None:
                    if self._table.has(want.digest):
                        continue  # another caller was faster
                    job = self._jobs[want.digest] = _Job(want, set())
                    new.append(job)
                job.waiters.add(waiter)
                waiter.left.add(want.digest)
        try:
            # One after the other and before any arrives, so that they lie in this order. Not under the lock: it may
            # take a while until there is room.
            for job in new:
                if job.wanted.nbytes:
                    job.region = self._table.alloc(_OWNER, job.wanted.nbytes)
        except BaseException as e:  # whatever it was: nobody may wait for what will not be begun
            error = e if isinstance(e, ElasticRLError) else NodeUnavailable(f"a fetch could not begin: {e!r}")
            with self._changed:
                for job in new:
                    self._fail(job.wanted.digest, error)
            raise
        with self._changed:
            self._schedule.want([j.wanted.digest for j in new if self._jobs.get(j.wanted.digest) is j], prefer)

    def _withdraw(self, waiter: _Waiter) -> None:
        for digest in waiter.left:
            job = self._jobs.get(digest)
            if job is not None:
                job.waiters.discard(waiter)
                if not job.waiters:
                    self._forget(digest)
        waiter.left = set()

    def _fail(self, digest: str, error: ElasticRLError) -> None:
        job = self._jobs.get(digest)
        if job is not None:
            for waiter in job.waiters:
                waiter.error = waiter.error or error
                waiter.left.discard(digest)
            self._forget(digest)
            self._changed.notify_all()

    def _forget(self, digest: str) -> None:
        """Locked: ends what is under way for a chunk."""
        self._cancel(self._schedule.drop(digest))
        job = self._jobs.pop(digest)
        if job.region >= 0:
            self._table.discard(_OWNER, job.region)
            job.region = -1

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            flight = self._flights.pop(number, None)
            if flight is not None:
                flight.cancelled = True
                if flight.connection is not None:
                    flight.connection.close()  # what the node still sends of it is of no use

    # -- carrying out the schedule -----------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        """Locked: begins whatever is due."""
        while (action := self._schedule.next(self._clock())) is not None:
            if isinstance(action, Lost):
                self._fail(action.digest, self._loss(action))
                continue
            if isinstance(action, Get | Recall):
                self._flights[action.number] = _Flight(self._jobs[action.digest])
            self._crew.run(partial(self._run, action))

    def _loss(self, lost: Lost) -> ElasticRLError:
        if lost.corrupt or self._table.was_rotten(lost.digest):
            return ChunkCorrupt(f"every copy of chunk {lost.digest} that was found is corrupt")
        if self._unlisted is not None and not self._nodes:
            return self._unlisted
        return ChunkMissing(f"chunk {lost.digest} is on no node that answers")

    def _run(self, action: Action) -> None:
        match action:
            case Look():
                self._look()
            case Ask():
                self._ask(action)
            case Get() | Recall():
                self._transfer(action)
        with self._changed:
            self._dispatch()

    def _look(self) -> None:
        try:
            nodes, why = {n.id: n for n in self._hub.nodes() if n.id != self._own_id}, None
        except (ElasticRLError, *_MALFORMED) as e:
            log.warning("the nodes cannot be listed: %s", e)
            nodes, why = None, e if isinstance(e, ElasticRLError) else NodeUnavailable(f"a node's record is odd: {e}")
        with self._changed:
            self._unlisted = why
            if nodes is not None:
                self._nodes = nodes
            self._schedule.looked(None if nodes is None else {n.id: n.arena_path for n in nodes.values()},
                                  self._clock())

    def _ask(self, ask: Ask) -> None:
        connection = None
        try:
            connection = self._pool.take(self._node(ask.peer))
            missing, load = connection.ask(ask.digests)
        except (ElasticRLError, *_MALFORMED) as e:
            log.log(logging.WARNING if isinstance(e, AccessDenied) else logging.INFO,
                    "node %s cannot be asked what it has: %s", ask.peer, e)
            with self._changed:
                self._schedule.unheard(ask, self._clock())
        else:
            with self._changed:
                self._schedule.heard(ask, missing, load, self._clock())
        finally:
            if connection is not None:
                self._pool.give(connection)

    def _node(self, node_id: str) -> DcsNode:
        node = self._nodes.get(node_id)
        if node is None:
            raise NodeUnavailable(f"node {node_id} is not registered any more")
        return node

    # -- transfers ---------------------------------------------------------------------------------------------------
    def _transfer(self, action: Get | Recall) -> None:
        with self._changed:
            flight = self._flights.get(action.number)
        if flight is None:
            return
        why: Failure | None = None
        try:
            if isinstance(action, Get):
                self._receive(action, flight)
            else:
                self._recall(action, flight)
        except _Cancelled:
            pass
        except (ArenaFull, DiskFull) as e:
            self._no_room(action, e)
            why = Failure.OWN
        except (ElasticRLError, OSError, *_MALFORMED) as e:
            if not flight.cancelled:
                why = Failure.CORRUPT if isinstance(e, ChunkCorrupt) else (
                    Failure.MISSING if isinstance(e, ChunkMissing) else Failure.BROKEN)
                source = f"node {action.peer}" if isinstance(action, Get) else "the durable store"
                log.log(logging.ERROR if why is Failure.CORRUPT else logging.INFO,
                        "chunk %s not from %s: %s", action.digest, source, e)
        finally:
            with self._changed:
                self._put_back(flight)
        if why is not None:
            with self._changed:
                self._flights.pop(action.number, None)
                self._schedule.failed(action.number, why, self._clock())

    def _no_room(self, action: Get | Recall, error: ElasticRLError) -> None:
        """There is no region for a chunk. That ends it, unless another transfer of it has one."""
        with self._changed:
            flight = self._flights.get(action.number)
            if flight is not None and not any(
                    f.job is flight.job for n, f in self._flights.items() if n != action.number):
                self._fail(action.digest, error)

    def _put_back(self, flight: _Flight) -> None:
        """Locked: what is left of a transfer's region is there for the next one of the chunk, or given back."""
        region, flight.region = flight.region, -1
        if region < 0:
            return
        job = flight.job
        if self._jobs.get(job.wanted.digest) is job and job.region < 0 and flight.region_nbytes == job.wanted.nbytes:
            job.region = region
        else:
            self._table.discard(_OWNER, region)

    def _receive(self, action: Get, flight: _Flight) -> None:
        want = flight.job.wanted
        base = want.base if self._delta and want.base and self._table.sound(want.base) else ""
        connection = self._pool.take(self._node(action.peer))
        try:
            with self._changed:
                if flight.cancelled:
                    raise _Cancelled
                flight.connection = connection
            try:
                self._receive_from(connection, flight, base)
            except (ChunkCorrupt, ChunkMissing) as e:
                if not base or flight.cancelled:
                    raise
                log.warning("chunk %s cannot be made from %s and what node %s sent, so all of it is asked for: %s",
                            want.digest, base, action.peer, e.message)
                self._receive_from(connection, flight, "")
        finally:
            self._pool.give(connection)
        self._landed(action, flight)

    def _receive_from(self, connection: NodeConnection, flight: _Flight, base: str) -> None:
        digest, dense = flight.job.wanted.digest, 0

        def place(header: dict[str, Any], nbytes: int) -> memoryview:
            nonlocal dense
            dense = int(header.get("delta", nbytes))
            if not nbytes <= dense <= len(self._table.view):
                raise ChunkCorrupt(f"chunk {digest} was announced with {dense} bytes")
            self._make_room(flight, dense)
            if "delta" in header:
                return memoryview(bytearray(nbytes))
            return self._table.view[flight.region:flight.region + dense]

        data = connection.get(digest, place, base=base)
        if not dense:
            raise ChunkCorrupt(f"chunk {digest} arrived empty")
        if len(data) < dense:
            self._put_together(data, base, flight, dense)
        self._seal(flight, dense)

    def _put_together(self, delta: memoryview, base: str, flight: _Flight, nbytes: int) -> None:
        with self._table.reading(base) as old:
            delta_codec.decode(delta, old, self._table.view[flight.region:flight.region + nbytes])

    def _make_room(self, flight: _Flight, nbytes: int) -> None:
        """Has the transfer have a region for so many bytes: not before the bytes are about to come, since a node that
        hangs while it is connected to would keep it."""
        job = flight.job
        with self._changed:
            if flight.cancelled:
                raise _Cancelled
            if flight.region < 0 and job.region >= 0:
                flight.region, flight.region_nbytes, job.region = job.region, job.wanted.nbytes, -1
        if flight.region < 0:
            flight.region, flight.region_nbytes = self._table.alloc(_OWNER, nbytes), nbytes
        if nbytes != flight.region_nbytes:
            raise ChunkCorrupt(f"chunk {job.wanted.digest} was announced with {nbytes} bytes")

    def _seal(self, flight: _Flight, nbytes: int) -> None:
        region, flight.region = flight.region, -1  # gone, whatever comes of it
        self._table.seal(_OWNER, region, nbytes, expect=flight.job.wanted.digest, hold=False)

    def _recall(self, action: Recall, flight: _Flight) -> None:
        assert self._durable is not None
        data = self._durable.read_chunk(flight.job.wanted.digest)
        self._make_room(flight, len(data))
        self._table.view[flight.region:flight.region + len(data)] = data
        self._seal(flight, len(data))
        self._landed(action, flight)

    def _landed(self, action: Get | Recall, flight: _Flight) -> None:
        """The chunk is here: tells those who wait for it, and ends other transfers of it."""
        digest = action.digest
        with self._changed:
            if self._flights.pop(action.number, None) is None:
                return  # another one was faster
            for waiter in flight.job.waiters:
                chunk = self._table.use(digest, waiter.holder)
                if chunk is None:  # dropped since it was sealed: nobody knew yet that it is used
                    self._schedule.failed(action.number, Failure.OWN, self._clock())
                    return
                waiter.chunks[digest] = chunk
                waiter.untold.append(chunk)
            for waiter in flight.job.waiters:
                waiter.left.discard(digest)
            self._cancel(self._schedule.got(action.number, self._clock()))
            self._forget(digest)
            self._changed.notify_all()
