"""Clients of the admin API that read and change what operators want of a cluster through every coordinator: the size of
a pool, which hosts are cordoned and drained, restarts, and engines that are registered."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from chaos_tests.history import Operation, Recorder, Refused, Unknown
from chaos_tests.model import created, linearizability, models
from chaos_tests.model.models import MODELS
from chaos_tests.model.number import READ, WRITE, State, VersionedNumber
from chaos_tests.model.operation import ABSENT
from chaos_tests.model.operation import Call as OperationCall
from chaos_tests.traffic.pool_changes import POOL, PoolCalls, refuse_unless, revision_of, send, with_observed
from elastic_rl.coordinator.api_paths import host_path, job_path
from elastic_rl.runtime.waiting import wait_until

_MORE_S = 600.0
_CALL_S, _LAST_CALL_S = 3.0, 60.0
_REGISTERED = 4
"""Engines that each client registers at most: a pool takes few."""
_MOST_ENGINES = 6
_ANSWERS_A_MOVE = 80
_PAGE = 1000
"""Most entries of a listing that the API gives at once."""
USED, CORDONED, DRAINED = 0, 1, 2
"""What is wanted of a host, as a number; from DRAINED on each drain is another one, which its deadline tells apart."""
_DRAIN_UNIT_S = 0.001


def wanted_of_host(spec: Mapping[str, Any]) -> int:
    """The number of a host's spec."""
    if drain := spec.get("drain"):
        return DRAINED + round(drain["within_s"] / _DRAIN_UNIT_S)
    return CORDONED if spec.get("cordoned") else USED


def _change_of_host(wanted: int) -> dict[str, Any]:
    drain = {"within_s": (wanted - DRAINED) * _DRAIN_UNIT_S} if wanted >= DRAINED else None
    return {"cordoned": wanted == CORDONED, "drain": drain}


@dataclass(frozen=True)
class Target:
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

    def __init__(self, target: Target, recorder: Recorder) -> None:
        self.target, self.recorder = target, recorder
        self.pool = PoolCalls(recorder, target.headers, target.verify, model=models.POOL)

    def job_url(self, replica: str) -> str:
        return self.target.urls[replica] + job_path(self.target.job)

    def want(self, replica: str, host: str, wanted: int, client: str, timeout_s: float = _CALL_S) -> bool:
        """Changes what is wanted of a host; returns whether that was accepted."""
        with self.recorder.operation(client, host, WRITE, wanted, model=models.NUMBER) as answer:
            got = self._send("PATCH", self.target.urls[replica] + host_path(host), timeout_s,
                             json=_change_of_host(wanted))
            refuse_unless(got, 200)
            answer.is_([wanted, revision_of(got)])
        return answer.known

    def wanted(self, replica: str, host: str, client: str, timeout_s: float = _CALL_S) -> bool:
        with self.recorder.operation(client, host, READ, model=models.NUMBER) as answer:
            got = self._read(self.target.urls[replica] + host_path(host), timeout_s)
            refuse_unless(got, 200)
            answer.is_([wanted_of_host(got.json()["spec"]), revision_of(got)])
        return answer.known

    def create(self, replica: str, path: str, body: Mapping[str, Any], key: str, client: str) -> str:
        """Begins an operation; returns its id, "" where that is not known."""
        with self.recorder.operation(client, f"key {key}", OperationCall.CREATE, model=models.OPERATION) as answer:
            got = self._send("POST", f"{self.job_url(replica)}/{path}", _CALL_S, json=body,
                             headers={"Idempotency-Key": key})
            refuse_unless(got, 202)
            answer.is_(got.json()["id"])
        return str(answer.result or "")

    def state(self, replica: str, operation: str, key: str, client: str, timeout_s: float = _CALL_S) -> str:
        """State of an operation, or ABSENT; "" where no replica says it."""
        with self.recorder.operation(client, f"key {key}", OperationCall.GET, operation, model=models.OPERATION
                                     ) as answer:
            got = self._read(f"{self.job_url(replica)}/operations/{operation}", timeout_s)
            if got.status_code != 404:
                refuse_unless(got, 200)
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
            refuse_unless(got, 200)
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
        """Id of an engine of the pool that is ready; "" where no replica says one."""
        with contextlib.suppress(Refused):
            got = self._read(f"{self.job_url(replica)}/engines?limit={_PAGE}", _CALL_S)
            refuse_unless(got, 200)
            return next((e["id"] for e in got.json()["items"] if e["pool"] == POOL and e["state"] == "ready"), "")
        return ""

    def _send(self, method: str, url: str, timeout_s: float, **more: Any) -> Any:
        return send(method, url, timeout_s, self.target.headers, self.target.verify, **more)

    def _read(self, url: str, timeout_s: float) -> Any:
        try:
            return self._send("GET", url, timeout_s)
        except Unknown:
            raise Refused from None  # a read has no effect


