"""Publishers, pullers and collectors of one stream of the checkpoint service. What they did is a history for the model
of a stream's catalog (``chaos_tests.model.catalog``); the bytes of each version follow from the seed in its record, so
that a reader knows whether it is whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from chaos_tests.event_log import EventLog
from chaos_tests.history import Answer, Operation, Recorder, Refused
from chaos_tests.model.catalog import FENCED, GONE, Call, of_sweep
from chaos_tests.model.models import CATALOG
from chaos_tests.traffic.traffic import Traffic, call
from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.publisher import Publisher, commit
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ElasticRLError, Fenced, OutcomeUnknown, VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

STREAM = "policy"
CHUNK_BYTES = 32 << 10
_TENSORS = 6


def content(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors [12_000] fp32, about nine chunks in all."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(_TENSORS):
        yield f"t{i}", torch.rand(12_000, generator=generator)


def is_whole(seed: int, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the tensors of the seed, to the last bit."""
    wanted = dict(content(seed))
    return tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def raise_epoch(etcd: EtcdClient, keys: Keys, holder: str, recorder: Recorder) -> int:
    with call(recorder, holder, STREAM, Call.RAISE_EPOCH, model=CATALOG) as answer:
        answer.is_(fencing.raise_epoch(etcd, keys, holder).number)
    return int(answer.result)


class SteppedPublisher:
    """Publishes step by step, and writes each step down: begin, seal, commit."""

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int, name: str, recorder: Recorder, *, node: str,
                 replicas: Replicas = 1, staging_ttl_s: int = 2, io_timeout_s: float = 10.0,
                 security: Security | None = None) -> None:
        self._name, self._epoch, self._recorder = name, epoch, recorder
        self._publisher = Publisher(etcd, keys, STREAM, epoch=epoch, owner=name, chunk_bytes=CHUNK_BYTES,
                                    replicas=replicas, staging_ttl_s=staging_ttl_s, io_timeout_s=io_timeout_s,
                                    node=node, security=security)
        self._client = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, node=node, security=security)
        self._arena = LocalArena(self._client)

    def publish(self, seed: int) -> int:
        """Number of the version, which is committed. Raises as ``Publisher.publish`` does."""
        staged = None
        try:
            with self._call(Call.BEGIN, self._epoch) as answer:
                try:
                    staged = self._publisher.begin({"seed": seed})
                    answer.is_(staged.version.number)
                except Fenced:
                    answer.is_(FENCED)
                    raise
            number = staged.version.number
            with self._call(Call.SEAL, number) as answer:
                writer = PartWriter(self._arena, chunk_bytes=CHUNK_BYTES)
                for name, tensor in content(seed):
                    writer.add(name, tensor)
                stored = self._publisher.store(staged, [writer.seal()], hold=True)
                answer.is_(None)
            with self._call(Call.COMMIT, number) as answer:
                try:
                    [version] = commit([stored])
                    answer.is_(None)
                except Fenced:
                    answer.is_(FENCED)
                    raise
        except OutcomeUnknown:
            self._publisher.drop_lease()
            raise
        except ElasticRLError:
            self._publisher.abort(staged)
            self._client.close()
            raise
        self._publisher.release_holds(stored, version)
        self._client.local().release_holds()
        return number

    def _call(self, what: Call, argument: int) -> AbstractContextManager[Answer]:
        return call(self._recorder, self._name, STREAM, what, argument, model=CATALOG)

    def close(self) -> None:
        self._publisher.close()
        self._arena.close()
        self._client.close()


class Publishers(Traffic):
    """Publish one version after the other; one that fails is skipped. With several, the number of each is committed
    only while no newer one is."""

    def __init__(self, make: Callable[[str, Recorder], SteppedPublisher], count: int = 1, *, pause_s: float = 0.1,
                 log: EventLog | None = None, recorder: Recorder | None = None) -> None:
        """``make``: a publisher of this name, which writes what it does into this recorder."""
        super().__init__(log=log, recorder=recorder)
        self.committed: list[int] = []
        self.failures: Counter[str] = Counter()
        """Publishes that ended without a version, by error."""
        self._pause_s, self._seeds = pause_s, itertools.count(1)
        self._publishers = [make(f"publisher-{n}", self.recorder) for n in range(count)]

    def workers(self) -> Sequence[Callable[[], None]]:
        return [lambda p=publisher: self._work(p) for publisher in self._publishers]  # type: ignore[misc]

    def _work(self, publisher: SteppedPublisher) -> None:
        while not self.pause(self._pause_s):
            try:
                number = publisher.publish(next(self._seeds))
            except ElasticRLError as e:
                self.failures[type(e).__name__] += 1
            else:
                self.committed.append(number)
                self.count()

    def close(self) -> None:
        try:
            super().close()
        finally:
            for publisher in self._publishers:
                publisher.close()


