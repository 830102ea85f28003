"""The states of a version and the transitions between them. Pure.

    STAGING ──▶ COMMITTED ──▶ GONE
       └──────▶ ABORTED

Release is safe without a lock: a pin is only taken together with the check that the version is COMMITTED, and a version
only goes together with the check that it has no pin. There is no transition from STAGING to GONE: a version that was
not committed was never visible.

A leader of an older release takes two steps, by way of RELEASING, in which a version can no longer be pinned. Nothing
else writes that state; a version that was left in it goes once it has no pin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import Version, VersionState

TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = {
    VersionState.STAGING: frozenset({VersionState.COMMITTED, VersionState.ABORTED}),
    VersionState.COMMITTED: frozenset({VersionState.GONE}),
    VersionState.RELEASING: frozenset({VersionState.GONE}),
    VersionState.GONE: frozenset(),
    VersionState.ABORTED: frozenset(),
}
LIVE = frozenset({VersionState.COMMITTED, VersionState.RELEASING})
"""States in which a version's chunks are needed. Those of a STAGING version are held by its publisher's connections."""


def transition(version: Version, to: VersionState, **changes: Any) -> Version:
    """The version in another state, with other fields changed too. Raises IllegalTransition."""
    if to not in TRANSITIONS[version.state]:
        raise IllegalTransition(f"{version.stream} version {version.number} cannot go from {version.state} to {to}")
    return version.replace(state=to, **changes)
