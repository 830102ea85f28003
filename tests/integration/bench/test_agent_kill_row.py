"""A row of recovery on a real cluster, which ends with the bench."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest
from support.tiers import full

from elastic_rl.bench import recovery
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options


@full(proved_in="tests/integration/host/test_host_agent.py tests/unit/bench/test_bench_recovery.py",
      why="the bench kills the host agent of a real cluster, and sees its standby")
def test_agent_is_killed_and_interrupted_bench_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows: list[Row] = []

    def interrupted_at_the_end(row: Row) -> None:
        rows.append(row)
        if row.id == "agent-kill-max":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recovery.run(Options(quick=True, rows=("agent-kill",)), interrupted_at_the_end)
    assert [(row.id, row.samples) for row in rows] == [("agent-kill", 3), ("agent-kill-max", 3)]
    assert all(row.value is not None and row.value > 0 for row in rows)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
            and p.status() != psutil.STATUS_ZOMBIE]
    assert not left and not list(tmp_path.iterdir())
