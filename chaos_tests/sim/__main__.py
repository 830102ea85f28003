"""``python -m chaos_tests.sim`` is ``elastic-rl chaos sim``."""

from __future__ import annotations

import sys

from elastic_rl.cli.main import main

if __name__ == "__main__":
    main(["chaos", "sim", *sys.argv[1:]])
