"""schemathesis against a replica: no 5xx, no undocumented answer, and no forbidden request is accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.api_cluster import ApiCluster
from support.coordinators import OPERATOR
from support.etcd_server import EtcdServers
from support.tiers import full

from elastic_rl.coordinator.api.app import APP
from elastic_rl.etcd.records import Engine, EngineState

EXAMPLES = 4
NOT_OURS = {
    "positive_data_acceptance": "what fits the schema may still not fit the state: an ETag, a cursor, a pool's limit",
    "ensure_resource_availability": "a dry run answers with what it would create, and creates nothing",
    "use_after_free": "DELETE cancels an operation, which can still be read",
}


@pytest.mark.timeout(1000)
@full(proved_in="tests/integration/coordinator/test_api.py tests/unit/coordinator/test_api_parts.py",
      why="thousands of requests that a tool makes of the schema")
def test_schemathesis_finds_no_5xx_and_no_undocumented_answer(etcd_servers: EtcdServers, tmp_path: Path) -> None:
    cluster = ApiCluster(etcd_servers, tmp_path)
    engine = Engine(id="rollout-3f2a", pool="rollout", state=EngineState.READY, epoch=1)
    cluster.etcd.put(cluster.keys.engine(engine.id), engine.encode())
    try:
        cluster.start("a")
        run = subprocess.run(
            [str(Path(sys.executable).parent / "schemathesis"), "run", f"{cluster.replicas.urls['a']}/openapi.json",
             "--header", f"Authorization: Bearer {OPERATOR}", "--checks", "all", "--exclude-checks", ",".join(NOT_OURS),
             "--exclude-path", "/v1/jobs/{job}/changes",  # it does not end
             "--max-examples", str(EXAMPLES), "--generation-deterministic", "--no-shrink",
             "--continue-on-failure", "--no-color", "--warnings", "off"],
            capture_output=True, text=True, timeout=900, cwd=tmp_path)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        operations = sum(len(methods) for methods in APP.openapi()["paths"].values())
        assert f"Tested: {operations - 1}" in run.stdout, run.stdout
    finally:
        cluster.close()
