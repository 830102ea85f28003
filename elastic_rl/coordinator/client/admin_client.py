"""A client of the admin API: tries one replica after the other, with the token of a cluster.

A POST carries an Idempotency-Key of its own, so that retrying it on another replica never does it twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api_paths import HOSTS, host_path, job_path
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError, EtcdUnavailable, OutcomeUnknown
from elastic_rl.etcd.records import OperationState
from elastic_rl.net import http_client
from elastic_rl.net.listeners import owners
from elastic_rl.net.problem_details import TYPE_PREFIX
from elastic_rl.runtime.backoff import RetryBackoff

_PAGE = 1000
_POLL_S, _MAX_POLL_S = 0.1, 1.0
_OF_AUTOSCALER = frozenset({"pool", "source", "by", "at", "recommended", "message", "updated_at", "etag"})
"""What the API says of an autoscaler beyond what it goes by."""
_NOT_APPLIED = ("no-leader", "job-not-open", "etcd-unavailable", "stopping", "overloaded", "token-table")
"""Problems of 5xx after which nothing was changed."""


class RequestRefused(ElasticRLError):
    """The API refused the request; ``type`` is the problem's stable type, ``status`` the HTTP status."""

    def __init__(self, message: str, *, status: int, type: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status, self.type = status, type

    @property
    def kind(self) -> str:
        """The last part of a problem's type, such as ``not-found``."""
        return self.type.removeprefix(TYPE_PREFIX)


class NotFound(RequestRefused):
    """There is no such object."""


class Denied(RequestRefused):
    """The token is missing, unknown, or not an operator's."""


class Changed(RequestRefused):
    """The object was modified since it was read (412), or its state does not allow the change (409)."""


class OperationFailed(ElasticRLError):
    """An operation failed or was cancelled; ``operation`` is its last state."""

    def __init__(self, operation: dict[str, Any]) -> None:
        super().__init__(f"{operation['kind']} of {operation['target']} {operation['state']}: "
                         f"{operation['error'] or operation['message']}")
        self.operation = operation


class AdminClient:
    """Tries the replicas in turn, the one that answered last first, for ``timeout_s`` seconds each.

    Every ``path`` is relative to the job's own: ``pools/rollout`` is ``/v1/jobs/NAME/pools/rollout``, and the empty one
    is the job itself.

    Raises EtcdUnavailable when none of them answers (OutcomeUnknown when a change may have been applied), and
    RequestRefused, or one of its kinds, when one answers with a problem.
    """

    def __init__(self, info: ClusterInfo, *, role: str = "operator", timeout_s: float = 5.0,
                 retry_budget_s: float = 10.0) -> None:
        """``retry_budget_s``: how long a request is retried while an election is under way.

        Raises ConfigError when the token or the authority of ``info`` cannot be read.
        """
        self._info, self._urls = info, list(info.coordinators)
        self._timeout_s, self._budget_s = timeout_s, retry_budget_s
        token = info.token(role)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls.ReloadingTrust(info.ca_file)
        self._users = owners(info.tokens_file)

    @property
    def url(self) -> str:
        """URL of the replica that answered last."""
        return self._urls[0]

    @property
    def info(self) -> ClusterInfo:
        """How to connect to the cluster, and the job: where none was named, the only one of the cluster. Raises
        ConfigError unless it has exactly one."""
        if not self._info.job:
            names = [job["name"] for job in self.jobs()]
            if len(names) != 1:
                raise ConfigError(f"the cluster has several jobs: {', '.join(names)}" if names else
                                  "the cluster has no job", hint="name one with --job=NAME, beside --url")
            self._info = replace(self._info, job=names[0])
        return self._info

    # -- reads ----------------------------------------------------------------------------------------------------
    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of the cluster, by name."""
        return self._items("/v1/jobs")

    def hosts(self, phase: str = "", *, limit: int = 0) -> list[dict[str, Any]]:
        """The hosts of the cluster by id, or the first ``limit``. ``phase``: only those in this one."""
        return self._items(HOSTS + (f"?{urlencode({'phase': phase})}" if phase else ""), limit)

    def host(self, host: str) -> dict[str, Any]:
        """One host of the cluster. Raises NotFound."""
        return dict(self._send("GET", host_path(host)).json())

    def get(self, path: str) -> Any:
        return self._send("GET", self._of_job(path)).json()

    def items(self, path: str, *, limit: int = 0) -> list[dict[str, Any]]:
        """All items of a listing, over its pages, or the first ``limit``."""
        return self._items(self._of_job(path), limit)

    def _items(self, path: str, limit: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = ""
        while not limit or len(found) < limit:
            query = {"limit": min(_PAGE, limit - len(found)) if limit else _PAGE, **({"after": after} if after else {})}
            page = self._send("GET", path + ("&" if "?" in path else "?") + urlencode(query)).json()
            found += page["items"]
            if page["next"] is None:
                break
            after = str(page["next"])
        return found

    # -- changes --------------------------------------------------------------------------------------------------
    def post(self, path: str, body: dict[str, Any], *, key: str = "") -> Any:
        """The answer to a POST, such as an operation. ``key``: the Idempotency-Key; empty: a new one."""
        return self._send("POST", self._of_job(path), body, {"Idempotency-Key": key or _new_key()}).json()

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        """Changes a resource as it is now. Raises Changed if it was modified concurrently."""
        return self._patch(self._of_job(path), body, lambda now: now)

    def change_host(self, host: str, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Changes what is wanted of a host: ``cordoned``, ``drain``; ``reason``. Raises NotFound, and Changed if it was
        modified concurrently."""
        return dict(self._patch(host_path(host), body, lambda now: now["spec"], dry_run=dry_run))

    def forget_host(self, host: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Deletes what is recorded of a host that is lost or has left; returns it as it was. Raises NotFound, and
        Changed for any other host."""
        before = self.host(host)
        try:
            return dict(self._send("DELETE", _with_dry_run(host_path(host), dry_run)).json())
        except NotFound:  # an earlier attempt was applied, and its answer lost
            return before

    def _patch(self, path: str, body: dict[str, Any], of: Callable[[Any], dict[str, Any]], *, dry_run: bool = False
               ) -> Any:
        """``of``: the fields that ``body`` changes, of a resource."""
        etag = self._send("GET", path).headers["ETag"]
        try:
            return self._send("PATCH", _with_dry_run(path, dry_run), body, {"If-Match": etag}).json()
        except Changed:
            now = self._send("GET", path).json()
            if body.items() <= of(now).items():  # an earlier attempt was applied, and its answer lost
                return now
            raise

    def delete(self, path: str) -> Any:
        answer = self._send("DELETE", self._of_job(path), headers={"Idempotency-Key": _new_key()})
        return answer.json() if answer.content else None

    # -- operations -----------------------------------------------------------------------------------------------
    def scale(self, pool: str, desired: int, *, dry_run: bool = False) -> dict[str, Any]:
        return self._begin(f"pools/{_part(pool)}/scale", {"desired": desired}, dry_run)

    def autoscaling(self, pool: str) -> dict[str, Any]:
        """Autoscaling of a pool. Raises NotFound."""
        return dict(self.get(f"pools/{_part(pool)}/autoscaling"))

    def set_autoscaling(self, pool: str, changes: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Changes some of what the autoscaler of a pool goes by, as it is now. Raises NotFound, and Changed if it was
        modified concurrently."""
        path = self._of_job(f"pools/{_part(pool)}/autoscaling")
        now = self._send("GET", path)
        known = {name: value for name, value in now.json().items() if name not in _OF_AUTOSCALER}
        try:
            return dict(self._send("PUT", _with_dry_run(path, dry_run), {**known, **changes},
                                   {"If-Match": now.headers["ETag"]}).json())
        except Changed:
            found = dict(self._send("GET", path).json())
            if changes.items() <= found.items():  # an earlier attempt was applied, and its answer lost
                return found
            raise

    def disable_autoscaling(self, pool: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Has the number of engines of a pool stay as it is. Raises NotFound."""
        return dict(self.delete(_with_dry_run(f"pools/{_part(pool)}/autoscaling", dry_run)))

    def drain_engine(self, engine_id: str, *, replace: bool = True, dry_run: bool = False) -> dict[str, Any]:
        return self._begin(f"engines/{_part(engine_id)}/drain", {"replace": replace}, dry_run)

    def register_engine(self, url: str, pool: str, *, via: str = "", dry_run: bool = False) -> dict[str, Any]:
        """Has an SGLang server that this cluster did not start join a pool. ``via``: name of its host; empty: that of
        the run."""
        return self._begin("engines", {"url": url, "pool": pool, **({"via": via} if via else {})}, dry_run)

    def deregister_engine(self, engine_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Has an external engine leave its pool."""
        return dict(self.delete(_with_dry_run(f"engines/{_part(engine_id)}", dry_run)))

    def restart(self, target: str, *, reason: str = "", dry_run: bool = False) -> dict[str, Any]:
        return self._begin("restarts", {"target": target, "reason": reason}, dry_run)

    def cancel(self, operation_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        return dict(self.delete(_with_dry_run(f"operations/{_part(operation_id)}", dry_run)))

    def operation(self, operation_id: str) -> dict[str, Any]:
        return dict(self.get(f"operations/{_part(operation_id)}"))

    def wait(self, operation: dict[str, Any], timeout_s: float,
             on_progress: Callable[[dict[str, Any]], None] = lambda operation: None) -> dict[str, Any]:
        """The operation once it has succeeded; ``on_progress`` is called with it after each poll.

        Raises OperationFailed when it fails or is cancelled, DeadlineExceeded when it does not end in time. Replicas
        that do not answer meanwhile are waited for.
        """
        on_progress(operation)
        end, pause = time.monotonic() + timeout_s, _POLL_S
        while not OperationState(operation["state"]).ended:
            if time.monotonic() + pause > end:
                raise DeadlineExceeded(
                    f"{operation['kind']} of {operation['target']} is not done after {timeout_s:g} s: "
                    f"{operation['message'] or operation['phase']}",
                    hint=f"it continues; see operation {operation['id']}, or cancel it")
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL_S)
            try:
                operation = self.operation(operation["id"])
            except EtcdUnavailable:
                continue
            on_progress(operation)
        if operation["state"] != "succeeded":
            raise OperationFailed(operation)
        return operation

    def _begin(self, path: str, body: dict[str, Any], dry_run: bool) -> dict[str, Any]:
        return dict(self.post(_with_dry_run(path, dry_run), body))

    def end_silence(self, silence_id: str) -> Any:
        return self.delete(f"silences/{_part(silence_id)}")

    # -- alerts and the dashboard ---------------------------------------------------------------------------------
    def test_alerts(self, timeout_s: float) -> dict[str, Any]:
        """Sends a test to every receiver of alerts. The result has for each ``delivered``, ``failed`` with a
        ``detail``, or ``waiting`` if that is not known after ``timeout_s``."""
        end, test = time.monotonic() + timeout_s, dict(self.post("alerts/test", {}))
        while any(r["status"] == "waiting" for r in test["receivers"]) and time.monotonic() + _POLL_S < end:
            time.sleep(_POLL_S)
            test = dict(self.get(f"alerts/tests/{_part(test['id'])}"))
        return test

    def dashboard_link(self, role: str = "") -> dict[str, Any]:
        """A one-time link to the job's page of the dashboard, or to the list of the jobs where none was named: ``url``,
        ``role``, and ``expires_at`` in unix seconds. ``role`` "": that of the token."""
        made = self._send("POST", "/v1/session-links", {"role": role or None}).json()
        page = f"jobs/{_part(self._info.job)}" if self._info.job else ""
        return {"url": f"{self.url}/{page}#link={made['link']}", "role": made["role"], "expires_at": made["expires_at"]}

    # -- requests -------------------------------------------------------------------------------------------------
    def _of_job(self, path: str) -> str:
        return job_path(self.info.job) + (f"/{path}" if path else "")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None,
              headers: dict[str, str] | None = None) -> httpx.Response:
        """One request, tried on each replica, and again while they wait for a leader or for etcd. No attempt is applied
        twice: a POST has its key, a PATCH or PUT its If-Match, and a DELETE its key or nothing left to delete."""
        end, retry = time.monotonic() + self._budget_s, RetryBackoff(_POLL_S, _MAX_POLL_S)
        may_be_applied = False
        while True:
            reasons: list[str] = []
            answered = False
            for url in tuple(self._urls):
                try:
                    answer = http_client.request(method, url + path, json=body, headers={
                        **self._headers, **(headers or {})}, timeout=self._timeout_s, users=self._users,
                        verify=self._tls.for_url(url))
                except httpx.HTTPError as e:
                    reasons.append(f"{url}: {str(e) or type(e).__name__}")
                    may_be_applied |= not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
                    continue
                if answer.status_code < 400 and not _of_the_api(answer):
                    reasons.append(f"{url}: no admin API answers there, but another HTTP server")
                    continue
                if answer.status_code < 400:
                    self._urls = [url, *(u for u in self._urls if u != url)]
                    return answer
                problem = problem_of(answer)
                if answer.status_code < 500:
                    raise problem
                reasons.append(f"{url}: {problem.message}")
                answered, may_be_applied = True, may_be_applied or problem.kind not in _NOT_APPLIED
            now = time.monotonic()
            retry.failed(now)
            if not answered or now + retry.left_s(now) > end:
                kind = OutcomeUnknown if may_be_applied and method != "GET" else EtcdUnavailable
                raise kind("no coordinator answered: " + "; ".join(reasons),
                           hint="see the logs in the cluster folder; `elastic-rl up` starts what is missing")
            time.sleep(retry.left_s(now))


def problem_of(answer: httpx.Response) -> RequestRefused:
    """The error for an answer with a status of 400 or more."""
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


def _of_the_api(answer: httpx.Response) -> bool:
    """Whether an answer without an error is one of the admin API: JSON, or empty, and no redirect."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip()
    return answer.status_code < 300 and (kind == "application/json" or not answer.content)


def _new_key() -> str:
    return f"client-{secrets.token_hex(16)}"


def _part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def _with_dry_run(path: str, dry_run: bool) -> str:
    return path + ("?dry_run=true" if dry_run else "")