class ClusterClients(ClusterCalls):
    """Read and change all the time, through each coordinator from a thread of its own, until the block ends."""

    def __init__(self, target: Target, seed: int, *, pause_s: float = 0.2) -> None:
        super().__init__(target, Recorder())
        self._pause_s, self._seed, self._moves = pause_s, seed, 0
        self._created = dict[str, str]()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._working = list[Future[None]]()

    def answered(self) -> int:
        """Operations whose outcome is known."""
        return sum(o.ended_s is not None for o in self.recorder.operations())

    def more(self, n: int) -> None:
        """Returns once the outcomes of ``n`` more operations are known."""
        goal = self.answered() + n
        wait_until(lambda: self.answered() >= goal, timeout_s=_MORE_S, poll_s=0.25,
                   what=f"{n} more answers of coordinators", alive=lambda: not any(w.done() for w in self._working))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self.target.urls), thread_name_prefix="client") as threads:
            self._working = [threads.submit(self._work, replica, random.Random(self._seed + n))
                             for n, replica in enumerate(self.target.urls)]
            try:
                yield
            finally:
                self._stop.set()
        for worked in self._working:
            worked.result()

    def _work(self, replica: str, choose: random.Random) -> None:
        registered = 0
        while not self._stop.wait(self._pause_s * 2 * choose.random()):
            match choose.choices(("pool", "host", "restart", "register"), (5, 4, 2, 1))[0]:
                case "pool" if choose.random() < 0.5:
                    self.pool.read(self.job_url(replica), client=replica, timeout_s=_CALL_S)
                case "pool":
                    self.pool.patch(self.job_url(replica), choose.randint(1, _MOST_ENGINES), client=replica,
                                    timeout_s=_CALL_S)
                case "host":
                    host = choose.choice([*self.target.hosts])
                    if choose.random() < 0.5:
                        self.wanted(replica, host, replica)
                    else:
                        self.want(replica, host, self._drawn(choose), replica)
                case "restart" if self._moves_the_run():
                    self._begin(replica, choose, "restarts", {"target": "driver", "reason": "chaos"})
                case "register" if registered < _REGISTERED:
                    registered += 1
                    url = f"http://{choose.choice([*self.target.hosts.values()])}:{choose.randint(20000, 60000)}"
                    self._begin(replica, choose, "engines", {"url": url, "pool": POOL})

    def _moves_the_run(self) -> bool:
        """Whether it is time for something that ends the driver: it needs time to begin again in between."""
        with self._lock:
            due = self.answered() >= _ANSWERS_A_MOVE * (self._moves + 1)
            self._moves += due
            return due

    def _drawn(self, choose: random.Random) -> int:
        """Mostly that a host is used, so that there are hosts for what is to run; seldom that one is drained, so that
        the run has time to begin where it was moved to."""
        if self._moves_the_run():
            return DRAINED + self._moves
        return choose.choices((USED, CORDONED), (2, 1))[0]

    def _begin(self, replica: str, choose: random.Random, path: str, body: Mapping[str, Any]) -> None:
        """Sends a request, and once more through another replica, as a client does that was told nothing."""
        key = f"{self._seed}-{replica}-{choose.getrandbits(48):x}"
        found = self.create(replica, path, body, key, replica)
        again = self.create(choose.choice([*self.target.urls]), path, body, key, replica)
        if operation := found or again:
            with self._lock:
                self._created[key] = operation
            self.state(replica, operation, key, replica)

    def last_reads(self) -> list[str]:
        """After all faults: every host is used again, and everything is read through each coordinator. Returns what
        could not be read."""
        failed = list[str]()
        first = next(iter(self.target.urls))
        for host in self.target.hosts:
            if not self.want(first, host, USED, "last", _LAST_CALL_S):
                failed.append(f"{first} did not take the last change of {host}")
        for replica in self.target.urls:
            client = f"last {replica}"
            if not self.pool.read(self.job_url(replica), client=client, timeout_s=_LAST_CALL_S):
                failed.append(f"{replica} did not answer the last read of the pool")
            failed += [f"{replica} did not answer the last read of {host}" for host in self.target.hosts
                       if not self.wanted(replica, host, client, _LAST_CALL_S)]
            failed += [f"{replica} does not know operation {operation}, which was acknowledged"
                       for key, operation in self._created.items()
                       if self.state(replica, operation, key, client, _LAST_CALL_S) in ("", ABSENT)]
        return failed


def violations(history: Sequence[Operation], observed: Mapping[str, Mapping[int, int]]) -> list[str]:
    """Why the clients' answers are not those of the models. ``observed``: of each key of a number, what it was changed
    to by revision, as the observer saw it; the first is that from which on there were clients. Pure."""
    found = list[linearizability.Violation]()
    for key in sorted({o.key for o in history}):
        of_key = [o for o in history if o.key == key]
        if key.startswith("key "):
            found += linearizability.check(MODELS[models.OPERATION].model, of_key)
        else:
            changes = observed[key]
            first = min(changes)
            model = VersionedNumber(State(changes[first], first))
            found += linearizability.check(model, with_observed(of_key, changes))
    return [str(violation) for violation in found]

