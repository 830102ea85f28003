"""What the job's status says of the last updates."""

from __future__ import annotations

import math

from elastic_rl.etcd.records import JobStatus
from elastic_rl.pipeline.records.recent_updates import RecentUpdates


def test_largest_divergence_is_kept_for_ten_steps() -> None:
    updates = RecentUpdates()
    status, kept = JobStatus(phase="rl"), []
    for step in range(1, 15):
        status = status.replace(**updates.add(step, {"kl": 5.0 if step == 3 else 0.01 * step, "lr": step}, status))
        kept.append(status)
    assert [found.update_kl_step for found in kept] == [1, 2, *[3] * 10, 13, 14]
    assert (kept[2].update_kl, kept[2].lr, kept[2].entropy) == (5.0, 3.0, None)
    assert (status.worst_kl, status.worst_kl_step, status.worst_kl_lr) == (5.0, 3, 3.0), "of all steps"
    again = RecentUpdates().add(15, {"kl": 0.1}, status)  # another actor
    assert again["update_kl"] == 0.1 and "worst_kl" not in again


def test_step_that_a_recovery_has_undone_is_forgotten() -> None:
    updates = RecentUpdates()
    for step in (1, 2, 3):
        updates.add(step, {"kl": float(step)}, JobStatus(phase="rl"))
    undone = JobStatus(phase="rl", worst_kl=3.0, worst_kl_step=3)
    found = updates.add(2, {"kl": 0.5}, undone)
    assert found["update_kl"] == 1.0 and found["worst_kl_step"] == 2
    assert updates.add(3, {"kl": 0.5}, undone)["update_kl_step"] == 1


def test_divergence_that_is_no_number_is_the_largest_and_can_be_stored() -> None:
    for kl in (math.inf, math.nan, 1e30):
        found = RecentUpdates().add(1, {"kl": kl, "lr": math.inf, "entropy": 0.5}, JobStatus(phase="rl"))
        status = JobStatus(phase="rl").replace(**found)
        assert JobStatus.decode(status.encode()) == status and status.update_kl == 1000.0 and status.entropy == 0.5
    assert RecentUpdates().add(1, {}, JobStatus(phase="rl"))["update_kl"] is None, "an algorithm that does not say it"
