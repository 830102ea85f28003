"""host-loss-trainer, shrink, grow, scale-1-4-1: a supervised run with a rank on each of four hosts. One of them loses
its power, is drained and comes back; then all but one are, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.recovery.host_runs import (
    NEXT_STEP,
    REDONE,
    SFT_RUN,
    HostRows,
    HostRun,
    HostsTestbed,
    Kind,
    Watched,
    over_hosts,
)
from elastic_rl.bench.recovery.trials import Trial

_HOSTS, _FEWER = 4, 3
"""With and without the row that goes from one to four: each host takes a share of the machine."""
_WITHIN_S = 600.0
"""Time after which a drain does not wait any more for a save, which comes every few steps."""
_LOST, _FORMED, _RANKS = "the host is lost", "the group is another one", "all ranks are there"
_MOST, _ONE = "it trains on all hosts", "it trains on one again"
_WITHOUT = "longest time without a new step"
_SINCE = "the last step before"


ROWS = HostRows({
    "host-loss-trainer": Kind("power cut of a host with a rank", 30.0, NEXT_STEP, (_LOST, _FORMED, _RANKS), _SINCE,
                              redoes=True),
    "shrink": Kind("drain of a host with a rank, without a step from the last one before", 15.0, NEXT_STEP,
                   (_FORMED, _RANKS), _SINCE, redoes=True),
    "grow": Kind("return of a drained host, without a step from the last one before", 15.0, NEXT_STEP,
                 (_FORMED, _RANKS), _SINCE, redoes=True),
    "scale-1-4-1": Kind("one host with a rank, then all, then one", 120.0, _ONE, (_MOST,), "the return of the others",
                        redoes=True),
})


def measure(testbed: HostsTestbed) -> Iterator[Row]:
    yield from ROWS.measured(testbed.options, _trials(testbed))


def _trials(testbed: HostsTestbed) -> Iterator[tuple[str, Trial]]:
    options = testbed.options
    hosts = _HOSTS if "scale-1-4-1" in ROWS.chosen(options) else _FEWER
    with testbed.run(hosts, [*SFT_RUN, *over_hosts(hosts)]) as run:
        trainer = _Trainer(run)
        trainer.await_on(run.names)
        for _ in range(testbed.trials):
            yield from _round(trainer, options)


def _round(trainer: _Trainer, options: Options) -> Iterator[tuple[str, Trial]]:
    """One trial of each chosen row; after each the group is on all hosts."""
    chosen, victim = ROWS.chosen(options), trainer.run.names[-1]
    if "host-loss-trainer" in chosen:
        yield "host-loss-trainer", trainer.lose(victim).trial()
        trainer.run.hosts.power_on(victim)
        trainer.await_on(trainer.run.names)
    if "shrink" in chosen or "grow" in chosen:
        yield "shrink", trainer.drain([victim]).trial()
        yield "grow", trainer.take_back([victim]).trial()
    if "scale-1-4-1" in chosen:
        others = trainer.run.names[1:]
        trainer.drain(others)
        began = time.monotonic()
        grown = trainer.take_back(others)
        most = time.monotonic() - began
        shrunk = trainer.drain(others)
        one = time.monotonic() - began
        parts = [grown.trial(), shrunk.trial()]
        yield "scale-1-4-1", {_MOST: most, _ONE: one, _WITHOUT: max(part[NEXT_STEP] for part in parts),
                              REDONE: float(grown.redone + shrunk.redone)}
        trainer.take_back(others)


class _Trainer:
    """The trainer group of the run."""

    def __init__(self, run: HostRun) -> None:
        self.run = run

    def await_on(self, hosts: Sequence[str]) -> None:
        """Returns once the group is on these hosts, and does steps there."""
        self.run.await_that(self._is_on(hosts), f"the trainer group on {', '.join(hosts)}")
        self.run.await_steps(self.run.records.trainer_step)

    def lose(self, host: str) -> Watched:
        self.run.say(f"power cut of {host}")
        self.run.hosts.power_off(host)
        return self._watch([name for name in self.run.names if name != host],
                           {_LOST: lambda: self.run.phase(host) == "lost"})

    def drain(self, hosts: Sequence[str]) -> Watched:
        self.run.say(f"draining {', '.join(hosts)}")
        for host in hosts:
            self.run.api.change_host(host, {"drain": {"within_s": _WITHIN_S}})
        return self._watch([name for name in self.run.names if name not in hosts], {})

    def take_back(self, hosts: Sequence[str]) -> Watched:
        self.run.say(f"return of {', '.join(hosts)}")
        for host in hosts:
            self.run.api.change_host(host, {"cordoned": False, "drain": None})
        return self._watch(self.run.names, {})

    def _watch(self, hosts: Sequence[str], marks: Mapping[str, Callable[[], object]]) -> Watched:
        """Returns once the group is on these hosts, and has done further steps there."""
        before, is_on = {rank.incarnation for rank in self.run.records.ranks()}, self._is_on(hosts)
        return self.run.watch(self.run.records.trainer_step, {
            **marks, _FORMED: lambda: self.run.records.trainer_hosts() == sorted(hosts),
            _RANKS: lambda: is_on() and before.isdisjoint(rank.incarnation for rank in self.run.records.ranks())},
            _RANKS)

    def _is_on(self, hosts: Sequence[str]) -> Callable[[], bool]:
        return lambda: self.run.records.trainer_hosts() == sorted(hosts) and (
            len(self.run.records.ranks()) == len(hosts))
