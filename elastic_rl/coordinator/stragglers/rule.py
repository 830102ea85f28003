"""Which engines a run goes on without, since they lack a version that others serve. Pure.

    READY ──lacks what a quorum serves──▶ asked to leave ──out of the router──▶ SYNCING ──caught up──▶ READY
                                                                                  │ not in time
                                                                                  ▼
                                                                               replaced

The evidence against an engine is what the *others* have: nobody is given up before a quorum of the pool serves the
version that the run needs. Where only a few serve it (one engine of many, or the only engine of a pool lacks it), it is
not they who are slow, and the run waits for all and says so. The quorum is of all engines that have served a version,
those that are out included: else one after the other would leave, and the last one be a quorum of itself.

An engine that was given up is not waited for again before it has followed a version in time: it leaves at once when a
quorum serves the next one. Without that one that always needs longer than the others would cost each step the whole
limit: it comes back in each, and is behind in the next. In time is within the limit for which others are waited for,
whether it was out of the router meanwhile or not: one that is merely slower than the quorum, or was late only once, is
out for a moment in one more step, and is waited for as any other then. It is raised to each version that the run needs
meanwhile, so that it does not come back with an old one.

An engine that is starting has served nothing and holds up nobody. Where engines take turns to update
(``engine.max_unavailable``), those that lack a version are given the time of all the turns that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.config.pools import slots_of
from elastic_rl.etcd.records import Engine, EngineState, Straggler

_PULLS = 3.0
"""Multiple of the longest last pull that is still no standstill."""
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
    max_unavailable: str | int | None = None
    """See ``PoolSettings.max_unavailable``."""

    @classmethod
    def of(cls, cfg: Config) -> FollowLimits:
        pool = cfg.pool_settings("")[ROLLOUT_POOL]
        return cls(pool.engine.follow_quorum, pool.engine.follow_timeout_s, pool.engine.catch_up_timeout_s,
                   pool.max_unavailable)

    def turns_s(self, lacking: int, serving: Sequence[Engine]) -> float:
        """Seconds of all turns to update of so many engines, as slow as the slowest of those that serve the version; 0
        where all may update at once."""
        if self.max_unavailable is None:
            return 0.0
        return _slowest_s(serving) * -(-lacking // slots_of(self.max_unavailable, lacking + len(serving)))

    def replaced_after_s(self, engine: Engine, lacking: int, serving: Sequence[Engine]) -> float:
        """Seconds without a newer version after which an engine that is out is replaced: long enough for one to come to
        it, as slowly as it came to the others, or to it before."""
        return max(self.catch_up_s, _PULLS * max(engine.pull_apply_s, _slowest_s(serving)),
                   self.turns_s(lacking, serving))

    def wait_s(self, lacking: int, serving: Sequence[Engine]) -> float:
        """Seconds for which so many engines that lack a version are waited for. ``serving``: a quorum that serves it.
        """
        return max(self.timeout_s, _slowest_s(serving), self.turns_s(lacking, serving))


def _slowest_s(engines: Sequence[Engine]) -> float:
    return max((e.pull_apply_s for e in engines), default=0.0)


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
    """Time since which a quorum serves it; None while none does."""
    missing_since: float | None = None
    """Time since which no quorum serves what the run needs; None while one does."""
    excused_at: float | None = None
    """End of the last outage, or the first look: what an engine did not do before is not held against it."""

    def look(self, engines: Sequence[Engine], needs: int, now: float, limits: FollowLimits
             ) -> tuple[Following, Verdicts]:
        """One look at the engines of a pool, of which the run needs version ``needs`` or a newer one."""
        serving = served_by_quorum(engines, needs, limits)
        excused = now if self.excused_at is None else self.excused_at
        if not needs or not serving:
            missing = now if self.missing_since is None else self.missing_since
            return Following(needs, None, missing, excused), Verdicts()
        lacking = sum(1 for e in engines if e.state.serving and 0 < e.version < needs)
        # One that was given up says nothing of how long the others take: its own time would excuse it.
        wait_s = limits.wait_s(lacking, [e for e in serving if e.straggler is None])
        if self.missing_since is not None and now - self.missing_since > _OUTAGE * wait_s:
            excused = now
        since = self.served_since if self.needs == needs and self.served_since is not None else now
        verdicts = Verdicts()
        for engine in engines:
            if not engine.state.serving or not engine.version:
                continue
            # One that was given up for the version before is not waited for, but has its turn.
            limit_s = wait_s if engine.straggler is None else limits.turns_s(lacking, serving)
            _judge(engine, needs, now, verdicts, is_over=now - since >= limit_s, is_late=now - since > wait_s,
                   wait_s=wait_s)
            known = verdicts.changed.get(engine.id, engine.straggler)
            if engine.is_behind and known is not None and not engine.external:  # nobody could start that again
                out_s = now - max(known.since, excused)
                if out_s >= limits.replaced_after_s(engine, lacking, serving):
                    verdicts.replace[engine.id] = (f"has version {engine.version}, and {len(serving)} others serve "
                                                   f"version {needs}: it did not catch up within {out_s:.0f} s")
        return Following(needs, since, None, excused), verdicts


def _judge(engine: Engine, needs: int, now: float, verdicts: Verdicts, *, is_over: bool, is_late: bool,
           wait_s: float) -> None:
    """Adds what the record of an engine is to have, if that changes. ``is_over``: whether the time is over for which
    this one is waited for, if it lacks the version. ``is_late``: whether that for which others are is over, ``wait_s``.
    """
    known = engine.straggler
    if engine.version >= needs:
        # A new leader does not know since when a quorum has served the version, but when this one was given up for it.
        if (known is not None and not engine.is_behind and engine.state is EngineState.READY and not is_late
                and (needs > known.missed or now - known.since <= wait_s)):
            verdicts.changed[engine.id] = None  # it has followed in time
    elif engine.is_behind and known is not None:
        if engine.version > known.version:  # it is slow, and not stuck
            known = known.replace(since=now, version=engine.version)
        if known.needs < needs:
            known = known.replace(needs=needs)
        if known != engine.straggler:
            verdicts.changed[engine.id] = known
    elif is_over:
        verdicts.changed[engine.id] = Straggler(needs=needs, missed=needs, since=now, version=engine.version)
