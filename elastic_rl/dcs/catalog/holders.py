"""Whether anybody has the chunks of a version. A reader that waits for a version cannot tell a slow one, which has to
wait, from one that is lost with the nodes that had it, which whoever has the weights must publish again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence, Set

from elastic_rl.dcs.catalog import reads, replica_sets
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.fan_out import in_parallel, on_each
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version

log = logging.getLogger(__name__)

_LOOKS = 4
"""Looks in a row after which nodes that do not answer count as having nothing."""


class HeadHolders:
    """Looks for the chunks of the head of a stream; not in two threads at once."""

    def __init__(self, etcd: EtcdClient, keys: Keys, client: DcsClient, stream: str) -> None:
        self._etcd, self._keys, self._client, self._stream = etcd, keys, client, stream
        self._unknown = 0
        """Looks in a row at which chunks were missing, and a node did not answer."""

    def is_lost(self) -> bool:
        """Whether the registered nodes, together, lack a chunk of the head, or its manifest, and the durable store does
        not have it either. Only what every node says counts: while one does not answer, which may have it, nothing is
        known, and the answer is no, for the first few looks; a node that is gone is no longer registered once its lease
        has ended, and one that keeps its lease and answers nobody is of no use to those who wait. Also no where
        there is no head, or no node. Never raises an error of ours, and takes as long as the slowest node, at most
        ``dcs.io_timeout_s`` for each of a few calls.

        The nodes that the replica sets name are asked first, each for the parts that it holds; then all for what these
        lack: every host that has pulled a version has its chunks, too."""
        try:
            head = reads.head(self._etcd, self._keys, self._stream)
            if head is None or self._etcd.get(self._keys.durable(self._stream, head.number)) is not None:
                return False
            nodes = self._client.registered()
            if not nodes:  # nobody could publish either, and they may come back with their disks
                return False
            manifest, all_answered = self._manifest(head, nodes)
            if manifest is None:
                return self._concludes(all_answered)
            sets = reads.read_replica_sets(self._etcd, self._keys, self._stream, head.number).replica_sets
            parts = manifest.part_digests()
            lacking, all_answered = self._lacking(set(manifest.chunks), {
                node_id: [d for i in held if i < len(parts) for d in parts[i]]
                for node_id, held in replica_sets.parts_by_node(sets).items() if node_id in nodes})
            if lacking:
                lacking, all_answered = self._lacking(lacking, dict.fromkeys(nodes, sorted(lacking)))
            if not lacking:
                self._unknown = 0
                return False
            return self._concludes(all_answered)
        except ElasticRLError as e:
            log.warning("it is not known whether the newest version of %s is lost: %s", self._stream, e)
            return False

    def _concludes(self, all_answered: bool) -> bool:
        """Whether what is missing is lost. To publish once more what somebody has does no harm."""
        self._unknown = 0 if all_answered else self._unknown + 1
        if all_answered or self._unknown < _LOOKS:
            return all_answered
        log.warning("a node has not answered %d times, and no other one has the newest version of %s", self._unknown,
                    self._stream)
        self._unknown = 0
        return True

    def _manifest(self, head: Version, nodes: Collection[str]) -> tuple[Manifest | None, bool]:
        """The manifest from the first node that has it; and, where none has, whether each of them has answered."""
        answers, silent = on_each(self._client, nodes, lambda connection: not connection.has([head.manifest]))
        for node_id in (n for n, has_it in answers.items() if has_it):
            with contextlib.suppress(ElasticRLError):  # it has lost it since
                data = self._client.connect(node_id).get(head.manifest)
                if matches(data, head.manifest):
                    return Manifest.decode(data), True
        return None, not silent and not any(answers.values())

    def _lacking(self, digests: Set[str], asked: Mapping[str, Sequence[str]]) -> tuple[set[str], bool]:
        """Which of the chunks no node has of those that it is asked for, and whether each node has answered."""
        answers, silent = in_parallel(asked, lambda node_id: set(asked[node_id]).difference(
            self._client.connect(node_id).has(asked[node_id])))
        return set(digests).difference(*answers.values()), not silent

    def close(self) -> None:
        self._client.close()
