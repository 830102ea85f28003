"""Engines whose weights are not what the others have, though version and layout are the same. Pure.

Each engine checks what it loads by itself; this check is between engines, for what one cannot see in itself: memory
that changed after it was verified, a loader that does not do the same everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from elastic_rl.etcd.records import Engine, EngineState


def outliers(engines: Iterable[Engine]) -> list[Engine]:
    """Ready engines that differ from more than half of their like. Two that differ from each other are none: nobody
    can say which is right."""
    alike = defaultdict(list)
    for engine in engines:
        if engine.checksum and engine.state is EngineState.READY and not engine.applying:
            alike[engine.version, engine.layout].append(engine)
    found = []
    for group in alike.values():
        checksum, votes = Counter(e.checksum for e in group).most_common(1)[0]
        if 2 * votes > len(group):
            found += [e for e in group if e.checksum != checksum]
    return found
