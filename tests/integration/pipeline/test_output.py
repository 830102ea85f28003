"""The output of a job that trains nothing, on a real etcd and a real folder: whatever is interrupted between two
writes, and whoever takes over meanwhile, each group is in it once or dropped on the record."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import Conflict, EtcdUnavailable, Fenced, OutputFailed, RecordUnreadable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import OutputState
from elastic_rl.etcd.transaction import TxnResult
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.schedule import Lost, RunPlan, State
from elastic_rl.pipeline.untrained.output import Output
from elastic_rl.pipeline.untrained.pieces import Piece, PieceFolder
from elastic_rl.runtime import files

GROUPS = 11
PLAN = RunPlan.of(config.parse({"mode": "rejection_sampling", "train": {"prompts_per_step": 3},
                             "trainer": {"data_parallel": 1}}), GROUPS)


class Killed(BaseException):
    """The actor's process ends here."""


class OnePolicy:
    """One version, as long as nobody needs another."""

    def __init__(self) -> None:
        self.published = 1

    def version(self) -> int:
        return self.published

    def publish(self) -> int:
        self.published += 1
        return self.published


@dataclass
class Interruption:
    """What happens at one of the places where an actor may be interrupted."""

    kill: bool
    """Whether the actor ends there. If not, it is only slow, and goes on afterwards."""
    steps: int
    """Effects that an actor which takes over there carries out before the interrupted one goes on."""


