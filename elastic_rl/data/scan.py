"""One look at every training row before a job begins: which are left out, and whether one of them is evaluated too.

The result is a file in the job's folder, so that later processes and starts of the job do not look again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from elastic_rl.data import derived
from elastic_rl.data.prompts import contains, hashes
from elastic_rl.errors import ConfigError

_CHUNK = 2048
"""Rows that are looked at together."""
_FORMAT = 1


@dataclass(frozen=True)
class Rules:
    """What is left out. ``max_tokens``: the most tokens of a prompt; None: any number."""

    max_tokens: int | None
    drop_duplicates: bool
    overlap: Literal["error", "drop", "unchecked"]

    @property
    def need_a_scan(self) -> bool:
        return self.max_tokens is not None or self.drop_duplicates or self.overlap != "unchecked"


@dataclass(frozen=True)
class Dropped:
    """Rows that are left out, by reason."""

    long: int = 0
    duplicate: int = 0
    overlap: int = 0
    """Rows that are evaluated too."""
    first_overlap: int | None = None
    """Number of the first of these, for people."""

    @property
    def total(self) -> int:
        return self.long + self.duplicate + self.overlap


@dataclass(frozen=True)
class Scanned:
    """``rows``: numbers of the rows that are trained on, ascending, int64, mapped from a file; None: nothing is left
    out."""

    rows: np.ndarray | None
    dropped: Dropped


def scan(texts: Iterator[str], is_train: Callable[[int], bool], lengths: Callable[[Sequence[str]], list[int]],
         held_out: np.ndarray, rules: Rules, where: Callable[[int], str]) -> tuple[np.ndarray, Dropped]:
    """Rows that are trained on, int64, ascending, and what is left out of the others.

    ``texts``: the texts of the prompts of all rows, in order; ``lengths``: tokens of texts; ``held_out``: sorted hashes
    of the texts that are evaluated. Memory: 16 bytes a row, and 32 more for duplicates. Raises ConfigError, which names
    the row, for a training prompt that is evaluated too, if the rules refuse that.
    """
    kept: list[np.ndarray] = []
    seen: list[np.ndarray] = []
    long = overlap = first = 0
    first_overlap: int | None = None
    while chunk := list(islice(texts, _CHUNK)):
        numbers = np.array([n for n in range(first, first + len(chunk)) if is_train(n)], np.int64)
        own = [chunk[n - first] for n in numbers]
        found = hashes(own)
        ok = np.ones(len(own), np.bool_)
        if rules.overlap != "unchecked" and (common := contains(held_out, found)).any():
            if rules.overlap == "error":
                raise ConfigError(
                    f"{where(int(numbers[common.argmax()]))}: this prompt is trained on and evaluated: its text is in "
                    "an evaluation set too", hint="take it out of one of them, or set data.options.overlap to drop, "
                    "which leaves it out of the training; without an evaluation set of its own a file with duplicates "
                    "has some on both sides")
            overlap += int(common.sum())
            first_overlap = int(numbers[common.argmax()]) if first_overlap is None else first_overlap
            ok &= ~common
        if rules.max_tokens is not None:
            places = np.flatnonzero(ok)
            too_long = np.array(lengths([own[i] for i in places]), np.int64) > rules.max_tokens
            long += int(too_long.sum())
            ok[places[too_long]] = False
        kept.append(numbers[ok])
        if rules.drop_duplicates:
            seen.append(found[ok])
        first += len(chunk)
    rows = np.concatenate([np.zeros(0, np.int64), *kept])
    if not rules.drop_duplicates:
        return rows, Dropped(long, 0, overlap, first_overlap)
    _, firsts = np.unique(np.concatenate([np.zeros(0, np.uint64), *seen]), return_index=True)
    return rows[np.sort(firsts)], Dropped(long, len(rows) - len(firsts), overlap, first_overlap)


def remembered(folder: Path, identity: Sequence[object], held_out: np.ndarray,
               work: Callable[[], tuple[np.ndarray, Dropped]]) -> Scanned:
    """The result of ``work``, from the file in ``folder`` if it was done for the same ``identity``, which is JSON-able,
    and the same held-out texts. Raises what ``work`` raises, and ConfigError for a folder that cannot be written."""
    digest = hashlib.sha256(json.dumps([_FORMAT, *identity]).encode())
    digest.update(held_out.tobytes())
    rows_file, result = (derived.path(folder, "scan", digest.hexdigest(), suffix) for suffix in (".npy", ".json"))
    try:
        return _read(rows_file, result)
    except (OSError, EOFError, TypeError, ValueError):  # there is none, or none that can be read
        rows, dropped = work()
    try:
        derived.write(rows_file, lambda file: np.save(file, rows))
        derived.write(result, json.dumps(asdict(dropped)))  # says that both are complete
        return _read(rows_file, result)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written: {e.strerror or e}", hint="run_dir must be a folder with room"
                          ) from e


def _read(rows_file: Path, result: Path) -> Scanned:
    dropped = Dropped(**json.loads(result.read_bytes()))
    return Scanned(np.load(rows_file, mmap_mode="r") if dropped.total else None, dropped)
