"""join, host-loss-engines, drain, join-trainer-dead, host-loss-driver: an RL run on two hosts, beside a third one that
has etcd and the coordinator alone. The driver, Ray's head and the trainer are on one of the two; the other joins, gets
an engine, and is lost or drained."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator

import psutil

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.recovery.host_runs import CHANGE_S, RL_RUN, HostRows, HostRun, HostsTestbed, Kind
from elastic_rl.bench.recovery.trials import Trial, follow
from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.host.service_files import ray_worker_service

_HOSTS = 3
_FEW, _MANY = 2, 3
"""Engines without the host that joins, and with it."""
_WITHIN_S = 600.0
_AGENT = "elastic_rl.trainer.group.agent"
"""This is in the command lines of the trainer's agent and its ranks."""
_KILLED_EVERY_S = 0.2
_READY, _RAY, _ENGINE = "the host is ready", "its worker of Ray runs", "an engine of it is routable"
_LOST, _ALL = "the host is lost", "as many engines as before are routable"
_LEFT, _ELSEWHERE = "the host has left", "the run is assigned again"
_EPOCH, _STEP = "a new epoch has begun", "the next step is done"


ROWS = HostRows({
    "join": Kind("a host is powered on, and the pool scaled up", 45.0, _ENGINE, (_READY, _RAY), "power on"),
    "host-loss-engines": Kind("power cut of a host with an engine", 45.0, _ALL, (_LOST,), "the power cut"),
    "drain": Kind("drain of a host with an engine", 60.0, _LEFT, (_ALL,), "the request"),
    "join-trainer-dead": Kind("the same as join while all ranks are killed again and again", 45.0, _ENGINE,
                               (_READY, _RAY), "power on"),
    "host-loss-driver": Kind("power cut of the host of driver, Ray's head and trainer", 120.0, _STEP,
                              (_LOST, _ELSEWHERE, _EPOCH, _ALL), "the power cut"),
})


def measure(testbed: HostsTestbed) -> Iterator[Row]:
    yield from ROWS.measured(testbed.options, _trials(testbed))


def _trials(testbed: HostsTestbed) -> Iterator[tuple[str, Trial]]:
    with testbed.run(_HOSTS, [*RL_RUN, f"--rollout.engines={_FEW}"], cordoned=["host-1"]) as run:
        for _ in range(testbed.trials):
            yield from _round(_Engines(run), testbed.options)


def _round(engines: _Engines, options: Options) -> Iterator[tuple[str, Trial]]:
    """One trial of each chosen row. It begins and ends with few engines, which are all on the host of the driver once
    the other one is off."""
    chosen = ROWS.chosen(options)
    engines.power_off_beside()
    if "join" in chosen or "host-loss-engines" in chosen:
        yield "join", engines.join()
        yield "host-loss-engines", engines.lose()
        engines.scale(_FEW)
    if "drain" in chosen:
        engines.join()
        yield "drain", engines.drain()
        engines.power_off_beside()
    if "join-trainer-dead" in chosen:
        with engines.dead_trainer():
            trial = engines.join()
        yield "join-trainer-dead", trial
        engines.power_off_beside()
    if "host-loss-driver" in chosen:
        engines.run.hosts.power_on(engines.beside)
        engines.await_working()
        yield "host-loss-driver", engines.lose_driver()


