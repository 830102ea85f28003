"""An SGLang server on a CPU, as a process (``support.forked``) with the arguments of the program that engines run. To
import SGLang is most of what the start of a server costs."""

from __future__ import annotations

import os

import setproctitle

from elastic_rl.engine.sglang import launch

launch.prepare()
launch.import_server()
setproctitle.getproctitle()  # it finds the place of the title, as long as the environment is where the kernel put it


def main() -> None:
    from sglang.srt.entrypoints import http_server

    launch.prepare()  # again: this process has another environment, which names its tag
    # It reads the environment when it is imported.
    http_server.HEALTH_CHECK_TIMEOUT = int(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
    launch.main()
