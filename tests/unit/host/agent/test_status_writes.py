"""When a host's status is written: only under its registration, and only where it says something new."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from support.clock import Clock

from elastic_rl.etcd.cluster_records import HostStatus, RunState, ServiceStatus
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.agent import host_session
from elastic_rl.host.agent.duties import KnownOrders
from elastic_rl.host.agent.host_session import HostSession, _Registration, _StatusWriter


class Writer:
    """A ``FencedWriter`` whose token holds."""

    def __init__(self) -> None:
        self.written: list[HostStatus] = []
        self.checks = 0

    def write(self, op: Op) -> None:
        self.written.append(HostStatus.decode(op.data))
        assert (op.key, op.lease) == ("status", 77)

    def require(self) -> None:
        self.checks += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(host_session, "boottime_s", clock)
    return clock


def held() -> _Registration:
    lease = SimpleNamespace(id=77, renewed_at=95.0, lost=threading.Event())
    return _Registration(lease, revision=7, granted_at=90.0)  # type: ignore[arg-type]


def status(registration: int = 7, observed: int = 10, **services: ServiceStatus) -> HostStatus:
    return HostStatus(registration=registration, observed_revision=observed, services=services)


def test_status_is_written_once_and_again_when_it_has_changed(clock: Clock) -> None:
    writer = Writer()
    statuses = _StatusWriter(writer, "status", held())  # type: ignore[arg-type]
    changed = status(a=ServiceStatus(state=RunState.RUNNING))
    for each in (status(), status(), changed, changed):
        statuses.write(each, changed_at=10)
    assert writer.written == [status(), changed]


@pytest.mark.parametrize("registration", [0, 6, 8])
def test_status_made_under_another_registration_is_no_evidence_for_this_one(clock: Clock, registration: int) -> None:
    writer = Writer()
    statuses = _StatusWriter(writer, "status", held())  # type: ignore[arg-type]
    statuses.write(status(registration), changed_at=10)
    statuses.write(None, changed_at=10)
    assert not writer.written


def test_observed_revision_alone_is_written_once_a_change_was_observed(clock: Clock) -> None:
    writer = Writer()
    statuses = _StatusWriter(writer, "status", held())  # type: ignore[arg-type]
    for observed, changed_at in ((10, 10), (20, 10), (20, 25), (30, 25), (40, 25)):
        statuses.write(status(observed=observed), changed_at)
    assert [s.observed_revision for s in writer.written] == [10, 30]


def test_registration_is_checked_while_there_is_nothing_to_write(clock: Clock) -> None:
    writer = Writer()
    statuses = _StatusWriter(writer, "status", held())  # type: ignore[arg-type]
    for _ in range(9):
        statuses.write(status(), changed_at=10)
        clock.now += 2.5
    assert (len(writer.written), writer.checks) == (1, 4)


def test_view_of_a_lost_lease_allows_nothing_and_counts_from_its_last_renewal(clock: Clock) -> None:
    session = HostSession.__new__(HostSession)  # without its thread

    def seen() -> tuple[float, float | None, int]:
        view = session.view()
        return view.lease.renewed_at, view.lease.granted_at, view.registration

    session._known, session._renewed_at, session._held = KnownOrders(), 50.0, None
    assert seen() == (50.0, None, 0)
    session._held = registered = held()
    assert seen() == (95.0, 90.0, 7)
    registered.lease.lost.set()
    assert seen() == (95.0, None, 0)
