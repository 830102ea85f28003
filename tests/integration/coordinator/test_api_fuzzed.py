"""schemathesis against a replica: no 5xx, no answer that the OpenAPI document does not have, no request that it forbids
and the replica takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.api_cluster import ApiCluster
from support.etcd_server import EtcdServers

from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.app import routes
from elastic_rl.etcd.records import Engine, EngineState

EXAMPLES = 6
NOT_OURS = {
    "positive_data_acceptance": "what fits the schema may still not fit the state: an ETag, a cursor, a pool's limit",
    "ensure_resource_availability": "a dry run answers with what it would create, and creates nothing",
    "use_after_free": "DELETE cancels an operation, which can be looked at ever after",
}


def test_schemathesis_finds_no_5xx_and_no_undocumented_answer(etcd_servers: EtcdServers, tmp_path: Path) -> None:
    house = ApiCluster(etcd_servers, tmp_path, coordinator={"require_token": True})
    table = tmp_path / house.keys.job / "cluster" / "tokens.json"
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"tokens": [{"name": "ada", "role": "operator", "sha256": auth.digest("do")}]}))
    table.chmod(0o600)
    engine = Engine(id="rollout-3f2a", pool="rollout", state=EngineState.READY, epoch=1)
    house.etcd.put(house.keys.engine(engine.id), engine.encode())
    try:
        house.start("a")
        run = subprocess.run(
            [str(Path(sys.executable).parent / "schemathesis"), "run", f"{house.replicas.urls['a']}/openapi.json",
             "--header", "Authorization: Bearer do", "--checks", "all", "--exclude-checks", ",".join(NOT_OURS),
             "--exclude-path", "/v1/changes",  # it does not end
             "--max-examples", str(EXAMPLES), "--generation-deterministic", "--no-shrink",
             "--continue-on-failure", "--no-color", "--warnings", "off"],
            capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        operations = sum(len(methods) for methods in routes().openapi()["paths"].values())
        assert f"Tested: {operations - 1}" in run.stdout, run.stdout
    finally:
        house.close()
