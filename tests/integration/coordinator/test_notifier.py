"""Notifications through real Apprise services, and the processes that send them."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from support import http_servers
from support.waiting import wait_until

from elastic_rl.config import AlertConfig
from elastic_rl.coordinator.alerts.notifier import NOT_LEADING, Notification, Notifier, NotifyType
from elastic_rl.coordinator.alerts.receiver_queue import AttemptResult
from elastic_rl.coordinator.alerts.receivers import receiver_name
from elastic_rl.coordinator.alerts.sender_process import REFUSED, SenderProcess, SendRequest
from elastic_rl.coordinator.alerts.write_failures import WriteFailureNotifier
from elastic_rl.net.addresses import free_port

pytestmark = pytest.mark.usefixtures("forked_senders")


class Service:
    """A notification service. ``/ok`` takes what is posted, ``/refuse`` refuses it, ``/hang`` never answers, and
    ``/drip`` answers a byte at a time without end, so that no read times out."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.bodies: list[str] = []
        self.asked = threading.Semaphore(0)
        """Released for each request of a path that does not answer."""
        self.leave = threading.Event()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path.startswith(("/hang", "/drip")):
                    service.asked.release()
                    while not service.leave.wait(0.1 if self.path.startswith("/drip") else None):
                        try:
                            self.wfile.write(b"H")
                        except OSError:
                            return
                    return
                if self.path.startswith("/ok"):
                    service.titles.append(body["title"])
                    service.bodies.append(body["message"])
                self.send_response(200 if self.path.startswith("/ok") else 500)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        http_servers.serve(self.server)

    def url(self, path: str) -> str:
        return f"json://127.0.0.1:{self.server.server_port}/{path}"

    def close(self) -> None:
        self.leave.set()
        http_servers.close(self.server)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sender() -> Iterator[SenderProcess]:
    """One for the module: its start takes seconds. A test that ends it leaves it to be started again."""
    made = SenderProcess()
    yield made
    made.close()


def request(url: str, body: str = "body") -> SendRequest:
    return SendRequest(url, "title", body, "info")


def notification(attempt: int = 1, *, leads: bool = True) -> Notification:
    return Notification("g1", attempt, "title", "body", NotifyType.INFO, lambda: leads)


def result(notifier: Notifier, name: str) -> AttemptResult:
    return wait_until(lambda: notifier.last_result(name), what="the result")


def children(pid: int | None) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# -- one process a notification -----------------------------------------------------------------------------------
def test_notification_is_sent_refused_or_fails_without_its_secret(sender: SenderProcess, service: Service) -> None:
    large = "x" * 500_000
    assert sender.send(request(service.url("ok"), large), 10.0) == ""
    assert (service.titles, service.bodies) == (["title"], [large])
    assert sender.send(request(service.url("refuse")), 10.0) == REFUSED
    dead = sender.send(request(f"json://user:secret@127.0.0.1:{free_port()}"), 10.0)
    unknown = sender.send(request("nosuch://secret@host"), 10.0)
    assert dead and unknown and "secret" not in dead + unknown


def test_services_that_never_finish_delay_no_other_receiver(service: Service) -> None:
    """Apprise sends from one small pool of threads and ends none of them: so many receivers used to stop all others."""
    pool = (os.cpu_count() or 1) + 4
    stuck, ok = [service.url(f"drip/{n}") for n in range(pool + 1)], service.url("ok")
    notifier = Notifier("j", AlertConfig(urls=[*stuck, ok], send_timeout_s=300.0))
    try:
        for url in stuck:
            assert notifier.send(receiver_name(url), notification())
        for _ in stuck:
            assert service.asked.acquire(timeout=120), "a service was never asked"
        for attempt in (1, 2):
            assert notifier.send(receiver_name(ok), notification(attempt))
            assert result(notifier, receiver_name(ok)) == AttemptResult("g1", attempt, True)
        assert all(notifier.busy(receiver_name(url)) for url in stuck)
        assert not notifier.send(receiver_name(stuck[0]), notification()), "one notification at a time"
        service.leave.set()
        assert not any(result(notifier, receiver_name(url)).ok for url in stuck)
    finally:
        service.leave.set()
        notifier.close()


