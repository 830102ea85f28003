"""Clients of the admin API that read and change a pool's desired number through every replica."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from chaos_tests.history import Operation, Recorder, Refused, Unknown
from chaos_tests.model.linearizability import Violation, check
from chaos_tests.model.number import READ, WRITE, State, VersionedNumber
from chaos_tests.validate.leadership import Led
from elastic_rl.net import http_client
from elastic_rl.runtime.waiting import wait_until

POOL = "rollout"
_MORE_S = 300.0


@dataclass(frozen=True)
class Written:
    """One PATCH of the workload. ``status`` 0: no answer."""

    url: str
    """URL of the job on a replica."""
    status: int
    desired: int
    revision: int


class PoolCalls:
    """Single calls, which write the history."""

    def __init__(self, recorder: Recorder, headers: Mapping[str, str], verify: Any = None, *, model: str = "") -> None:
        """``headers``: of each request; those of an operator. ``verify``: what trusts the replicas, as httpx has it.
        ``model``: name of the model that judges the history."""
        self.recorder, self._headers, self._verify, self._model = recorder, headers, verify, model

    def patch(self, url: str, desired: int, *, client: str = "", timeout_s: float = 2.0) -> Written:
        """One change, through the replica with this URL of the job."""
        written = Written(url, 0, desired, 0)
        with self.recorder.operation(client or url, POOL, WRITE, desired, model=self._model) as answer:
            got = self._send("PATCH", f"{url}/pools/{POOL}", timeout_s, json={"desired": desired})
            written = Written(url, got.status_code, desired, revision_of(got))
            refuse_unless(got, 200)
            answer.is_([desired, written.revision])
        return written

    def read(self, url: str, *, client: str = "", timeout_s: float = 2.0) -> bool:
        """Returns whether there was an answer."""
        with self.recorder.operation(client or url, POOL, READ, model=self._model) as answer:
            try:
                got = self._send("GET", f"{url}/pools/{POOL}", timeout_s)
            except Unknown:
                raise Refused from None
            refuse_unless(got, 200)
            answer.is_([got.json()["desired"], revision_of(got)])
        return answer.known

    def _send(self, method: str, url: str, timeout_s: float, **more: Any) -> httpx.Response:
        return send(method, url, timeout_s, self._headers, self._verify, **more)


def send(method: str, url: str, timeout_s: float, access: Mapping[str, str], verify: Any, *,
         headers: Mapping[str, str] = {}, **more: Any) -> httpx.Response:
    """The answer to a request. ``access``: headers of every request; ``headers``: of this one. Raises Refused where it
    was not sent, and Unknown where its answer was lost."""
    try:
        return http_client.request(method, url, headers={**access, "If-Match": "*", **headers},
                                   timeout=timeout_s, verify=verify, **more)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise Refused from None
    except httpx.HTTPError:
        raise Unknown from None


def refuse_unless(got: httpx.Response, status: int) -> None:
    """Raises Unknown for an answer that says that the outcome is unknown, and Refused for any other but this one."""
    if got.status_code == 504:
        raise Unknown
    if got.status_code != status:
        raise Refused


class PoolClients(PoolCalls):
    """Change and read the pool all the time, through each replica from a thread of its own."""

    def __init__(self, urls: Sequence[str], seed: int, headers: Mapping[str, str]) -> None:
        """``urls``: URL of the job on each replica."""
        super().__init__(Recorder(), headers)
        self.done: list[Written] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(url, random.Random(seed + n)), daemon=True)
                         for n, url in enumerate(urls)]
        for thread in self._threads:
            thread.start()

    def accepted(self) -> int:
        return sum(w.status == 200 for w in self.done)

    def more(self, n: int) -> None:
        """Returns once ``n`` more writes were accepted: the fault is over for the clients."""
        goal = self.accepted() + n
        wait_until(lambda: self.accepted() >= goal, timeout_s=_MORE_S, what=f"{n} more accepted writes")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(15)

    def violations(self, observed: Mapping[int, int]) -> list[Violation]:
        """Why the clients' answers are not those of one number. ``observed``: what the number was changed to, by
        revision, as the observer saw it; the first is that from which on there were clients. Raises AssertionError
        where the clients have read nothing."""
        history = with_observed(self.recorder.operations(), observed)
        assert any(o.call == READ and o.ended_s is not None for o in history), "no client has read the pool"
        first = min(observed)
        return check(VersionedNumber(State(observed[first], first)), history)

    def _work(self, url: str, choose: random.Random) -> None:
        while not self._stop.wait(0.02):
            if choose.random() < 0.5:
                self.read(url)
            else:
                self.done.append(self.patch(url, choose.randint(1, 60)))


def with_observed(history: Sequence[Operation], observed: Mapping[int, int]) -> list[Operation]:
    """The history without the unknown writes that never happened: those of a number to which the observer saw no change
    beside those of acknowledged writes. The search would have to try each of them everywhere."""
    told = {o.result[1] for o in history if o.call == WRITE and o.ended_s is not None}
    unexplained = {desired for revision, desired in observed.items() if revision not in told}
    return [o for o in history if o.ended_s is not None or o.call == READ or o.argument in unexplained]


def revision_of(answer: httpx.Response) -> int:
    return int(answer.headers.get("etag", '"0"').strip('"'))


def lost(writes: Iterable[Written], led: Led) -> list[Written]:
    """The writes that were acknowledged and are not in the store: the acknowledged revision did not set this number. (A
    write of the number that was there already changes nothing and names the revision that had set it.)"""
    return [w for w in writes if w.status == 200 and led.desired.get(w.revision) != w.desired]
