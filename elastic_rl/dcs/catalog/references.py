"""Which versions of the policy are kept for the group ``reference``, on nodes and in the durable store, whatever the
retention says. Pure.

The reference policy of a step is the policy after an earlier one (``reference_step``). A group that re-forms loads it
again, however long ago that was; and a trainer that goes back to an older state needs the reference of that state. So
each version of the state, and of the policy while there is no state yet, has the number of its reference in its meta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_rl.config.groups import ACTOR
from elastic_rl.etcd.records import Version

REFERENCE_KEY = "reference_version"
"""Not in the meta of a version of the policy that is the reference itself: its number is not known before."""


def reference_of(version: Version) -> int:
    """Number of the version of the policy that is the reference of this one; 0 for none, or itself."""
    return int(version.meta.get(REFERENCE_KEY) or 0)


def needed(versions: Mapping[str, Sequence[Version]]) -> dict[str, set[int]]:
    """Numbers of the versions to keep, by stream: the reference of the newest policy and those of all states.
    ``versions``: of each stream, the committed ones."""
    policy, states = versions.get(ACTOR.weights, ()), versions.get(ACTOR.state, ())
    newest = sorted(policy, key=lambda v: v.number)[-1:]
    found = {reference_of(v) or v.number for v in newest}
    return {ACTOR.weights: found | {number for v in states if (number := reference_of(v))}}
