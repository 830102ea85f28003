"""The phases of trainer and engines on the devices, as the loop changes them between its effects (``placement:
colocated``).

The loop is the only one that knows when nobody needs the devices: before it has samples generated, it has the trainer
keep everything in host memory; before the trainer computes, it waits until the engines have released theirs. What may
not happen, whatever it does, follows from ``etcd.device_phase``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from elastic_rl.config import ROLLOUT_POOL, Config, Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.errors import Conflict
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.device_claims import DeviceClaims, named
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.pipeline.waits import Waits

_LOOK_S = 0.1

Publish = Callable[[], Mapping[str, Any]]
"""Has the trainer publish its policy; returns the result as ``Trainers.save`` does, and raises as it."""


class DevicePhases(Protocol):
    """Every method may take as long as it takes, and says what it waits for. Raises Fenced, and TrainerFailed and
    Conflict as commands to the trainer do."""

    def before(self, effect: schedule.Effect) -> None:
        """Gives the devices to the side that computes in the effect."""

    def publish_again(self, publish: Publish) -> None:
        """Has the trainer publish its policy while engines have the devices, and wait for its version."""


class OwnDevices:
    """Trainer and engines have devices of their own, or there is only one of both: there are no phases."""

    def before(self, effect: schedule.Effect) -> None:
        pass

    def publish_again(self, publish: Publish) -> None:
        publish()


class MovableTrainer(Protocol):
    """The trainer, as ``TrainerClient`` has it."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class SharedDevices:
    """The device phases that one actor begins."""

    def __init__(self, etcd: EtcdClient, keys: Keys, writer: FencedWriter, waits: Waits, trainer: MovableTrainer, *,
                 epoch: int, term: int) -> None:
        """``writer``: of the actor's term."""
        self._etcd, self._keys, self._writer, self._waits, self._trainer = etcd, keys, writer, waits, trainer
        self._claims = DeviceClaims(etcd, keys, ROLLOUT_POOL, epoch=epoch)
        self._term = term
        self._side: Side | None = None
        """The side that has the devices, as far as this actor has completed the change; None: not known."""
        self._onloaded = False
        """Whether the trainer has taken its memory since its phase began."""

    def before(self, effect: schedule.Effect) -> None:
        match effect:
            case schedule.Resume():
                self.begin_resume()
            case schedule.OnTrainer():
                self.to_trainer(effect.timer)
            case schedule.OnEngines():
                self.to_engines(effect.min_version, effect.timer)

    def publish_again(self, publish: Publish) -> None:
        self.to_trainer(StepTimer())
        # A trainer whose memory is offloaded does not repeat a commit that failed.
        committed = until_committed(self._waits, publish)
        self.to_engines(int(committed["policy_version"]), StepTimer())

    def begin_resume(self) -> None:
        """The trainer is to resume: its group may be another one, which waits for the devices before it is ready for
        any command."""
        self._side, self._onloaded = None, False
        self._begin_trainers(StepTimer())

    def to_trainer(self, timer: StepTimer) -> None:
        """``timer``: of the step that is being made."""
        self._begin_trainers(timer)
        if not self._onloaded:
            with timer.stage("devices"):
                self._waits.stage("devices")
                self._trainer.onload()
            self._onloaded = True

    def to_engines(self, version: int, timer: StepTimer) -> None:
        """``version``: the policy's that engines are to serve, at least."""
        if self._side is Side.ENGINES:
            return
        with timer.stage("devices"):
            self._waits.stage("devices")
            self._side = None
            # The trainer repeats a publish that fails, which it can do while it has its memory.
            self._await_committed(version)
            self._onloaded = False
            self._trainer.offload()
            if not self._waits.retry("etcd", partial(self._claims.begin_phase, Side.ENGINES, self._writer, self._term)):
                raise Conflict("a trainer group has taken the devices since it was to give them up",
                               hint="resume from the trainer's state")
            self._side = Side.ENGINES  # that they are back is for ``PoolSync`` to wait for

    def _begin_trainers(self, timer: StepTimer) -> None:
        """Makes it the trainer's phase, and waits until no engine has device memory. One that does not release it is
        ended by the driver, so this comes to an end."""
        if self._side is Side.TRAINER:
            return
        with timer.stage("devices"):
            self._waits.stage("devices")
            self._side = None
            self._waits.retry("etcd", partial(self._claims.begin_phase, Side.TRAINER, self._writer, self._term))
            self._onloaded = False
            with contextlib.closing(self._claims):
                while held := self._waits.retry("etcd", self._claims.holding):
                    self._waits.waits("engines", f"{named(held)} to release memory")
                    self._waits.pause(_LOOK_S)
            self._waits.works()
            self._side = Side.TRAINER

    def _await_committed(self, version: int) -> None:
        while True:
            head = self._waits.retry("etcd", partial(reads.head, self._etcd, self._keys, Stream.POLICY))
            if head is not None and head.number >= version:
                self._waits.works()
                return
            self._waits.waits("dcs", f"version {version} to be committed, before the trainer gives its devices up")
            self._waits.pause(_LOOK_S)


def make_device_phases(cfg: Config, etcd: EtcdClient, keys: Keys, writer: FencedWriter, waits: Waits,
                       trainer: MovableTrainer, *, epoch: int, term: int) -> DevicePhases:
    """The phases as ``placement`` of a job that trains has them. See ``SharedDevices``."""
    if cfg.colocated:
        return SharedDevices(etcd, keys, writer, waits, trainer, epoch=epoch, term=term)
    return OwnDevices()
