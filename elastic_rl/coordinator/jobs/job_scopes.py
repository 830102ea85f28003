"""The jobs of a cluster as one replica has them: a scope for each job that has a record."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, ValuesView
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from elastic_rl.coordinator.api.context import JobContext, ServedJobs
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.jobs.job_scope import JobScope
from elastic_rl.coordinator.reconciler import loop_of
from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import JobHealth, JobProblem
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_POLL_S = 0.5
_RETRY_S = (0.5, 15.0)
_JOIN_S = 2.0
_CLOSING_AT_ONCE = 16

OpenScope = Callable[[], JobScope]
PrepareScope = Callable[[str, JobRecord], OpenScope]
"""Reads the settings in the record of a job, and returns what opens its scope. Both raise ElasticRLError."""


@dataclass
class _Known:
    """A job that has a record."""

    scope: JobScope | None = None
    settings: str = ""
    """The sealed settings that the scope was opened with."""
    closing: JobScope | None = None
    """The scope that was open before, whose loops may still be in their last pass."""
    retry: RetryBackoff = field(default_factory=lambda: RetryBackoff(*_RETRY_S))
    fault: str = ""
    """Why no scope with the settings of the record is open; empty if one is, or was not tried yet."""


class JobScopes(ServedJobs):
    """Follows the records of jobs: opens a scope for each, opens it again when the settings in its record have changed,
    and closes it when the record is gone. Where the new settings cannot be used, the scope with those before stays.

    Never are two scopes of a job open here at once: their loops would have the same fencing token. A job without an
    open scope counts as a loop of the leader whose passes fail, so that a leader which cannot open it resigns.

    As a mapping it has the context of each job that was opened, by name; other threads may read it.
    """

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, election: Election, prepare: PrepareScope) -> None:
        self._etcd, self._prefix, self._election, self._prepare = etcd, keys.jobs_prefix(), election, prepare
        self._health = election.health
        self._records = Mirror(etcd, self._prefix, self._decode)
        self._decoded: dict[str, JobRecord] = {}
        self._jobs: dict[str, _Known] = {}
        self._contexts: dict[str, JobContext] = {}
        """Replaced, never changed: other threads iterate it."""
        self._term, self._written = 0, dict[str, JobProblem]()
        """The term in which this replica led last, and what it has written in it of each job (``_write_problems``)."""
        self._write_error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-scopes", daemon=True)

    # -- read by other threads ---------------------------------------------------------------------------------------
    def __getitem__(self, job: str) -> JobContext:
        return self._contexts[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)

    def items(self) -> ItemsView[str, JobContext]:
        return self._contexts.items()

    def values(self) -> ValuesView[JobContext]:
        return self._contexts.values()

    def known(self) -> Collection[str]:
        return self._jobs.copy().keys()

    def problem(self, job: str) -> JobProblem | None:
        health, why = JobHealth.NOT_OPEN, self.waits_for(job)
        if not why:
            health, why = JobHealth.FAILING, self._health.problem_of(loop_of(job))
        return JobProblem(replica=self._election.replica, health=health, message=why) if why else None

    def waits_for(self, job: str) -> str:
        known = self._jobs.get(job)
        if known is None or known.scope is not None:
            return ""
        return known.fault or "it is being opened"

    def wake(self) -> None:
        """Has the leader's loop of each job make a pass now."""
        for known in self._jobs.copy().values():
            if (scope := known.scope) is not None:
                scope.reconciler.wake()

    # -- following ---------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Opens the scopes of the jobs that there are, and follows the records from then on. Raises EtcdUnavailable."""
        self._update(self._records.read(0.0))
        self._thread.start()
        return self

    def close(self) -> None:
        """Closes all scopes, several at once."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._records.close()
        scopes = [known.scope for known in self._jobs.copy().values() if known.scope is not None]
        with ThreadPoolExecutor(_CLOSING_AT_ONCE) as pool:
            list(pool.map(lambda scope: scope.close(), scopes))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._update(self._records.read(_POLL_S))
                except ElasticRLError as e:
                    log.warning("the records of jobs cannot be read: %s", e)
                    self._stopping.wait(_RETRY_S[0])
                self._write_problems()
        finally:
            if not self._stopping.is_set():
                # Only a defect in this loop itself ends it: without it the replica would never see another record.
                os.kill(os.getpid(), signal.SIGTERM)

    def _write_problems(self) -> None:
        """While this replica leads, writes what keeps it from deciding about each job, for the answers of the other
        replicas. The lease of its candidacy deletes the keys with its term. A write that fails is repeated."""
        try:
            if self._term != (term := self._election.term):
                self._term, self._written = term, {}
            for job in {*self._jobs, *self._written}:
                found = self.problem(job)
                if found == self._written.get(job):
                    continue
                mine = self._etcd.get(self._election.key)
                if mine is None:
                    return
                key = Keys(job).leader_problem()
                self._election.writer.write(Op.put(key, found.encode(), mine.lease) if found else Op.delete(key))
                if found:
                    self._written[job] = found
                else:
                    del self._written[job]
            self._write_error = ""
        except Fenced:
            return
        except ElasticRLError as e:
            if self._write_error != str(e):
                log.warning("what keeps this leader from deciding about jobs cannot be written: %s", e)
            self._write_error = str(e)

    def _decode(self, kv: KeyValue) -> JobRecord | None:
        """A record; for one that cannot be read, such as one of a later release, the one before it: a job whose record
        is damaged must not be left without a leader."""
        record = readable_one(kv, JobRecord) or self._decoded.get(kv.key)
        if record is not None:
            self._decoded[kv.key] = record
        return record

    def _update(self, records: Mapping[str, JobRecord]) -> None:
        """Closes and opens the scopes that differ from the records."""
        self._decoded = {key: record for key, record in self._decoded.items() if key in records}
        found = {key.removeprefix(self._prefix): record for key, record in records.items()}
        for job in self._jobs.keys() - found.keys():
            self._leave(job)
        for job, record in found.items():
            if self._stopping.is_set():
                return
            if job not in self._jobs:
                self._jobs = {**self._jobs, job: _Known()}
                self._health.expect(loop_of(job))
            known = self._jobs[job]
            if (known.scope is None or known.settings != record.settings) and known.retry.is_due(time.monotonic()):
                self._open(job, known, record)

    def _open(self, job: str, known: _Known, record: JobRecord) -> None:
        try:
            open_scope = self._prepare(job, record)
            if known.scope is not None:
                known.closing, known.scope = known.scope, None
                known.closing.close()
            if known.closing is not None and not known.closing.ended:
                raise ElasticRLError("the last pass with the settings before has not ended")
            known.scope, known.closing = open_scope(), None
        except Exception as e:  # a defect that shows with one job must not leave the others without a leader
            known.retry.failed(time.monotonic())
            known.fault = f"{e}" if isinstance(e, ElasticRLError) else f"{type(e).__name__}: {e}"
            left_s = known.retry.left_s(time.monotonic())
            log.error("the settings of job %s cannot be used; next try in %.0f s: %s", job, left_s, known.fault,
                      exc_info=None if isinstance(e, ElasticRLError) else e)
            if known.scope is None:
                self._health.pass_failed(loop_of(job), f"the job is not open: {known.fault}")
            return
        known.settings, known.fault = record.settings, ""
        known.retry.reset()
        self._contexts = {**self._contexts, job: known.scope.context}

    def _leave(self, job: str) -> None:
        known = self._jobs[job]
        self._jobs = {name: other for name, other in self._jobs.items() if name != job}
        self._contexts = {name: context for name, context in self._contexts.items() if name != job}
        if known.scope is not None:
            try:
                known.scope.close(gone=True)
            except Exception:  # as in ``_open``
                log.exception("job %s was left, and not all of it could be closed", job)
        self._health.ended(loop_of(job))
