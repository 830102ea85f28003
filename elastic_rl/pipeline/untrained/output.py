"""The committed state of a job that trains nothing, in the place of a trainer's: what its output consists of.

    piece on disk ──▶ transaction under the actor's term that names it and counts its groups as consumed

A crash before the transaction leaves a piece that no record names: it is no part of the output, its groups are sampled
again, and the next term sweeps it. A crash after it loses nothing. An actor that has been replaced can write pieces,
under names of its own, and no record. So each group is in the output once, or dropped on the record (I5).
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from elastic_rl.data.ledger import ConsumedGroups, Consumption
from elastic_rl.errors import Conflict, OutputFailed, RecordUnreadable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import OutputState
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.pipeline.untrained.pieces import Piece, PieceFolder, sweep_partial
from elastic_rl.runtime.files import replace_file


class Policy(Protocol):
    """What engines sample with (``BasePolicy``)."""

    def version(self) -> int:
        """Number of the newest version; there is one once this returns."""

    def publish(self) -> int:
        """Number of a new version of the same weights."""


@dataclass(frozen=True)
class OutputStatus:
    """The committed state of the output, with the names of ``TrainerStatus``."""

    phase: str
    step: int
    policy_version: int
    cursor: Mapping[str, Any]
    consumed: ConsumedGroups


class Output:
    """The output of one job, as one term of its actor writes it. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, writer: FencedWriter, policy: Policy, *, mode: str, term: int,
                 file: Path, alive: Callable[[], None] = lambda: None) -> None:
        """``writer``: of this term. ``file``: where all lines are at the end; pieces are in a folder of its name
        without suffix, and the summary has the suffix .json. ``alive``: called during long work; may raise."""
        self._etcd, self._key, self._writer, self._policy = etcd, keys.output(), writer, policy
        self._mode, self._term, self._file, self._alive = mode, term, file, alive
        self._pieces = PieceFolder(file.with_suffix(""))
        self._state = OutputState()
        self._revision = 0
        """Revision of the record in etcd; 0: there is none."""
        self._republished: int | None = None
        """A version that was published again and is not yet in the record: the answer of etcd may be lost."""
        self._joined = False

    @property
    def policy_version(self) -> int:
        """The newest version that the job has published."""
        return self._state.policy_version

    @property
    def consumed(self) -> ConsumedGroups:
        """The groups whose samples are in the output, or were dropped."""
        return ConsumedGroups.from_json(self._state.consumed)

    def resume(self) -> OutputStatus:
        """What is committed, once there is a policy to sample with. Deletes what earlier terms left behind.

        Raises Fenced, EtcdUnavailable, OutputFailed, RecordUnreadable, and what the policy raises."""
        found = self._etcd.get(self._key)
        self._republished, self._joined = None, False
        if found is None:
            self._revision = 0
            self._commit(OutputState(policy_version=self._policy.version()))
        else:
            try:
                self._state, self._revision = OutputState.decode(found.value), found.mod_revision
            except ValidationError as e:
                # Without it the job would begin again, and have each prompt twice.
                raise RecordUnreadable(f"{self._key} cannot be decoded, so it is not known what the output consists of",
                                       hint="restore it, or begin a new job") from e
        self._writer.require()  # an older term's look at the record may be too old to sweep by
        if not self._state.complete:
            self._pieces.require(self._named())  # a folder that is gone is found now, and not at the end
        self._pieces.sweep(self._is_named, self._term)
        state = self._state
        return OutputStatus(self._mode, state.step, state.policy_version, state.cursor, self.consumed)

    def commit(self, step: int, lines: Iterable[bytes], consumption: Consumption, cursor: Mapping[str, Any]) -> None:
        """Adds the lines of a step, each with its newline. May be repeated, with the same arguments, after any error.

        Raises Conflict when the step does not follow, or a group is consumed already: resume. Raises Fenced,
        EtcdUnavailable and OutputFailed."""
        state = self._state
        if step != state.step + 1:
            raise Conflict(f"step {step} does not follow: the output is at step {state.step}",
                           hint="resume from the output's state")
        consumed = self.consumed
        consumed.check(consumption)
        self._pieces.write(Piece(step, self._term), lines)
        mine = bool(state.pieces) and state.pieces[-1][1] == self._term
        self._commit(state.replace(
            step=step, consumed=consumed.add(consumption).to_json(), cursor=dict(cursor),
            pieces=state.pieces if mine else [*state.pieces, (step, self._term)]))

    def publish_again(self) -> int:
        """Number of a new version of the same weights, for engines that cannot get the last one. May be repeated.
        Raises Conflict: resume; and as ``resume``."""
        if self._republished is None:
            self._republished = self._policy.publish()
        self._commit(self._state.replace(policy_version=self._republished))
        self._republished = None
        return self._state.policy_version

    def complete(self, summarise: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
        """Makes one file of all pieces, and a summary of it beside it; the pieces are deleted. Returns the summary. May
        be repeated.

        Raises Fenced, EtcdUnavailable, OutputFailed, and what ``summarise`` raises."""
        summary = self._file.with_suffix(".json")
        if not self._state.complete:
            if not self._joined:
                self._join(summary, summarise)
                self._joined = True
            self._commit(self._state.replace(complete=True))
        self._pieces.sweep(self._is_named, self._term)
        for target in (self._file, summary):
            sweep_partial(target, self._term)
        try:
            return dict(json.loads(summary.read_bytes()))
        except (OSError, ValueError) as e:
            raise OutputFailed(f"{summary} cannot be read: {e}", hint="restore it") from e

    def _join(self, summary: Path, summarise: Callable[[Path], Mapping[str, Any]]) -> None:
        self._pieces.join(self._named(), self._file, alive=self._alive, term=self._term)
        text = json.dumps(summarise(self._file), indent=2) + "\n"
        try:
            replace_file(summary, text, mark=str(self._term), durable=True)
        except OSError as e:
            raise OutputFailed(f"{summary} cannot be written: {e.strerror or e}", hint="make room") from e

    # -- state --------------------------------------------------------------------------------------------------------
    def _named(self) -> Iterator[Piece]:
        """The pieces of the output, by step."""
        for n, (first, term) in enumerate(self._state.pieces):
            after = self._state.pieces[n + 1][0] if n + 1 < len(self._state.pieces) else self._state.step + 1
            for step in range(first, after):
                yield Piece(step, term)

    def _is_named(self, piece: Piece) -> bool:
        state = self._state
        at = bisect.bisect_right(state.pieces, piece.step, key=lambda entry: entry[0]) - 1
        return not state.complete and at >= 0 and piece.step <= state.step and state.pieces[at][1] == piece.term

    def _commit(self, new: OutputState) -> None:
        """Raises Conflict when the record is neither the one that this is based on nor, since the answer to an earlier
        attempt was lost, this one."""
        value = new.encode()
        done = self._writer.txn([Compare.mod(self._key, "==", self._revision)], [Op.put(self._key, value)],
                                [Op.get(self._key)])
        found = done.get(self._key)
        if not done.succeeded and (found is None or found.value != value):
            raise Conflict("the state of the output was changed by somebody else", hint="resume from it")
        self._state, self._revision = new, done.revision if done.succeeded or found is None else found.mod_revision
