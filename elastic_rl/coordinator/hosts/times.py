"""How long a host may be silent: the times by which agents and the leader agree without talking to each other."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_rl.errors import ConfigError

LONGEST_DRAIN_S = 7 * 86400.0
"""Longest time that a drain may wait before it moves what the host holds."""


@dataclass(frozen=True)
class HostTimes:
    """Seconds, each by the clock of whoever waits.

    The rule: an agent that lost its lease has ended the singletons of its host before the leader may assign them
    elsewhere. The agent counts from when its last answered keep-alive was *sent*, which is no later than when etcd
    began to count. Then, for clocks that are wrong by at most ``clock_error`` (as a share):

        (lease_ttl_s + agent_pass_s + stop_s) / (1 - clock_error)  <=  (lease_ttl_s + lost_s) / (1 + clock_error)

    On the left are the slowest agent: it notices within a pass, then ends the processes. On the right is the fastest
    leader: the lease ends, then the host is only suspected for ``lost_s``. An agent that was killed or stopped keeps no
    rule. Then only the generation protects: etcd refuses the writes of the older holder.
    """

    lease_ttl_s: float = 9.0
    """Time to live of the agent's lease."""
    lost_s: float = 6.5
    """A host is suspected for so long after its lease has ended before it is lost."""
    agent_pass_s: float = 0.5
    """Longest time between two looks of an agent at its lease and its services."""
    stop_s: float = 5.0
    """A singleton that is stopped has ended after so long, if need be by SIGKILL."""
    start_margin_s: float = 3.0
    """An agent starts no singleton in the last seconds of its lease, since a start takes time."""
    clock_error: float = 0.01
    """Largest error of a host's clock, as a share of the time that it measures."""

    def __post_init__(self) -> None:
        fenced_s = (self.lease_ttl_s + self.agent_pass_s + self.stop_s) / (1 - self.clock_error)
        assigned_s = (self.lease_ttl_s + self.lost_s) / (1 + self.clock_error)
        if fenced_s > assigned_s:
            raise ConfigError(
                f"a host that is cut off may run its singletons for {fenced_s:.1f} s, and they are assigned elsewhere "
                f"after {assigned_s:.1f} s",
                hint=f"make lost_s at least {self.lost_s + (fenced_s - assigned_s) * (1 + self.clock_error):.1f}")
        if not 0 < self.start_margin_s < self.lease_ttl_s:
            raise ConfigError(f"start_margin_s ({self.start_margin_s}) is not within the lease ({self.lease_ttl_s} s)",
                              hint="make it at least the time that a start takes, and shorter than lease_ttl_s")
