"""The states of a version and the transitions between them. Pure.

    STAGING ──▶ COMMITTED ──▶ RELEASING ──▶ GONE
       └──────▶ ABORTED

There is no transition from RELEASING back to COMMITTED, which makes release safe without a lock: a pin is only taken
together with the check that the version is COMMITTED, so once it is RELEASING no pin can be added, and after the last
one ends it can go. There is no transition from STAGING to RELEASING either: a version that was not committed was never
visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import Version, VersionState

TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = {
    VersionState.STAGING: frozenset({VersionState.COMMITTED, VersionState.ABORTED}),
    VersionState.COMMITTED: frozenset({VersionState.RELEASING}),
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
