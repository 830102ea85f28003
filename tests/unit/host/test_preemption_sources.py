"""Sources of notices of preemption, asked over real HTTP: what they say, and what is no answer."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import http_servers
from support.waiting import wait_until

from elastic_rl.errors import ConfigError
from elastic_rl.etcd.cluster_records import HostStatus, PreemptionNotice
from elastic_rl.host import preemption
from elastic_rl.host.agent.preemption_watch import PreemptionWatch
from elastic_rl.host.preemption import NoticeSource, NoticeUnreadable, checked

AT = 1795791722.0
ISO = "2026-11-27T15:02:02Z"
Reply = tuple[int, bytes]


@dataclass
class Metadata:
    """A metadata server: what it answers, by method and path, and what it was asked."""

    replies: dict[str, Reply] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    proceed: threading.Event = field(default_factory=threading.Event)
    """An answer of status 0 waits for it within its body."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    metadata: Metadata

    def do_GET(self) -> None:
        name = f"{self.command} {self.path}"
        self.metadata.headers[name] = {key.lower(): value for key, value in self.headers.items()}
        status, body = self.metadata.replies.get(name, (404, b"not found"))
        self.send_response(status or 200)
        self.send_header("Content-Length", str(len(body) + (status == 0)))
        self.end_headers()
        self.wfile.write(body)
        if not status:
            self.wfile.flush()
            self.metadata.proceed.wait(60)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"metadata": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    with http_servers.serving(server):
        yield made
        made.proceed.set()


@pytest.fixture
def source(metadata: Metadata) -> Iterator[Callable[[str], NoticeSource]]:
    made: list[NoticeSource] = []

    def of(name: str) -> NoticeSource:
        made.append(NoticeSource(name, url=metadata.url))
        return made[-1]

    yield of
    for each in made:
        each.close()


Sources = Callable[[str], NoticeSource]


# -- providers ---------------------------------------------------------------------------------------------------------
def test_aws_is_asked_with_a_token_and_tells_when_the_instance_ends(metadata: Metadata, source: Sources) -> None:
    aws, path = source("aws"), "GET /latest/meta-data/spot/instance-action"
    with pytest.raises(NoticeUnreadable, match="no token"):
        aws.read()
    metadata.replies["PUT /latest/api/token"] = 200, b"t0ken\n"
    assert aws.read() is None
    assert metadata.headers[path]["x-aws-ec2-metadata-token"] == "t0ken"
    assert metadata.headers["PUT /latest/api/token"]["x-aws-ec2-metadata-token-ttl-seconds"]
    metadata.replies[path] = 200, json.dumps({"action": "terminate", "time": ISO}).encode()
    assert aws.read() == PreemptionNotice(reason="aws: terminate", deadline_at=AT, warning_s=120.0)


def test_gcp_says_true_or_false_to_those_who_name_it(metadata: Metadata, source: Sources) -> None:
    gcp, path = source("gcp"), "GET /computeMetadata/v1/instance/preempted"
    metadata.replies[path] = 200, b"FALSE"
    assert gcp.read() is None and metadata.headers[path]["metadata-flavor"] == "Google"
    metadata.replies[path] = 200, b"TRUE"
    assert gcp.read() == PreemptionNotice(reason="gcp: preempted", warning_s=30.0)


def test_azure_tells_of_all_machines_of_a_set_and_only_this_one_counts(metadata: Metadata, source: Sources) -> None:
    azure, path = source("azure"), "GET /metadata/scheduledevents?api-version=2020-07-01"

    def event(kind: str, *machines: str, at: str = "") -> dict[str, Any]:
        return {"EventId": "x", "EventType": kind, "Resources": machines, "EventStatus": "Scheduled", "NotBefore": at}

    def tells(*events: dict[str, Any]) -> PreemptionNotice | None:
        metadata.replies[path] = 200, json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()
        return azure.read()

    metadata.replies["GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"] = 200, b"vm_3"
    assert tells() is None and metadata.headers[path]["metadata"] == "true"
    assert tells(event("Preempt", "vm_2"), event("Freeze", "vm_3")) is None
    due = event("Preempt", "vm_2", "vm_3", at="Fri, 27 Nov 2026 15:02:02 GMT")
    assert tells(due, event("Terminate", "vm_3", at="Fri, 27 Nov 2026 16:00:00 GMT")) == PreemptionNotice(
        reason="azure: Preempt", deadline_at=AT)


@pytest.mark.parametrize("name", list(preemption.PROVIDERS))
@pytest.mark.parametrize("reply", [(200, b"<html>sign in</html>"), (200, b"\xff\xfe"), (200, b"[" * 9000), (500, b""),
                                   (302, b""), (200, b"x" * (1 << 20)), (200, b'{"Events": 3, "action": []}'),
                                   (200, b"[1]")])
def test_garbage_of_a_provider_is_neither_a_notice_nor_none(
        metadata: Metadata, source: Sources, name: str, reply: Reply) -> None:
    metadata.replies = dict.fromkeys((
        "GET /latest/meta-data/spot/instance-action", "GET /computeMetadata/v1/instance/preempted",
        "GET /metadata/scheduledevents?api-version=2020-07-01"), reply) | {
        "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text": (200, b"vm"),
        "PUT /latest/api/token": (200, b"t")}
    with pytest.raises(NoticeUnreadable):
        source(name).read()


