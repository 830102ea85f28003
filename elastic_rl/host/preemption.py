"""Notices of preemption: how the provider of a spot machine announces that it takes the machine back.

A *source* of notices is the name of a provider (``PROVIDERS``), an http or https URL, or the path of a file. What it
answers may be anything: a source says that there is a notice or that there is none, and everything else is
``NoticeUnreadable``, which says neither.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

import httpx

from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.cluster_records import PreemptionNotice
from elastic_rl.net import http_client

_PAUSE_S = 2.0
"""Longest time to connect, and longest pause within an answer."""
_ANSWER_S = 5.0
"""Longest time for the body of an answer."""
_ANSWER_BYTES = 64 << 10
_REASON_CHARS = 120
_NONE = ("FALSE", "NONE", "NULL", "0")
"""Answers that say that there is no notice, in any case."""
_EARLIEST, _LATEST = 1e9, 1e11
"""Unix seconds: a number outside is no time."""


class NoticeUnreadable(ElasticRLError):
    """A source of notices does not answer, or with something that is neither a notice nor none."""


@dataclass(frozen=True)
class Answer:
    """What a server has answered."""

    status: int
    text: str


class Ask(Protocol):
    """Sends a request to a source. Raises NoticeUnreadable."""

    def __call__(self, path: str, method: str = "GET", headers: Mapping[str, str] = {}) -> Answer: ...


@dataclass(frozen=True)
class Provider:
    """How a provider announces that it takes back the machine that asks."""

    url: str
    """Its metadata server, which only the machine itself reaches."""
    read: Callable[[Ask], PreemptionNotice | None]


def _aws(ask: Ask) -> PreemptionNotice | None:
    """EC2, with IMDSv2: the path does not exist until an interruption of the spot instance is due."""
    token = ask("/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if token.status != 200:
        raise NoticeUnreadable(f"no token of IMDSv2 is given: HTTP {token.status}")
    answer = ask("/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token.text.strip()})
    if answer.status == 404:
        return None
    found = _object(answer)
    if not isinstance(action := found.get("action"), str):
        raise NoticeUnreadable("the answer has no action")
    return _notice(f"aws: {action}", _time(found.get("time")), warning_s=120.0)


def _gcp(ask: Ask) -> PreemptionNotice | None:
    """Compute Engine: tells no time; a spot VM has 30 s."""
    answer = ask("/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
    said = answer.text.strip().upper()
    if answer.status != 200 or said not in ("TRUE", "FALSE"):
        raise NoticeUnreadable(f"the answer is no TRUE or FALSE: HTTP {answer.status}")
    return _notice("gcp: preempted") if said == "TRUE" else None


def _azure(ask: Ask) -> PreemptionNotice | None:
    """Scheduled events, which a machine gets of all machines of its set."""
    header = {"Metadata": "true"}
    name = ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers=header)
    if name.status != 200 or not name.text.strip():
        raise NoticeUnreadable(f"the name of the machine is not given: HTTP {name.status}")
    found = _object(ask("/metadata/scheduledevents?api-version=2020-07-01", headers=header)).get("Events")
    if not isinstance(found, list):
        raise NoticeUnreadable("the answer has no events")
    notices = [_notice(f"azure: {event['EventType']}", _time(event.get("NotBefore")))
               for event in found if isinstance(event, dict) and event.get("EventType") in ("Preempt", "Terminate")
               and name.text.strip() in (event.get("Resources") or ())]
    return min(notices, key=lambda notice: notice.deadline_at, default=None)  # one without a time has begun


PROVIDERS = {"aws": Provider("http://169.254.169.254", _aws),
             "gcp": Provider("http://metadata.google.internal", _gcp),
             "azure": Provider("http://169.254.169.254", _azure)}


def checked(source: str) -> str:
    """A source as it is stored, a path as an absolute one. Raises ConfigError for what is none."""
    if not source or source in PROVIDERS:
        return source
    if "://" in source:
        try:
            url = httpx.URL(source)
        except httpx.InvalidURL as e:
            raise ConfigError(f"--preemption-notice={source} is no URL: {e}") from e
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--preemption-notice={source} is no http or https URL")
        return source
    if "/" not in source:
        raise ConfigError(f"--preemption-notice={source} is no source of notices",
                          hint=f"give one of {', '.join(PROVIDERS)}, an http or https URL, or a path with a /")
    return str(Path(source).expanduser().absolute())


class NoticeSource:
    """Asks a source, again and again. For one thread."""

    def __init__(self, source: str, *, url: str = "") -> None:
        """``source``: as ``checked`` returns it, not empty. ``url``: of the metadata server, in place of the
        provider's."""
        self._provider = PROVIDERS.get(source)
        self._path = Path(source) if self._provider is None and "://" not in source else None
        self._url = url or (self._provider.url if self._provider is not None else source)
        # Each poll has a connection of its own: one of a server that has gone would cost the next poll its answer.
        self._client = None if self._path is not None else http_client.client(
            timeout=_PAUSE_S, users=None, limits=httpx.Limits(max_keepalive_connections=0),
            verify=not self._url.startswith("http://"))

    def read(self) -> PreemptionNotice | None:
        """The notice that stands; None where there is none. Raises NoticeUnreadable."""
        if self._path is not None:
            return _of_file(self._path)
        return self._provider.read(self._ask) if self._provider is not None else _of_url(self._ask(""))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _ask(self, path: str, method: str = "GET", headers: Mapping[str, str] = {}) -> Answer:
        assert self._client is not None
        end, body = time.monotonic() + _ANSWER_S, b""
        try:
            with self._client.stream(method, self._url + path, headers={"Accept-Encoding": "identity", **headers}
                                     ) as response:
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > _ANSWER_BYTES or time.monotonic() > end:
                        raise NoticeUnreadable("the answer is too long")
                return Answer(response.status_code, body.decode())
        except UnicodeError as e:
            raise NoticeUnreadable("the answer is no text") from e
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as e:
            raise NoticeUnreadable(f"there is no answer: {str(e) or type(e).__name__}") from e


