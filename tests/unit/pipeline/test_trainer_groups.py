"""The policy's and the critic's group as one (``training.trainers``): one that refuses, is lost, or cannot commit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from elastic_rl import config
from elastic_rl.config.groups import TrainerGroupSpec
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.branch import Branch
from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.dcs.catalog.pairs import pair_name
from elastic_rl.errors import ConfigError, Conflict, Fenced, StaleSamples, StepRefused, TrainerFailed, VersionNotFound
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.models.flops import SequenceCost
from elastic_rl.pipeline.training import trainers
from elastic_rl.pipeline.training.trainers import Trainers
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.service.client import TrainerStatus, Uploaded

_IDS = itertools.count()


@dataclass
class TrainerGroup:
    """A group by the rules of its service, without tensors, as its client shows it. ``refusals``: of its next calls of
    a name, in order. ``at_ready``: called when its status is asked for."""

    step: int = 7
    step_id: str = "a"
    formation: str = "1"
    refusals: dict[str, list[Exception]] = field(default_factory=dict)
    at_ready: Callable[[], object] = lambda: None
    calls: list[str] = field(default_factory=list)
    committed: list[bool] = field(default_factory=list)
    taken: str = ""
    version: int = 8
    on_wait: Callable[[str], None] = lambda what: None
    versions: tuple[int, ...] = ()
    """Versions of the samples of the last step."""
    uploaded: list[str] = field(default_factory=list)
    """Names of the tensors of the last batch."""
    checked: list[list[str]] = field(default_factory=list)
    """Names of the tensors of each batch that it was to check."""
    away: bool = False
    """Calls wait for ever."""

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if refusals := self.refusals.get(name):
            raise refusals.pop(0)

    def wait_ready(self) -> TrainerStatus:
        self.at_ready()
        self.taken = self.formation
        return TrainerStatus(self.formation, self.step, "rl", 8, 1, 0, {}, ConsumedGroups(),
                             pair_name(self.step, self.step_id), Branch(), ("url",), 1, SequenceCost(1.0, 0.0), 5, "")

    def require_same_group(self) -> None:
        if self.taken != self.formation:
            raise TrainerFailed("re-formed")

    def upload(self, batch: Batch) -> Uploaded:
        self._called("upload")
        self.uploaded = sorted(batch.tensors)
        return Uploaded(str(next(_IDS)), self.taken)

    def update(self, phase: str, step: int, batch: Uploaded, *, step_id: str, versions: Sequence[int] = (), **_: Any
               ) -> dict[str, Any]:
        self._called("update")
        self.versions = tuple(versions)
        self.require_same_group()
        if step != self.step + 1:
            raise Conflict(f"step {step} does not follow")
        self.step, self.step_id = step, step_id
        return {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-6, "value_clip_fraction": 0.0}

    def check(self, step: int, batch: Batch, phase: str = "rl") -> dict[str, Any]:
        self._called("check")
        self.checked.append(sorted(batch.tensors))
        return {}

    def discard(self, uploaded: Uploaded) -> None:
        self._called("discard")

    def load(self, version: int, phase: str, step: int) -> dict[str, Any]:
        self._called(f"load {version}")
        return {"loaded": False}

    def forget(self) -> None:
        self.taken = ""

    def forward_version(self, batch: Batch, step: int, at_least: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        self._called(f"forward {step} {at_least}")
        while self.away:
            self.on_wait("it to answer")
        return {"step": self.step, "version": self.version}, {"logprobs": batch["tokens"][batch["loss_mask"]].float()}

    def save(self, phase: str, step: int, **_: Any) -> dict[str, Any]:
        self._called("save")
        return {"committed": self.committed.pop(0) if self.committed else True}


@dataclass
class Pair:
    policy: TrainerGroup
    critic: TrainerGroup
    trainers: Trainers
    shown: list[tuple[str, str]]
    """Kinds and texts of what was waited for."""


def ready(monkeypatch: pytest.MonkeyPatch, groups: dict[str, TrainerGroup], cfg: config.Config,
          on_recovered: Callable[[str], None] = lambda group: None) -> tuple[Trainers, list[tuple[str, str]]]:
    assert [group.name for group in cfg.trainer_groups] == list(groups)
    def client(*_: Any, group: TrainerGroupSpec, on_wait: Callable[[str], None], **__: Any) -> TrainerGroup:
        groups[group.name].on_wait = on_wait
        return groups[group.name]

    monkeypatch.setattr(trainers, "TrainerClient", client)
    monkeypatch.setattr(Trainers, "_committed", lambda self, group: {})
    monkeypatch.setattr(trainers.reads, "list_versions", lambda *_: [_policy(5, 4)])
    shown: list[tuple[str, str]] = []
    waits = Waits(lambda stage, kind, what: shown.append((kind, what)), threading.Event())
    monkeypatch.setattr(waits, "pause", lambda seconds: None)
    made = Trainers(None, None, None, cfg, epoch=1, term=1,  # type: ignore[arg-type]
                    on_wait=lambda group, what: shown.append((group, what)), waits=waits, on_recovered=on_recovered)
    made.wait_ready()
    return made, shown


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    groups = {"trainer": TrainerGroup(), "critic": TrainerGroup()}
    return Pair(*groups.values(), *ready(monkeypatch, groups, config.parse({"algorithm": {"name": "ppo"}})))


def _policy(number: int, step: int) -> Version:
    return Version(stream="policy", number=number, state=VersionState.COMMITTED, epoch=1,
                   meta={"step": step, "phase": "rl"})


def _batch() -> Batch:
    batch = collate([(Prompt((1,)), Sample((Segment((2, 3), (-0.1, -0.1), version=1),)))], [0.0])
    return batch.with_tensors(values=torch.zeros(2), returns=torch.zeros(2))


def test_batch_that_one_group_does_not_take_is_trained_on_by_neither(pair: Pair) -> None:
    pair.critic.refusals["upload"] = [ConfigError("the share has too many bytes")]
    with pytest.raises(ConfigError, match="too many bytes"):
        pair.trainers.update("rl", 8, _batch())
    pair.policy.refusals["upload"] = [ConfigError("the share has too many bytes")]
    with pytest.raises(ConfigError, match="too many bytes"):
        pair.trainers.update("rl", 8, _batch())
    assert (pair.policy.step, pair.critic.step) == (7, 7)
    assert pair.critic.calls[-2:] == ["upload", "discard"], "shares that nobody will use"
    assert pair.critic.uploaded == ["lengths", "loss_mask", "numbers", "returns", "tokens", "values"], "by minibatches"
    pair.trainers.update("rl", 8, _batch())
    assert (pair.policy.step, pair.critic.step) == (8, 8) and pair.policy.step_id == pair.critic.step_id


def test_step_says_to_the_policys_group_which_versions_made_its_samples(pair: Pair) -> None:
    pair.policy.refusals["update"] = [StaleSamples("too old", [6])]
    with pytest.raises(StaleSamples):
        pair.trainers.update("rl", 8, _batch(), versions=[6, 7])
    assert pair.critic.step == 7, "nothing of the step is made"
    pair.trainers.update("rl", 8, _batch(), versions=[7, 8])
    assert (pair.policy.versions, pair.critic.versions) == ((7, 8), ())


def test_critic_that_refuses_the_policys_step_is_asked_again(pair: Pair) -> None:
    refused = ConfigError("a batch for a critic needs returns", hint="restart critic")
    pair.critic.refusals["update"] = [Conflict("not every rank has its share"), *[refused] * 5]
    metrics = pair.trainers.update("rl", 8, _batch())
    assert metrics["critic_loss"] == 0.5
    assert (pair.policy.step, pair.critic.step) == (8, 8) and pair.policy.step_id == pair.critic.step_id
    assert pair.policy.calls.count("update") == 1, "it goes back to nothing"
    assert pair.critic.calls.count("upload") == pair.critic.calls.count("update") == 7, "with shares for each attempt"
    assert any("critic refuses step 8" in what and "needs returns" in what for _, what in pair.shown)


def test_samples_are_checked_by_both_groups(pair: Pair) -> None:
    pair.trainers.check(8, _batch())
    [[of_policy], [of_critic]] = pair.policy.checked, pair.critic.checked
    assert not {"values", "returns"} & {*of_policy} and {"values", "returns"} <= {*of_critic}
    pair.critic.refusals["check"] = [StepRefused("the norm of the gradient is nan")]
    with pytest.raises(StepRefused):
        pair.trainers.check(8, _batch())


def test_samples_that_the_critic_cannot_compute_with_have_both_groups_go_back(pair: Pair) -> None:
    refused = StepRefused("the norm of the gradient is nan", hint="lower critic.train.lr")
    pair.critic.refusals["update"] = [refused]
    assert "critic_loss" in pair.trainers.update("rl", 8, _batch()), "it is asked once more"
    for _ in range(2):  # the samples are tried each time
        pair.critic.refusals["update"] = [refused] * 2
        with pytest.raises(StepRefused, match="critic cannot make step 9.*nan") as found:
            pair.trainers.update("rl", 9, _batch())
        assert found.value.went_back and not pair.critic.refusals["update"] and pair.critic.step == 8
        pair.policy.step = 8  # it has gone back
    pair.critic.refusals["update"] = [refused] * 20
    assert "critic_loss" in pair.trainers.update("rl", 9, _batch()), "going back has not helped"
    assert any(kind == "critic" and "is nan" in what for kind, what in pair.shown)


def test_critic_that_has_gone_back_itself_is_not_asked_again(pair: Pair) -> None:
    pair.critic.refusals["update"] = [StepRefused("the norm of the gradient is nan", went_back=True)]
    with pytest.raises(StepRefused) as found:
        pair.trainers.update("rl", 8, _batch())
    assert found.value.went_back and pair.critic.calls.count("update") == 1


def test_step_of_the_critic_whose_answer_was_lost_counts(pair: Pair) -> None:
    update = pair.critic.update

    def twice(*args: Any, **fields: Any) -> dict[str, Any]:
        update(*args, **fields)
        return update(*args, **fields)  # a Conflict: it does not follow

    pair.critic.update = twice  # type: ignore[method-assign]
    assert "critic_loss" not in pair.trainers.update("rl", 8, _batch()) and pair.critic.step == 8


@pytest.mark.parametrize("error", [TrainerFailed("a rank was lost"), Fenced("a newer actor")])
def test_loss_of_the_critic_and_a_newer_actor_end_the_step(pair: Pair, error: Exception) -> None:
    pair.critic.refusals["update"] = [error]
    with pytest.raises(type(error)) as found:
        pair.trainers.update("rl", 8, _batch())
    assert not isinstance(found.value, TrainerFailed) or found.value.group == "critic"


def test_critic_at_another_step_is_lost(pair: Pair) -> None:
    pair.critic.step = 5
    with pytest.raises(TrainerFailed, match="at step 5") as found:
        pair.trainers.update("rl", 8, _batch())
    assert found.value.group == "critic"


def test_policys_state_is_read_again_after_the_wait_for_the_critic(pair: Pair) -> None:
    """It re-forms at an older state meanwhile, with which the critic agrees: nothing is to be loaded."""
    pair.policy.step, pair.policy.step_id = 9, "b"

    def meanwhile() -> None:
        pair.policy.step, pair.policy.step_id, pair.policy.formation = 7, "a", "2"

    pair.critic.at_ready = meanwhile
    status = pair.trainers.wait_ready()
    assert (status.step, status.group) == (7, "2") and not pair.critic.calls and not pair.policy.calls


def test_groups_that_re_formed_are_known_also_the_one_that_nobody_missed(pair: Pair) -> None:
    assert pair.trainers.take_reformed() == set(), "the first formation is no loss"
    pair.policy.formation = pair.critic.formation = "2"
    pair.trainers.wait_ready()
    assert pair.trainers.take_reformed() == {"trainer", "critic"}
    pair.critic.formation = "3"
    pair.trainers.wait_ready()
    pair.trainers.wait_ready()
    assert pair.trainers.take_reformed() == {"critic"}


def test_unavailable_states_are_named_and_read_again_after_growing_pauses(pair: Pair,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds
        if clock[0] > 600:
            raise Fenced("enough")

    monkeypatch.setattr(trainers.time, "sleep", sleep)
    monkeypatch.setattr(trainers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Trainers, "_committed", lambda self, group: {3: "5/x"})
    pair.critic.step_id = "other"
    with pytest.raises(Fenced):
        pair.trainers.wait_ready()
    assert 2 <= pair.critic.calls.count("load 3") <= 12
    assert any("critic_state 3" in what for _, what in pair.shown)


def test_only_the_group_whose_commit_failed_commits_again(pair: Pair) -> None:
    pair.critic.committed = [False, False, True]
    assert [pair.trainers.save("rl", 7)["committed"] for _ in range(3)] == [False, False, True]
    assert (pair.policy.calls, pair.critic.calls) == (["save"], ["save"] * 3)
    pair.policy.committed = [False, True]
    assert [pair.trainers.save("rl", 7)["committed"] for _ in range(2)] == [False, True]
    assert pair.policy.calls.count("save") == 3, "a later save is another one"


def test_policy_that_re_formed_after_its_commit_is_lost(pair: Pair) -> None:
    pair.critic.committed = [False]
    assert not pair.trainers.save("rl", 7)["committed"]
    pair.policy.formation = "2"
    with pytest.raises(TrainerFailed, match="re-formed"):
        pair.trainers.save("rl", 7)


@dataclass
class Forward:
    policy: TrainerGroup
    reference: TrainerGroup
    trainers: Trainers
    shown: list[tuple[str, str]]
    recovered: list[str]


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    recovered: list[str] = []
    groups = {"trainer": TrainerGroup(), "reference": TrainerGroup(step=4, version=5)}
    cfg = config.parse({"algorithm": {"kl_coef": 0.1, "reference_every_steps": 4}, "reference": {"enabled": True}})
    return Forward(*groups.values(), *ready(monkeypatch, groups, cfg, recovered.append), recovered)


def test_lost_group_without_state_is_asked_again_without_a_rewind(forward: Forward) -> None:
    forward.reference.refusals["forward 4 5"] = [Conflict("no version after RL step 4 is committed"),
                                                 *[TrainerFailed("re-formed")] * 3]
    batch = _batch()
    assert torch.equal(forward.trainers.reference_logprobs(batch, 8), torch.tensor([2.0, 3.0]))
    assert forward.recovered == ["reference"] and not forward.policy.calls
    assert {kind for kind, what in forward.shown if "re-formed" in what} == {"reference"}
    forward.trainers.reference_logprobs(batch, 8)
    assert forward.recovered == ["reference"], "once for a loss"


@pytest.mark.parametrize("lost", [1, 5])
def test_version_that_nobody_has_any_more_is_published_again_and_computed_with(
        forward: Forward, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    asked: list[tuple[int, int]] = []

    def publish_again(step: int, version: int) -> None:
        asked.append((step, version))
        forward.trainers._version += 1
        now = forward.trainers._version
        forward.reference.refusals[f"forward 4 {now}"] = forward.reference.refusals.pop(f"forward 4 {version}")
        forward.reference.version = now
        monkeypatch.setattr(trainers.reads, "list_versions", lambda *_: [_policy(5, 4), _policy(now, 4)])

    forward.trainers._publish_again = publish_again
    forward.reference.refusals["forward 4 5"] = [VersionNotFound("no node has its chunks")] * lost
    batch = _batch()
    assert torch.equal(forward.trainers.reference_logprobs(batch, 8), torch.tensor([2.0, 3.0]))
    assert [step for step, _ in asked] == [4] * (1 if lost == 1 else 3) and asked[0] == (4, 5)
    assert any("no node has its chunks" in what for kind, what in forward.shown if kind == "reference")


def test_wait_for_a_stateless_group_ends_with_the_policys_group(forward: Forward) -> None:
    forward.reference.refusals["forward 4 5"] = [ConfigError("the share has too many bytes")]
    with pytest.raises(ConfigError, match="too many bytes"):
        forward.trainers.reference_logprobs(_batch(), 8)
    forward.policy.formation = "2"
    with pytest.raises(TrainerFailed, match="re-formed") as found:
        forward.trainers.reference_logprobs(_batch(), 8)
    assert found.value.group == "trainer"


def test_loss_of_the_policys_group_ends_the_wait_for_a_stateless_one(forward: Forward,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "_POLICY_LOOK_S", 0.0)
    forward.reference.away = True
    looks = iter(("1", "1", "2"))
    of_same = forward.policy.require_same_group

    def look() -> None:
        forward.policy.formation = next(looks, "2")
        of_same()

    forward.policy.require_same_group = look  # type: ignore[method-assign]
    with pytest.raises(TrainerFailed, match="re-formed") as found:
        forward.trainers.reference_logprobs(_batch(), 8)
    assert found.value.group == "trainer" and ("reference", "it to answer") in forward.shown
    assert not forward.recovered, "nobody has seen the reference compute again"


def test_batch_is_not_sent_before_its_version_is_committed(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = iter([[], [_policy(4, 4), _policy(6, 5)]])
    monkeypatch.setattr(trainers.reads, "list_versions", lambda *_: next(catalog, [_policy(5, 4)]))
    forward.trainers.reference_logprobs(_batch(), 8)
    assert forward.reference.calls == ["forward 4 5"] and next(catalog, None) is None
    assert any("no version of the policy after RL step 4 is committed" in what for _, what in forward.shown)


def test_answer_for_another_version_is_not_taken(forward: Forward) -> None:
    steps = iter((0, 4))
    forward.policy.require_same_group = lambda: setattr(  # type: ignore[method-assign]
        forward.reference, "step", next(steps))
    forward.trainers.reference_logprobs(_batch(), 8)
    assert forward.reference.calls == ["forward 4 5"] * 2
    assert any("answered for version 5 of step 0" in what for _, what in forward.shown)
