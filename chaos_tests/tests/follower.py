"""A puller that follows the head, as an engine does, and judges every byte that it gets."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from dcs_publisher_loop import content

from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.errors import ElasticRLError, VersionNotFound
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


class Follower(threading.Thread):
    """Pulls every head it sees and compares each byte with what its publisher meant. A version that cannot be had now
    is asked for again until a newer one is the head."""

    def __init__(self, etcd: EtcdClient, keys: Keys, node: str, name: str = "follower") -> None:
        super().__init__(name=name, daemon=True)
        self.puller = Puller(etcd, keys, name, io_timeout_s=10, node=node)
        self.seen: list[int] = []
        self.torn: list[int] = []
        self.failures: Counter[str] = Counter()
        """Pulls that ended without the version, by error."""
        self.pulling = False
        self.stopping = threading.Event()

    def run(self) -> None:
        with self.puller, self.puller.watch_head("policy") as heads:
            wanted = 0
            while not self.stopping.is_set():
                head = heads.get(0.1)
                wanted = head.number if head is not None else wanted
                if wanted and (not self.seen or self.seen[-1] < wanted) and not self.pull(wanted):
                    self.stopping.wait(0.2)

    def pull(self, number: int) -> bool:
        """Whether there is no more to do for this version."""
        self.pulling = True
        try:
            with self.puller.pull("policy", number) as pulled:
                found = dict(pulled.tensors())
                wanted = dict(content(pulled.version.meta["seed"]))
                whole = found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
        except VersionNotFound:
            return True  # released while it was asked for: a newer one is the head
        except ElasticRLError as e:
            self.failures[type(e).__name__] += 1
            return False
        finally:
            self.pulling = False
        self.seen.append(number)
        if not whole:
            self.torn.append(number)
        return True

    def close(self) -> None:
        self.stopping.set()
        self.join(timeout=30)
