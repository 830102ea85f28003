"""``python -m benchmarks NAME [options]``: the options are those of ``elastic-rl bench``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import BENCHES
from elastic_rl.cli.main import run_benches
from elastic_rl.runtime.text_encoding import use_utf8

if __name__ == "__main__":
    use_utf8()
    # Workers, and SGLang's schedulers, import modules of this package.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    run_benches(BENCHES, sys.argv[1:])