class Follower(Traffic):
    """Pulls every head that it sees, as an engine does, and compares each byte with what its publisher meant. A version
    that cannot be had now is asked for again until a newer one is the head."""

    def __init__(self, etcd: EtcdClient, keys: Keys, node: str, name: str = "follower", *, pins: bool = False,
                 log: EventLog | None = None, recorder: Recorder | None = None) -> None:
        """``pins``: the node and its lease live all the time, so that a version which was pulled cannot be collected
        until it is closed, which the history then has."""
        super().__init__(log=log, recorder=recorder)
        self.puller = Puller(etcd, keys, name, io_timeout_s=10, node=node)
        self._etcd, self._keys, self._name = etcd, keys, name
        self._take = Call.PIN if pins else Call.PULL
        self.seen: list[int] = []
        self.torn: list[int] = []
        self.failures: Counter[str] = Counter()
        """Pulls that ended without the version, by error."""
        self.pulling = False

    def workers(self) -> Sequence[Callable[[], None]]:
        return [self._follow]

    def _follow(self) -> None:
        with self.puller.watch_head(STREAM) as heads:
            wanted = 0
            while not self.stopping:
                head = heads.get(0.1)
                wanted = head.number if head is not None else wanted
                if wanted and (not self.seen or self.seen[-1] < wanted):
                    self._read_head()
                    if not self.pull(wanted):
                        self.pause(0.2)

    def _read_head(self) -> None:
        try:
            with call(self.recorder, self._name, STREAM, Call.HEAD, model=CATALOG) as answer:
                head = reads.head(self._etcd, self._keys, STREAM)
                answer.is_(head.number if head is not None else 0)
        except ElasticRLError:
            return

    def pull(self, number: int) -> bool:
        """Whether there is no more to do for this version."""
        self.pulling = True
        try:
            with call(self.recorder, self._name, STREAM, self._take, number, model=CATALOG) as answer:
                try:
                    pulled = self.puller.pull(STREAM, number)
                    answer.is_(None)
                except VersionNotFound:
                    answer.is_(GONE)
            if answer.result == GONE:
                return True  # released while it was asked for: a newer one is the head
            with pulled:
                try:
                    whole = is_whole(pulled.version.meta["seed"], dict(pulled.tensors()))
                finally:
                    if self._take is Call.PIN:  # the version may be collected as soon as the block begins to end
                        at = self.recorder.now()
                        self.recorder.add(Operation(self._name, STREAM, Call.UNPIN, number, at, at, model=CATALOG))
        except ElasticRLError as e:
            self.failures[type(e).__name__] += 1
            return False
        finally:
            self.pulling = False
        self.seen.append(number)
        if not whole:
            self.torn.append(number)
        self.count()
        return True

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.puller.close()


def sweep(etcd: EtcdClient, keys: Keys, collector: GarbageCollector, recorder: Recorder, *,
          guard: Sequence[Compare] = ()) -> list[str]:
    """One sweep of the garbage collector; its lines. Whoever is killed in the middle of it leaves a history in which
    each version may have been collected."""
    begun_s, versions = recorder.now(), reads.list_versions(etcd, keys, STREAM)
    maybe = [(Call.RELEASE, v.number) for v in versions if v.state is VersionState.COMMITTED]
    maybe += [(Call.ABORT, v.number) for v in versions if v.state is VersionState.STAGING]
    lines = list[str]()

    def collect(rest: Sequence[tuple[Call, int]]) -> None:
        if not rest:
            lines.extend(collector.sweep(guard))
            return
        (what, number), *others = rest
        with recorder.operation("collector", STREAM, what, number, model=CATALOG) as answer:
            collect(others)
            if (what, number) not in of_sweep(lines, STREAM):
                raise Refused
            answer.is_(None)

    collect(maybe)
    for what, number in of_sweep(lines, STREAM):
        if (what, number) not in maybe:
            recorder.add(Operation("collector", STREAM, what, number, begun_s, recorder.now(), model=CATALOG))
    return lines
