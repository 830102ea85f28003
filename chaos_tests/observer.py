"""Prints every change under a prefix since a revision, read with PyPI's ``etcd3``, sharing nothing with our client.

    python observer.py HOST:PORT PREFIX START_REVISION [LAST_KEY]

With @REVISION in the place of START_REVISION, first each key as it was at that revision, with ``present``, and then
{"listed": REVISION}; the changes after it follow.

Run it with PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python (the client's stubs are old). One JSON object a line, in the
order of the store's revisions. Ends after the change of LAST_KEY, if one is given, and with an error where its watch is
lost: that client does not resume one. Where the store has compacted the first revisions, the last line is
{"compacted": REVISION}. CA, CERT and KEY in the environment name PEM files of a store with TLS.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from typing import Any

import etcd3
import grpc
from etcd3 import etcdrpc
from etcd3.events import PutEvent
from etcd3.exceptions import RevisionCompactedError

_SILENT_S = 5.0
"""After so long without a change it asks whether there was one, of which the watch would have told."""
_PAGE = 500
"""Keys that are read at once."""
_VALUE_BYTES = 64 << 10
"""A longer value is printed as its size alone, ``omitted_bytes``: the longest that checkers read is the record of a
state of the trainer, which has the groups that were consumed."""


def main() -> None:
    endpoint, prefix, start, *last = sys.argv[1:]
    host, _, port = endpoint.rpartition(":")
    files = {option: os.environ[name] for option, name in (
        ("ca_cert", "CA"), ("cert_cert", "CERT"), ("cert_key", "KEY")) if os.environ.get(name)}
    client = etcd3.client(host=host, port=int(port), timeout=5, **files)
    seen: queue.Queue[Any] = queue.Queue()
    if start.startswith("@"):
        _list(client, prefix, int(start[1:]))
    first = int(start[1:]) + 1 if start.startswith("@") else int(start)
    client.add_watch_prefix_callback(prefix, seen.put, start_revision=first)
    newest = first - 1
    while True:
        try:
            answer = seen.get(timeout=_SILENT_S)
        except queue.Empty:
            if _newest(client, prefix) <= newest:
                continue
            try:  # of a change that was made just now
                answer = seen.get(timeout=_SILENT_S)
            except queue.Empty:
                sys.exit("the watch is lost")
        if isinstance(answer, RevisionCompactedError):
            print(json.dumps({"compacted": answer.compacted_revision}), flush=True)
        if isinstance(answer, Exception):
            sys.exit(f"the watch has ended: {type(answer).__name__} {answer}")
        for change in answer.events:
            newest = change.mod_revision
            _print(change, put=isinstance(change, PutEvent))
            if [change.key.decode()] == last:
                os._exit(0)  # its threads would wait for the watch


def _print(kv: Any, *, put: bool = True, **more: Any) -> None:
    omitted = len(kv.value) if put and len(kv.value) > _VALUE_BYTES else 0
    value = kv.value.decode(errors="replace") if put and not omitted else ""  # write tokens are no text
    print(json.dumps({"revision": kv.mod_revision, "put": put, "key": kv.key.decode(), "create": kv.create_revision,
                      "value": value, **({"omitted_bytes": omitted} if omitted else {}), **more}), flush=True)


def _list(client: Any, prefix: str, revision: int) -> None:
    """Prints the keys as they were at a revision. Where that was compacted, nothing is said of them, and the watch of
    what follows finds it."""
    key, more = prefix.encode(), True
    end = etcd3.utils.increment_last_byte(key)
    while more:  # the client's own calls take neither a limit nor a revision
        request = etcdrpc.RangeRequest(key=key, range_end=end, limit=_PAGE, revision=revision)
        try:
            answer = client.kvstub.Range(request, client.timeout, credentials=client.call_credentials,
                                         metadata=client.metadata)
        except grpc.RpcError as e:
            if e.code() is grpc.StatusCode.OUT_OF_RANGE:
                return
            sys.exit(f"the keys cannot be read: {e.code()}")
        for kv in answer.kvs:
            _print(kv, present=True)
        more, key = answer.more, (answer.kvs[-1].key if answer.kvs else key) + b"\0"
    print(json.dumps({"listed": revision}), flush=True)


def _newest(client: Any, prefix: str) -> int:
    """The newest revision of a key that is there now."""
    found = [meta.mod_revision for _, meta in client.get_prefix(prefix, sort_order="descend", sort_target="mod",
                                                                keys_only=True)]
    return max(found, default=0)


if __name__ == "__main__":
    main()
