"""torchft's lighthouse in a process of its own."""

from __future__ import annotations

from typing import Any

from elastic_rl.bench.control.testbed import TTL_S
from elastic_rl.bench.workers import serve


def main() -> None:
    from torchft.coordination import LighthouseServer
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=TTL_S * 1000)
    port = server.address().rpartition(":")[2]

    def address() -> dict[str, Any]:
        return {"address": f"http://127.0.0.1:{port}"}

    try:
        serve({"address": address})
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
