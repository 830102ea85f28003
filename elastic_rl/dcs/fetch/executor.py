"""Fetches chunks from other nodes: carries out what a ``FetchScheduler`` decides, with a thread and a connection for
each transfer.

Callers that request the same chunk share one transfer of it. What arrives is received in a new region of the arena,
verified there, and sealed; a delta is received aside and decoded into such a region. Sealed bytes are never written to.

No failure of a transfer may leave a fetch waiting: whatever ends one, also an unexpected error or a thread
that cannot be started, is reported to the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_rl.dcs.codecs import delta as delta_codec
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.fetch.delta_policy import DeltaPolicy, Outcome
from elastic_rl.dcs.fetch.model import (
    Abandon,
    Action,
    ChunkLost,
    ChunkRequest,
    Failure,
    FetchLimits,
    GetChunk,
    ListNodes,
    QueryHave,
    ReadDurable,
)
from elastic_rl.dcs.fetch.scheduler import FetchScheduler
from elastic_rl.dcs.fetch.transfers import ConnectionPool, DurableChunks, PeerSource, WorkerPool
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
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
"""Owner under which the table knows regions that are being received; connections count upwards from 1."""
_MALFORMED = (KeyError, TypeError, ValueError)
"""What an answer that makes no sense raises."""
_POLL_S = 1.0

OnChunk = Callable[[Chunk], None]
"""Called with each chunk that is here, in the thread that waits; quick."""
Tick = Callable[[], None]
"""Called at least every second while a fetch is alive; may raise, to cancel it."""


@dataclass(eq=False)
class _Waiter:
    """A caller of ``fetch``."""

    holder: int | None
    left: set[str]
    chunks: dict[str, Chunk] = field(default_factory=dict)
    unreported: list[Chunk] = field(default_factory=list)
    error: ElasticRLError | None = None


@dataclass(eq=False)
class _Job:
    """A requested chunk."""

    request: ChunkRequest
    waiters: set[_Waiter]
    region: int = -1
    """Allocated ahead for it, and not in use by a transfer; -1: none."""
    error: str = ""
    """What last went wrong in this node."""


@dataclass(eq=False)
class _Transfer:
    """A transfer in progress."""

    job: _Job
    region: int = -1
    region_nbytes: int = 0
    connection: NodeConnection | None = None
    cancelled: bool = False


class _TransferCancelled(Exception):
    """Another transfer of the chunk was faster, or nothing requests it any more."""


class FetchExecutor:
    """See the module. Thread-safe."""

    def __init__(self, table: ChunkTable, peers: PeerSource, own_id: str, limits: FetchLimits, *, delta: bool = True,
                 durable: DurableChunks | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``limits.durable`` says whether there is a ``durable``. ``delta``: whether to request deltas."""
        self._table, self._peers, self._own_id = table, peers, own_id
        self._delta, self._durable, self._clock = delta, durable, clock
        self._changed = threading.Condition()
        self._scheduler = FetchScheduler(limits, own_id)
        self._policy = DeltaPolicy()
        self._jobs: dict[str, _Job] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._nodes: dict[str, DcsNode] = {}
        self._list_error: ElasticRLError | None = None  # why the nodes could not be listed the last time
        self._pool = ConnectionPool(lambda node: peers.open(node, as_node=own_id), max_idle=2 * limits.parallel)
        self._workers = WorkerPool("fetch")

    def close(self) -> None:
        """Ends every transfer; callers that wait get NodeUnavailable."""
        with self._changed:
            for digest in list(self._jobs):
                self._fail(digest, NodeUnavailable("this node is stopping"))
        self._pool.close()
        self._workers.close()

    # -- callers -----------------------------------------------------------------------------------------------------
    def fetch(self, requests: Sequence[ChunkRequest], prefer: Sequence[str], holder: int | None, on_chunk: OnChunk,
              tick: Tick = lambda: None) -> dict[str, Chunk]:
        """Fetches chunks; each is marked as used, and held for ``holder`` unless None, the moment it is here. Those
        that are here already are left out of the result.

        Raises ChunkMissing, ChunkCorrupt, ArenaFull, DiskFull, EtcdUnavailable when no node is known and none can be
        listed, and what ``tick`` raises.
        """
        waiter = _Waiter(holder, set())
        try:
            self._enlist(requests, prefer, waiter, tick)
            waits = True
            while waits:
                tick()
                waits = self._wait(waiter)
                for chunk in self._take_unreported(waiter):
                    on_chunk(chunk)
        finally:
            with self._changed:
                self._withdraw(waiter)
        if waiter.error is not None:
            raise waiter.error
        return waiter.chunks

    def _wait(self, waiter: _Waiter) -> bool:
        """Waits for a change; False when there is nothing left to wait for. The callers also drive what is due by time
        alone."""
        with self._changed:
            self._dispatch()
            if waiter.left and waiter.error is None:
                now = self._clock()
                self._changed.wait(min(self._scheduler.wake_at(now) - now, _POLL_S))
            return bool(waiter.left) and waiter.error is None

    def _take_unreported(self, waiter: _Waiter) -> list[Chunk]:
        with self._changed:
            out, waiter.unreported = waiter.unreported, []
            return out

    def _enlist(self, requests: Sequence[ChunkRequest], prefer: Sequence[str], waiter: _Waiter, tick: Tick) -> None:
        new: list[_Job] = []
        with self._changed:
            for request in requests:
                job = self._jobs.get(request.digest)
                if job is None:
                    if self._table.has(request.digest):
                        continue  # another caller was faster
                    job = self._jobs[request.digest] = _Job(request, set())
                    new.append(job)
                job.waiters.add(waiter)
                waiter.left.add(request.digest)
        cancelled = False
        try:
            # In order, so that they are contiguous. Not under the lock: it may wait for room.
            for job in new:
                cancelled = True
                tick()
                cancelled = False
                if job.request.nbytes:
                    job.region = self._table.alloc(_OWNER, job.request.nbytes)
        except BaseException as e:  # whatever it is: no caller may wait for what does not begin
            error = e if isinstance(e, ElasticRLError) else NodeUnavailable(f"a fetch could not begin: {e!r}")
            with self._changed:
                if cancelled:  # this caller alone: others may have requested the same chunks meanwhile
                    self._withdraw(waiter)
                    self._begin(new, prefer)
                else:
                    for job in new:
                        self._fail(job.request.digest, error)
            raise
        with self._changed:
            self._begin(new, prefer)

    def _begin(self, new: Sequence[_Job], prefer: Sequence[str]) -> None:
        """Locked: has the scheduler fetch those chunks that are still requested."""
        self._scheduler.request([j.request.digest for j in new if self._jobs.get(j.request.digest) is j], prefer)
        self._changed.notify_all()

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
        """Locked: ends what is in progress for a chunk."""
        self._cancel(self._scheduler.cancel(digest))
        job = self._jobs.pop(digest)
        if job.region >= 0:
            self._table.discard(_OWNER, job.region)
            job.region = -1

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            transfer = self._transfers.pop(number, None)
            if transfer is not None:
                transfer.cancelled = True
                if transfer.connection is not None:
                    transfer.connection.close()  # what the node still sends of it is useless

    # -- actions -----------------------------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        """Locked: begins every action that is due."""
        while (action := self._scheduler.next(self._clock())) is not None:
            match action:
                case ChunkLost():
                    self._fail(action.digest, self._loss(action, self._jobs[action.digest].error))
                    continue
                case Abandon():
                    self._cancel([action.number])
                    continue
                case GetChunk() | ReadDurable():
                    self._transfers[action.number] = _Transfer(self._jobs[action.digest])
            try:
                self._workers.run(partial(self._run, action))
            except RuntimeError as e:  # no more threads: others may end
                log.error("a thread for %s cannot be started: %s", type(action).__name__, e)
                self._report_failure(action, str(e))
                return

    def _loss(self, lost: ChunkLost, local_error: str) -> ElasticRLError:
        if local_error:
            return NodeUnavailable(f"chunk {lost.digest} cannot be received: {local_error}",
                                   hint="this node is at fault; its log says more")
        if lost.corrupt or self._table.was_corrupt(lost.digest):
            return ChunkCorrupt(f"every copy of chunk {lost.digest} that was found is corrupt")
        if self._list_error is not None and not self._nodes:
            return self._list_error
        return ChunkMissing(f"chunk {lost.digest} is on no node that answers")

    def _run(self, action: Action) -> None:
        try:
            match action:
                case ListNodes():
                    self._list_nodes()
                case QueryHave():
                    self._query(action)
                case GetChunk() | ReadDurable():
                    self._transfer(action)
        except Exception as e:  # an error of ours: it must not stop the fetch
            log.exception("%s failed", action)
            with self._changed:
                self._report_failure(action, repr(e))
        with self._changed:
            self._dispatch()

    def _report_failure(self, action: Action, why: str) -> None:
        """Locked: the action came to nothing, through no fault of another node."""
        now = self._clock()
        match action:
            case ListNodes():
                self._scheduler.on_nodes(None, now)
            case QueryHave():
                self._scheduler.on_query_failed(action, now)
            case GetChunk() | ReadDurable():
                transfer = self._transfers.pop(action.number, None)
                if transfer is not None:
                    transfer.job.error = why
                    self._put_back(transfer)
                    self._scheduler.on_failed(action.number, Failure.LOCAL, now)

    def _list_nodes(self) -> None:
        nodes: dict[str, DcsNode] | None = None
        error: ElasticRLError | None = None
        try:
            nodes = {n.id: n for n in self._peers.nodes() if n.id != self._own_id}
        except (ElasticRLError, *_MALFORMED) as e:
            log.warning("the nodes cannot be listed: %s", e)
            error = e if isinstance(e, ElasticRLError) else NodeUnavailable(f"a node's record cannot be read: {e}")
        with self._changed:
            self._list_error = error
            if nodes is not None:
                self._nodes = nodes
            self._scheduler.on_nodes(None if nodes is None else {n.id: n.arena_path for n in nodes.values()},
                                     self._clock())

    def _query(self, query: QueryHave) -> None:
        connection = None
        try:
            connection = self._pool.take(self._node(query.peer))
            missing, load = connection.ask(query.digests)
        except (ElasticRLError, *_MALFORMED) as e:
            log.log(logging.WARNING if isinstance(e, AccessDenied) else logging.INFO,
                    "node %s cannot be queried: %s", query.peer, e)
            with self._changed:
                self._scheduler.on_query_failed(query, self._clock())
        else:
            with self._changed:
                self._scheduler.on_have(query, missing, load, self._clock())
        finally:
            if connection is not None:
                self._pool.give(connection)

    def _node(self, node_id: str) -> DcsNode:
        node = self._nodes.get(node_id)
        if node is None:
            raise NodeUnavailable(f"node {node_id} is not registered any more")
        return node

    # -- transfers ---------------------------------------------------------------------------------------------------
    def _transfer(self, action: GetChunk | ReadDurable) -> None:
        with self._changed:
            transfer = self._transfers.get(action.number)
        if transfer is None:
            return
        why: Failure | None = None
        try:
            if isinstance(action, GetChunk):
                self._receive(action, transfer)
            else:
                self._read_durable(action, transfer)
        except _TransferCancelled:
            pass
        except (ArenaFull, DiskFull) as e:
            self._no_room(action, e)
            why = Failure.LOCAL
        except (ElasticRLError, OSError, *_MALFORMED) as e:
            if not transfer.cancelled:
                why = Failure.CORRUPT if isinstance(e, ChunkCorrupt) else (
                    Failure.MISSING if isinstance(e, ChunkMissing) else Failure.BROKEN)
                source = f"node {action.peer}" if isinstance(action, GetChunk) else "the durable store"
                log.log(logging.ERROR if why is Failure.CORRUPT else logging.INFO,
                        "chunk %s not received from %s: %s", action.digest, source, e)
        finally:
            with self._changed:
                self._put_back(transfer)
        if why is not None:
            with self._changed:
                self._transfers.pop(action.number, None)
                self._scheduler.on_failed(action.number, why, self._clock())

    def _no_room(self, action: GetChunk | ReadDurable, error: ElasticRLError) -> None:
        """There is no region for a chunk. That ends it, unless another transfer of it has one."""
        with self._changed:
            transfer = self._transfers.get(action.number)
            if transfer is not None and not any(
                    t.job is transfer.job for n, t in self._transfers.items() if n != action.number):
                self._fail(action.digest, error)

    def _put_back(self, transfer: _Transfer) -> None:
        """Locked: a transfer's unused region goes to the next transfer of the chunk, or is freed."""
        region, transfer.region = transfer.region, -1
        if region < 0:
            return
        job = transfer.job
        if (self._jobs.get(job.request.digest) is job and job.region < 0
                and transfer.region_nbytes == job.request.nbytes):
            job.region = region
        else:
            self._table.discard(_OWNER, region)

    def _receive(self, action: GetChunk, transfer: _Transfer) -> None:
        request, began = transfer.job.request, self._clock()
        base = request.base if self._wants_delta(request) and self._table.verify(request.base) else ""
        connection = self._pool.take(self._node(action.peer))
        try:
            with self._changed:
                if transfer.cancelled:
                    raise _TransferCancelled
                transfer.connection = connection
            try:
                nbytes, is_delta = self._receive_from(connection, transfer, base)
            except (ChunkCorrupt, ChunkMissing) as e:
                if transfer.cancelled or connection.closed or not (base or isinstance(e, ChunkCorrupt)):
                    raise
                # The copy in the node's memory may have rotted, and that on its disk not: else it sends it for ever.
                log.warning("chunk %s of node %s%s is not what it should be, requesting all of it, verified there: %s",
                            request.digest, action.peer, f" as a delta to {base}" if base else "", e.message)
                try:
                    nbytes, is_delta = self._receive_from(connection, transfer, "", verify=True)
                except ChunkMissing as missing:  # its only copy was that one, and it has dropped it
                    raise missing if base else e from missing
        finally:
            self._pool.give(connection)
        outcome = Outcome.DELTA if is_delta else Outcome.REFUSED if base else Outcome.DENSE
        with self._changed:
            self._policy.record(request.stream, outcome, nbytes, self._clock() - began)
        self._received(action, transfer)

    def _wants_delta(self, request: ChunkRequest) -> bool:
        if not (self._delta and request.base):
            return False
        with self._changed:
            return self._policy.use(request.stream)

    def _receive_from(self, connection: NodeConnection, transfer: _Transfer, base: str, *, verify: bool = False
                      ) -> tuple[int, bool]:
        """Receives and seals the chunk; its bytes, and whether it came as a delta. ``verify``: see
        ``NodeConnection.get``."""
        digest, nbytes = transfer.job.request.digest, 0

        def place(header: dict[str, Any], payload: int) -> memoryview:
            nonlocal nbytes
            nbytes = int(header.get("delta", payload))
            if not payload <= nbytes <= len(self._table.view):
                raise ChunkCorrupt(f"chunk {digest} was announced with {nbytes} bytes")
            self._take_region(transfer, nbytes)
            if "delta" in header:
                return memoryview(bytearray(payload))
            return self._table.view[transfer.region:transfer.region + nbytes]

        data = connection.get(digest, place, base=base, verify=verify)
        if not nbytes:
            raise ChunkCorrupt(f"chunk {digest} arrived empty")
        if is_delta := len(data) < nbytes:
            self._decode(data, base, transfer, nbytes)
        self._seal(transfer, nbytes)
        return nbytes, is_delta

    def _decode(self, delta: memoryview, base: str, transfer: _Transfer, nbytes: int) -> None:
        with self._table.reading(base) as old:
            delta_codec.decode(delta, old, self._table.view[transfer.region:transfer.region + nbytes])

    def _take_region(self, transfer: _Transfer, nbytes: int) -> None:
        """Gives the transfer a region: only when its bytes are about to come, since a node that hangs while it is
        connected to would occupy it."""
        job = transfer.job
        with self._changed:
            if transfer.cancelled:
                raise _TransferCancelled
            if transfer.region < 0 and job.region >= 0:
                transfer.region, transfer.region_nbytes, job.region = job.region, job.request.nbytes, -1
        if transfer.region < 0:
            transfer.region, transfer.region_nbytes = self._table.alloc(_OWNER, nbytes), nbytes
        if nbytes != transfer.region_nbytes:
            raise ChunkCorrupt(f"chunk {job.request.digest} was announced with {nbytes} bytes")

    def _seal(self, transfer: _Transfer, nbytes: int) -> None:
        region, transfer.region = transfer.region, -1
        try:
            self._table.seal(_OWNER, region, nbytes, expect=transfer.job.request.digest, hold=False)
        except ElasticRLError:
            raise  # the table has freed it
        except BaseException:
            self._table.discard(_OWNER, region)
            raise

    def _read_durable(self, action: ReadDurable, transfer: _Transfer) -> None:
        assert self._durable is not None
        data = self._durable.read_chunk(transfer.job.request.digest)
        self._take_region(transfer, len(data))
        self._table.view[transfer.region:transfer.region + len(data)] = data
        self._seal(transfer, len(data))
        self._received(action, transfer)

    def _received(self, action: GetChunk | ReadDurable, transfer: _Transfer) -> None:
        """The chunk is here: notifies the callers, and ends its other transfers."""
        digest = action.digest
        with self._changed:
            if self._transfers.pop(action.number, None) is None:
                return  # another transfer was faster
            for waiter in transfer.job.waiters:
                chunk = self._table.use(digest, waiter.holder)
                if chunk is None:  # dropped since it was sealed: it was not marked as used yet
                    self._scheduler.on_failed(action.number, Failure.LOCAL, self._clock())
                    return
                waiter.chunks[digest] = chunk
                waiter.unreported.append(chunk)
            for waiter in transfer.job.waiters:
                waiter.left.discard(digest)
            self._cancel(self._scheduler.on_received(action.number, self._clock()))
            self._forget(digest)
            self._changed.notify_all()
