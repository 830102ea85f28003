"""What a replica of a role says that its host lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.roles.host_needs import role_context


def context(folder: Path, **roles: object) -> RunContext:
    cfg = config.parse({"job": "j", "cluster": "lab", "roles": roles, "rollout": {"reward": "genrm"},
                        "pools": {"genrm": {"model": str(folder)}}})
    return RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=1, model_dir="", host="10.0.0.8")


def test_role_on_another_host_names_the_model_that_the_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    monkeypatch.delenv("ELASTIC_RL_RUN", raising=False)
    ctx = context(tmp_path, genrm={"host_selector": {"zone": "a"}})
    with pytest.raises(ConfigError, match=f"host 10.0.0.8 lacks the model {tmp_path} of pool genrm"):
        role_context(ctx, "genrm")
    assert role_context(ctx, "advantages") is ctx, "on the host of the run, which was checked before"
    (tmp_path / "config.json").write_text("{}")
    assert role_context(ctx, "genrm") == ctx