class World:
    """Actors of one job, one after the other and at once."""

    def __init__(self, etcd: EtcdClient, folder: Path, interruptions: dict[int, Interruption]) -> None:
        self.etcd, self.keys, self.file = etcd, Keys(f"output-{secrets.token_hex(4)}"), folder / "kept.jsonl"
        self.epoch = fencing.raise_epoch(etcd, self.keys, "test").number
        self.policy, self.generations = OnePolicy(), itertools.count()
        self.places, self.interruptions = 0, interruptions
        self.current: Iterator[None] | None = None
        self.fenced = 0
        self.finished = False

    def place(self) -> None:
        """An actor may be interrupted here."""
        self.places += 1
        found = self.interruptions.get(self.places)
        if found is None:
            return
        self.current = self.actor()
        for _ in range(found.steps):
            if next(self.current, self) is self:
                break
        if found.kill:
            raise Killed

    def actor(self) -> Iterator[None]:
        term = fencing.begin_term(self.etcd, self.keys, self.epoch, "actor")
        writer = _Writer.of_term(self.etcd, self.keys, self.epoch, term)
        writer.place = self.place
        output = Output(self.etcd, self.keys, writer, self.policy, mode=PLAN.mode, term=term, file=self.file)
        steps = schedule.run_sampled(PLAN)
        effect = next(steps)
        while True:
            try:
                outcome = self.perform(output, effect)
            except Conflict as e:
                effect = steps.throw(Lost(str(e)))
                continue
            except OutputFailed:  # its successor has swept what it was writing: the loop looks at the fence, and waits
                writer.require()
                continue
            yield
            try:
                effect = steps.send(outcome)
            except StopIteration:
                self.finished = True
                return

    def perform(self, output: Output, effect: schedule.Effect) -> Any:
        match effect:
            case schedule.Resume():
                found = output.resume()
                return State(found.phase, found.step, found.policy_version, found.consumed.groups, found.cursor)
            case schedule.SampleGroups(ordinals=ordinals):
                return [(group(o), "uniform" if o % 4 == 3 else "") for o in ordinals]
            case schedule.Write(step=step, groups=groups, consumption=consumption, cursor=cursor):
                generation = next(self.generations)
                lines = [json.dumps({"ordinal": g.ordinal, "generation": generation}).encode() + b"\n" for g in groups]
                new = {**cursor, "lines": len(lines)}
                output.commit(step, lines, consumption, new)
                return new
            case schedule.Complete():
                output.complete(lambda file: {"lines": len(file.read_bytes().splitlines())})
        return None

    def run(self) -> None:
        for _ in range(1000):
            if self.finished:
                return
            if self.current is None:
                self.current = self.actor()
            me = self.current
            try:
                if next(me, self) is self and self.current is me:
                    self.current = None
            except Killed:
                if self.current is me:
                    self.current = None
            except Fenced:
                self.fenced += 1
                assert self.current is not me, "the newest actor was fenced off"
        raise AssertionError("the job did not finish")

    def check(self) -> None:
        rows = [json.loads(line) for line in self.file.read_bytes().splitlines()]
        assert [row["ordinal"] for row in rows] == [o for o in range(GROUPS) if o % 4 != 3], "once each, in order"
        for step in range(0, GROUPS, 3):
            assert len({row["generation"] for row in rows if row["ordinal"] // 3 == step // 3}) <= 1, "a torn step"
        state = OutputState.decode(self.etcd.get(self.keys.output()).value)  # type: ignore[union-attr]
        assert state.consumed == {"groups": [[0, GROUPS]], "trained": len(rows), "dropped": {"uniform": 2}}
        assert state.complete and state.step == PLAN.steps == 4
        assert json.loads(self.file.with_suffix(".json").read_bytes()) == {"lines": len(rows)}


class _Writer(FencedWriter):
    place: Any

    def txn(self, *args: Any, **named: Any) -> TxnResult:
        self.place()
        done = super().txn(*args, **named)
        self.place()
        return done


def group(ordinal: int) -> Group:
    return Group(ordinal, Prompt((1,)), (Sample((Segment((2,), (-0.1,), version=1),)),))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """The world in which every fsync is a place; the last one that was put in."""
    worlds: list[World] = []
    fsync = os.fsync

    def place(fd: int) -> None:
        fsync(fd)
        worlds[-1].place()

    monkeypatch.setattr(files.os, "fsync", place)
    return worlds


def play(etcd: EtcdClient, hooked: list[World], interruptions: dict[int, Interruption]) -> World:
    folder = Path(tempfile.mkdtemp())
    try:
        world = World(etcd, folder, interruptions)
        hooked.append(world)
        world.run()
        world.check()
        left = sorted(p.name for p in folder.rglob("*"))
        late = [name for name in left if name not in ("kept.json", "kept.jsonl")]
        assert not late or world.fenced, f"left behind: {late}"
        return world
    finally:
        shutil.rmtree(folder)


def test_output_is_whole_whichever_write_the_actor_dies_at(etcd: EtcdClient, hooked: list[World]) -> None:
    places = play(etcd, hooked, {}).places
    assert places > 20
    for place in range(1, places + 1):
        play(etcd, hooked, {place: Interruption(kill=True, steps=0)})


def test_output_is_whole_whoever_takes_over_from_an_actor_that_goes_on(etcd: EtcdClient, hooked: list[World]) -> None:
    places, fenced = play(etcd, hooked, {}).places, 0
    for place in range(1, places):
        fenced += play(etcd, hooked, {place: Interruption(kill=False, steps=2 + place % 9)}).fenced
    assert fenced > places / 2, "actors went on after they had been replaced"


@given(st.dictionaries(st.integers(1, 80), st.builds(Interruption, st.booleans(), st.integers(0, 30)), max_size=6))
@settings(max_examples=seeds(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_is_whole_whatever_interrupts_it(etcd: EtcdClient, hooked: list[World],
                                                interruptions: dict[int, Interruption]) -> None:
    play(etcd, hooked, interruptions)


def _output(etcd: EtcdClient, keys: Keys, folder: Path, *, epoch: int = 0) -> Output:
    epoch = epoch or fencing.raise_epoch(etcd, keys, "test").number
    term = fencing.begin_term(etcd, keys, epoch, "actor")
    return Output(etcd, keys, FencedWriter.of_term(etcd, keys, epoch, term), OnePolicy(), mode="eval", term=term,
                  file=folder / "eval.jsonl")


def _consumption(*ordinals: int) -> Consumption:
    return Consumption(IntervalSet.from_values(ordinals))


def test_step_that_does_not_follow_or_repeats_a_group_is_refused(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    output = _output(etcd, keys, tmp_path)
    output.resume()
    output.commit(1, [b"1\n"], _consumption(0, 1), {})
    with pytest.raises(Conflict, match="does not follow"):
        output.commit(3, [b"3\n"], _consumption(2), {})
    with pytest.raises(Conflict, match="consumed already"):
        output.commit(2, [b"2\n"], _consumption(1, 2), {})


def test_weights_that_engines_cannot_get_are_published_again(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "test").number
    output = _output(etcd, keys, tmp_path, epoch=epoch)
    assert output.resume().policy_version == 1
    assert output.publish_again() == 2
    assert _output(etcd, keys, tmp_path, epoch=epoch).resume().policy_version == 2


def test_weights_are_not_published_once_more_when_the_answer_of_etcd_is_lost(
        etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    output = _output(etcd, keys, tmp_path)
    output.resume()
    write, lost = output._writer.txn, [True]

    def lose_an_answer(*args: Any) -> TxnResult:
        done = write(*args)
        if lost.pop() if lost else False:
            raise EtcdUnavailable("the answer is lost")
        return done

    output._writer.txn = lose_an_answer  # type: ignore[method-assign]
    with pytest.raises(EtcdUnavailable):
        output.publish_again()
    assert output.publish_again() == 2 and output.publish_again() == 3


def test_folder_that_is_gone_is_found_when_an_actor_resumes(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "test").number
    output = _output(etcd, keys, tmp_path, epoch=epoch)
    output.resume()
    for step in (1, 2):
        output.commit(step, [b"1\n"], _consumption(step), {})
    (tmp_path / "eval").rename(tmp_path / "elsewhere")
    successor = _output(etcd, keys, tmp_path, epoch=epoch)
    with pytest.raises(OutputFailed, match="the samples of step 1"):
        successor.resume()
    (tmp_path / "elsewhere").rename(tmp_path / "eval")
    assert successor.resume().step == 2


def test_output_that_is_joined_is_not_joined_again_while_etcd_is_away(
        etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    output = _output(etcd, keys, tmp_path)
    output.resume()
    output.commit(1, [b"1\n"], _consumption(0), {})
    write, summaries = output._writer.txn, list[Path]()

    def refuse(*_: Any) -> TxnResult:
        raise EtcdUnavailable("away")

    def summarise(file: Path) -> dict[str, Any]:
        summaries.append(file)
        return {}

    output._writer.txn = refuse  # type: ignore[method-assign]
    with pytest.raises(EtcdUnavailable):
        output.complete(summarise)
    output._writer.txn = write  # type: ignore[method-assign]
    output.complete(summarise)
    assert len(summaries) == 1 and (tmp_path / "eval.jsonl").read_bytes() == b"1\n"


def test_state_that_cannot_be_read_never_counts_as_none(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    etcd.put(keys.output(), b'{"step": "many"}')
    with pytest.raises(RecordUnreadable, match="not known what the output consists of"):
        _output(etcd, keys, tmp_path).resume()


def test_folder_that_cannot_be_written_is_an_error_that_may_pass(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    output = _output(etcd, keys, tmp_path)
    output.resume()
    (tmp_path / "eval").write_text("in the way")
    with pytest.raises(OutputFailed, match="make room"):
        output.commit(1, [b"1\n"], _consumption(0), {})
    (tmp_path / "eval").unlink()
    output.commit(1, [b"1\n"], _consumption(0), {})
    output.complete(lambda file: {})
    assert (tmp_path / "eval.jsonl").read_bytes() == b"1\n"


def test_committed_piece_that_is_gone_is_named(etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    output = _output(etcd, keys, tmp_path)
    output.resume()
    output.commit(1, [b"1\n"], _consumption(0), {})
    shutil.rmtree(tmp_path / "eval")
    with pytest.raises(OutputFailed, match="the samples of step 1"):
        output.complete(lambda file: {})
    assert not (tmp_path / "eval.jsonl").exists()


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), unique=True, max_size=12), st.integers(1, 5),
       st.data())
def test_sweep_deletes_what_is_not_kept_of_terms_up_to_its_own(written: Sequence[tuple[int, int]], term: int,
                                                              data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.sampled_from(written))) if written else set()
    with tempfile.TemporaryDirectory() as at:
        folder = PieceFolder(Path(at) / "pieces")
        for piece in written:
            folder.write(Piece(*piece), [b"x\n"])
            (Path(at) / "pieces" / f"{piece[0]:08d}-{piece[1]}.jsonl.partial").write_bytes(b"torn")
        folder.sweep(lambda piece: tuple(piece) in kept, term)
        found = Counter(p.name for p in (Path(at) / "pieces").glob("*")) if written else Counter()
        expected = [f"{s:08d}-{t}.jsonl" for s, t in written if (s, t) in kept or t > term]
        expected += [f"{s:08d}-{t}.jsonl.partial" for s, t in written if t > term]
        assert sorted(found) == sorted(expected)
