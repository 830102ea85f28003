"""What a log says last, for an error about the service that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_rl.host.local_cluster import last_message

FULL = json.dumps({"level": "panic", "msg": "failed to open database",
                   "error": "write /d/member/snap/db: no space left on device", "stacktrace": "go.etcd.io/…\n\tx.go:1"})
STACKS = """panic: failed to open database

goroutine 132 [running]:
go.uber.org/zap.(*Logger).Panic(0xc000137a80?, {0x1030078?, 0x180?}, {0xc000185980, 0x2, 0x2})
\tgo.uber.org/zap/logger.go:251 +0x59
main.main()
\tgo.etcd.io/etcd/main.go:28 +0x20
"""


@pytest.mark.parametrize(("log", "said"), [
    (f"{FULL}\n{STACKS}", "write /d/member/snap/db: no space left on device"),
    (STACKS, "panic: failed to open database"),
    (f"starting\n{STACKS}", "panic: failed to open database"),
    (f"{STACKS}{json.dumps({'msg': 'started again'})}\n", "started again"),
    ("fatal error: out of memory\n\ngoroutine 1:\n\tx\n", "fatal error: out of memory"),
    (json.dumps({"message": "short", "error": "Traceback …\n  x\nOSError: disk full"}), "OSError: disk full"),
    ("Traceback (most recent call last):\n  File x\nValueError: y\n", "ValueError: y"), ("", "its log is empty"),
    ("[1]\n", "[1]"), ("one\n\n", "one")])
def test_last_message_is_the_reason_and_no_stack(log: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(log, encoding="utf-8")
    assert last_message(tmp_path / "x.log") == said
