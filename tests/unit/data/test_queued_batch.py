"""A batch whose samples are in the queue is, for whoever reads it, the batch that has them itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.data.batch import SCHEMA, Batch, collate
from elastic_rl.data.queue import queued_batch
from elastic_rl.data.queue.queued_batch import QueuedBatch, QueuedShare, batch_of
from elastic_rl.data.queue.step_groups import SampleRef, StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import ConfigError, GroupsLost, QueueUnavailable
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.training_batch import TrainingBatches
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.service.shares import Shares


class Elsewhere:
    """The samples of groups as those of another process. A ``StepReader``."""

    is_local = False
    address: dict[str, Any] = {"at": "test"}

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = {group.ordinal: group for group in groups}
        self.reads: list[list[SampleRef]] = []
        self.failures = 0

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        if self.failures:
            self.failures -= 1
            raise QueueUnavailable("away")
        self.reads.append(list(refs))
        if lost := [ordinal for ordinal, _ in refs if ordinal not in self.groups]:
            raise GroupsLost("gone", lost)
        return [(self.groups[ordinal].prompt, self.groups[ordinal].samples[index]) for ordinal, index in refs]

    def require(self, refs: Sequence[SampleRef]) -> None:
        pass


def queued(groups: Sequence[Group]) -> tuple[StepGroups, Elsewhere]:
    held, reader = StepGroups.from_groups(groups), Elsewhere(groups)
    return StepGroups(held.groups, reader), reader


def sample(reward: float, *turns: tuple[int, ...], rewards: Sequence[float] = ()) -> Sample:
    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        segments += [Segment((7, 8), loss=False)] if i else []
        segments.append(Segment(turn, tuple(-0.5 - 0.1 * t for t in turn), version=1 + i))
    return Sample(tuple(segments), "stop", reward, turn_rewards=tuple(rewards))


GROUPS = (Group(4, Prompt((1, 2, 3)), (sample(1.0, (4, 5), (6,), rewards=(0.25, 0.5)), sample(0.0, (4,)))),
          Group(2, Prompt((1,)), (sample(0.0, (2, 2, 2)), sample(3.0, (5, 4), (3, 2)))))
tokens = st.lists(st.integers(0, 9), max_size=6).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids, loss = draw(tokens), draw(st.booleans())
    return Segment(ids, tuple(-0.1 * (i + 1) for i in ids) if loss else (), loss, int(loss))


groups = st.lists(st.lists(st.lists(segments(), max_size=4), min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda found: [Group(n, Prompt((1,) * (1 + n)), tuple(Sample(tuple(s), reward=float(i))
                                                          for i, s in enumerate(group)))
                   for n, group in enumerate(found)])


def same(found: Batch, wanted: Batch) -> None:
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found[name], tensor), name


@settings(max_examples=seeds(40), deadline=None)
@given(groups, st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_share_that_a_rank_reads_is_the_one_that_would_be_sent(groups: list[Group], replicas: int, piece: int,
                                                                scored: bool) -> None:
    held, (elsewhere, reader) = StepGroups.from_groups(groups), queued(groups)
    advantages = [0.5 * n for n in range(len(held.samples))]
    sent, referred = batch_of(held, advantages), batch_of(elsewhere, advantages)
    assert isinstance(referred, QueuedBatch) and not reader.reads
    if scored:
        values = torch.rand(sent.loss_tokens)
        sent, referred = sent.with_tensors(values=values), referred.with_tensors(values=values)
    assert (referred.samples, referred.loss_tokens) == (sent.samples, sent.loss_tokens)
    assert torch.equal(referred.sample_bytes, sent.sample_bytes)
    for rows, own in zip(sent.share_rows(replicas), referred.share_rows(replicas), strict=True):
        assert torch.equal(rows, own)
        share = QueuedShare.from_bytes(referred.rows(rows).to_bytes())
        assert share is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queued_batch, "_PIECE_TOKENS", piece)
            same(share.read(reader), sent.rows(rows))
    values_of = [torch.rand(sent.rows(rows).loss_tokens) for rows in sent.share_rows(replicas)]
    assert torch.equal(referred.joined(sent.share_rows(replicas), values_of),
                       sent.joined(sent.share_rows(replicas), values_of))


def test_share_has_the_tensors_that_the_batch_has_and_no_others() -> None:
    held, (elsewhere, reader) = StepGroups.from_groups(GROUPS), queued(GROUPS)
    for choose in (lambda b: b.only("tokens", "lengths", "loss_mask"), lambda b: b.without("old_logprobs", "versions"),
                   lambda b: b.without_loss(torch.tensor([1, 3])), lambda b: b.without_loss(torch.arange(4))):
        sent, referred = choose(batch_of(held, [0.0] * 4)), choose(batch_of(elsewhere, [0.0] * 4))
        assert {name for name in SCHEMA if name in referred} == set(sent.tensors)
        rows = torch.arange(4)
        share = QueuedShare.from_bytes(referred.rows(rows).to_bytes())
        assert share is not None
        same(share.read(reader), sent.rows(rows))
        same(referred.loaded(), sent)
    with pytest.raises(ConfigError, match="no tensor 'values'"):
        batch_of(elsewhere).only("values")
    with pytest.raises(ConfigError, match="must be torch.float32"):
        batch_of(elsewhere).with_tensors(values=torch.zeros(11, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"but L is 11"):
        batch_of(elsewhere).with_tensors(values=torch.zeros(12))


class Roles:
    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return rewards

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores | None]:
        import numpy as np

        return [TokenScores(np.array([-0.1 * t for t in s.token_ids[s.first:]], np.float32),
                            np.tile(np.arange(top, dtype=np.int32), (len(s.token_ids) - s.first, 1)),
                            np.full((len(s.token_ids) - s.first, top), -1.5, np.float32)) for s in sequences]


class Passes:
    def _of(self, batch: Batch, scale: float) -> torch.Tensor:
        read = batch.loaded()  # as the ranks do
        return (scale * read["tokens"])[read["loss_mask"]]

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of(batch, 0.1)

    def trainer_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of(batch, -0.3)

    def reference_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of(batch, -0.2)


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "groups of their own": {"algorithm": {"name": "grpo", "tis_cap": 2.0, "kl_coef": 0.1},
                            "train": {"updates_per_step": 2}, "actor_fwd": {"enabled": True},
                            "reference": {"enabled": True}},
    "divergence in rewards": {"algorithm": {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}},
    "critic": {"algorithm": {"name": "ppo", "options": {"gae_lambda": 0.7}, "kl_coef": 0.1, "kl_in": "reward",
                             "kl_estimator": "k1"}},
    "teacher": {"algorithm": {"name": "on_policy_distillation", "teacher": "teacher", "teacher_top_k": 3},
                "pools": {"teacher": {"model": "/models/teacher"}}},
}
READS = {"grpo": 0}
"""Number of reads from the controller, by algorithm."""


def made(cfg: config.Config, groups: StepGroups) -> Any:
    batches = TrainingBatches(cfg, Roles(), Waits(lambda *_: None, threading.Event()), 16,  # type: ignore[arg-type]
                              Passes())
    found = batches.make(groups, 5, StepTimer())
    batches.close()
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_step_is_trained_on_the_same_wherever_its_samples_are(name: str) -> None:
    cfg, (elsewhere, reader) = config.parse(SETTINGS[name]), queued(GROUPS)
    reader.failures = 2  # it is waited for
    held, referred = made(cfg, StepGroups.from_groups(GROUPS)), made(cfg, elsewhere)
    assert referred.advantages == held.advantages and referred.metrics == held.metrics
    assert len(reader.reads) == READS.get(name, len(reader.reads))
    assert "tokens" in referred.batch.stored.names, "the ranks read these"
    reader.failures = 0
    same(referred.batch.loaded(), held.batch)


def test_batch_for_rl_of_empty_responses_has_the_tensors_of_any_other() -> None:
    """A group is tried alone, and a part may be of one group: what a rank needs may not depend on the samples."""
    empty = [Group(1, Prompt((1, 2)), (Sample((Segment((), (), True, 3),)),) * 2)]
    usual = batch_of(StepGroups.from_groups(GROUPS), [0.0] * 4)
    for made in (batch_of(StepGroups.from_groups(empty), [0.0] * 2), batch_of(queued(empty)[0], [0.0] * 2).loaded(),
                 collate([(empty[0].prompt, s) for s in empty[0].samples], [0.0] * 2)):
        assert made.tensors.keys() == usual.tensors.keys() and made.loss_tokens == 0 == len(made["old_logprobs"])
    for groups in (StepGroups.from_groups(empty), queued(empty)[0]):  # as for a divergence that is a part of the reward
        assert batch_of(groups)["old_logprobs"].shape == (0,)


def test_lost_groups_end_the_wait_for_the_queue() -> None:
    elsewhere, reader = queued(GROUPS)
    del reader.groups[2]
    with pytest.raises(GroupsLost) as lost:
        made(config.parse(SETTINGS["critic"]), elsewhere)
    assert lost.value.ordinals == (2, 2)


def test_tensors_are_read_in_pieces_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_batch, "_PIECE_TOKENS", 10)
    elsewhere, reader = queued(GROUPS)
    held = batch_of(StepGroups.from_groups(GROUPS))
    batch = batch_of(elsewhere)
    assert torch.equal(batch["old_logprobs"], held["old_logprobs"])
    lengths = dict(zip(elsewhere.refs, held["lengths"].tolist(), strict=True))
    assert [ref for read in reader.reads for ref in read] == elsewhere.refs and len(reader.reads) > 1
    assert all(len(read) == 1 or sum(lengths[ref] for ref in read) <= 10 for read in reader.reads)
    before = len(reader.reads)
    assert torch.equal(batch.without("versions")["loss_mask"], held["loss_mask"]) and len(reader.reads) == before


def test_other_samples_than_those_of_the_batch_are_refused() -> None:
    elsewhere, reader = queued(GROUPS)
    share = QueuedShare.from_bytes(batch_of(elsewhere).rows(torch.arange(4)).to_bytes())
    reader.groups[2] = Group(2, Prompt((1,)), (sample(0.0, (2,)), sample(3.0, (5,))))
    assert share is not None
    with pytest.raises(ConfigError, match="other samples"):
        share.read(reader)


def test_lengths_of_a_share_cannot_be_summed_to_a_small_number() -> None:
    elsewhere, reader = queued(GROUPS)
    batch = batch_of(elsewhere).rows(torch.arange(4))
    share = QueuedShare.from_bytes(batch.to_bytes())
    assert share is not None and share.read_bytes == int(batch["lengths"].sum()) * 9
    share = replace(share, tensors={**share.tensors, "lengths": torch.tensor([3, 1 << 62, 1 << 62, 1])})
    with pytest.raises(ConfigError, match="needs the length of each sample"):
        share.read_bytes  # noqa: B018
    with pytest.raises(ConfigError, match="needs the length of each sample"):
        share.read(reader)


def test_rank_refuses_a_share_in_the_queue_that_is_too_large_before_it_reads_it() -> None:
    long = Group(1, Prompt((1,)), (sample(0.0, (2,) * 200_000),))
    raw = batch_of(queued([long])[0]).to_bytes()
    cfg = config.parse({"trainer": {"share_piece_bytes": 1 << 20}})
    shares = Shares(cfg, needs=[], vocab=10)
    shares._samples = Unread()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"has up to 1800009 bytes; the limit is 1048576"):
        shares.take(raw)


class Unread:
    def at(self, address: object) -> object:
        raise AssertionError("it is read")


@pytest.mark.parametrize("ref", ["1e999", "-1e999", "[1]", "null", "NaN"])
def test_share_whose_references_are_no_numbers_is_refused(ref: str) -> None:
    elsewhere, _ = queued(GROUPS)
    [row, *_] = elsewhere.refs
    raw = batch_of(elsewhere).rows(torch.arange(4)).to_bytes()
    own = f"[[{row[0]}, {row[1]}]".encode()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8:8 + size].replace(own, f"[[{ref}, {row[1]}]".encode(), 1)
    assert header != raw[8:8 + size]
    with pytest.raises(ConfigError, match="no share of a batch"):
        QueuedShare.from_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size:])


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(0, 1 << 16), st.binary(max_size=8))
def test_share_that_is_none_is_refused_with_a_typed_error(at: int, other: bytes) -> None:
    elsewhere, reader = queued(GROUPS)
    raw = batch_of(elsewhere, [0.0] * 4).rows(torch.arange(4)).to_bytes()
    at %= len(raw)
    changed = raw[:at] + other + raw[at + len(other):]
    try:
        share = QueuedShare.from_bytes(changed)
        if share is not None and share.read_bytes > 1 << 20:  # a rank refuses what is too large before it reads it
            return
        batch = Batch.from_bytes(changed) if share is None else share.read(reader)
    except (ConfigError, GroupsLost):
        return
    except IndexError:  # of a sample that its group does not have: the real reader says that it is lost
        return
    assert batch.samples == 4
