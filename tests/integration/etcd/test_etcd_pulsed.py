"""The fault in which etcd is stopped again and again: writes are made whose answers are lost, as its witness says."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from support.etcd_server import EtcdServers

from elastic_rl import config
from elastic_rl.etcd.keys import Keys
from elastic_rl.faults import etcd as faults
from elastic_rl.faults.context import FaultContext, InjectionEnded
from elastic_rl.faults.etcd import EtcdPulsed
from elastic_rl.faults.undo import Undone, UndoRegistry, undo_all
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.processes import OWNER_ENV


def test_answers_of_writes_that_were_made_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    monkeypatch.setenv(OWNER_ENV, str(ClusterPaths.of(cfg).folder))  # as a service of its cluster has it
    servers = EtcdServers(tmp_path / "etcd", 1).start()
    try:
        monkeypatch.setattr(faults, "await_service", lambda context, name: servers.processes[0].pid)
        with servers.connect() as client:
            context = FaultContext(cfg, client, Keys("j"), cast("Any", None), undo=UndoRegistry(tmp_path / "undo"))
            fault = EtcdPulsed(context, "etcd_answers_lost", seconds=3.0, stopped_s=0.8, running_s=0.4,
                               loses_answers=True)
            _, witness = fault.inject()
            found = re.search(r"(\d+) writes of a witness were made and not answered", witness)
            assert found is not None and int(found[1]) > 0 and not fault.detected() and fault.may_go_unnoticed
            assert client.range(f"{Keys('j').root}chaos/")[0] == [], "its keys are gone"
            assert undo_all(tmp_path / "undo") == Undone()
            threading.Timer(0.5, context.end).start()
            revision = client.revision()
            with contextlib.suppress(InjectionEnded):
                EtcdPulsed(context, "etcd_slow", seconds=600.0, stopped_s=0.2, running_s=0.1,
                           loses_answers=False).inject()
            assert client.revision() == revision, "it writes nothing"
            assert client.get("x") is None, "it goes on"
    finally:
        servers.close()
