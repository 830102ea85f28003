"""``engine_process.py CONTEXT ENGINE``: runs one engine in a process of its own, as a Ray actor does."""

from __future__ import annotations

import sys

from elastic_rl.engine.runner import EngineRunner
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    EngineRunner(RunContext.load(sys.argv[1]), sys.argv[2]).run()
