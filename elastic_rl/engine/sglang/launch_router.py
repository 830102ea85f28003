"""The program of the router: ``python -m elastic_rl.engine.sglang.launch_router``, with the arguments of
``sglang_router.launch_router``.

It starts the same router as ``sglang_router.launch_router``, which also imports a debugging balancer, and with it all
of SGLang and torch: 12 s of a core before the router listens.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

from elastic_rl.net.engine_key import KEY_FILE_ENV, read_key


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(prog="elastic_rl.engine.sglang.launch_router")
    RouterArgs.add_cli_args(parser)
    args = RouterArgs.from_cli_args(parser.parse_args())
    if path := os.environ.get(KEY_FILE_ENV):
        args.api_key = read_key(Path(path))  # of requests; for each worker it is told the worker's own
    args._validate_router_args()
    Router.from_args(args).start()


if __name__ == "__main__":
    main()
