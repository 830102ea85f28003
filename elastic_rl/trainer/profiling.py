"""Profiles of chosen steps on chosen ranks: traces of torch's profiler, and snapshots of CUDA's memory.

A profile is an aid: what fails in it is logged, and the step is made as without it. Files are written in a thread of
their own while the rank goes on, since the other ranks would wait for it in their next collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from elastic_rl.config.trainer import TrainerConfig
from elastic_rl.runtime.files import delete_oldest
from elastic_rl.trainer.progress import Phase

log = logging.getLogger(__name__)

MAX_FILES = 64
"""So many files of profiles are kept on a host; the oldest are deleted."""
_MEMORY_EVENTS = 100_000
"""Allocations and frees of a step that a snapshot has, the newest ones, each with its stack."""
_CLOSE_S = 30.0


class StepProfiler:
    """Profiles the chosen steps of one rank. For the rank's thread alone."""

    def __init__(self, cfg: TrainerConfig, folder: Path, group: str, rank: int, *, cuda: bool,
                 written: Callable[[Path], None] = lambda path: None) -> None:
        """``folder``: of the job's profiles on this host. ``written``: called in another thread with each file."""
        self._steps = frozenset(cfg.profile_steps) if rank in cfg.profile_ranks else frozenset[int]()
        self._kinds, self._cuda, self._folder, self._written = cfg.profile, cuda, folder, written
        self._part_of = f"{group}-rank-{rank}"
        self._writer: threading.Thread | None = None

    @contextlib.contextmanager
    def step(self, phase: Phase, step: int, piece: str = "") -> Iterator[None]:
        """Profiles what the block does, where this step is chosen. ``piece``: what of the step it is; empty: all. A
        step that is made again replaces its files; what comes while the files of another profile are still being
        written is left out. Raises what the block raises."""
        if step not in self._steps or self._busy(phase, step):
            yield
            return
        name = f"{phase}-step-{step:06d}{f'-{piece}' if piece else ''}-{self._part_of}"
        writes, written = list[tuple[Path, Callable[[str], object]]](), list[Path]()
        try:
            with contextlib.ExitStack() as stack:
                if "memory" in self._kinds and self._cuda:
                    stack.enter_context(self._memory(self._folder / f"{name}.memory.pickle", written))
                if "trace" in self._kinds:
                    stack.enter_context(self._trace(self._folder / f"{name}.trace.json.gz", writes))
                yield
        finally:  # also of a step that fails, such as one that needs too much memory
            if writes or written:
                self._writer = threading.Thread(target=self._finish, args=(writes, written), name="profile-writer",
                                                daemon=True)
                self._writer.start()

    def close(self) -> None:
        """Waits, for a while, until the last file is written."""
        if self._writer is not None:
            self._writer.join(_CLOSE_S)

    def _busy(self, phase: Phase, step: int) -> bool:
        busy = self._writer is not None and self._writer.is_alive()
        if busy:
            log.warning("step %d (%s) is not profiled: the files of another profile are being written", step, phase)
        return busy

    @contextlib.contextmanager
    def _trace(self, path: Path, writes: list[tuple[Path, Callable[[str], object]]]) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU, *(
            [torch.profiler.ProfilerActivity.CUDA] if self._cuda else [])]
        profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        begun = _tried("the profiler does not start", profile.start)
        try:
            yield
        finally:
            if begun and _tried("the profiler does not stop", profile.stop):
                writes.append((path, profile.export_chrome_trace))

    @contextlib.contextmanager
    def _memory(self, path: Path, written: list[Path]) -> Iterator[None]:
        memory: Any = torch.cuda.memory  # the functions have no public names
        begun = _tried("the memory is not recorded", lambda: memory._record_memory_history(max_entries=_MEMORY_EVENTS))
        try:
            yield
        finally:
            if begun:  # of what is allocated now: it cannot wait for a thread
                written += self._write([(path, memory._dump_snapshot)])
                _tried("the memory is still recorded", lambda: memory._record_memory_history(enabled=None))

    def _finish(self, writes: list[tuple[Path, Callable[[str], object]]], written: list[Path]) -> None:
        for path in [*written, *self._write(writes)]:
            self._written(path)

    def _write(self, writes: list[tuple[Path, Callable[[str], object]]]) -> list[Path]:
        """Returns the files that are there."""
        found = list[Path]()
        for path, write in writes:
            partial = path.with_name(f".{path.name}")  # torch packs by the end of the name
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write(str(partial))
                os.replace(partial, path)
                delete_oldest(self._folder, "[!.]*.*", MAX_FILES)
            except (OSError, RuntimeError) as e:
                log.warning("the profile %s is not written: %s", path, e)
                with contextlib.suppress(OSError):
                    partial.unlink()
                continue
            log.info("profile: %s", path)
            found.append(path)
        return found


def _tried(what: str, call: Callable[[], object]) -> bool:
    """Whether a call of torch's returned: a profiler may lack the driver's permission, or be in use by another tool."""
    try:
        call()
    except Exception as e:  # whatever it is, the step matters more
        log.warning("%s: %s: %s", what, type(e).__name__, e)
        return False
    return True
