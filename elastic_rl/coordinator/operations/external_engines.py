"""Registrations of engines that someone else runs: which servers may be registered, and under which key."""

from __future__ import annotations

from urllib.parse import urlsplit

from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.decoding import decode_all
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, ExternalEngine


def normalized_url(url: str) -> str:
    """The URL in the one form in which it is stored. Raises a 422 problem unless it is http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:  # an invalid port, half an IPv6 address
        host, port, parts = "", 0, urlsplit("")
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme != "http" or not host or not port or not plain or not url.isascii() or not url.isprintable():
        raise Problem(422, "invalid", "The request is not valid", f"url must be http://HOST:PORT, not {url!r}",
                      errors=[{"pointer": "/url", "detail": "http://HOST:PORT"}])
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def free_registration(etcd: EtcdClient, keys: Keys, url: str, limit: int) -> KeyValue | None:
    """The server's registration if it has ended; None where there is none. Raises a 409 problem for a server that is
    registered or is the pool's own already, and where ``limit`` external engines are registered."""
    kvs = etcd.range(keys.external_engines_prefix())[0]
    registered = [r for r, _ in decode_all(kvs, ExternalEngine, {})]
    taken = {r.url: r.engine for r in registered if not r.ended}
    for engine, _ in decode_all(etcd.range(keys.engines_prefix())[0], Engine, {}):
        if not engine.state.ended:
            taken.setdefault(engine.url, engine.id)
    if url in taken:
        raise Problem(409, "conflict", "The server is registered already", f"{url} is engine {taken[url]}")
    if sum(not r.ended for r in registered) >= limit:
        raise Problem(409, "conflict", "There are too many external engines",
                      f"{limit} are registered, which is coordinator.max_engines; drain one first")
    return next((kv for kv in kvs if kv.key == keys.external_engine(url)), None)


def registration_of(etcd: EtcdClient, keys: Keys, engine: Engine) -> KeyValue | None:
    """The registration of an external engine, if it still stands."""
    found = etcd.get(keys.external_engine(engine.url))
    return found if found is not None and ExternalEngine.decode(found.value).engine == engine.id else None
