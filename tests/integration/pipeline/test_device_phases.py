"""The pipeline of a job whose engines and trainer share devices, on a real etcd: who has memory when, through a lost
trainer, an engine that does not release, and an actor that is replaced in the middle of a change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.actor_runs import WAIT_S
from support.etcd_server import EtcdServers
from support.simulated_job import Roles, SimulatedJob, TrainerWithoutTensors
from support.waiting import wait_until

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.etcd import device_phase, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, StepMetrics, Version, VersionState
from elastic_rl.trainer.service.commands import Command, Offload, Onload
from elastic_rl.trainer.service.shares import Shares

ENGINES = ("rollout-a", "rollout-b")


class TrainerInPhases(TrainerWithoutTensors):
    """Has memory, as a real one, from a take that etcd knows of to the next offload."""

    has_memory = False
    epoch_claims: DeviceClaims

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int, shares: Shares, max_staleness: int) -> None:
        self.epoch_claims = DeviceClaims(etcd, keys, ROLLOUT_POOL, epoch=epoch)
        self.without_memory: list[Command] = []
        """Commands that it was given while it had none."""
        super().__init__(etcd, keys, epoch, shares, max_staleness)

    def _report(self) -> None:
        if not self.has_memory and not self.board.status()["ready"]:
            return  # it has yet to make its model
        super()._report()
        head = Version(stream=Stream.POLICY, number=self.version, state=VersionState.COMMITTED, epoch=self._epoch)
        self._etcd.put(self._keys.stream_head(Stream.POLICY), head.encode())

    def _take(self) -> None:
        while not self._stop.is_set() and self.epoch_claims.take_for_trainer(self.member.incarnation):
            self._stop.wait(0.05)
        self.has_memory = not self._stop.is_set()

    def _run(self) -> None:
        self._take()
        self._report()
        super()._run()

    def _execute(self, command: Command) -> dict[str, Any]:
        if not isinstance(command, Offload | Onload):
            if not self.has_memory:
                self.without_memory.append(command)
            return super()._execute(command)
        if isinstance(command, Onload):
            self._take()
        else:
            self.has_memory = False
            self.epoch_claims.give_up_for_trainer(self.member.incarnation)
        return {}

    def lose(self) -> None:
        super().lose()
        self.has_memory = False


class EngineInPhases:
    """A colocated engine without a server. ``stuck``: it does not release its memory while it is set. ``lacking``: it
    cannot fetch a version after the first one while it is set."""

    def __init__(self, etcd: EtcdClient, keys: Keys, engine_id: str, epoch: int) -> None:
        self._etcd, self._keys, self._epoch = etcd, keys, epoch
        self.id, self.holds, self._version = engine_id, False, 0
        self.stuck, self.lacking, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._write(EngineState.RELEASED, holds=False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            seen = SeenPhase.of(self._etcd.get(self._keys.device_phase()), self._epoch)
            if self.holds and seen.side is Side.TRAINER and not self.stuck.is_set():
                self.holds = False
                self._write(EngineState.RELEASED, holds=False)
            guards = device_phase.take_for_engine(self._keys, seen)
            if not self.holds and guards is not None and self._write(EngineState.SYNCING, holds=True, guards=guards):
                self.holds = True
                self._write(EngineState.READY, holds=True)
            elif self.holds and self._newest() != self._version:
                self._write(EngineState.READY, holds=True)

    def _newest(self) -> int:
        """The newest version that it can fetch."""
        head = self._etcd.get(self._keys.stream_head(Stream.POLICY))
        number = Version.decode(head.value).number if head else 0
        return min(number, 1) if self.lacking.is_set() else number

    def _write(self, state: EngineState, *, holds: bool, guards: Sequence[Any] = ()) -> bool:
        self._version = self._newest() if state is EngineState.READY else 0
        record = Engine(id=self.id, pool=ROLLOUT_POOL, state=state, epoch=self._epoch, version=self._version,
                        holds_device=holds)
        return self._etcd.txn([*guards], [device_phase.Op.put(self._keys.engine(self.id), record.encode())]).succeeded

    def die(self) -> None:
        """As killed by the driver, which then deletes its record."""
        self._stop.set()
        self._thread.join(WAIT_S)
        self.holds = False
        self._etcd.delete(self._keys.engine(self.id))


class RolesInPhases(Roles):
    """Notes who had memory when samples were asked for."""

    def __init__(self, trainer: TrainerInPhases, etcd: EtcdClient, keys: Keys) -> None:
        super().__init__(trainer, etcd, keys)
        self.engines: list[EngineInPhases] = []
        self.holders: list[tuple[int, bool]] = []
        """At each request how many engines had memory, and whether the trainer had."""

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> list[Answers]:
        self.holders.append((sum(e.holds for e in self.engines), self.trainer.has_memory))  # type: ignore[attr-defined]
        return super().generate(prompts, min_version)


class ColocatedJob(SimulatedJob):
    trainer: TrainerInPhases
    roles: RolesInPhases

    def __init__(self, etcd: EtcdClient, endpoints: list[str], keys: Keys, folder: Path) -> None:
        super().__init__(etcd, endpoints, keys, folder, placement="colocated")
        etcd.delete(keys.engine("rollout-e"))
        self.trainer.lose()
        self.trainer = TrainerInPhases(etcd, keys, self.ctx.epoch, Shares(self.cfg, needs=[], vocab=1 << 31),
                                       self.cfg.train.max_staleness)
        self.roles = RolesInPhases(self.trainer, etcd, keys)
        self.engines = self.roles.engines
        self.engines += [EngineInPhases(etcd, keys, name, self.ctx.epoch) for name in ENGINES]

    def phase(self) -> SeenPhase:
        return SeenPhase.of(self.etcd.get(self.keys.device_phase()), self.ctx.epoch)

    def wait_for_release(self, engine_id: str) -> None:
        """Until the run says that it waits for this."""
        wait_until(lambda: f"engine {engine_id} to release memory" in self.status().waiting_for,
                   what="the wait to be shown")

    def assert_in_phases(self) -> None:
        assert self.trainer.without_memory == []
        assert self.roles.holders and all(not trainer for _, trainer in self.roles.holders)
        self.assert_exactly_once()

    def close(self) -> None:
        for engine in self.engines:
            engine.die()
        super().close()


@pytest.fixture
def job(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[ColocatedJob]:
    with contextlib.closing(ColocatedJob(etcd, etcd_servers.endpoints, keys, tmp_path)) as made:
        yield made


def test_trainer_and_engines_have_memory_in_phases(job: ColocatedJob) -> None:
    job.start_actor()
    job.finish()
    job.assert_in_phases()
    assert all(engines == len(ENGINES) for engines, _ in job.roles.holders), "all engines are waited for"
    # From the trainer to the engines and back in each of the 6 steps, of which 3 evaluate in the phase that generates,
    # once for the last evaluation, and back for the last commit.
    assert job.phase().side is Side.TRAINER and job.phase().number == 1 + 2 * 6 + 2
    last = StepMetrics.decode(job.etcd.get(job.keys.step_metrics(6)).value)  # type: ignore[union-attr]
    assert last.seconds["devices"] > 0
    assert job.kinds("trainer.") == [] and job.kinds("engine.") == []


def test_trainer_that_is_lost_in_the_engines_phase_re_forms_in_its_own(job: ColocatedJob) -> None:
    job.start_actor()
    job.wait_for(1)
    job.roles.hanging.clear()
    asked = len(job.roles.holders)
    wait_until(lambda: len(job.roles.holders) > asked, what="a request in the engines' phase")
    job.trainer.lose()
    job.trainer.form()
    assert "the engines' phase" in job.trainer.epoch_claims.take_for_trainer("another"), "it could not be refused"
    assert not job.trainer.board.status()["ready"] and not job.trainer.has_memory
    job.roles.hanging.set()
    job.finish()
    job.assert_in_phases()
    assert job.kinds("trainer.") == ["trainer.failed", "trainer.recovered"]


def test_engine_that_does_not_release_is_named_until_it_is_gone(job: ColocatedJob) -> None:
    stuck = job.engines[1]
    stuck.stuck.set()
    job.start_actor()
    job.wait_for_release("rollout-b")
    assert job.status().stage == "devices" and not job.trainer.has_memory
    stuck.die()
    job.finish()
    job.assert_in_phases()


def test_version_that_engines_lack_is_published_again_in_the_trainers_phase(
        job: ColocatedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside engines that hold the devices, the trainer has no memory to publish from."""
    monkeypatch.setattr("elastic_rl.pipeline.pool_sync.FIRST_S", 0.3)
    monkeypatch.setattr(HeadHolders, "is_lost", lambda _: True)
    job.start_actor()
    job.wait_for(1)
    for engine in job.engines:
        engine.lacking.set()
    wait_until(lambda: job.trainer.republished > 0, what="another publish")
    for engine in job.engines:
        engine.lacking.clear()
    job.finish()
    job.assert_in_phases()
    assert "version.republished" in job.kinds("version.")


