"""Simulated worlds that write the event log of a real run, for the validators of real runs to judge: what the
independent observer sees in etcd, what clients were told, the faults, and what receivers of alerts get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from chaos_tests.event_log import Event, Kind
from chaos_tests.sim import alerts, cluster, election
from chaos_tests.sim.alerts import Died, MemoryEtcd
from chaos_tests.sim.recorded import RecordedCluster, RecordedElection
from chaos_tests.sim.store import Log
from chaos_tests.sim.violation import RuleViolated
from chaos_tests.sim.worlds import function_of
from chaos_tests.validate.attribution import AFTER_S
from chaos_tests.validate.judge import judge
from chaos_tests.validate.verdict import RUN, State, Verdict
from elastic_rl.coordinator.alerts.notifier import Notification
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.etcd.transaction import Compare, Op

_FAULTS = 3


def _election(seed: int) -> list[Event]:
    log = Log("election", seed, cluster=election.CLUSTER)
    world = RecordedElection(seed, log)
    world.run(election.END_S)
    world.close()
    return log.end()


def _cluster(seed: int) -> list[Event]:
    log = Log("cluster", seed, cluster=cluster.KEYS.cluster)
    world = RecordedCluster(seed, log)
    with suppress(RuleViolated):
        world.run()
    world.close()
    return log.end()


# -- alerts ------------------------------------------------------------------------------------------------------------
class _ObservedAlerts(MemoryEtcd):
    """The leader dies only when it has just recorded a delivery: no answer of a receiver is lost, and so nothing may be
    notified twice."""

    def __init__(self, log: Log, dies: Callable[[], bool]) -> None:
        super().__init__()
        self._log, self._dies = log, dies

    def _apply(self, op: Op) -> None:
        super()._apply(op)
        if not op.key.startswith(alerts.KEYS.events_prefix()):  # this world's events have no more than their order
            self._log.change(op.key, self.kvs.get(op.key), self.revision)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        of_alerts = [op for op in then if op.kind == "put" and op.key.startswith(alerts.KEYS.alerts_prefix())]
        before = {op.key: set(Alert.decode(self.kvs[op.key].value).notified) for op in of_alerts if op.key in self.kvs}
        held = super().txn(compares, then)
        if held and any(set(Alert.decode(op.data).notified) - before.get(op.key, set()) for op in of_alerts) and (
                self._dies()):
            raise Died
        return held


class _LoggedAlerts(alerts.AlertSimulation):
    """One receiver, as a real run has it."""

    def __init__(self, seed: int) -> None:
        made = alerts.make(seed)
        super().__init__(made.rng, made.per_minute, made.group_wait_s)
        self.log = Log("alerts", seed, clock=lambda: self.t)
        self.faults, self.receivers = made.faults, [Receiver("chat")]
        self.is_quiet = False
        self.etcd = _ObservedAlerts(self.log, lambda: not self.is_quiet and self.rng.random() < 0.3)

    def deliver(self, receiver: str, notification: Notification) -> None:
        super().deliver(receiver, notification)
        for kv in self.etcd.range(alerts.KEYS.alerts_prefix())[0]:
            if (alert := Alert.decode(kv.value)).id in self.delivered[-1].alerts:
                self.log.write(Kind.NOTIFICATION, alert=alert.kind, subject=alert.subject,
                               phase=self.delivered[-1].phase.value, key=alert.id)

    def play(self) -> None:
        """One fault after the other, so that the validators can tell which alert is of which."""
        for fault in self.faults[:_FAULTS]:
            began = self.t
            self.toggle(fault)
            self.run(self.rng.uniform(15.0, 25.0))
            self.toggle(fault)
            self.log.write(Kind.FAULT, name="publish_failed" if fault.reported else "dcs_failed", step=0,
                           target=fault.subject, state="", said="", witness="it was simulated", problem="",
                           injected_at=began - alerts.SKEW_S, detected_at=began, healed_at=self.t)
            self.run(AFTER_S + 2 * alerts.SKEW_S)
        self.is_quiet = True
        self.run_until_settled(60.0)


def _alerts(seed: int) -> list[Event]:
    world = _LoggedAlerts(seed)
    world.play()
    return world.log.end()


LOGS: Mapping[str, Callable[[int], list[Event]]] = {
    "election": _election, "cluster": _cluster, "alerts": _alerts, "versions": function_of("catalog", "log"),
    "engines": function_of("engines", "log"), "steps": function_of("step_log", "steps"),
    "async": function_of("step_log", "beside_steps")}
"""The log of a run of a seed, by the name of its world."""


_UNPLANNED = ("steps", "async")
"""Worlds whose log has no faults, although actors die in them: ``RUN`` takes each step that one has left unreported for
one of a run without faults."""


def violated(world: str, seed: int) -> list[Verdict]:
    """The verdicts of the validators on rules that are broken in the log of a run."""
    return [verdict for verdict in judge(LOGS[world](seed))
            if verdict.state is State.VIOLATED and (verdict.rule != RUN or world not in _UNPLANNED)]
