"""Engines whose weights differ from those of the others, though pool, version and layout are the same. Pure.

Each engine verifies what it loads. This check compares engines, for what an engine cannot see in itself: memory that
changed after it was verified, a loader that works differently on one host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from elastic_rl.etcd.records import Engine, EngineState


def outliers(engines: Iterable[Engine]) -> list[Engine]:
    """Ready engines whose checksum differs from that of a majority of the engines of their pool, version and
    layout. Of two engines that differ from each other neither is one: there is no majority."""
    alike = defaultdict(list)
    for engine in engines:
        if engine.checksum and engine.state is EngineState.READY and not engine.applying:
            alike[engine.pool, engine.version, engine.layout].append(engine)
    found = []
    for group in alike.values():
        checksum, votes = Counter(e.checksum for e in group).most_common(1)[0]
        if 2 * votes > len(group):
            found += [e for e in group if e.checksum != checksum]
    return found
