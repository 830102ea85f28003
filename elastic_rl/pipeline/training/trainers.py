"""The trainer groups of a job as one: the policy's, and beside it the critic's where the algorithm has one; and groups
that compute with the policy, off its ranks.

It has the methods of ``TrainerClient``, and keeps the two groups at a common step (``common_state`` has the rules):
``update`` has both make the step, ``save`` has both commit it, and ``wait_ready`` has the group that is ahead go back.

The policy makes a step before the critic does. Both learn from values that were computed before, so the order changes
no weight; but the policy's loss may be a user's and may fail, and then nothing of the step is made yet. Both groups
have taken their shares of the batch before either makes the step. A critic that refuses it all the same is asked again
until it does: it is at the step before, so there is nothing that either would have to go back from. But if it cannot
compute with the samples, asking again does not help: both go back to their last common state, and the step's groups are
tried with both (``check``) before it is made again. Where that has not helped twice, the run waits for a person.

A group that does not train has no state. When it is lost, what it was asked for is asked for again, without end:
nothing goes back. That ends only when the policy's group has re-formed, whose versions are others then.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from elastic_rl.config import Config
from elastic_rl.config.algorithm import reference_step
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, CRITIC, REFERENCE, TrainerGroupSpec
from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.dcs.catalog import pairs, reads
from elastic_rl.dcs.catalog.references import oldest_of_step
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    GroupsLost,
    PluginFailed,
    StepRefused,
    TrainerFailed,
    VersionNotFound,
)
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState
from elastic_rl.pipeline.training.common_state import Available, common_state
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.service.calls import Uploaded
from elastic_rl.trainer.service.client import TrainerClient, TrainerStatus

OnWait = Callable[[str, str], None]
"""``(group, what it waits for)``, as of ``TrainerClient``."""
_LOOK_AGAIN_S = (2.0, 120.0)
"""First and longest pause before the states are looked for again when no pair of them was available."""
_SHOW_EVERY_S = 1.0
_POLICY_LOOK_S = 1.0
"""How often it is looked whether the policy's group is lost while a group without state is waited for."""
_ATTEMPTS = 2
"""Attempts of the critic to make a step before both groups go back from it, and how often they do so."""
_OF_CRITIC = ("values", "returns")
"""Tensors of a batch that the critic learns from, and the policy does not read."""
_METRICS = {"loss": "critic_loss", "grad_norm": "critic_grad_norm", "lr": "critic_lr",
            "value_clip_fraction": "value_clip_fraction"}
"""Metrics of the critic's update, and their names beside those of the policy's."""


