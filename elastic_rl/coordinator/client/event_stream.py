"""Server-Sent Events of the admin API, over all replicas.

``Decoder`` is the format, pure. ``EventFollower`` resumes on the next replica where a stream broke off, so that no
event is lost or repeated.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.client.admin_client import problem_of
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.net import http_client
from elastic_rl.net.listeners import owners

_SILENCE_S = 25.0
"""A stream that is silent for so long is dead; a replica sends a comment every 10 s."""
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Frame:
    """One event of a stream; ``id`` is a revision of etcd."""

    id: str
    event: str
    data: str


class Decoder:
    """Builds frames from lines without their ends."""

    def __init__(self) -> None:
        self._id, self._event = "", ""
        self._data: list[str] = []

    def feed(self, line: str) -> Frame | None:
        """The frame that ends with this line, if one does; frames without data are dropped."""
        if not line:
            frame = Frame(self._id, self._event, "\n".join(self._data)) if self._data else None
            self._event, self._data = "", []
            return frame
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "id":
                self._id = value
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
        return None


class EventFollower:
    """Iterates over the newest ``limit`` events of the job of ``info``, and every later one, in order.

    Raises RequestRefused when a replica refuses the request, and EtcdUnavailable when none was reached for
    ``patience_s``.
    """

    def __init__(self, info: ClusterInfo, *, limit: int, patience_s: float = 60.0, role: str = "operator") -> None:
        self._urls, self._limit, self._patience_s = list(info.coordinators), limit, patience_s
        self._path = job_path(info.job, "events")
        token = info.token(role)
        self._headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._tls = tls.ReloadingTrust(info.ca_file)
        self._users = owners(info.tokens_file)
        self._revision = 0
        self._seen: set[str] = set()
        """Ids of the events of ``_revision`` that were yielded: a transaction may write several."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        reasons: dict[str, str] = {}
        answered_at = time.monotonic()
        for url in itertools.cycle(self._urls):
            try:
                for frame in self._frames(url):
                    if frame is not None and (event := self._new(frame)) is not None:
                        yield event
                    answered_at = time.monotonic()
            except httpx.HTTPError as e:
                reasons[url] = str(e) or type(e).__name__
            except EtcdUnavailable as e:
                reasons[url] = e.message
            if time.monotonic() - answered_at > self._patience_s:
                raise EtcdUnavailable(
                    "no coordinator answered: " + "; ".join(f"{u}: {why}" for u, why in reasons.items()),
                    hint="see the logs in the cluster folder; `elastic-rl up` starts what is missing")
            time.sleep(_PAUSE_S)

    def _frames(self, url: str) -> Iterator[Frame | None]:
        """Frames of one stream until it ends; None for its other lines."""
        # One revision earlier, since the stream may have broken off between two events of the same one.
        resume = {"Last-Event-ID": str(self._revision - 1)} if self._revision else {}
        with http_client.stream("GET", url + self._path, params={"limit": self._limit},
                                headers={**self._headers, **resume}, timeout=httpx.Timeout(5.0, read=_SILENCE_S),
                                users=self._users, verify=self._tls.for_url(url)) as answer:
            if answer.status_code >= 400:
                answer.read()
                problem = problem_of(answer)
                if answer.status_code < 500:
                    raise problem
                raise EtcdUnavailable(problem.message)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise EtcdUnavailable("no admin API answers there, but another HTTP server")
            decoder = Decoder()
            for line in answer.iter_lines():
                yield decoder.feed(line)

    def _new(self, frame: Frame) -> dict[str, Any] | None:
        """The event of a frame, unless it was yielded before."""
        revision, event = int(frame.id), dict(json.loads(frame.data))
        if revision == self._revision and event["id"] in self._seen:
            return None
        if revision != self._revision:
            self._revision, self._seen = revision, set()
        self._seen.add(event["id"])
        return event
