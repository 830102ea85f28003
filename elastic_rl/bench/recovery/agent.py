"""agent-kill: kill -9 of the active process of the host agent, until its standby has done a pass. The standby runs
already, so there is no start in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.recovery import trials
from elastic_rl.bench.recovery.testbed import TRIAL_S, Testbed
from elastic_rl.bench.recovery.trials import Trial, follow
from elastic_rl.faults.context import kill
from elastic_rl.host.agent.status import AgentStatus
from elastic_rl.runtime.waiting import wait_until

_END = "the standby has done a pass"


def measure(testbed: Testbed) -> Iterator[Row]:
    found = [_trial(testbed) for _ in range(testbed.trials)]
    yield from trials.rows("agent-kill", "kill -9 of the active host agent", found, (_END,), goal=trials.SPARE_S)


def _trial(testbed: Testbed) -> Trial:
    active = wait_until(lambda: _active_beside_a_standby(testbed), timeout_s=TRIAL_S, what="a host agent and a standby")
    kill(active)
    killed_at = time.time()

    def passed() -> bool:
        status = _status(testbed)
        return status is not None and status.pid != active and status.at > killed_at

    return follow({_END: passed}, (_END,), timeout_s=TRIAL_S)


def _status(testbed: Testbed) -> AgentStatus | None:
    return AgentStatus.load(testbed.cluster.paths.agent_status)


def _active_beside_a_standby(testbed: Testbed) -> int:
    """Pid of the active process, once the other one waits to take over; 0 while there are no such two."""
    pids = {record.pid for record in testbed.cluster.agents.running()}
    status = _status(testbed)
    if status is None or status.pid not in pids:
        return 0
    lock = str(testbed.cluster.paths.active_agent_lock)
    for pid in pids - {0, status.pid}:
        with contextlib.suppress(psutil.Error):  # it may just have ended
            if any(file.path == lock for file in psutil.Process(pid).open_files()):
                return status.pid
    return 0
