"""A DCS node behind a link of ``links``: the real node, but it registers the link's port in place of its own.

    python -m elastic_rl.bench.dcs.linked_node --link-port PORT <arguments of elastic_rl.dcs.node>
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from elastic_rl.dcs import node
from elastic_rl.dcs.registration import Registration


def register_as(port: int) -> None:
    """From here on this process registers with that port."""
    original = Registration.__init__

    def linked(self: Registration, store: Any, keys: Any, record: Any, *args: Any, **kwargs: Any) -> None:
        original(self, store, keys, record.but(port=port), *args, **kwargs)

    Registration.__init__ = linked  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--link-port", type=int, required=True)
    args, rest = parser.parse_known_args()
    register_as(args.link_port)
    return node.main(rest)


if __name__ == "__main__":
    sys.exit(main())
