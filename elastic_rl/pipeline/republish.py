"""When a version that engines lack for long is published again. Pure; the clock is an argument.

With one replica a node that dies takes the chunks along that were not on its disk yet. A committed version may then be
one that nobody can fetch, while the trainer has the very weights. Engines that merely take long to fetch must not be
given another version again and again: the limit grows with their last pulls, and doubles each time, up to an hour.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.etcd.records import Engine
from elastic_rl.runtime.backoff import doubled_s

FIRST_S, _MAX_S = 15.0, 3600.0
_PULLS = 3.0
"""Multiple of the longest last pull that is still no loss."""


class Republish:
    """Decides, in one wait for one version, when to publish it again."""

    def __init__(self, first_pull_s: float) -> None:
        """``first_pull_s``: how long the first pull of an engine, of which nothing is known, may take."""
        self._first_pull_s = first_pull_s
        self._since: dict[str, float] = {}
        self._times = 0

    def is_due(self, now: float, behind: Sequence[Engine]) -> bool:
        """Whether to publish again now. ``behind``: the engines that run and lack the version. Call it regularly."""
        self._since = {e.id: self._since.get(e.id, now) for e in behind}
        longest_pull_s = max((e.pull_apply_s for e in behind), default=0.0)
        usual_s = max(FIRST_S, _PULLS * longest_pull_s)

        def over(engine: Engine) -> bool:
            limit_s = usual_s if engine.version or engine.pull_apply_s else max(usual_s, self._first_pull_s)
            return now - self._since[engine.id] >= doubled_s(self._times + 1, limit_s, max(limit_s, _MAX_S))

        if not any(map(over, behind)):
            return False
        self._times += 1
        self._since = dict.fromkeys(self._since, now)
        return True
