"""The record of an engine on a real etcd, between its runner and the driver and the leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.engine.record import EngineRecord
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address


class Written:
    """A record that its runner has written once."""

    def __init__(self, etcd: EtcdClient, keys: Keys, folder: Path) -> None:
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        self.etcd, self.key = etcd, keys.engine("e")
        self.of_runner = Engine(id="e", pool="rollout", state=EngineState.READY, epoch=epoch, incarnation="i",
                                version=1)
        self.record = EngineRecord(RunContext(
            config=config.parse({"job": keys.job, "run_dir": str(folder)}), etcd_endpoints=["unused:1"], job=keys.job,
            epoch=epoch, model_dir="", host=own_address()), etcd, "e", "i")
        self.record.write(self.of_runner)

    def now(self) -> Engine:
        found = self.etcd.get(self.key)
        assert found is not None
        return Engine.decode(found.value)


@pytest.fixture
def written(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Written:
    return Written(etcd, keys, tmp_path)


def test_record_is_written_again_without_reading_it(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(written.etcd, "get", lambda key: pytest.fail(f"it reads {key}"))
        for version in (2, 3):
            written.record.write(written.of_runner.replace(version=version))
    assert written.now().version == 3


def test_write_finds_what_others_have_asked_for_meanwhile(written: Written) -> None:
    written.etcd.put(written.key, written.now().replace(state=EngineState.DRAINING).encode())
    found = written.record.write(written.of_runner.replace(version=2))
    assert (found.state, found.version) == (EngineState.DRAINING, 2)
    assert written.now() == found


def test_write_of_a_deleted_record_is_refused(written: Written) -> None:
    written.etcd.delete(written.key)
    with pytest.raises(Fenced, match="deleted"):
        written.record.write(written.of_runner.replace(version=2))
    assert written.etcd.get(written.key) is None


def test_engine_that_was_declared_dead_is_never_written_alive_again(written: Written) -> None:
    dead = written.now().replace(state=EngineState.DEAD, reason="its process is stopped")
    written.etcd.put(written.key, dead.encode())
    for act in (lambda: written.record.write(written.of_runner.replace(version=2)), written.record.read):
        with pytest.raises(Fenced, match="declared dead meanwhile: its process is stopped"):
            act()
    assert written.now() == dead
    for end in (EngineState.DEAD, EngineState.QUARANTINED):
        assert written.record.write(written.of_runner.replace(state=end, reason="its server ended")) == dead
    assert written.now() == dead, "it stays as the leader has said"


def test_record_that_was_deleted_in_an_outage_is_not_made_again_after_it(
        written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise EtcdUnavailable("etcd does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(written.etcd, "update_from", away)
        with pytest.raises(EtcdUnavailable):
            written.record.write(written.of_runner.replace(version=2))
    written.etcd.delete(written.key)
    with pytest.raises(Fenced, match="deleted"):
        written.record.write(written.of_runner.replace(version=2))
    assert written.etcd.get(written.key) is None


def test_write_of_an_older_epoch_is_refused(written: Written, keys: Keys) -> None:
    fencing.raise_epoch(written.etcd, keys, "the next driver")
    with pytest.raises(Fenced):
        written.record.write(written.of_runner.replace(version=2))
    assert written.now().version == 1


def test_write_beside_another_runner_is_refused(written: Written) -> None:
    written.etcd.put(written.key, written.now().replace(incarnation="other").encode())
    with pytest.raises(Fenced, match="taken over"):
        written.record.write(written.of_runner.replace(version=2))
    assert written.now().incarnation == "other"
