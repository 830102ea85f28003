"""Prints every change under a prefix since a revision, read with PyPI's ``etcd3``, sharing nothing with our client.

    python observer.py HOST:PORT PREFIX START_REVISION [LAST_KEY]

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
from etcd3.events import PutEvent
from etcd3.exceptions import RevisionCompactedError

_SILENT_S = 5.0
"""After so long without a change it asks whether there was one, of which the watch would have told."""
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
    client.add_watch_prefix_callback(prefix, seen.put, start_revision=int(start))
    newest = int(start) - 1
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
            put = isinstance(change, PutEvent)
            key, newest = change.key.decode(), change.mod_revision
            omitted = len(change.value) if put and len(change.value) > _VALUE_BYTES else 0
            value = change.value.decode(errors="replace") if put and not omitted else ""  # write tokens are no text
            print(json.dumps({"revision": change.mod_revision, "put": put, "key": key,
                              "create": change.create_revision, "value": value,
                              **({"omitted_bytes": omitted} if omitted else {})}), flush=True)
            if [key] == last:
                os._exit(0)  # its threads would wait for the watch


def _newest(client: Any, prefix: str) -> int:
    """The newest revision of a key that is there now."""
    found = [meta.mod_revision for _, meta in client.get_prefix(prefix, sort_order="descend", sort_target="mod",
                                                                keys_only=True)]
    return max(found, default=0)


if __name__ == "__main__":
    main()
