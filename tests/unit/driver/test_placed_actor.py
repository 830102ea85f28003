"""A Ray actor that does not end within its grace is killed. Ray is a stand-in that only notes its calls."""

from __future__ import annotations

from unittest import mock

import pytest

from elastic_rl.driver import placement
from elastic_rl.driver.placement import PlacedActor
from elastic_rl.errors import EtcdUnavailable, Fenced

GRACE_S = 10.0


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    found = mock.MagicMock()
    monkeypatch.setattr(placement, "ray", found)
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {
        "state": "CREATED", "bundles_to_node_id": {0: "n"}})
    return found


def make(writer: mock.MagicMock | None = None) -> PlacedActor:
    return PlacedActor("trainer", mock.MagicMock(), mock.MagicMock(), {"CPU": 1.0}, writer or mock.MagicMock(), 1)


def test_actor_that_hangs_is_killed_once_its_time_to_stop_is_over(
        ray: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    actor = make()
    actor.end(grace_s=GRACE_S)
    now[0] += GRACE_S - 1
    actor.end(grace_s=GRACE_S)  # again, which gives it no more time
    actor.enforce()
    assert actor.stopping and not ray.kill.called
    now[0] += 1
    actor.enforce()
    assert ray.kill.call_count == 1
    actor.enforce()
    assert ray.kill.call_count == 1


def test_actor_that_hangs_is_ended_by_the_method_that_writes_its_stacks(ray: mock.MagicMock) -> None:
    body = mock.MagicMock()
    actor = PlacedActor("engine", body, mock.MagicMock(), {"CPU": 1.0}, mock.MagicMock(), 3)
    actor.end(grace_s=GRACE_S, method="kill_hung")
    assert body.call.remote.mock_calls == [mock.call(3, "kill_hung")] and actor.stopping and not ray.kill.called


def test_actor_is_told_once_that_its_host_ends(ray: mock.MagicMock) -> None:
    body = mock.MagicMock()
    actor = PlacedActor("engine", body, mock.MagicMock(), {"CPU": 1.0}, mock.MagicMock(), 3)
    for _ in range(2):
        actor.hurry()
    assert body.call.remote.mock_calls == [mock.call(3, "hurry")]


def test_actor_without_room_ends_at_once(ray: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "PENDING"})
    actor = make()
    actor.end(grace_s=GRACE_S)
    actor.enforce()
    assert actor.stopping and ray.kill.call_count == 1


@pytest.mark.parametrize("error", [Fenced("a newer driver has begun"), EtcdUnavailable("no member answers")])
def test_actor_is_not_killed_by_a_driver_that_may_have_been_replaced(ray: mock.MagicMock, error: Exception) -> None:
    writer = mock.MagicMock()
    writer.require.side_effect = error
    actor = make(writer)
    with pytest.raises(type(error)):
        actor.kill()
    assert not actor.stopping and not ray.kill.called
    writer.require.side_effect = None
    actor.kill()
    assert actor.stopping and ray.kill.called
