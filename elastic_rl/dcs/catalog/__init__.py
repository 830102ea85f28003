"""The catalog of versions in etcd: which exist, in which state, where their chunks are, and its maintenance.

What other packages need of it is here: reads and pins. Publishing is in ``writer``, the leading coordinator's work in
``maintenance``.
"""

from elastic_rl.dcs.catalog.pins import pin, pinned, unpin
from elastic_rl.dcs.catalog.reads import (
    Entry,
    get_entry,
    get_version,
    head,
    head_entry,
    list_entries,
    list_versions,
    read_catalog,
    read_placement,
)
from elastic_rl.dcs.catalog.transitions import TRANSITIONS, transition
from elastic_rl.dcs.catalog.writer import Staged

__all__ = ["TRANSITIONS", "Entry", "Staged", "get_entry", "get_version", "head", "head_entry", "list_entries",
           "list_versions", "pin", "pinned", "read_catalog", "read_placement", "transition", "unpin"]
