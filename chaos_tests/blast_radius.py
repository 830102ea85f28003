"""How much of a running cluster a chaos run may strike. Pure but for ``replicas_of`` and ``guarded``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chaos_tests.faults.catalogue import FAULTS, Part
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.faults.context import Fault, FaultContext

NAMED_ONLY = frozenset({Part.ETCD, Part.HOSTS})
"""Parts that are struck only where the operator names them: other jobs depend on them too."""
DEFAULT = frozenset(Part) - NAMED_ONLY


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
        if entry.part not in self.parts:
            return f"{entry.part.value} are not to be struck"
        count = replicas.get(entry.part, 0)
        if not self.allow_last and (entry.takes_all or count <= 1):
            return (f"it takes all {entry.part.value}" if entry.takes_all and count > 1 else
                    f"there is {count or 'none'} of {entry.part.value}, and the last one is not to be struck")
        return ""

    def allowed(self, names: Mapping[str, float], replicas: Mapping[Part, int]) -> tuple[list[str], dict[str, str]]:
        """The faults that may be injected, and why each other one may not."""
        refused = {name: why for name in names if (why := self.refusal(name, replicas))}
        return sorted(names.keys() - refused.keys()), refused


def parts(text: str) -> frozenset[Part]:
    """Parts from a list with commas; ``DEFAULT`` for none. Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in {*Part}]
    if unknown:
        raise ConfigError(f"there are no parts {', '.join(unknown)}", hint=f"known: {', '.join(Part)}")
    return frozenset(map(Part, words)) or DEFAULT


def replicas_of(context: FaultContext) -> dict[Part, int]:
    """How many of each part there are now that can serve. Raises EtcdUnavailable."""
    count = context.etcd.count
    roles = [len(context.members(role)) for role in ("actor", "rollout", "advantages")]
    return {Part.ENGINES: len(context.ready()), Part.TRAINER: len(context.trainer_ranks()), Part.ROLES: min(roles),
            Part.DRIVER: len(context.members("driver")), Part.ROUTER: int(bool(context.router_pid())),
            Part.COORDINATORS: count(ClusterKeys(context.cfg.cluster_name).leader_prefix()),
            Part.DCS: count(context.keys.dcs_nodes_prefix()), Part.ETCD: len(context.etcd.endpoints),
            Part.HOSTS: max(1, count(ClusterKeys(context.cfg.cluster_name).hosts_prefix()))}


class _Guarded:
    """A fault that checks the blast radius in the moment in which it is to be injected."""

    def __init__(self, fault: Fault, check: Callable[[], str]) -> None:
        self._fault, self._check, self.name = fault, check, fault.name

    @property
    def said(self) -> str:
        return str(getattr(self._fault, "said", ""))

    @property
    def state(self) -> str:
        return str(getattr(self._fault, "state", ""))

    @property
    def may_go_unnoticed(self) -> bool:
        return bool(getattr(self._fault, "may_go_unnoticed", False))

    def inject(self) -> tuple[str, str]:
        if why := self._check():
            raise OutOfRadius(f"it was not injected: {why}")
        return self._fault.inject()

    def detected(self) -> bool:
        return self._fault.detected()

    def healed(self) -> bool:
        return self._fault.healed()


def guarded(radius: BlastRadius, context: FaultContext) -> Callable[[str, Fault], Fault]:
    """For ``catalogue.plan_of``: faults that are injected only while they are within the radius."""
    return lambda name, fault: _Guarded(fault, lambda: radius.refusal(name, replicas_of(context)))
