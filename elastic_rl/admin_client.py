"""A client of the admin API for people's tools: asks one replica after the other, with the token that ``up`` left."""

from __future__ import annotations

from typing import Any

import httpx

from elastic_rl.cluster import ClusterInfo
from elastic_rl.errors import ElasticRLError, StoreUnavailable


class RequestRefused(ElasticRLError):
    """The API understood the request and said no; ``type`` is the problem's stable type, ``status`` the HTTP status."""

    def __init__(self, message: str, *, status: int, type: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status, self.type = status, type


class AdminClient:
    """Raises StoreUnavailable when no replica answers, RequestRefused when one answers with a problem."""

    def __init__(self, info: ClusterInfo, *, role: str = "operator", timeout_s: float = 5.0) -> None:
        self._urls, self._timeout_s = info.coordinators, timeout_s
        token = info.token(role)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:
        return self._request("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("POST", path, body)

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        """Changes a resource as it is now; RequestRefused with status 412 if somebody changed it in between."""
        etag = self._send("GET", path).headers["ETag"]
        return self._send("PATCH", path, body, {"If-Match": etag}).json()

    def items(self, path: str) -> list[dict[str, Any]]:
        """A listing, whether it is a bare list or an object around one."""
        found = self.get(path)
        if isinstance(found, dict):
            found = next((v for v in found.values() if isinstance(v, list)), [found])
        return list(found)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._send(method, path, body).json()

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None,
              headers: dict[str, str] | None = None) -> httpx.Response:
        problems: list[str] = []
        for url in self._urls:
            try:
                answer = httpx.request(method, url + path, json=body, headers={**self._headers, **(headers or {})},
                                       timeout=self._timeout_s, follow_redirects=True)
            except httpx.HTTPError as e:
                problems.append(f"{url}: {type(e).__name__}")
                continue
            if answer.status_code < 400:
                return answer
            problem = _problem(answer)
            if answer.status_code < 500:
                raise problem
            problems.append(f"{url}: {problem.message}")
        raise StoreUnavailable("no coordinator answered: " + "; ".join(problems),
                               hint="see the logs in the cluster folder; `elastic-rl up` starts what is missing")


def _problem(answer: httpx.Response) -> RequestRefused:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    detail = str(body.get("detail") or body.get("title") or answer.reason_phrase)
    return RequestRefused(detail, status=answer.status_code, type=str(body.get("type", "about:blank")))