def test_process_that_times_out_is_killed(sender: SenderProcess, service: Service) -> None:
    for timeout_s in (1.0, 5.0, 25.0):  # a busy machine may need longer than one second to get as far as the service
        found: list[str] = []
        sending = threading.Thread(target=lambda t=timeout_s, f=found: f.append(  # type: ignore[misc]
            sender.send(request(service.url("drip")), t)))
        sending.start()
        asked = service.asked.acquire(timeout=timeout_s)
        running = children(sender.pid)
        sending.join(60)
        assert found == [f"no answer within {timeout_s:g} s"] and not children(sender.pid)
        if asked and running:
            assert not any(child.is_running() for child in running)
            return
    pytest.fail("the service was never asked")


def test_helper_that_is_killed_fails_what_it_sends_and_is_started_again(
        sender: SenderProcess, service: Service) -> None:
    found: list[str] = []
    sending = threading.Thread(target=lambda: found.append(sender.send(request(service.url("hang")), 60.0)))
    sending.start()
    assert service.asked.acquire(timeout=60)
    helper, (child,) = sender.pid, children(sender.pid)
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    sending.join(30)
    assert found == ["the sender process ended"]
    wait_until(lambda: ended(child.pid), what="the end of the orphan")
    assert sender.send(request(service.url("ok")), 10.0) == "" and sender.pid != helper


def test_helper_that_is_stopped_blocks_nobody_for_long_and_is_replaced(service: Service) -> None:
    sender = SenderProcess(start_timeout_s=60.0)
    try:
        assert sender.send(request(service.url("ok")), 10.0) == ""
        sender._start_timeout_s = 0.5
        helper = sender.pid
        assert helper is not None
        os.kill(helper, signal.SIGSTOP)
        assert sender.send(request(service.url("ok")), 0.5) == (
            "the sender process did not answer in time and was restarted")
        assert ended(helper)
        sender._start_timeout_s = 60.0
        assert sender.send(request(service.url("ok")), 10.0) == ""
    finally:
        sender.close()


def test_nothing_outlives_a_coordinator_that_is_killed(service: Service) -> None:
    program = ("import sys; from elastic_rl.coordinator.alerts.sender_process import SenderProcess, SendRequest; "
               "SenderProcess().send(SendRequest(sys.argv[1], 't', 'b', 'info'), 600.0)")
    owner = subprocess.Popen([sys.executable, "-c", program, service.url("drip")])
    try:
        assert service.asked.acquire(timeout=60)
        family = children(owner.pid)
        assert len(family) == 2, "the helper and the process that sends"
    finally:
        owner.kill()
        owner.wait()
    for process in family:
        wait_until(lambda p=process: ended(p.pid), what="the end of an orphan")


# -- the notifier -------------------------------------------------------------------------------------------------
def test_result_is_announced_and_a_replica_that_lost_the_leadership_sends_nothing(service: Service) -> None:
    ok, announced = receiver_name(service.url("ok")), threading.Event()
    notifier = Notifier("j", AlertConfig(urls=[service.url("ok")], send_timeout_s=10.0))
    notifier.on_result(announced.set)
    try:
        notifier.send(ok, notification(leads=False))
        assert result(notifier, ok) == AttemptResult("g1", 1, False, NOT_LEADING) and announced.wait(60)
        assert not service.titles
        notifier.send(ok, notification(2))
        assert result(notifier, ok) == AttemptResult("g1", 2, True) and service.titles == ["title"]
    finally:
        notifier.close()
    assert not notifier.send(ok, notification(3)), "it is closed"


def test_etcd_that_refuses_writes_is_notified_once_and_its_recovery_too(service: Service) -> None:
    notifier, now = Notifier("j", AlertConfig(urls=[service.url("ok")], send_timeout_s=10.0)), [100.0]
    failures = WriteFailureNotifier(notifier, clock=lambda: now[0])
    try:
        failures.succeeded()
        for _ in range(10):
            failures.failed("etcd refused: mvcc: database space exceeded")
            now[0] += 2.0
            wait_until(lambda: not notifier.busy(receiver_name(service.url("ok"))),
                               what="the delivery")
        failures.succeeded()
        wait_until(lambda: len(service.titles) == 2, what="the recovery's notification")
        failures.succeeded()
        assert [t.split()[0] for t in service.titles] == ["[FIRING]", "[RESOLVED]"]
    finally:
        notifier.close()
