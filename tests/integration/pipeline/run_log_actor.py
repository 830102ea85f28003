"""A term of the actor in a process of its own (``support.forked``), which is killed where its arguments say. These are:

    ETCD JOB FOLDER STEPS FAILPOINT
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.run_log_terms import Term, use_small_segments

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.runtime import failpoints


def main() -> None:
    endpoint, job, folder, steps, failpoint = sys.argv[1:]
    failpoints._wanted, failpoints._nth = failpoints.parse(failpoint)
    use_small_segments()
    with EtcdClient([endpoint], call_timeout_s=2.0) as etcd:
        term = Term(etcd, Keys(job), Path(folder))
        term.copy()
        for _ in range(int(steps)):
            term.step()
            term.seal()
            term.copy()
