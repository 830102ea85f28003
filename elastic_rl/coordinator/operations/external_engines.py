"""Servers that others run and that shall take part in a pool: which may, and the wishes that they do."""

from __future__ import annotations

from urllib.parse import urlsplit

from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine


def check_url(url: str) -> str:
    """The URL in the one way in which it is written down. Raises a 422 problem unless it is http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:  # a port that is none, half an IPv6 address
        host, port, parts = "", 0, urlsplit("")
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme != "http" or not host or not port or not plain or not url.isascii() or not url.isprintable():
        raise Problem(422, "invalid", "The request is not valid", f"url must be http://HOST:PORT, not {url!r}",
                      errors=[{"pointer": "/url", "detail": "http://HOST:PORT"}])
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def vacant(etcd: EtcdClient, keys: Keys, url: str, most: int) -> KeyValue | None:
    """The wish for a server as it was found: none, or one that is over. Raises a 409 problem for a server that takes
    part already, and where ``most`` take part."""
    kvs = etcd.range(keys.adoptions_prefix())[0]
    there = [ExternalEngine.decode(kv.value) for kv in kvs]
    taken = {a.url: a.engine for a in there if not a.ended}
    for engine in (Engine.decode(kv.value) for kv in etcd.range(keys.engines_prefix())[0]):
        if engine.state not in (EngineState.DEAD, EngineState.QUARANTINED):
            taken.setdefault(engine.url, engine.id)
    if url in taken:
        raise Problem(409, "conflict", "The server takes part already", f"{url} is engine {taken[url]}")
    if sum(not a.ended for a in there) >= most:
        raise Problem(409, "conflict", "There are too many adopted engines",
                      f"{most} take part, which is coordinator.max_engines; drain one first")
    return next((kv for kv in kvs if kv.key == keys.adoption(url)), None)


def wish_of(etcd: EtcdClient, keys: Keys, engine: Engine) -> KeyValue | None:
    """The wish by which an adopted engine takes part, if it still stands."""
    found = etcd.get(keys.adoption(engine.url))
    return found if found is not None and ExternalEngine.decode(found.value).engine == engine.id else None
