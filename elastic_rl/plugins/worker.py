"""A worker process: runs one function for its owner, over a socket, until the owner closes it or kills this process.

Messages are JSON. Nothing is unpickled: what comes back from code that may be wrong is text and numbers.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence

from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.host import encoded, guard_family, receive, send
from elastic_rl.plugins.user_code import describe, text_of
from elastic_rl.runtime.imports import imported

_SANDBOXED_FILES = 128
"""Open files in a sandbox: the kernel holds some 200 KiB for each socket, which no limit of a process counts."""


def main(arguments: Sequence[str]) -> None:
    """Serves as the arguments of the process say: the connection's descriptor, the function, what makes it ("" for
    nothing), its memory in MiB and, in a sandbox only, the word ``sandboxed``."""
    descriptor, function, made_of, memory_mb, *more = arguments
    _serve(int(descriptor), function, made_of, int(memory_mb), sandboxed=more == ["sandboxed"])


def _serve(descriptor: int, function: str, made_of: str, memory_mb: int, *, sandboxed: bool) -> None:
    """Serves ``module:function``, which is called with the JSON value of each job; with ``made_of``, what it returns
    for that. ``sandboxed``: in a sandbox, which starts no process and ends with this one."""
    if not sandboxed:
        guard_family(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sandboxed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_SANDBOXED_FILES,) * 2)
    with socket.socket(fileno=descriptor) as connection:
        os.set_inheritable(descriptor, False)  # what the function starts does not get it
        try:
            call = imported(function)
            if made_of:
                call = call(made_of)
        except BaseException as e:  # whatever a module raises while it is imported: also SystemExit
            send(connection, {"error": describe(e)})
            return
        send(connection, {"value": "ready"})
        this = os.getpid()
        while True:
            try:
                number, job = receive(connection)
            except EOFError:
                return
            try:
                answer = encoded({"id": number, "value": call(job)})
            except MemoryError:
                return  # what it holds is unknown; the owner starts another
            except PluginFailed as e:
                answer = encoded({"id": number, "error": text_of(e)})
            except BaseException as e:  # whatever the function raises: also SystemExit
                answer = encoded({"id": number, "error": describe(e)})
            if os.getpid() != this:
                os._exit(1)  # a fork that the function has made, and that has come back from it
            connection.sendall(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
