"""A client of the admin API for people's tools: asks one replica after the other, with the token that ``up`` left.

A POST carries an Idempotency-Key of its own, so that trying it again on another replica never does it twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EtcdUnavailable, OutcomeUnknown

_PROBLEM = "urn:elastic-rl:problem:"
_PAGE = 1000
_POLL_S, _LONGEST_POLL_S = 0.1, 1.0
_ENDED = ("succeeded", "failed", "cancelled")
_NOTHING_DONE = ("no-leader", "store-unavailable", "stopping", "overloaded", "token-table")
"""Problems of 5xx that say that nothing was done."""


class RequestRefused(ElasticRLError):
    """The API understood the request and said no; ``type`` is the problem's stable type, ``status`` the HTTP status."""

    def __init__(self, message: str, *, status: int, type: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status, self.type = status, type

    @property
    def kind(self) -> str:
        """The last part of a problem's type, such as ``not-found``."""
        return self.type.removeprefix(_PROBLEM)


class NotFound(RequestRefused):
    """There is no such thing."""


class Denied(RequestRefused):
    """The token is missing, unknown, or not an operator's."""


class Changed(RequestRefused):
    """It is not what it was read as (412), or its state does not allow the change (409)."""

    retryable = True


class OperationFailed(ElasticRLError):
    """An operation ended otherwise than wanted; ``operation`` is how."""

    def __init__(self, operation: dict[str, Any]) -> None:
        super().__init__(f"{operation['kind']} of {operation['target']} {operation['state']}: "
                         f"{operation['error'] or operation['message']}")
        self.operation = operation


class AdminClient:
    """Asks the replicas in turn, the one that answered last first, for ``timeout_s`` seconds an attempt.

    Raises EtcdUnavailable when none of them answers (OutcomeUnknown when a change may have been applied), and
    RequestRefused, or one of its kinds, when one answers with a problem.
    """

    def __init__(self, info: ClusterInfo, *, role: str = "operator", timeout_s: float = 5.0,
                 retry_budget_s: float = 10.0) -> None:
        """``retry_budget_s``: how long a request is tried on the replicas while an election is under way."""
        self._urls, self._timeout_s, self._budget_s = list(info.coordinators), timeout_s, retry_budget_s
        token = info.token(role)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._trust = tls.trust(info.ca_file)

    # -- reading --------------------------------------------------------------------------------------------------
    def get(self, path: str) -> Any:
        return self._send("GET", path).json()

    def items(self, path: str, *, most: int = 0) -> list[dict[str, Any]]:
        """All items of a listing, over its pages, or the first ``most``."""
        found: list[dict[str, Any]] = []
        after = ""
        while not most or len(found) < most:
            query = {"limit": min(_PAGE, most - len(found)) if most else _PAGE, **({"after": after} if after else {})}
            page = self.get(path + ("&" if "?" in path else "?") + urlencode(query))
            found += page["items"]
            if page["next"] is None:
                break
            after = str(page["next"])
        return found

    # -- changing -------------------------------------------------------------------------------------------------
    def post(self, path: str, body: dict[str, Any], *, key: str = "") -> Any:
        """``key``: the Idempotency-Key; empty: a new one. What the API answers, such as an operation."""
        return self._send("POST", path, body, {"Idempotency-Key": key or f"client-{secrets.token_hex(16)}"}).json()

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        """Changes a resource as it is now. Raises Changed if somebody made something else of it in between."""
        etag = self._send("GET", path).headers["ETag"]
        try:
            return self._send("PATCH", path, body, {"If-Match": etag}).json()
        except Changed:
            now = self.get(path)
            if body.items() <= now.items():  # it was us: the answer to an earlier attempt was lost
                return now
            raise

    def delete(self, path: str) -> Any:
        answer = self._send("DELETE", path)
        return answer.json() if answer.content else None

    # -- operations -----------------------------------------------------------------------------------------------
    def scale(self, pool: str, desired: int, *, dry_run: bool = False) -> dict[str, Any]:
        return self._operation(f"/v1/pools/{quote(pool, safe='')}/scale", {"desired": desired}, dry_run)

    def drain(self, engine_id: str, *, replace: bool = True, dry_run: bool = False) -> dict[str, Any]:
        return self._operation(f"/v1/engines/{quote(engine_id, safe='')}/drain", {"replace": replace}, dry_run)

    def adopt(self, url: str, pool: str, *, dry_run: bool = False) -> dict[str, Any]:
        return self._operation("/v1/engines", {"url": url, "pool": pool}, dry_run)

    def restart(self, target: str, *, reason: str = "", dry_run: bool = False) -> dict[str, Any]:
        return self._operation("/v1/restarts", {"target": target, "reason": reason}, dry_run)

    def cancel(self, operation_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        path = f"/v1/operations/{quote(operation_id, safe='')}"
        return dict(self.delete(path + ("?dry_run=true" if dry_run else "")))

    def operation(self, operation_id: str) -> dict[str, Any]:
        return dict(self.get(f"/v1/operations/{quote(operation_id, safe='')}"))

    def test_alerts(self, timeout_s: float) -> dict[str, Any]:
        """Sends a test to every receiver of alerts, and what became of it: of each ``delivered``, ``failed`` with a
        ``detail``, or ``waiting`` if that is not known after ``timeout_s``."""
        end, test = time.monotonic() + timeout_s, dict(self.post("/v1/alerts/test", {}))
        while any(r["status"] == "waiting" for r in test["receivers"]) and time.monotonic() + _POLL_S < end:
            time.sleep(_POLL_S)
            test = dict(self.get(f"/v1/alerts/tests/{test['id']}"))
        return test

    def wait(self, operation: dict[str, Any], timeout_s: float,
             seen: Callable[[dict[str, Any]], None] = lambda operation: None) -> dict[str, Any]:
        """The operation once it has succeeded; ``seen`` is called with it as it goes on. Raises OperationFailed when it
        ends otherwise, DeadlineExceeded when it does not end in time; a replica that is away is waited for."""
        seen(operation)
        end, pause = time.monotonic() + timeout_s, _POLL_S
        while operation["state"] not in _ENDED:
            if time.monotonic() + pause > end:
                raise DeadlineExceeded(
                    f"{operation['kind']} of {operation['target']} is not done after {timeout_s:g} s: "
                    f"{operation['message'] or operation['phase']}",
                    hint=f"it goes on; look at operation {operation['id']}, or cancel it")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
            try:
                operation = self.operation(operation["id"])
            except EtcdUnavailable:
                continue
            seen(operation)
        if operation["state"] != "succeeded":
            raise OperationFailed(operation)
        return operation

    def _operation(self, path: str, body: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        return dict(self.post(path + ("?dry_run=true" if dry_run else ""), body))

    # -- asking ---------------------------------------------------------------------------------------------------
    def _send(self, method: str, path: str, body: dict[str, Any] | None = None,
              headers: dict[str, str] | None = None) -> httpx.Response:
        """One request, tried on each replica, and again while they wait for a leader or for etcd. That does nothing
        twice: a POST has its key, a PATCH its If-Match, and a DELETE takes back what is there."""
        end, pause = time.monotonic() + self._budget_s, _POLL_S
        maybe_done = False
        while True:
            said: list[str] = []
            alive = False
            for url in tuple(self._urls):
                try:
                    answer = httpx.request(method, url + path, json=body, headers={**self._headers, **(headers or {})},
                                           timeout=self._timeout_s, verify=self._trust)
                except httpx.HTTPError as e:
                    said.append(f"{url}: {type(e).__name__}")
                    maybe_done |= not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
                    continue
                if answer.status_code < 400:
                    self._urls = [url, *(u for u in self._urls if u != url)]
                    return answer
                problem = problem_of(answer)
                if answer.status_code < 500:
                    raise problem
                said.append(f"{url}: {problem.message}")
                alive, maybe_done = True, maybe_done or problem.kind not in _NOTHING_DONE
            if not alive or time.monotonic() + pause > end:
                kind = OutcomeUnknown if maybe_done and method != "GET" else EtcdUnavailable
                raise kind("no coordinator answered: " + "; ".join(said),
                           hint="see the logs in the cluster folder; `elastic-rl up` starts what is missing")
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_POLL_S)


def problem_of(answer: httpx.Response) -> RequestRefused:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    detail = str(body.get("detail") or body.get("title") or answer.reason_phrase)
    kinds = {401: Denied, 403: Denied, 404: NotFound, 409: Changed, 412: Changed}
    return kinds.get(answer.status_code, RequestRefused)(
        detail, status=answer.status_code, type=str(body.get("type", "about:blank")))