def test_actor_that_is_replaced_in_the_middle_of_a_change_is_continued(job: ColocatedJob) -> None:
    stuck = job.engines[0]
    stuck.stuck.set()
    job.start_actor()
    job.wait_for_release("rollout-a")
    number = job.phase().number
    job.runs[0].stop(WAIT_S)
    job.start_actor()
    job.wait_for_release("rollout-a")
    assert job.phase() == SeenPhase(Side.TRAINER, number, job.phase().revision), "it is the trainer's phase already"
    stuck.stuck.clear()
    job.finish()
    job.assert_in_phases()


def test_phase_that_cannot_be_read_is_written_again(job: ColocatedJob) -> None:
    job.roles.hanging.clear()
    job.start_actor()
    wait_until(lambda: job.roles.holders, what="a request in the engines' phase")
    job.etcd.put(job.keys.device_phase(), b"?")
    assert all(e.holds for e in job.engines), "all stay as they are"
    job.roles.hanging.set()
    job.finish()
    job.assert_in_phases()


def test_group_that_takes_memory_back_before_the_phase_changes_is_never_overlooked(job: ColocatedJob) -> None:
    """A group may re-form between its offload and the phase of the engines."""
    claims, writer = job.trainer.epoch_claims, fencing.FencedWriter.of_epoch(job.etcd, job.keys, job.ctx.epoch)
    wait_until(lambda: job.trainer.has_memory, what="the trainer's memory")
    assert not claims.begin_phase(Side.ENGINES, writer, 1)
    claims.give_up_for_trainer(job.trainer.member.incarnation)
    assert claims.take_for_trainer("re-formed") == ""
    claims.give_up_for_trainer(job.trainer.member.incarnation)  # late, and of a formation that has ended
    assert not claims.begin_phase(Side.ENGINES, writer, 1)
    claims.give_up_for_trainer("re-formed")
    assert claims.begin_phase(Side.ENGINES, writer, 1)
