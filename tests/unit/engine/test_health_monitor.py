"""The monitor's rounds: what a probe counts for, and that a pause of the server counts for nothing."""

from __future__ import annotations

import threading

from elastic_rl.engine.server.health import Effort, Health, HealthLimits
from elastic_rl.engine.server.health_monitor import HealthMonitor

LIMITS = HealthLimits(waiting_s=30.0, working_s=300.0, gap_s=15.0)


class Server:
    """Answers probes as told; each takes ``takes_s`` of a clock that only probes move."""

    def __init__(self) -> None:
        self.answers: bool | None = True
        self.takes_s, self.now, self.probes = 10.0, 0.0, 0
        self.during = lambda: None
        self.monitor = HealthMonitor(self.probe, Effort, limits=LIMITS, interval_s=0.001, clock=lambda: self.now,
                                     on_frozen=self.frozen)
        self.reasons: list[str] = []
        self.condemned = threading.Event()

    def probe(self) -> bool | None:
        self.now += self.takes_s
        self.probes += 1
        self.during()
        return self.answers

    def frozen(self, reason: str) -> None:
        self.reasons.append(reason)
        self.condemned.set()


def test_server_that_stops_answering_is_condemned_once_with_the_reason() -> None:
    server = Server()
    server.answers = False
    server.monitor.start()
    assert server.condemned.wait(30)
    server.monitor.join(30)
    assert len(server.reasons) == 1 and "no sign of life for 30 s" in server.reasons[0] and server.probes == 3


def test_answer_ends_the_suspicion() -> None:
    server = Server()
    server.answers = False
    assert [server.monitor.observe() for _ in range(2)] == [Health.SUSPECTED] * 2
    server.answers = True
    assert server.monitor.observe() is Health.HEALTHY and server.monitor.health.silent_s == 0


def test_probe_that_asked_nothing_neither_suspects_nor_ends_a_suspicion() -> None:
    server = Server()
    server.answers = None
    assert [server.monitor.observe() for _ in range(9)] == [Health.HEALTHY] * 9
    server.answers = False
    server.monitor.observe()
    server.answers = None
    before = server.monitor.health
    assert server.monitor.observe() is Health.SUSPECTED and server.monitor.health is before


def test_paused_server_is_not_probed() -> None:
    server = Server()
    with server.monitor.paused():
        server.now += 1000.0
        assert server.monitor.observe() is Health.HEALTHY and server.probes == 0
    assert server.monitor.observe() is Health.HEALTHY and server.probes == 1


def test_probe_that_overlaps_a_pause_counts_for_nothing() -> None:
    server = Server()
    server.answers = False

    def pause() -> None:
        with server.monitor.paused():
            pass

    server.during = pause
    assert [server.monitor.observe() for _ in range(10)] == [Health.HEALTHY] * 10
    server.during = lambda: None
    assert server.monitor.observe() is Health.SUSPECTED


def test_closed_monitor_condemns_nobody() -> None:
    server = Server()
    server.answers = False
    server.during = server.monitor.close
    server.monitor.start()
    server.monitor.join(30)
    assert server.probes == 1 and not server.reasons


def test_server_is_not_probed_before_the_last_of_several_pauses_ends() -> None:
    server = Server()
    with server.monitor.paused():
        with server.monitor.quiet():
            pass
        assert server.monitor.observe() is Health.HEALTHY and server.probes == 0
    server.monitor.observe()
    assert server.probes == 1


def test_quiet_begins_after_the_probe_that_is_in_flight() -> None:
    """A probe generates a token, for which a server without its memory would read what is not there."""
    server, began, goes_on, order = Server(), threading.Event(), threading.Event(), list[str]()

    def probe() -> None:
        began.set()
        goes_on.wait(30)
        order.append("probe ended")

    server.during = probe
    probing = threading.Thread(target=server.monitor.observe)
    probing.start()
    assert began.wait(30)

    def silence() -> None:
        with server.monitor.quiet():
            order.append("quiet")

    silencing = threading.Thread(target=silence)
    silencing.start()
    goes_on.set()
    probing.join(30)
    silencing.join(30)
    assert order == ["probe ended", "quiet"]
