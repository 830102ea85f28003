"""States of an engine: a pure state machine over the fields of its record. No I/O and no clock.

    STARTING ──up──▶ SYNCING ──routed──▶ READY ──drain──▶ DRAINING
                      │  ▲                │  ▲
                 torn │  └ begin,         │  └─ begin, verified (applying in place, still known to the router)
                      │  ▲ verified,      │
                      │  │ unconfirmed    │
                      │  ├────unrouted────┤ (to update without requests in flight)
                      │  └────given_up────┤ (behind the others; it may be applying a version)
                      └──▶ QUARANTINED ◀──┘ torn
    any living state ──died──▶ DEAD

    Colocated with the trainer, whose phase comes and ends:

    STARTING ──released──▶ RELEASED ──resumed──▶ STARTING      (before its server was launched)
    SYNCING ──released──▶ RELEASED ──resumed──▶ SYNCING

The transition that must NOT exist: into READY by anything but ``routed``, and ``routed`` without a version of which
exactly what was begun was verified. So there is no edge STARTING → READY (a recovered engine would take traffic before
its weights are synced), none QUARANTINED → READY (torn weights stay torn; only a new server with a full load may
serve), none DEAD → anything, and no ``verified`` without ``begin``. ``unconfirmed`` is of an engine without weights
alone, which no router knows: its next load is a full one. An update never goes back to an older version. An
engine that no router takes stays SYNCING, and goes on following the head. A released engine has no weights: there is no
edge RELEASED → READY, and its version is none until one is begun and verified again, the same one or a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import EngineState


@dataclass(frozen=True)
class EngineLifecycle:
    """State of one engine. ``version``: verified in it; ``applying``: begun and not yet verified. 0 means none."""

    state: EngineState = EngineState.STARTING
    version: int = 0
    applying: int = 0
    reason: str = ""
    newest: int = 0
    """Newest version that was ever verified in it, also if its weights are gone since."""
    launched: bool = False
    """Whether its server was ever up."""

    def up(self) -> EngineLifecycle:
        """The server answers; its weights belong to no version yet."""
        self._need(EngineState.STARTING, event="up")
        return replace(self, state=EngineState.SYNCING, launched=True)

    def accepts(self, version: int) -> bool:
        """Whether an update to a version is one to a newer one than it has or, without weights, none to an older one
        than it had."""
        return version > self.version and version >= self.newest

    def begin(self, version: int) -> EngineLifecycle:
        """Bytes that change from here on belong to ``version``."""
        self._need(EngineState.SYNCING, EngineState.READY, event="begin")
        if self.applying:
            raise IllegalTransition(f"begin({version}) while version {self.applying} is being applied")
        if not self.accepts(version):
            raise IllegalTransition(f"begin({version}) would roll an engine back that has version {self.version}, and "
                                    f"had version {self.newest}")
        return replace(self, applying=version)

    def verified(self, version: int) -> EngineLifecycle:
        """Every byte of ``version`` was checked in the engine."""
        self._need(EngineState.SYNCING, EngineState.READY, EngineState.DRAINING, event="verified")
        if not version or version != self.applying:
            raise IllegalTransition(f"verified({version}) while {self.applying or 'nothing'} is being applied")
        return replace(self, version=version, newest=version, applying=0)

    def unconfirmed(self) -> EngineLifecycle:
        """What was loaded into an engine without weights may be other bytes than those of the version; every byte is
        loaded again."""
        self._need(EngineState.SYNCING, event="unconfirmed")
        if not self.applying or self.version:
            raise IllegalTransition(f"unconfirmed with version {self.version} while {self.applying or 'nothing'} is "
                                    "being applied")
        return replace(self, applying=0)

    def routed(self) -> EngineLifecycle:
        """The router sends requests to it."""
        self._need(EngineState.SYNCING, event="routed")
        if not self.version or self.applying:
            raise IllegalTransition(f"routed with version {self.version} while {self.applying} is being applied")
        return replace(self, state=EngineState.READY)

    def unrouted(self) -> EngineLifecycle:
        """The router is to send no request to it until it is ``routed`` again."""
        self._need(EngineState.READY, event="unrouted")
        if self.applying:
            raise IllegalTransition(f"unrouted while version {self.applying} is being applied")
        return replace(self, state=EngineState.SYNCING)

    def given_up(self) -> EngineLifecycle:
        """The driver has taken it out of the router, since it is behind. It may apply a version meanwhile, and is
        ``routed`` again with a later one."""
        self._need(EngineState.READY, event="given_up")
        return replace(self, state=EngineState.SYNCING)

    def torn(self, reason: str) -> EngineLifecycle:
        """An update ended without verification: the weights may be half of one version and half of another."""
        self._need(EngineState.SYNCING, EngineState.READY, EngineState.DRAINING, event="torn")
        if not self.applying:
            raise IllegalTransition("torn without an update in progress")
        return replace(self, state=EngineState.QUARANTINED, reason=reason)

    def released(self) -> EngineLifecycle:
        """It has no device memory: it gave it up, or waits for its phase to take any."""
        self._need(EngineState.STARTING, EngineState.SYNCING, event="released")
        if self.applying:
            raise IllegalTransition(f"released while version {self.applying} is being applied")
        return replace(self, state=EngineState.RELEASED, version=0)

    def resumed(self) -> EngineLifecycle:
        """It may have device memory again; its weights belong to no version yet."""
        self._need(EngineState.RELEASED, event="resumed")
        return replace(self, state=EngineState.SYNCING if self.launched else EngineState.STARTING)

    def drain(self) -> EngineLifecycle:
        """The engine takes no new request and leaves the pool. Idempotent."""
        if self.state.ended:
            raise IllegalTransition(f"drain of an engine that is {self.state}")
        return replace(self, state=EngineState.DRAINING)

    def died(self, reason: str) -> EngineLifecycle:
        """The server's process ended. ``applying`` stays set if the weights were being changed."""
        if self.state.ended:
            raise IllegalTransition(f"died of an engine that is already {self.state}")
        return replace(self, state=EngineState.DEAD, reason=reason)

    def _need(self, *states: EngineState, event: str) -> None:
        if self.state not in states:
            raise IllegalTransition(f"{event} of an engine that is {self.state}")
