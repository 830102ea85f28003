"""Which engines a run goes on without, since they lack a version that others serve. Pure.

    READY ──lacks what a quorum serves──▶ asked to leave ──out of the router──▶ SYNCING ──caught up──▶ READY
                                                                                  │ not in time
                                                                                  ▼
                                                                               replaced

The evidence against an engine is what the *others* have: nobody is given up before a quorum of the pool serves the
version that the run needs. Where only a few serve it (one engine of many, or the only engine of a pool lacks it), it is
not they who are slow, and the run waits for all and says so. The quorum is of all engines that have served a version,
those that are out included: else one after the other would leave, and the last one be a quorum of itself.

An engine that was given up is not waited for again before it has followed a version in time. Without that one that
always needs longer than the others would cost each step the whole limit: it comes back in each, and is behind in the
next. It is raised to each version that the run needs meanwhile, so that it does not come back with an old one.

An engine that is starting has served nothing and holds up nobody. One whose update waits for its turn
(``engine.max_unavailable``) may lack the newest version, but not one that the run needs: only that counts here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic_rl.config.engine import EngineConfig
from elastic_rl.etcd.records import Engine, EngineState, Straggler

_OUTAGE = 2.0
"""Multiple of the limit for which a quorum may be missing before that is an outage, in which nobody can catch up."""


def quorum_of(quorum: str | int, engines: int) -> int:
    """How many of ``engines`` are one, at least one. ``quorum``: ``engine.follow_quorum``."""
    if isinstance(quorum, int):
        return quorum
    return max(1, -(-engines * int(quorum.rstrip("%")) // 100))


@dataclass(frozen=True)
class FollowLimits:
    """The settings of the policy's pool; see ``EngineConfig``."""

    quorum: str | int = "50%"
    timeout_s: float = 15.0
    catch_up_s: float = 600.0

    @classmethod
    def of(cls, cfg: EngineConfig) -> FollowLimits:
        return cls(cfg.follow_quorum, cfg.follow_timeout_s, cfg.catch_up_timeout_s)

    def wait_s(self, serving: Iterable[Engine]) -> float:
        """Seconds for which those that lack a version are waited for. ``serving``: a quorum that serves it."""
        return max(self.timeout_s, *(e.pull_apply_s for e in serving), 0.0)


def served_by_quorum(engines: Sequence[Engine], version: int, limits: FollowLimits) -> list[Engine]:
    """The engines of a pool that serve the version or a newer one, if they are a quorum; else none."""
    members = [e for e in engines if e.state.serving and e.version]
    serving = [e for e in members if e.state is EngineState.READY and e.version >= version]
    return serving if serving and len(serving) >= min(quorum_of(limits.quorum, len(members)), len(members)) else []


@dataclass(frozen=True)
class Verdicts:
    """What follows from one look at a pool."""

    changed: dict[str, Straggler | None] = field(default_factory=dict)
    """Engine → what its record is to have."""
    replace: dict[str, str] = field(default_factory=dict)
    """Engine → why it is to be replaced."""


@dataclass(frozen=True)
class Following:
    """What is remembered of a pool between two looks. A leader that takes over knows nothing of it: it gives the
    engines as much time once more. All times are seconds of the leader clock."""

    needs: int = 0
    """Version that the run needs, as of the last look."""
    served_since: float | None = None
    """Since when a quorum serves it; None while none does."""
    missing_since: float | None = None
    """Since when no quorum serves what the run needs; None while one does."""
    excused_at: float = float("-inf")
    """End of the last outage: what an engine did not do before is not held against it."""

    def look(self, engines: Sequence[Engine], needs: int, now: float, limits: FollowLimits
             ) -> tuple[Following, Verdicts]:
        """One look at the engines of a pool, of which the run needs version ``needs`` or a newer one."""
        serving = served_by_quorum(engines, needs, limits)
        if not needs or not serving:
            missing = now if self.missing_since is None else self.missing_since
            return replace(self, needs=needs, served_since=None, missing_since=missing), Verdicts()
        wait_s = limits.wait_s(serving)
        excused = self.excused_at
        if self.missing_since is not None and now - self.missing_since > _OUTAGE * wait_s:
            excused = now
        since = self.served_since if self.needs == needs and self.served_since is not None else now
        verdicts = Verdicts()
        for engine in engines:
            if not engine.state.serving or not engine.version:
                continue
            _judge(engine, needs, now, now - since >= wait_s, verdicts)
            if engine.is_behind and engine.straggler is not None:
                out_s = now - max(engine.straggler.since, excused)
                if out_s >= limits.catch_up_s:
                    verdicts.replace[engine.id] = (f"has version {engine.version}, and {len(serving)} others serve "
                                                   f"version {needs}: it did not catch up within {out_s:.0f} s")
        return Following(needs, since, None, excused), verdicts


def _judge(engine: Engine, needs: int, now: float, is_over: bool, verdicts: Verdicts) -> None:
    """Adds what the record of an engine is to have, if that changes. ``is_over``: whether the time is over for which
    one that lacks the version is waited for."""
    known = engine.straggler
    if engine.version >= needs:
        if known is not None and not engine.is_behind and engine.state is EngineState.READY and needs > known.missed:
            verdicts.changed[engine.id] = None  # it has followed a later version in time
    elif engine.is_behind and known is not None:
        if known.needs < needs:
            verdicts.changed[engine.id] = known.replace(needs=needs)
    elif is_over or known is not None:
        verdicts.changed[engine.id] = Straggler(needs=needs, missed=needs, since=now)
