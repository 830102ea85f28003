"""Calls of the admin API that read and change a pool's desired number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from chaos_tests.history import Recorder, Refused, Unanswered, Unknown
from chaos_tests.model.number import READ, WRITE
from elastic_rl.net import http_client

POOL = "rollout"


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
            with reading():
                got = self._send("GET", f"{url}/pools/{POOL}", timeout_s)
                refuse_unless(got, 200)
            answer.is_([got.json()["desired"], revision_of(got)])
        return answer.known

    def _send(self, method: str, url: str, timeout_s: float, **more: Any) -> httpx.Response:
        return send(method, url, timeout_s, self._headers, self._verify, **more)


def send(method: str, url: str, timeout_s: float, access: Mapping[str, str], verify: Any, *,
         headers: Mapping[str, str] = {}, **more: Any) -> httpx.Response:
    """The answer to a request. ``access``: headers of every request; ``headers``: of this one. Raises Unanswered where
    it was not sent, and Unknown where its answer was lost."""
    try:
        return http_client.request(method, url, headers={**access, "If-Match": "*", **headers},
                                   timeout=timeout_s, verify=verify, **more)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise Unanswered from None
    except httpx.HTTPError:
        raise Unknown from None


def refuse_unless(got: httpx.Response, status: int) -> None:
    """Raises for any answer but this one. Refused where what was asked for cannot be done as things are; Unanswered
    where it was not served: of a 503 the API's documentation says that nothing was done, and a request of this traffic
    is allowed and well-formed; else Unknown, also for a 500, which may come after the write."""
    if got.status_code == status:
        return
    if got.status_code in (404, 409):
        raise Refused
    raise Unanswered if got.is_client_error or got.status_code == 503 else Unknown


@contextmanager
def reading() -> Iterator[None]:
    """Inside, something is read, which has no effect and is there: what is not told was not served."""
    try:
        yield
    except (Unknown, Refused):
        raise Unanswered from None


def revision_of(answer: httpx.Response) -> int:
    return int(answer.headers.get("etag", '"0"').strip('"'))
