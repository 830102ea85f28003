"""Prints every change under a prefix since a revision, read with PyPI's ``etcd3``, sharing nothing with our client.

    python observer.py HOST:PORT PREFIX START_REVISION LAST_KEY [AUTHORITY CERTIFICATE KEY]

Run it with PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python (the client's stubs are old). One JSON object a line, in the
order of the store's revisions; ends after the change of LAST_KEY.
"""

from __future__ import annotations

import json
import sys

import etcd3
from etcd3.events import PutEvent


def main() -> None:
    endpoint, prefix, start, last, *files = sys.argv[1:]
    tls = dict(zip(("ca_cert", "cert_cert", "cert_key"), files, strict=False))
    host, _, port = endpoint.rpartition(":")
    client = etcd3.client(host=host, port=int(port), timeout=5, **tls)
    changes, cancel = client.watch_prefix(prefix, start_revision=int(start))
    for change in changes:
        put = isinstance(change, PutEvent)
        key = change.key.decode()
        value = change.value.decode(errors="replace") if put else ""  # write tokens are no text
        print(json.dumps({"revision": change.mod_revision, "put": put, "key": key, "create": change.create_revision,
                          "value": value}), flush=True)
        if key == last:
            break
    cancel()


if __name__ == "__main__":
    main()
