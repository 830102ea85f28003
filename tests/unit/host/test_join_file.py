"""The file by which another machine joins a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_rl.config import parse
from elastic_rl.errors import ConfigError
from elastic_rl.host.join_file import JoinFile
from elastic_rl.net.cluster_secret import ClusterSecret


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cfg = parse({"cluster": "lab", "run_dir": "/first", "coordinator": {"lease_ttl_s": 7},
                 "dcs": {"chunk_bytes": 8192}})
    path = tmp_path / "cluster.join"
    JoinFile.of(cfg, ClusterSecret.generate(), ["10.0.0.7:2379"], ["https://10.0.0.7:1"]).save(path)
    return path


def test_file_has_the_settings_of_the_cluster_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0
    cfg = JoinFile.read(path).config("/second")
    assert (cfg.cluster, str(cfg.run_dir), cfg.coordinator.lease_ttl_s) == ("lab", "/second", 7)
    assert cfg.dcs == parse({}).dcs and JoinFile.read(path).config().run_dir == parse({}).run_dir


def test_file_that_is_no_join_file_is_refused(path: Path) -> None:
    good = path.read_text()
    for bad in ("", "{", "{}", "[]", good.replace('"lab"', '""'), good.replace("lease_ttl_s", "lease")):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="is no join file of this release"):
            JoinFile.read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        JoinFile.read(path)
    path.write_text(good)
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        JoinFile.read(path)
    path.unlink()
    with pytest.raises(ConfigError, match="elastic-rl up --cluster=NAME --address=IP"):
        JoinFile.read(path)
