"""A Ray actor that does not end within its grace is killed. Ray is a stand-in that only notes its calls."""

from __future__ import annotations

from unittest import mock

import pytest

from elastic_rl.driver import placement
from elastic_rl.driver.placement import PlacedActor

GRACE_S = 10.0


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    found = mock.MagicMock()
    for name in ("ray", "placement_group", "PlacementGroupSchedulingStrategy"):
        monkeypatch.setattr(placement, name, found if name == "ray" else mock.MagicMock())
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "CREATED"})
    return found


def test_actor_that_hangs_is_killed_once_its_time_to_stop_is_over(
        ray: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    actor = PlacedActor("trainer", object, cpus=1.0, gpus=0)
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


def test_actor_without_room_ends_at_once(ray: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "PENDING"})
    actor = PlacedActor("trainer", object, cpus=1.0, gpus=0)
    actor.end(grace_s=GRACE_S)
    assert actor.stopping and ray.kill.call_count == 1
