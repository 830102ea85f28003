"""What runs on a test host to make it a host of the cluster, and to take it down in order.

``python -m elastic_rl.host.test_hosts.inside``, in the namespaces of the host. It reads a ``Request`` from stdin, says
on stderr what it does, and answers on stdout.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from elastic_rl import config, errors
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.record import Record
from elastic_rl.host.join_file import JoinFile
from elastic_rl.host.local_cluster import Cluster


class Request(Record):
    """What the host is to do."""

    action: Literal["up", "join", "submit", "down"]
    settings: dict[str, Any]
    """The settings of the cluster, or of the job to submit; for ``join`` the ``run_dir`` alone: the others are in the
    join file."""
    name: str = ""
    address: str = ""
    join_file: JoinFile | None = None
    control: bool = False
    """Whether a member of etcd and a coordinator are there, too; else as before."""
    folder: str = ""
    """Working folder of the run to submit."""
    faults: bool = False
    from_job: str = ""


class Answer(Record):
    """How it went."""

    error: str = ""
    """Name of the class of the error that ended it; empty for none."""
    message: str = ""
    hint: str = ""

    def require(self, host: str) -> None:
        """Raises the error, as one of the host."""
        if self.error:
            kind = getattr(errors, self.error, ElasticRLError)
            raise kind(f"{host}: {self.message}", hint=self.hint)


def _do(request: Request) -> None:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    match request.action:
        case "up":
            Cluster(config.parse(request.settings), say=say).up(name=request.name, address=request.address)
        case "join":
            assert request.join_file is not None
            cluster = Cluster(request.join_file.config(request.settings["run_dir"]), say=say)
            control = request.control or None
            cluster.join(request.join_file, name=request.name, address=request.address, coordinator=control,
                         etcd=control)
        case "submit":
            try:
                os.chdir(request.folder)
            except OSError as e:
                raise ConfigError(f"the working folder {request.folder} is not on this host",
                                  hint="submit from a folder that is not below /tmp") from e
            job = Cluster(config.parse(request.settings), say=say)
            job.admit()
            job.submit(faults=request.faults, from_job=request.from_job)
        case "down":
            Cluster(config.parse(request.settings), say=say).down()


def main() -> None:
    request = Request.decode(sys.stdin.buffer.read())
    try:
        _do(request)
        answer = Answer()
    except ElasticRLError as e:
        answer = Answer(error=type(e).__name__, message=e.message, hint=e.hint)
    sys.stdout.buffer.write(answer.encode())


if __name__ == "__main__":
    main()
