"""How much of a running cluster a chaos run may strike. Pure but for ``replicas_of`` and ``guarded``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from chaos_tests.faults.catalogue import FAULTS, Need, Part
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.faults.context import Fault, FaultContext, WrappedFault
from elastic_rl.faults.processes import PROCESS_KINDS

NAMED_ONLY = frozenset({Part.ETCD, Part.HOSTS})
"""Parts that are struck only where the operator names them: other jobs depend on them too."""
DEFAULT = frozenset(Part) - NAMED_ONLY


_NEEDS: Mapping[Need, str] = {
    Need.OUTSIDE: "an injector outside of the run", Need.DISK: "DCS nodes with a disk (dcs.disk_bytes)",
    Need.PTRACE: "ptrace (Linux on x86-64; root, or kernel.yama.ptrace_scope=0)", Need.ONE_HOST: "a job on one host",
    Need.CLOCK: "a clock that can be set (Linux on x86-64, and ptrace as above)",
    Need.OWN_CLUSTER: "a cluster of the run's own, since it destroys what nobody could give back (leave --job out)",
    Need.TEST_HOSTS: "a cluster on test hosts (a scenario on them makes one)"}


class OutOfRadius(ElasticRLError):
    """A fault would strike more than the operator allowed; it was not injected."""


@dataclass(frozen=True)
class BlastRadius:
    parts: frozenset[Part] = DEFAULT
    at_once: int = 1
    """Most faults at once."""
    faults: int = 5
    """Most faults in a run."""
    allow_last: bool = False
    """Whether a fault may take the last replica of a part."""

    def refusal(self, name: str, replicas: Mapping[Part, int]) -> str:
        """Why a fault of the catalogue must not be injected into a cluster with so many replicas of each part; "" if it
        may."""
        entry = FAULTS[name]
        for part in sorted(entry.parts):
            if part not in self.parts:
                return f"{part.value} are not to be struck"
            count, takes_all = replicas.get(part, 0), entry.takes_all and part is entry.part
            if self.allow_last or (part is entry.part and not entry.takes_replica):
                continue
            if takes_all or count <= 1:
                return (f"it takes all {part.value}" if takes_all and count > 1 else
                        f"there is {count or 'none'} of {part.value}, and the last one is not to be struck")
        return ""

    def allowed(self, names: Mapping[str, float], replicas: Mapping[Part, int], has: Set[Need] = frozenset(Need)
                ) -> tuple[list[str], dict[str, str]]:
        """The faults that may be injected, and why each other one may not. ``has``: the needs that are met."""
        refused = {name: why for name in names if (why := self.refusal(name, replicas) or unmet(name, has))}
        return sorted(names.keys() - refused.keys()), refused


def unmet(name: str, has: Set[Need]) -> str:
    """What a fault of the catalogue needs and does not have; "" for nothing."""
    missing = sorted(FAULTS[name].all_needs - has)
    return f"it needs {', '.join(_NEEDS[need] for need in missing)}" if missing else ""


def parts(text: str) -> frozenset[Part]:
    """Parts from a list with commas. Raises ConfigError, also for one without any: of a variable that is not set, it
    would be whatever is struck without it."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in {*Part}]
    if unknown:
        raise ConfigError(f"there are no parts {', '.join(unknown)}", hint=f"known: {', '.join(Part)}")
    if not words:
        raise ConfigError("no part is named that may be struck", hint=f"name some of {', '.join(Part)}")
    return frozenset(map(Part, words))


def replicas_of(context: FaultContext) -> dict[Part, int]:
    """How many of each part there are now that can serve. Raises EtcdUnavailable."""
    count = context.etcd.count
    roles = [len(context.members(role)) for role in ("actor", "rollout", "advantages")]
    return {Part.ENGINES: len(context.ready()), Part.TRAINER: len(context.trainer_ranks()), Part.ROLES: min(roles),
            Part.DRIVER: len(context.members("driver")), Part.ROUTER: int(bool(context.router_pid())),
            Part.RUN: len(PROCESS_KINDS["run"].pids(context)),
            Part.RAY: min(len(PROCESS_KINDS[name].pids(context)) for name in ("gcs", "raylet")),
            Part.API: count(ClusterKeys(context.cfg.cluster_name).leader_prefix()),
            Part.COORDINATORS: count(ClusterKeys(context.cfg.cluster_name).leader_prefix()),
            Part.DCS: count(context.keys.dcs_nodes_prefix()), Part.ETCD: len(context.etcd.endpoints),
            Part.HOSTS: max(1, count(ClusterKeys(context.cfg.cluster_name).hosts_prefix()))}


class _UnderWay:
    """What the faults that are under way have left of each part. The records of what they have killed may be there for
    some time yet, and two faults that are injected at once must not both count on the same replica."""

    def __init__(self, radius: BlastRadius, replicas: Callable[[], Mapping[Part, int]]) -> None:
        self._radius, self._replicas, self._lock = radius, replicas, threading.Lock()
        self._left = dict[int, dict[Part, int]]()

    def begin(self, key: int, name: str) -> None:
        """Raises OutOfRadius for a fault that would strike more than may be struck."""
        with self._lock:
            now = dict(self._replicas())
            for left in self._left.values():
                now |= {part: min(now.get(part, 0), count) for part, count in left.items()}
            if why := self._radius.refusal(name, now):
                raise OutOfRadius(f"it was not injected: {why}")
            entry = FAULTS[name]
            self._left[key] = {part: 0 if entry.takes_all and part is entry.part else now.get(part, 0) - 1
                               for part in entry.parts if part is not entry.part or entry.takes_replica}

    def end(self, key: int) -> None:
        with self._lock:
            self._left.pop(key, None)


class _Guarded(WrappedFault):
    """A fault that checks the blast radius in the moment in which it is to be injected."""

    def __init__(self, fault: Fault, name: str, under_way: _UnderWay, context: FaultContext) -> None:
        super().__init__(fault)
        self._under_way, self._named, self._context = under_way, name, context

    def inject(self) -> tuple[str, str]:
        self._under_way.begin(id(self), self._named)
        try:
            return super().inject()
        except BaseException:
            if not self._context.struck:  # nothing is lost; it may be begun again
                self._under_way.end(id(self))
            raise

    def healed(self) -> bool:
        if healed := super().healed():
            self._under_way.end(id(self))
        return healed


def guarded(radius: BlastRadius, context: FaultContext) -> Callable[[str, Fault], Fault]:
    """For ``catalogue.plan_of``: faults that are injected only while they are within the radius."""
    under_way = _UnderWay(radius, lambda: replicas_of(context))
    return lambda name, fault: _Guarded(fault, name, under_way, context)
