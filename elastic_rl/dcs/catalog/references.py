"""Which version of the policy a group computes with that does not train, and which ones are kept for the group
``reference``, on nodes and in the durable store, whatever the retention says. Pure.

The reference policy of a step is the policy after an earlier one (``reference_step``). A group that re-forms loads it
again, however long ago that was; and a trainer that goes back to an older state needs the reference of that state. So
each version of the state, and of the policy while there is no state yet, has the number of its reference in its meta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_rl.config.groups import ACTOR
from elastic_rl.errors import Conflict
from elastic_rl.etcd.records import Version, VersionState

REFERENCE_KEY = "reference_version"
"""Key in a version's meta; the meta of the version that is the reference itself does not have it, since its number is
not known before."""


def reference_of(version: Version) -> int:
    """Number of the version of the policy that is the reference of this one; 0 for none, or itself."""
    return int(version.meta.get(REFERENCE_KEY) or 0)


def needed(versions: Mapping[str, Sequence[Version]]) -> dict[str, set[int]]:
    """Numbers of the versions to keep, by stream: the reference of the newest policy and those of all states.
    ``versions``: the versions of each stream, the committed ones."""
    policy, states = versions.get(ACTOR.weights, ()), versions.get(ACTOR.state, ())
    newest = sorted(policy, key=lambda v: v.number)[-1:]
    found = {reference_of(v) or v.number for v in newest}
    return {ACTOR.weights: found | {number for v in states if (number := reference_of(v))}}


def oldest_of_step(versions: Sequence[Version], step: int, at_least: int) -> int:
    """Number of the oldest committed version of the policy that this RL step made, of those with ``at_least`` this
    number: that one, or where it was not committed the next publish of the same weights. A later version of the step
    may have other weights, if the run has gone back and made the step again. Raises Conflict when there is none. Pure.
    """
    committed = [v for v in versions if v.state is VersionState.COMMITTED]
    found = [v.number for v in committed
             if v.number >= at_least and v.meta.get("phase") == "rl" and v.meta.get("step") == step]
    if not found:
        newest = max(committed, key=lambda v: v.number, default=None)
        there_is = f"the newest is {newest.number}, of step {newest.meta.get('step')}" if newest else "there is none"
        raise Conflict(f"no version of the policy after RL step {step} is committed"
                       f"{f', of number {at_least} or higher' if at_least else ''}; {there_is}")
    return min(found)
