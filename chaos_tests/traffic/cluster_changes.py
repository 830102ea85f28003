"""Calls of the admin API that read and change what operators want of a cluster, each of which writes the history: the
size of a pool, which hosts are cordoned and drained, silences, and what takes a while."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_tests.history import Recorder, Refused, Unanswered, Unknown
from chaos_tests.model import created, models
from chaos_tests.model.host_spec import change_of_host, wanted_of_host
from chaos_tests.model.number import READ, WRITE
from chaos_tests.model.operation import ABSENT
from chaos_tests.model.operation import Call as OperationCall
from chaos_tests.traffic.pool_changes import POOL, PoolCalls, reading, refuse_unless, revision_of, send
from elastic_rl.coordinator.api_paths import host_path, job_path

_CALL_S = 3.0
_PAGE = 1000
"""Most entries of a listing that the API gives at once."""

@dataclass(frozen=True)
class ApiTarget:
    """Where the clients send their requests. ``urls``: of each coordinator by its name; ``verify``: what trusts them,
    as httpx has it; ``headers``: those of an operator."""

    urls: Mapping[str, str]
    job: str
    headers: Mapping[str, str]
    verify: Any
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Address of each host by its name, where clients change what is wanted of hosts."""


class ClusterCalls:
    """Single calls, which write the history."""

    def __init__(self, target: ApiTarget, recorder: Recorder) -> None:
        self.target, self.recorder = target, recorder
        self.pool = PoolCalls(recorder, target.headers, target.verify, model=models.POOL)

    def job_url(self, replica: str) -> str:
        return self.target.urls[replica] + job_path(self.target.job)

    def want(self, replica: str, host: str, wanted: int, client: str, timeout_s: float = _CALL_S) -> bool:
        """Changes what is wanted of a host; returns whether that was accepted."""
        with self.recorder.operation(client, host, WRITE, wanted, model=models.NUMBER) as answer:
            got = self._send("PATCH", self.target.urls[replica] + host_path(host), timeout_s,
                             json=change_of_host(wanted))
            refuse_unless(got, 200)
            answer.is_([wanted, revision_of(got)])
        return answer.known

    def wanted(self, replica: str, host: str, client: str, timeout_s: float = _CALL_S) -> bool:
        with self.recorder.operation(client, host, READ, model=models.NUMBER) as answer:
            got = self._read(self.target.urls[replica] + host_path(host), timeout_s)
            answer.is_([wanted_of_host(got.json()["spec"]), revision_of(got)])
        return answer.known

    def create(self, replica: str, path: str, body: Mapping[str, Any] | None, key: str, client: str, *,
               method: str = "POST") -> str:
        """Begins an operation; returns its id, "" where that is not known."""
        with self.recorder.operation(client, f"key {key}", OperationCall.CREATE, model=models.OPERATION) as answer:
            got = self._send(method, f"{self.job_url(replica)}/{path}", _CALL_S, json=body,
                             headers={"Idempotency-Key": key})
            refuse_unless(got, 202)
            answer.is_(got.json()["id"])
        return str(answer.result or "")

    def state(self, replica: str, operation: str, key: str, client: str, timeout_s: float = _CALL_S) -> str:
        """State of an operation, or ABSENT; "" where no replica says it."""
        with self.recorder.operation(client, f"key {key}", OperationCall.GET, operation, model=models.OPERATION
                                     ) as answer:
            got = self._read(f"{self.job_url(replica)}/operations/{operation}", timeout_s, may_be_absent=True)
            answer.is_(got.json()["state"] if got.status_code == 200 else ABSENT)
        return str(answer.result or "")

    def silence(self, replica: str, kind: str, seconds: float, key: str, client: str) -> str:
        """Silences the alerts of a kind; returns the id of the silence, "" where that is not known."""
        with self.recorder.operation(client, f"silence {key}", created.CREATE, model=models.CREATED) as answer:
            got = self._send("POST", f"{self.job_url(replica)}/silences", _CALL_S, headers={"Idempotency-Key": key},
                             json={"duration_s": seconds, "kind": kind})
            refuse_unless(got, 201)
            answer.is_(got.json()["id"])
        return str(answer.result or "")

    def silenced(self, replica: str, silence: str, key: str, client: str) -> bool:
        """Whether a silence is listed; False also where no replica says so."""
        with self.recorder.operation(client, f"silence {key}", created.READ, silence, model=models.CREATED) as answer:
            got = self._read(f"{self.job_url(replica)}/silences?limit={_PAGE}", _CALL_S)
            answer.is_(silence in {each["id"] for each in got.json()["items"]})
        return bool(answer.result)

    def end_silence(self, replica: str, silence: str, key: str, client: str) -> bool:
        """Returns whether it was ended by this call. One that is not there may have been ended by this request too: a
        coordinator sends it to etcd again where an answer is lost."""
        with self.recorder.operation(client, f"silence {key}", created.DELETE, silence, model=models.CREATED) as answer:
            got = self._send("DELETE", f"{self.job_url(replica)}/silences/{silence}", _CALL_S)
            if got.status_code == 404:
                raise Unknown
            refuse_unless(got, got.status_code if got.is_success else 200)
            answer.is_(None)
        return answer.known

    def ready_engine(self, replica: str) -> str:
        """Id of an engine of the pool's own that is ready; "" where the replica says none."""
        return next((e["id"] for e in self._engines(replica) or () if e["pool"] == POOL and e["state"] == "ready"
                     and not e["external"]), "")

    def engine_at(self, replica: str, url: str) -> str | None:
        """Id of the engine at a URL, "" where there is none that lives; None where the replica does not say it."""
        engines = self._engines(replica)
        return None if engines is None else next(
            (e["id"] for e in engines if e["url"] == url and e["state"] != "dead"), "")

    def _engines(self, replica: str) -> Sequence[Mapping[str, Any]] | None:
        with contextlib.suppress(Refused, Unanswered):
            got = self._read(f"{self.job_url(replica)}/engines?limit={_PAGE}", _CALL_S)
            return list(got.json()["items"])
        return None

    def _send(self, method: str, url: str, timeout_s: float, **more: Any) -> Any:
        return send(method, url, timeout_s, self.target.headers, self.target.verify, **more)

    def _read(self, url: str, timeout_s: float, *, may_be_absent: bool = False) -> Any:
        """``may_be_absent``: whether 404 is an answer too."""
        with reading():
            got = self._send("GET", url, timeout_s)
            if not (may_be_absent and got.status_code == 404):
                refuse_unless(got, 200)
        return got