class _Engines:
    """The pool of the run, its driver's host, and the host beside that."""

    def __init__(self, run: HostRun) -> None:
        self.run, self.records = run, run.records
        run.await_that(lambda: run.driver_host() and self._serve(_FEW), "the run and its engines")
        self.driver = run.driver_host()
        self.beside = next(name for name in run.names[1:] if name != self.driver)
        self._worker = ray_worker_service(run.job)

    def await_working(self, engines: int = _FEW) -> None:
        """Returns once so many engines serve, and the run does steps."""
        self.run.await_that(lambda: self._serve(engines), f"{engines} engines")
        self.run.await_steps(self.records.step)

    def scale(self, engines: int) -> None:
        self.run.api.scale(ROLLOUT_POOL, engines)
        self.await_working(engines)

    def power_off_beside(self) -> None:
        """Begins a trial that needs nothing on the other host."""
        self.run.api.scale(ROLLOUT_POOL, _FEW)
        self.run.hosts.power_off(self.beside)
        self.run.await_that(lambda: self.run.phase(self.beside) in ("lost", "left"), f"the loss of {self.beside}")
        self.run.api.change_host(self.beside, {"cordoned": False, "drain": None})
        self.await_working()

    def join(self) -> Trial:
        """Powers the other host on, and scales up once it has a worker of Ray. Meanwhile the driver's host is cordoned:
        the engine would be there before Ray knows of the worker."""
        self.run.say(f"{self.beside} joins")
        began = time.monotonic()
        self.run.hosts.power_on(self.beside)
        ready = follow({_READY: lambda: self.run.phase(self.beside) == "ready",
                        _RAY: lambda: self.run.has_services(self.beside, self._worker)}, (_READY, _RAY),
                       timeout_s=CHANGE_S)
        self._cordon_driver(True)
        started = time.monotonic()
        self.run.api.scale(ROLLOUT_POOL, _MANY)
        served = follow({_ENGINE: lambda: self.run.engines_on(self.beside)}, (_ENGINE,), timeout_s=CHANGE_S)
        self._cordon_driver(False)
        on_s = started - began - max(ready.values())  # a command that powers a host on waits until it is known
        return {**{name: on_s + at for name, at in ready.items()}, _ENGINE: started - began + served[_ENGINE]}

    def _cordon_driver(self, cordoned: bool) -> None:
        self.run.api.change_host(self.driver, {"cordoned": cordoned})
        self.run.await_that(lambda: (self.run.phase(self.driver) == HostPhase.CORDONED) is cordoned,
                            f"the cordon of {self.driver}" if cordoned else f"the end of the cordon of {self.driver}")

    def lose(self) -> Trial:
        self.await_working(_MANY)
        self.run.say(f"power cut of {self.beside}, which has {self.run.engines_on(self.beside)} engines")
        gone = self._on(self.beside)
        self.run.hosts.power_off(self.beside)
        return follow({_LOST: lambda: self.run.phase(self.beside) == "lost",
                       _ALL: lambda: self._serve(_MANY, without=gone)}, (_LOST, _ALL), timeout_s=CHANGE_S)

    def drain(self) -> Trial:
        self.await_working(_MANY)
        self.run.say(f"draining {self.beside}")
        gone = self._on(self.beside)
        self.run.api.change_host(self.beside, {"drain": {"within_s": _WITHIN_S}})
        return follow({_LEFT: lambda: self.run.phase(self.beside) == "left",
                       _ALL: lambda: self._serve(_MANY, without=gone)}, (_LEFT, _ALL), timeout_s=CHANGE_S)

    def lose_driver(self) -> Trial:
        self.run.say(f"power cut of {self.driver}, which has the driver")
        step, epoch, gone = self.records.step(), self.records.epoch(), self._on(self.driver)
        self.run.hosts.power_off(self.driver)
        return follow({_LOST: lambda: self.run.phase(self.driver) == "lost",
                       _ELSEWHERE: lambda: self.run.driver_host() == self.beside,
                       _EPOCH: lambda: self.records.epoch() > epoch,
                       _ALL: lambda: self._serve(_FEW, without=gone),
                       _STEP: lambda: self.records.step() > step}, (_STEP, _ALL), timeout_s=CHANGE_S)

    @contextlib.contextmanager
    def dead_trainer(self) -> Iterator[None]:
        """Within the block the trainer's agent and ranks are killed as soon as they are there."""
        ending = threading.Event()

        def kill() -> None:
            while not ending.wait(_KILLED_EVERY_S):
                for process in self.run.hosts.isolated.processes(self.driver):
                    with contextlib.suppress(psutil.Error):
                        if _AGENT in process.cmdline():
                            process.kill()

        thread = threading.Thread(target=kill, name="dead-trainer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def _on(self, host: str) -> set[str]:
        """Ids of the engines there that serve."""
        address = self.run.addresses[host]
        return {engine for engine, at in self.records.engines().items() if at == address}

    def _serve(self, engines: int, without: Collection[str] = ()) -> bool:
        """Whether so many engines serve the newest version, other than those of ``without``."""
        return len(self.records.engines().keys() - set(without)) >= engines
