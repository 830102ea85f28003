"""Memory of processes as the kernel counts it: PSS, in which a shared page counts in equal parts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_POLL_S = 0.02


def pss(pids: Sequence[int]) -> dict[str, int]:
    """Bytes of all these processes together: ``Pss_Anon`` (their own), ``Pss_File``, ``Pss_Shmem`` (arenas) and
    ``Pss``, the sum. Processes that ended count nothing."""
    out = {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0, "Pss_Shmem": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, ValueError):
            continue
        for key, value in parse_rollup(lines).items():
            if key in out:
                out[key] += value
    return out


def parse_rollup(lines: Sequence[str]) -> dict[str, int]:
    """``Name:  123 kB`` lines as bytes. Pure."""
    out = {}
    for line in lines:
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            out[key] = int(number) << 10
    return out


class Peak:
    """The largest sum over processes of one kind of memory while the block runs."""

    def __init__(self, pids: Sequence[int], kind: str = "Pss_Anon") -> None:
        self._pids, self._kind = list(pids), kind
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak", daemon=True)
        self.before = 0
        self.most = 0

    @property
    def grown(self) -> int:
        """Bytes at the peak beyond those at the start."""
        return self.most - self.before

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.most = max(self.most, pss(self._pids)[self._kind])

    def __enter__(self) -> Self:
        self.before = self.most = pss(self._pids)[self._kind]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, pss(self._pids)[self._kind])
