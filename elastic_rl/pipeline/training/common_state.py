"""Decides at which state the policy's and the critic's group go on together, as a function of what each of them has.
Pure.

A step is made by both groups, one after the other, and each commits its own state (``trainer_state``,
``critic_state``) when it is due. So there are moments in which one is ahead of the other: between the two updates of a
step; when a group was lost and is back at its last state; when only one of two commits was made. A group that is ahead
must go back, since the step that it has made would be made again, with other weights beside it or other samples.

States belong together when the same update made them, not when they have the same number of steps: after a run has
gone back, step 20 is made again, with other samples, and a state of the first step 20 may still be there. So the actor
names each update that it orders with an id of its own, the same for both groups, which is a part of the state
(``Progress.pair``), and of the meta of the version that it is committed as.

The rules, which make a run that went on equal to one that was not disturbed (I7), and train on each sample once (I5):

- Both groups go on from where they are if these states belong together: nothing is lost then.
- Else both go to the newest pair of states that belong together, of those that are committed or that a group is at.
- The leader releases no version of the newest committed pair, however old (``dcs.catalog.garbage_collector``).
- There is always a pair: what the critic begins with is in its model's folder and is not published, and it belongs to
  the policy's state at the beginning of RL, which is kept until there is a newer pair; and to all of the supervised
  phase, in which a critic takes no part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastic_rl.config.groups import ACTOR, CRITIC
from elastic_rl.dcs.catalog.pairs import newest_pair

_LIVE = 1 << 62
"""Number of the state that a group is at, among those of its committed versions: it is the newest."""


@dataclass(frozen=True)
class Available:
    """What a group can go on from."""

    live: str
    """Name of the pair that the state belongs to that it is at."""
    committed: Mapping[int, str]
    """Number of a committed version → the name of its pair."""


@dataclass(frozen=True)
class CommonState:
    """What each group is to load: the number of a version, 0 for the beginning; None where it is there already."""

    policy: int | None
    critic: int | None

    @property
    def is_reached(self) -> bool:
        return self.policy is None and self.critic is None


def common_state(policy: Available, critic: Available, without: Collection[tuple[str, int]] = ()) -> CommonState | None:
    """The newest state that both have. ``without``: versions that are not available after all, each by stream and
    number. None when there is no such state."""
    if policy.live == critic.live:
        return CommonState(None, None)
    have = {name: {**{n: pair for n, pair in of.committed.items() if (name, n) not in without}, _LIVE: of.live}
            for name, of in ((ACTOR.state, policy), (CRITIC.state, critic))}
    found = newest_pair(have[ACTOR.state], have[CRITIC.state])
    if found is None:
        return None
    return CommonState(*(None if number == _LIVE else number for number in found))