class Trainers:
    """Sends the commands of one actor to its trainer groups, and keeps these at a common step. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, security: Security, cfg: Config, *, epoch: int, term: int,
                 on_wait: OnWait, waits: Waits, on_recovered: Callable[[str], None] = lambda group: None,
                 publish_again: Callable[[int, int], None] = lambda step, version: None) -> None:
        """``on_recovered`` gets the name of a group without state that was lost, once it works again.
        ``publish_again``: called with the step and the number of a version of the policy that such a group needs and
        that nobody has any more; where the policy is still that of the step, it publishes it again."""
        self._etcd, self._keys, self._on_wait, self._waits = etcd, keys, on_wait, waits
        self._on_recovered, self._publish_again = on_recovered, publish_again
        self._saved: tuple[Phase, int, dict[str, Any]] | None = None
        """Phase and step of the policy's last commit while the critic's is missing, and its result."""
        self._clients = {group.name: TrainerClient(
            etcd, keys, security, epoch=epoch, term=term, group=group,
            share_piece_bytes=cfg.trainer.share_piece_bytes,
            on_wait=lambda what, group=group: self._waiting(group, what))  # type: ignore[misc]
            for group in (ACTOR, *(g for g in cfg.trainer_groups if g is not ACTOR))}
        self._policy, self._critic = self._clients[ACTOR.name], self._clients.get(CRITIC.name)
        self._reference_every = cfg.algorithm.reference_every_steps
        self._version = 0
        """Number of the policy as it is now, or of an earlier publish of it."""
        self.step = 0
        """Step of the policy as it is now."""
        self._cursor: Mapping[str, Any] = {}
        """The cursor as the policy's group has it."""
        self._reference_version = 0
        """Number of the reference policy, where a group of its own computes with it."""
        self._policy_look = 0.0
        """Monotonic time of the next look for the policy's group."""
        self._not_learned = (0, 0)
        """The last step that both groups went back from, since the critic could not compute with it, and how often."""
        self._formations: dict[str, str] = {}
        """Formation of each group with a state, as of the last one that was read."""
        self._reformed: set[str] = set()

    def _waiting(self, group: TrainerGroupSpec, what: str) -> None:
        self._on_wait(group.name, what)
        if what and not group.trains and time.monotonic() >= self._policy_look:  # what is waited for is of its weights
            self._policy_look = time.monotonic() + _POLICY_LOOK_S
            self._policy.require_same_group()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def wait_ready(self) -> TrainerStatus:
        """Waits, without end, until every group that trains is there, at a common step; the policy's status. Raises as
        ``TrainerClient.wait_ready``, and TrainerFailed when a group is lost meanwhile."""
        self._saved = None
        if self._critic is None:
            status = self._policy.wait_ready()
            self._note_formations({ACTOR: status})
        else:
            status = self._at_common_state(self._critic)
        self._version, self._reference_version = status.policy_version, status.reference_version
        self.step, self._cursor = status.step, status.cursor
        return status

    def _at_common_state(self, of_critic: TrainerClient) -> TrainerStatus:
        unavailable: set[tuple[str, int]] = set()
        backoff = RetryBackoff(*_LOOK_AGAIN_S)
        while True:
            status, critic = self._both_ready(of_critic)
            found = common_state(Available(status.pair, self._committed(ACTOR)),
                                 Available(critic.pair, self._committed(CRITIC)), unavailable)
            if found is None:
                self._await_states(unavailable, backoff)
                unavailable.clear()
            elif found.is_reached:
                self._note_formations({ACTOR: status, CRITIC: critic})
                return status
            else:
                if found.policy is not None and not self._policy.load(
                        found.policy, status.phase, status.step)["loaded"]:
                    unavailable.add((ACTOR.state, found.policy))
                with _of(CRITIC):
                    if found.critic is not None and not of_critic.load(
                            found.critic, critic.phase, critic.step)["loaded"]:
                        unavailable.add((CRITIC.state, found.critic))

    def _note_formations(self, found: Mapping[TrainerGroupSpec, TrainerStatus]) -> None:
        now = {group.name: status.group for group, status in found.items()}
        self._reformed |= {name for name, formation in now.items()
                           if self._formations.get(name, formation) != formation}
        self._formations = now

    def take_reformed(self) -> Set[str]:
        """Names of the groups that have re-formed since the last call, also of those that nobody has missed: of two
        that are lost at once, the first one is noticed, and both are waited for."""
        taken, self._reformed = self._reformed, set()
        return taken

    def _both_ready(self, critic: TrainerClient) -> tuple[TrainerStatus, TrainerStatus]:
        """The status of each group, of one time: while one is waited for, the other may re-form at another state."""
        policy = self._policy.wait_ready()
        while True:
            with _of(CRITIC):
                found = critic.wait_ready()
            before, policy = policy, self._policy.wait_ready()
            if (policy.group, policy.pair, policy.policy_version) == (
                    before.group, before.pair, before.policy_version):
                return policy, found

    def _await_states(self, unavailable: Set[tuple[str, int]], backoff: RetryBackoff) -> None:
        """A pause, longer each time, before states are looked for again: to try one, a group reads it whole."""
        which = ", ".join(f"{stream} {number}" for stream, number in sorted(unavailable)) or (
            f"versions of {ACTOR.state} and {CRITIC.state}")
        backoff.failed(time.monotonic())
        while (left := backoff.left_s(time.monotonic())) > 0:
            self._on_wait(CRITIC.name, "a state that the policy and the critic both have: start the DCS nodes that "
                          f"have {which}")
            time.sleep(min(left, _SHOW_EVERY_S))

    def _committed(self, group: TrainerGroupSpec) -> dict[int, str]:
        return pairs.names_of([v for v in reads.list_versions(self._etcd, self._keys, group.state)
                               if v.state is VersionState.COMMITTED])

    def update(self, phase: Phase, step: int, batch: Batch, *, versions: Sequence[int] = (),
               consumption: Consumption = Consumption(), cursor: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Makes the updates of a step as ``TrainerClient.update`` does; returns the policy's metrics, with those of the
        critic beside them. Of a StepRefused by the critic ``went_back`` says that the policy is to go back."""
        if self._critic is None or phase == "sft":
            return self._stepped(step, cursor, self._policy.update(
                phase, step, batch, versions=versions, consumption=consumption, cursor=cursor))
        step_id, of_critic = secrets.token_hex(8), _of_critic(batch)
        with _of(CRITIC):
            shares = self._critic.upload(of_critic)
        try:
            trained = self._stepped(step, cursor, self._policy.update(
                phase, step, self._policy.upload(batch.without(*_OF_CRITIC)), versions=versions,
                consumption=consumption, cursor=cursor, step_id=step_id))
        except (StepRefused, PluginFailed, ConfigError, Conflict):
            self._critic.discard(shares)
            raise
        with _of(CRITIC):
            learned = self._learn(self._critic, step, of_critic, shares, consumption, step_id)
        return trained | {name: learned[key] for key, name in _METRICS.items() if key in learned}

    def accumulate(self, step: int, batch: Batch, part: int, *, versions: Sequence[int]) -> None:
        """Calls ``TrainerClient.accumulate`` of the policy's group. Used by a job without a critic."""
        self._policy.accumulate(step, batch, part, versions=versions)

    def apply(self, step: int, parts: int, *, versions: Sequence[int], consumption: Consumption,
              cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Calls ``TrainerClient.apply`` of the policy's group. Used by a job without a critic."""
        return self._stepped(step, cursor, self._policy.apply(step, parts, versions=versions, consumption=consumption,
                                                              cursor=cursor))

    def check(self, step: int, batch: Batch, phase: Phase = "rl") -> None:
        """Calls ``TrainerClient.check`` of the policy's group, and of the critic's if it is to make the same step."""
        if self._critic is None or phase == "sft":
            self._policy.check(step, batch, phase)
            return
        self._policy.check(step, batch.without(*_OF_CRITIC))
        with _of(CRITIC):
            self._critic.check(step, _of_critic(batch))

    def _stepped(self, step: int, cursor: Mapping[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
        """The policy's group has made this step, with this result."""
        self.step, self._cursor = step, cursor or {}
        return self._noted(result)

    def _noted(self, result: dict[str, Any]) -> dict[str, Any]:
        """Notes with which versions of the policy a command of its group ended."""
        self._version = int(result.get("policy_version") or self._version)
        self._reference_version = int(result.get("reference_version") or self._reference_version)
        return result

    def _learn(self, critic: TrainerClient, step: int, batch: Batch, shares: Uploaded, consumption: Consumption,
               step_id: str) -> dict[str, Any]:
        """Has the critic make the step that the policy has made, for as long as that takes. Raises StepRefused when it
        cannot compute with the samples and both groups are to go back, TrainerFailed when the critic is lost or is at
        another step, and Fenced."""
        group, given = shares.group, [shares]  # for the first attempt; a refused command has used its shares up
        refusals = 0

        def attempt() -> dict[str, Any] | StepRefused:
            nonlocal refusals
            try:
                return critic.update("rl", step, given.pop() if given else critic.upload(batch),
                                     consumption=consumption, step_id=step_id)
            except StepRefused as e:
                refusals += 1
                if e.went_back or (refusals >= _ATTEMPTS and self._not_learned != (step, _ATTEMPTS)):
                    return e
                raise
            except GroupsLost as e:  # those of a step that was made: nobody generates them again for this one
                raise TrainerFailed(f"the critic cannot make step {step}, which the policy has made: {e}") from e
            except ConfigError as e:
                raise ConfigError(f"the critic refuses step {step}, which the policy has made: {e.message}",
                                  hint=e.hint) from e
            except Conflict:
                now = critic.wait_ready()
                if now.group == group and now.pair == pairs.pair_name(step, step_id):
                    return {}  # it was made, and the answer was lost
                if now.group != group or now.step != step - 1:
                    raise TrainerFailed(f"the critic is at step {now.step} while the policy has made step {step}"
                                        ) from None
                raise

        learned = self._waits.retry(CRITIC.name, attempt, end_on=(TrainerFailed,))
        if isinstance(learned, StepRefused):
            self._not_learned = step, 1 + (self._not_learned[1] if self._not_learned[0] == step else 0)
            raise StepRefused(f"the critic cannot make step {step}, which the policy has made: {learned.message}",
                              hint=learned.hint, went_back=True)
        return learned

    def forward_logprobs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The log-probs as ``TrainerClient.forward_logprobs`` returns them."""
        return self._policy.forward_logprobs(batch)

    def reference_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the reference policy of RL step ``step``. Raises as
        ``TrainerClient.forward_reference``."""
        if REFERENCE.name not in self._clients:
            return self._policy.forward_reference(batch, step)
        return self._by_version(REFERENCE, batch, reference_step(step, self._reference_every),
                                self._reference_version)

    def trainer_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the policy before RL step ``step``. Used by a job with the group
        ``actor_fwd``."""
        return self._by_version(ACTOR_FWD, batch, step - 1, self._version)

    def _by_version(self, group: TrainerGroupSpec, batch: Batch, step: int, at_least: int) -> torch.Tensor:
        """The log-probs by the policy that RL step ``step`` made. Waits for the group, and for the version to be
        committed; one whose chunks are lost is published again. Raises TrainerFailed when the policy's group has
        re-formed, and as ``TrainerClient.forward_version``."""
        client, lost, missed = self._clients[group.name], False, 0

        def attempt() -> torch.Tensor:
            nonlocal lost, missed, at_least
            self._policy.require_same_group()
            # Before the batch is sent, which a group that refuses it has to be sent again.
            oldest_of_step(reads.list_versions(self._etcd, self._keys, ACTOR.weights), step, at_least)
            try:
                used, outputs = client.forward_version(batch, step, at_least)
            except TrainerFailed as e:
                client.forget()  # another formation of it is as good
                lost = True
                raise Conflict(f"the policy after RL step {step}: {e}") from e
            except VersionNotFound:
                missed += 1
                if missed & (missed - 1) == 0:  # less often each time: there may be more wrong than this version
                    before = self._version
                    self._publish_again(step, at_least)
                    at_least = self._version if self._version != before else at_least
                raise
            if used["step"] != step or used["version"] < at_least:
                raise Conflict(f"it answered for version {used['version']} of step {used['step']}")
            return outputs["logprobs"]

        found = self._waits.retry(group.name, attempt, end_on=(TrainerFailed, ConfigError, GroupsLost, StepRefused))
        if lost:
            self._on_recovered(group.name)
        return found

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        """[L] of the loss tokens, by the critic before RL step ``step``. Used by a job that has one. Raises as
        ``TrainerClient.forward_values``."""
        assert self._critic is not None
        with _of(CRITIC):
            return self._critic.forward_values(batch, step)

    def save(self, phase: Phase, step: int, *, begin_rl: bool = False, publish: bool = False,
             cursor: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Saves the states as ``TrainerClient.save`` does; ``committed``: whether all groups have committed the step.
        When it is repeated, the policy's group does not commit a state again that it has committed."""
        if self._critic is None or phase == "sft" or publish:  # the beginning of the critic needs no version
            return self._noted(self._policy.save(phase, step, begin_rl=begin_rl, publish=publish, cursor=cursor))
        if self._saved is not None and self._saved[:2] == (phase, step):
            self._policy.require_same_group()
            saved = self._saved[2]
        else:
            saved = self._noted(self._policy.save(phase, step, begin_rl=begin_rl, cursor=cursor))
            self._saved = (phase, step, saved) if saved["committed"] else None
        with _of(CRITIC):
            of_critic = self._critic.save(phase, step)
        if of_critic["committed"]:
            self._saved = None
        return {**saved, "committed": saved["committed"] and of_critic["committed"]}

    def publish_policy(self) -> dict[str, Any]:
        """Publishes the policy as it is under a new number, with a state. Raises as ``TrainerClient.save``."""
        return self.save("rl", self.step, publish=True, cursor=self._cursor)

    def offload(self) -> None:
        """Calls ``TrainerClient.offload`` of the policy's group: a critic has devices of its own."""
        self._policy.offload()

    def onload(self) -> None:
        """Calls ``TrainerClient.onload`` of the policy's group."""
        self._policy.onload()


def _of_critic(batch: Batch) -> Batch:
    """What the critic needs of a batch."""
    return batch.only("tokens", "lengths", "loss_mask", "numbers", *_OF_CRITIC)


@contextlib.contextmanager
def _of(group: TrainerGroupSpec) -> Iterator[None]:
    """Names ``group`` in a TrainerFailed that is raised inside."""
    try:
        yield
    except TrainerFailed as e:
        e.group = group.name
        raise
