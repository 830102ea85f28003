"""This host's member of the cluster's own etcd: how it is admitted by the others, and how they know it.

The first host begins an etcd of one member. A host that joins with ``--etcd`` becomes a further one: without a vote
until it has caught up (a learner), so that no majority is lost by an admission. A member stays one while its host is
away, down or off, and comes back with its data. It is removed by an operator (``elastic-rl etcd remove``), or by its
own host when its data are gone: a member that has forgotten what it had agreed to must not vote under its old id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from elastic_rl.errors import ConfigError, DeadlineExceeded, EtcdRefused, EtcdUnavailable
from elastic_rl.etcd.client import ClusterMember, EtcdClient
from elastic_rl.etcd.record import Record
from elastic_rl.host import etcd_server
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.addresses import host_port
from elastic_rl.runtime.files import replace_file
from elastic_rl.runtime.waiting import wait_until

log = logging.getLogger(__name__)

MAX_MEMBERS = 7
"""Each write waits for a majority, so that more members make etcd slower and little safer."""
_ADMITTED_S = 240.0
"""Longest wait for etcd to take a member in: it has one learner at a time, and takes none in while a member is away."""
_POLL_S = 1.0


class EtcdMember(Record):
    """A member as its host starts it; kept in the cluster's folder. Its ports stay the same, since others know them."""

    name: str
    endpoint: str = ""
    """``host:port`` for clients; empty before its first start."""
    peer_port: int = 0
    id: int = 0
    """The member's id in etcd's list; 0 while this host does not know it."""
    initial_cluster: str = ""
    """The members that it was admitted by, as etcd takes them; empty for the one that began the cluster."""
    admitted_at: float = 0.0
    """When it was admitted, in seconds since 1970 by this host's clock."""
    removed: bool = False
    """Whether it is none of etcd's members any more."""

    @classmethod
    def of(cls, paths: ClusterPaths) -> Self | None:
        """The member of this host; None where it has none. Raises ConfigError for a damaged file."""
        try:
            return cls.decode(paths.etcd_member.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as e:
            raise ConfigError(f"{paths.etcd_member} cannot be read: {e}", hint=(
                f"put it back; where nobody has it, remove this host's member on another host (`elastic-rl etcd remove "
                f"MEMBER`), then delete it and {paths.etcd}")) from e

    def save(self, paths: ClusterPaths) -> None:
        replace_file(paths.etcd_member, self.encode(), private=True, durable=True)

    def peer_url(self, host: LocalHost) -> str:
        """Where the other members find it."""
        return f"http{'' if host.is_local else 's'}://{host_port(host.address, self.peer_port)}"


def service_of(host: LocalHost) -> str:
    """Name of the member of a host, in etcd's list and as a service."""
    return f"{etcd_server.PREFIX}{host.name}" if host.joined else etcd_server.FIRST


def endpoints_of(members: Sequence[ClusterMember]) -> list[str]:
    """``host:port`` of the members that have started."""
    return sorted({url.partition("://")[2].rstrip("/") for member in members for url in member.client_urls})


# -- what is to be done, pure -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Add:
    """Add it to etcd's list."""


@dataclass(frozen=True)
class Remove:
    """Remove the member that this host had, whose data are gone, and look again."""

    id: int


@dataclass(frozen=True)
class Start:
    """Start it: it was added and has never run."""

    id: int
    initial_cluster: str


def admission(member: EtcdMember, peer_url: str, members: Sequence[ClusterMember]) -> Add | Remove | Start:
    """What makes a member whose host has no data of it one of etcd's. Raises ConfigError where etcd has one of its name
    that this host knows nothing of, and where there are enough."""
    for known in members:
        if peer_url in known.peer_urls and not known.name:
            return Start(known.id, _initial_cluster(member.name, peer_url, members))
        if known.id == (member.id or None) or peer_url in known.peer_urls:
            return Remove(known.id)
        if known.name == member.name:
            raise ConfigError(
                f"etcd has a member {known.name} at {', '.join(known.peer_urls)}, and its data are not on this machine",
                hint=f"give this host a --name of its own; or, where the machine that had them is gone, `elastic-rl "
                     f"etcd remove {known.name}`, then this command again")
    if len(members) >= MAX_MEMBERS:
        raise ConfigError(f"etcd has {len(members)} members", hint="leave --etcd out: 3 or 5 members are enough")
    return Add()


def _initial_cluster(name: str, peer_url: str, members: Sequence[ClusterMember]) -> str:
    """etcd's ``--initial-cluster``: the members that have started, and this one."""
    others = [(known.name, url) for known in members if known.name for url in known.peer_urls]
    return ",".join(f"{known}={url}" for known, url in (*others, (name, peer_url)))


@dataclass(frozen=True)
class Promote:
    """Give it its vote."""

    id: int


@dataclass(frozen=True)
class MovePeer:
    """Tell the others where it listens for them now."""

    id: int


@dataclass(frozen=True)
class Removed:
    """It is no member any more: what it has is of no use."""


def of_host(member: EtcdMember, peer_url: str, members: Sequence[ClusterMember]) -> list[int]:
    """Ids of the members that a host has been admitted with, also where it was killed before it had noted that."""
    return [known.id for known in members if known.id == member.id or peer_url in known.peer_urls]


def upkeep(member: EtcdMember, peer_url: str, members: Sequence[ClusterMember]) -> Promote | MovePeer | Removed | None:
    """What is to be done about a member that runs; None: nothing."""
    own = next((m for m in members if (m.id == member.id if member.id else m.name == member.name)), None)
    if own is None:
        return Removed() if member.id else None
    if list(own.peer_urls) != [peer_url]:
        return MovePeer(own.id)
    return Promote(own.id) if own.is_learner else None


def advice(members: Sequence[ClusterMember]) -> str:
    """What an operator should know of the number of members; empty where that is fine."""
    if (count := len(members)) % 2:
        return ""
    return f"etcd has {count} members, which stand no more losses than {count - 1}: let one more host have one (--etcd)"


# -- carried out ------------------------------------------------------------------------------------------------------
def admit(etcd: EtcdClient, member: EtcdMember, peer_url: str) -> EtcdMember:
    """Has etcd take a member in whose host has no data of it, and returns it as it is to be started. Waits while etcd
    takes in another one, or has done so a moment ago. Raises ConfigError as ``admission`` does, and DeadlineExceeded.
    """
    why = "another member is taken in"

    def attempt() -> EtcdMember | None:
        nonlocal why
        try:
            match admission(member, peer_url, members := etcd.members()):
                case Remove(known):
                    log.warning("etcd's member %x, which this host had, is removed: its data are gone", known)
                    etcd.remove_member(known)
                case Start(known, initial_cluster):
                    return member.replace(id=known, initial_cluster=initial_cluster, admitted_at=time.time())
                case Add():
                    if not any(known.is_learner for known in members):
                        etcd.add_learner(peer_url)  # the next reading finds it, also where the answer was lost
        except (EtcdRefused, EtcdUnavailable) as e:  # such as members that have not all answered for five seconds
            why = e.message
        return None

    try:
        return wait_until(attempt, timeout_s=_ADMITTED_S, poll_s=_POLL_S, what="etcd to take in this host's member")
    except DeadlineExceeded as e:
        raise DeadlineExceeded(f"{e.message}: {why}", hint="`elastic-rl etcd ls` shows the members, and `elastic-rl "
                               "etcd remove MEMBER` removes one that is not to come back") from e


def may_vote(member: EtcdMember, now: float, follow_members_s: float) -> bool:
    """Whether all clients know a member by now (seconds since 1970), so that they find it when the others are gone. A
    clock that went back counts as time that has passed."""
    return not 0.0 <= now - member.admitted_at < 1.5 * follow_members_s


def keep(etcd: EtcdClient, member: EtcdMember, peer_url: str, members: Sequence[ClusterMember], *, votes: bool) -> bool:
    """Has etcd know a member as it is. False where it is none any more. ``votes``: whether it gets its vote once it has
    caught up; not while it does not answer: etcd could be without a majority then. Raises EtcdUnavailable."""
    try:
        match upkeep(member, peer_url, members):
            case Removed():
                return False
            case MovePeer(known):
                etcd.set_peer_url(known, peer_url)
            case Promote(known) if votes:
                etcd.promote(known)
                log.info("the member of etcd on this host has its vote")
    except EtcdRefused as e:  # mostly a learner that has not caught up
        log.debug("etcd does not change its members: %s", e)
    return True