# -- a URL -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("reply", "expected"), [
    ((404, b""), None), ((204, b""), None), ((200, b"FALSE\n"), None), ((200, b"none"), None), ((200, b"0"), None),
    ((200, b""), PreemptionNotice(reason="announced")), ((200, b"TRUE"), PreemptionNotice(reason="announced")),
    ((200, ISO.encode()), PreemptionNotice(reason="announced", deadline_at=AT)),
    ((200, str(AT).encode()), PreemptionNotice(reason="announced", deadline_at=AT)),
    ((200, json.dumps({"reason": "spot", "deadline": ISO}).encode()),
     PreemptionNotice(reason="spot", deadline_at=AT)),
    ((200, b'{"time": "soon", "action": "reboot"}'), PreemptionNotice(reason="reboot"))])
def test_url_says_whether_there_is_a_notice(
        metadata: Metadata, reply: Reply, expected: PreemptionNotice | None) -> None:
    metadata.replies["GET /notice?host=a"] = reply
    assert NoticeSource(f"{metadata.url}/notice?host=a").read() == expected


@pytest.mark.parametrize("reply", [(500, b""), (401, b"TRUE"), (301, b""), (200, b"<html></html>"), (200, b"[]"),
                                   (200, b"\x00\x01"), (200, b"{"), (200, b"{}"), (200, b"OK"),
                                   (200, b'{"preempted": false}'), (200, b"x" * 500), (200, b"a\nb")])
def test_garbage_of_a_url_is_neither_a_notice_nor_none(metadata: Metadata, reply: Reply) -> None:
    metadata.replies["GET /"] = reply
    with pytest.raises(NoticeUnreadable):
        NoticeSource(f"{metadata.url}/").read()


def test_server_that_hangs_is_given_up(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_PAUSE_S", 0.2)
    metadata.replies["GET /"] = 0, b"TR"
    with pytest.raises(NoticeUnreadable, match="no answer"):
        NoticeSource(f"{metadata.url}/").read()


def test_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NoticeUnreadable, match="no answer"):
        NoticeSource("http://127.0.0.1:1/").read()


# -- a file ------------------------------------------------------------------------------------------------------------
def test_file_is_a_notice_by_being_there(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = NoticeSource(str(path))
    assert source.read() is None
    for text, expected in (("", PreemptionNotice(reason="announced")), ("a\nb", PreemptionNotice(reason="announced")),
                           ("password-of-root", PreemptionNotice(reason="announced")),
                           (ISO, PreemptionNotice(reason="announced", deadline_at=AT)), ("FALSE\n", None)):
        path.write_text(text)
        assert source.read() == expected, text
    path.unlink()
    assert source.read() is None


def test_what_is_no_file_is_neither_a_notice_nor_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(NoticeUnreadable):
            NoticeSource(str(path)).read()


@pytest.mark.parametrize("source", ["awz", "notice", "ftp://a/b", "http://", "http://a:b", "://x"])
def test_source_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(ConfigError):
        checked(source)


def test_path_is_kept_as_an_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked("./notice") == str(tmp_path / "notice")
    assert [checked(source) for source in ("", "aws", "https://a/b")] == ["", "aws", "https://a/b"]


# -- the watch ---------------------------------------------------------------------------------------------------------
def test_watch_follows_its_source_and_an_outage_changes_nothing(metadata: Metadata) -> None:
    metadata.replies["GET /"] = 500, b""
    now = [1000.0]
    watch = PreemptionWatch(NoticeSource(f"{metadata.url}/"), every_s=0.02, clock=lambda: AT - 120.0,
                            monotonic=lambda: now[0]).start()

    def seen() -> HostStatus:
        return watch.added_to(HostStatus(registration=1))

    wait_until(lambda: "HTTP 500" in seen().preemption_problem, what="the first answer")
    assert seen().preemption is None and seen().preemption_unknown
    metadata.replies["GET /"] = 200, json.dumps({"reason": "spot", "deadline": ISO}).encode()
    wait_until(lambda: seen().preemption is not None, what="the notice")
    assert not seen().preemption_problem and not seen().preemption_unknown
    noticed = seen().preemption
    assert seen().preemption_left_s == 120.0, "by the clock of this machine, once"
    now[0] += 59.0
    assert seen().preemption_left_s == 120.0, "the report is not written each second"
    now[0] += 31.0
    assert seen().preemption_left_s == 30.0
    metadata.replies["GET /"] = 200, b"<html>"
    wait_until(lambda: bool(seen().preemption_problem), what="the outage")
    assert seen().preemption == noticed, "the machine may lose its network first"
    for later in (b'{"reason": "spot"}', json.dumps({"reason": "spot", "deadline": AT + 60}).encode()):
        metadata.replies["GET /"] = 200, later
        wait_until(lambda: not seen().preemption_problem, what="the same notice without its time, or a later one")
        assert seen().preemption == noticed
    metadata.replies["GET /"] = 404, b""
    wait_until(lambda: seen().preemption is None, what="the withdrawal")
    watch.close()


def test_watch_never_waits_for_its_source(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_PAUSE_S", 60.0)
    monkeypatch.setattr("elastic_rl.host.agent.preemption_watch._SILENT_S", 0.1)
    metadata.replies["GET /"] = 0, b""
    watch = PreemptionWatch(NoticeSource(f"{metadata.url}/")).start()
    wait_until(lambda: "no answer" in watch.added_to(HostStatus(registration=1)).preemption_problem, what="the report")
    metadata.proceed.set()
    watch.close()
