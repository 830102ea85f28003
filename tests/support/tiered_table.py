"""A table of chunks with a disk, for tests of how chunks move between the two."""

from __future__ import annotations

from pathlib import Path

from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.dcs.storage.disk_saver import DiskSaver
from support.clock import Clock

KIB = 1024


class Node:
    """A table with a disk, whose saver runs only when a test steps it."""

    def __init__(self, folder: Path, *, arena: int = 4 * KIB, disk: int = 1 << 20, grace_s: float = 0.0,
                 verify_every_s: float = 0.0, wait_s: float = 0.0) -> None:
        self.folder, self.clock = folder, Clock()
        self.disk = DiskFolder(folder, disk, "job")
        self.table = ChunkTable(memoryview(bytearray(arena)), disk=self.disk, orphan_grace_s=grace_s,
                                verify_every_s=verify_every_s, wait_s=wait_s, clock=self.clock)
        self.saver: DiskSaver = self.table.saver()

    def write(self, conn: int, data: bytes) -> str:
        offset = self.table.alloc(conn, len(data))
        self.table.view[offset:offset + len(data)] = data
        return self.table.seal(conn, offset, len(data)).digest

    def commit(self, data: bytes) -> str:
        digest = self.write(1, data)
        self.table.release_holds(1)
        return digest

    def save_all(self) -> None:
        while self.table.stat()["unsaved"]:
            self.saver.step(0)

    def read(self, digest: str) -> bytes:
        with self.table.reading(digest) as data:
            return bytes(data)

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def resident(self, digest: str) -> bool:
        return self.table._chunks[digest].offset >= 0
