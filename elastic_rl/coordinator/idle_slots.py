"""Engines that could process more requests while a limit keeps the run from sending any. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.autoscaling.signals import KNOWN, with_known_load
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.records import EngineState, GenerationCap


@dataclass(frozen=True)
class IdleSlots:
    """What the routable engines whose load is known could do more while the run asks for no more samples."""

    cap: GenerationCap
    """The generation cap of the run."""
    engines: int
    slots: int
    """The most requests that they process at once, above 0."""
    free: int
    """Requests that they could process at once beside those that they have."""

    @property
    def share(self) -> float:
        """Free ones of all, 0 to 1."""
        return self.free / self.slots


def idle_slots(snapshot: ClusterSnapshot) -> IdleSlots | None:
    """None while no limit binds: where there is nothing more to ask for, as at the end of each step of a job that
    generates and trains in turn, or where the run waits for a part of the system, and the engines with it. None also
    where the load of too many engines is not known. An engine in which requests wait has no slot that is free: its KV
    cache is full."""
    status = snapshot.status
    if status is None or not status.generation_cap or status.waiting_kind or snapshot.run_ended or (
            not snapshot.has_actor):
        return None
    routable = [e for e in snapshot.engines.values()
                if e.pool == ROLLOUT_POOL and e.state is EngineState.READY and e.slots > 0]
    known = with_known_load(snapshot, routable)
    if not known or len(known) < KNOWN * len(routable):
        return None
    return IdleSlots(status.generation_cap, len(known), sum(e.slots for e in known),
                     sum(e.slots - min(e.running, e.slots) for e in known if not e.waiting))