def _of_url(answer: Answer) -> PreemptionNotice | None:
    if answer.status in (204, 404):
        return None
    if answer.status != 200:
        raise NoticeUnreadable(f"the answer is HTTP {answer.status}")
    return _of_text(answer.text)


def _of_file(path: Path) -> PreemptionNotice | None:
    """A file that is there is a notice, whatever it has in it, but for one that says that there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NoticeUnreadable(f"{path} is no file")
            text = os.read(fd, _ANSWER_BYTES).decode(errors="replace")
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise NoticeUnreadable(f"{path} cannot be read: {e.strerror}") from e
    try:
        return _of_text(text)
    except NoticeUnreadable:
        return _notice("announced")


def _of_text(text: str) -> PreemptionNotice | None:
    """The notice of a text: empty, TRUE, a time, or a JSON object with a time or a reason. Raises NoticeUnreadable,
    also for what a proxy or a wrong URL may answer: it would empty every host. No other text becomes a reason, which
    everybody may read who may read the hosts: the path may be that of another file."""
    text = text.strip()
    if text.upper() in _NONE:
        return None
    if (deadline := _time(text)) or text.upper() in ("", "TRUE"):
        return _notice("announced", deadline)
    if not text.startswith("{"):
        raise NoticeUnreadable("the answer is no notice")
    found = _object(Answer(200, text))
    reasons = [found[key] for key in ("reason", "action") if isinstance(found.get(key), str)]
    times = [at for key in ("deadline", "time") if (at := _time(found.get(key)))]
    if not reasons and not times:
        raise NoticeUnreadable("the answer has neither a time nor a reason")
    return _notice(next(iter(reasons), "announced"), next(iter(times), 0.0))


def _notice(reason: str, deadline_at: float = 0.0, warning_s: float = 30.0) -> PreemptionNotice:
    line = "".join(c if c.isprintable() else " " for c in reason)[:_REASON_CHARS]
    return PreemptionNotice(reason=line, deadline_at=deadline_at, warning_s=warning_s)


def _object(answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer. Raises NoticeUnreadable."""
    if answer.status != 200:
        raise NoticeUnreadable(f"the answer is HTTP {answer.status}")
    try:
        found = json.loads(answer.text)
    except (ValueError, RecursionError) as e:
        raise NoticeUnreadable("the answer is no JSON") from e
    if not isinstance(found, dict):
        raise NoticeUnreadable("the answer is no JSON object")
    return found


def _time(value: object) -> float:
    """Unix seconds of a time: these, or as ISO 8601 and HTTP have it (UTC where no zone is given); 0 for what is
    none."""
    text = str(value).strip() if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    at = 0.0
    if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,20})?", text):
        at = float(text)
    else:
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            try:
                found = parse(text)
                at = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
                break
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
    return at if math.isfinite(at) and _EARLIEST <= at <= _LATEST else 0.0
