"""The processes of a user's code, with what they import loaded already, which takes most of a start of one: for
``support.forked``. The first argument is the module that ``python -m`` would run."""

from __future__ import annotations

import sys

import elastic_rl.engine.own_generate
import elastic_rl.rewards.own  # noqa: F401
from elastic_rl.plugins import host, worker


def main() -> None:
    module, *arguments = sys.argv[1:]
    if module == worker.__name__:
        worker.main(arguments)
    else:
        assert module == host.__name__
        [descriptor] = arguments
        host.main(int(descriptor))
