"""Which prompt groups are generated and trained next, one after the other or both at once. Pure.

    (none) ──lease──▶ leased ──finished──▶ generated ──arrived──▶ queued ──choose──▶ chosen ──commit───▶ trained 
      ▲                 │ dropped by a filter: on the record with the next update     │             │
      └── lost by the queue, too stale when it was due, or of weights that            │             │
          the trainer went back from, or refused by it: generated again ◀─────────────┴─────────────┘

Two bounds hold the producer and the trainer together (``max_staleness`` = S, ``groups_per_step`` = B, and A steps whose
groups may be generated ahead of the next one's: S beside the steps, 0 where generation and training alternate):

- A group is trained only while its oldest token is at most S versions older than the policy that it trains. This one
  is checked when a step is chosen (``data.staleness``), on what the samples say of themselves, so it holds whatever the
  engines did, and after a recovery, which gives the same weights a newer number. Numbers say nothing of weights that
  the trainer went back from (``data.branch``): a group with a token of theirs is never trained, however new; and no
  group is asked of engines that serve them. The trainer applies the same rule to what it gets. What it refuses all the
  same, such as a version that was never published, is generated again, and dropped when it is refused once more.
- A group is leased only while fewer than (A + 1)·B others are not consumed yet, those of the step in progress
  included: the last of them is then trained after at most S further versions. For the same reason one with n others
  before it asks for samples of version v + n // B - S or newer, where v is the policy's: by the time that it is
  trained, n // B more versions are out.
  With A = 0 that is synchronous training: B groups, and the next ones once these are trained.

Groups are trained in the order in which they finish, so a slow one may be overtaken and become too stale. It is
generated again, which would happen for ever to one that always takes longer than S steps; so a group that was too stale
once is trained first, and no step is made that would make it too stale again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from elastic_rl.config import Config
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption, GroupLedger, GroupState
from elastic_rl.data.samples import FAILED, TRAIN_FAILED, TRAINER_REFUSED
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit

_REFUSALS = 2
"""Times that the trainer refuses a group before it is dropped: engines may have said a wrong version once."""
LEASED, GENERATED, QUEUED, CHOSEN = (GroupState.LEASED, GroupState.GENERATED, GroupState.QUEUED, GroupState.CHOSEN)


@dataclass(frozen=True)
class FlowLimits:
    """The settings that the flow goes by."""

    steps: int
    groups_per_step: int
    max_staleness: int
    max_dropped_groups: int
    beside_steps: bool = True
    """Whether groups are generated while others are trained. If not, nothing outlives a step that was interrupted: what
    was generated for it is generated again, so that a run which was disturbed drops and trains in each step what an
    undisturbed one does."""
    max_in_flight: int | None = None
    """Groups that are generated at once; None: as many as the staleness allows."""
    groups_per_part: int | None = None
    """Groups of a step that are trained on as soon as so many have finished; None: all of them together."""
    drop_limit: DropLimit = field(default_factory=lambda: DropLimit(0.5, 8))
    """How many groups may be dropped since the trainer refuses them; further ones are generated again. A flow has a
    copy of its own."""

    @classmethod
    def of(cls, cfg: Config) -> FlowLimits:
        """The limits of a job with RL steps."""
        beside_steps = cfg.train.schedule == "fully_async"
        return cls(steps=cfg.train.steps, groups_per_step=cfg.train.prompts_per_step,
                   max_staleness=cfg.train.max_staleness, max_dropped_groups=cfg.rollout.max_dropped_groups,
                   beside_steps=beside_steps, max_in_flight=cfg.train.max_groups_in_flight if beside_steps else None,
                   groups_per_part=cfg.train.prompts_per_part if cfg.computes_parts else None,
                   drop_limit=DropLimit.of(cfg))

    @property
    def steps_ahead(self) -> int:
        """Steps after the next one whose groups may be generated already."""
        return self.max_staleness if self.beside_steps else 0

    @property
    def capacity(self) -> int:
        """Most groups that are open at once."""
        return (self.steps_ahead + 1) * self.groups_per_step


@dataclass(frozen=True)
class Grant:
    """Groups to be generated now. ``min_version``: the oldest version of which samples are of use."""

    ordinals: tuple[int, ...]
    min_version: int


@dataclass(frozen=True)
class StalenessSpread:
    """How old the groups of a step are, in versions, by the oldest token of each group."""

    least: int = 0
    mean: float = 0.0
    most: int = 0


@dataclass(frozen=True)
class ChosenPart:
    """Groups of the next step that may be computed with now."""

    ordinals: tuple[int, ...]
    """Ascending."""
    first: bool
    """Whether these are the first groups chosen of their step."""
    step: ChosenStep | None
    """The whole step, once these are its last groups."""


@dataclass(frozen=True)
class ChosenStep:
    """What is trained next."""

    ordinals: tuple[int, ...]
    """Ascending."""
    consumption: Consumption
    staleness: StalenessSpread


@dataclass
class FlowCounts:
    """What has happened since the flow began."""

    stale: int = 0
    """Groups that were generated again since they were too stale when they were due, or of weights that the trainer
    went back from, or since the trainer refused them."""
    lost: int = 0
    """Groups that were generated again since the queue lost them."""


@dataclass(frozen=True)
class Depth:
    """Numbers of groups by where they are."""

    leased: int
    queued: int
    """Finished and not chosen yet."""
    training: int


@dataclass
class GroupFlow:
    """The groups of one actor: which of them the ledger moves when. Not thread-safe."""

    limits: FlowLimits
    counts: FlowCounts = field(default_factory=FlowCounts)

    def __post_init__(self) -> None:
        self._ledger = GroupLedger(IntervalSet())
        self._step = self._version = 0
        self._begun = False
        self._branch = Branch()
        self._refusals: dict[int, int] = {}
        """How often the trainer has refused groups that are not consumed."""
        self._given_up: set[int] = set()
        """Groups that the trainer has refused too often, until an update records it: as far as steps are left for them
        they are dropped."""
        self._limit = self.limits.drop_limit.copy()
        self._judged: tuple[StalenessRule | None, dict[tuple[int, ...], bool]] = None, {}
        """The rule of the next step, and what it says of the versions of groups: thousands are queued, which have a few
        between them, and this is asked whenever a group comes."""

    # -- the trainer's state ----------------------------------------------------------------------------------------
    def resume(self, step: int, version: int, consumed: IntervalSet, branch: Branch) -> list[int]:
        """The trainer is at this committed state: at the start, and after a loss. What is being generated or queued
        goes on, if groups are generated beside the steps, unless it is consumed. Returns the groups whose data nobody
        needs any more."""
        self._step, self._version, self._branch, self._begun = step, version, branch, True
        if self.limits.beside_steps:
            self.choose_again()  # if the step in progress was not made, its groups are next
            self._ledger.forget_drops()  # lower groups may be due now, and take their places
            gone = self._ledger.rebase(consumed)
        else:
            gone = self._ledger.in_progress
            self._ledger = GroupLedger(consumed)
        self._forget_refusals(consumed)
        self._give_up_again()
        end = self._end
        surplus = [o for state in (QUEUED, GENERATED) for o in self._ledger.in_state(state) if o >= end]
        self._release(surplus)
        return gone + surplus

    @property
    def _end(self) -> int:
        """No step is left for this group and those above it. A run consumes its lowest groups and leaves none out, and
        lower ones may be due again after a higher one was begun: those that an update had dropped which was undone."""
        consumed = self._ledger.consumed
        due = (self.limits.steps - self._step) * self.limits.groups_per_step + sum(
            map(len, self._ledger.dropped.values()))
        missing = consumed.stop - len(consumed)
        return consumed.first_missing(due + 1)[-1] if due < missing else consumed.stop + due - missing

    def _give_up_again(self) -> None:
        """Drops the groups that were given up, but for those that no step is left for: each drop makes room for one
        more."""
        for ordinal in sorted(self._given_up.difference(self._ledger.dropped.get(TRAINER_REFUSED, ()))):
            if ordinal < self._end:
                self._ledger.give_up(ordinal, TRAINER_REFUSED)

    def _forget_refusals(self, consumed: IntervalSet) -> None:
        self._refusals = {o: times for o, times in self._refusals.items() if o not in consumed}
        self._given_up = {o for o in self._given_up if o not in consumed}

    def _release(self, ordinals: Iterable[int], *, stale: bool = False) -> None:
        for ordinal in ordinals:
            self._ledger.release(ordinal, stale=stale)

    def trained(self, consumption: Consumption, version: int) -> list[int]:
        """The chosen step was made, and its policy has this number. Returns the groups whose data nobody needs any
        more."""
        done = list(self._ledger.in_state(CHOSEN))
        self._ledger.commit(consumption)
        self._step, self._version = self._step + 1, version
        self._forget_refusals(self._ledger.consumed)
        self._limit.kept(len(done))
        return done

    # -- the producer -----------------------------------------------------------------------------------------------
    def lease(self) -> Grant | None:
        """Takes groups to be generated, the lowest first; None while there is no room, and before the trainer's state
        is known."""
        if not self._begun:
            return None
        self._give_up_again()
        size, ahead = self.limits.groups_per_step, self._ledger.count(*GroupState)
        room = min(self.limits.steps_ahead + 1, self.limits.steps - self._step) * size - ahead
        if self.limits.max_in_flight is not None:
            room = min(room, self.limits.max_in_flight - self._ledger.count(LEASED))
        room = min(room, size - ahead % size)  # all of a grant are due in the same step
        if room <= 0:
            return None
        min_version = max(1, self._version + ahead // size - self.limits.max_staleness, self._branch.first)
        return Grant(tuple(self._ledger.lease(room, min_version)), min_version)

    @property
    def generation_cap(self) -> GenerationCap:
        """The limit that leaves no room for groups of further steps; none without such steps, which is so where each
        step is to be trained on samples of the newest weights."""
        limits, ahead = self.limits, self._ledger.count(*GroupState)
        if not self._begun or not limits.steps_ahead or ahead >= (limits.steps - self._step) * limits.groups_per_step:
            return GenerationCap.NONE
        if ahead >= limits.capacity:
            return GenerationCap.STALENESS
        if limits.max_in_flight is not None and self._ledger.count(LEASED) >= limits.max_in_flight:
            return GenerationCap.GROUPS_IN_FLIGHT
        return GenerationCap.NONE

    def give_back(self, ordinals: Iterable[int]) -> None:
        """These groups are not being generated any more, although they were leased: they are leased again."""
        self._release([ordinal for ordinal in ordinals if self._ledger.state(ordinal) is LEASED])

    def finished(self, ordinal: int, versions: Sequence[int], reason: str) -> bool:
        """A group was generated and rewarded. ``versions``: of its tokens, ascending. ``reason``: why a filter drops
        it, or one of ``FAILED``; "" to keep it. Returns whether it is kept: then its data is put into the queue, and
        ``arrived`` says so. A group that nobody waits for any more is not kept."""
        if self._ledger.state(ordinal) is not LEASED:
            return False
        if ordinal >= self._end:
            self._ledger.release(ordinal)
            return False
        self._ledger.generated(ordinal, versions)
        if reason in FAILED or (reason and self._dropped_by_filters < self.limits.max_dropped_groups):
            self._ledger.drop(ordinal, reason)
            return False
        return True

    @property
    def _dropped_by_filters(self) -> int:
        return sum(len(groups) for reason, groups in self._ledger.dropped.items() if reason not in FAILED)

    def arrived(self, ordinal: int) -> bool:
        """The data of a kept group is in the queue. False when nobody needs it any more."""
        if self._ledger.state(ordinal) is not GENERATED:
            return False
        self._ledger.queued(ordinal)
        return True

    @property
    def open(self) -> IntervalSet:
        """Groups that were begun and that no update has recorded: leased, finished, or to be generated again."""
        return self._ledger.unrecorded

    # -- the queue --------------------------------------------------------------------------------------------------
    def lost(self, ordinals: Iterable[int]) -> list[int]:
        """Generates groups again of which the queue has no data (any more). Returns those that had been in it. The
        groups of the step in progress are left alone: once they are loaded nobody needs the queue's data, and before,
        ``not_loaded`` is called."""
        found = [ordinal for ordinal in ordinals if self._ledger.state(ordinal) in (QUEUED, GENERATED)]
        self._release(found)
        self.counts.lost += len(found)
        return found

    def not_loaded(self, missing: Iterable[int]) -> list[int]:
        """The queue lacks some of the groups that were chosen; the step is chosen again. Returns those of them that
        were lost."""
        self.choose_again()
        return self.lost(missing)

    # -- the trainer ------------------------------------------------------------------------------------------------
    def refused(self, versions: Collection[int]) -> list[int]:
        """The trainer refuses samples of these versions, which it was sent. The groups that have some are generated
        again; those that it refuses for the second time are dropped, within the limit: else a group of which wrong
        versions are said would hold the run up for ever. Returns the groups whose data nobody needs any more."""
        self.choose_again()
        found = [ordinal for ordinal, group in self._ledger.in_state(QUEUED).items()
                 if not set(versions).isdisjoint(group.versions)]
        self._release(found, stale=True)
        self.counts.stale += len(found)
        for ordinal in found:
            self._refusals[ordinal] = self._refusals.get(ordinal, 0) + 1
            if self._refusals[ordinal] >= _REFUSALS and self._limit.drop():
                self._ledger.give_up(ordinal, TRAINER_REFUSED)
                self._given_up.add(ordinal)
        return found

    def take_stale(self) -> list[int]:
        """Gives up the queued groups that must not be trained, by their versions; they are leased again. Returns them.
        """
        stale = self._stale()
        self._release(stale, stale=True)
        self.counts.stale += len(stale)
        return stale

    @property
    def has_stale(self) -> bool:
        """Whether a queued group must not be trained, by its versions."""
        return bool(self._stale())

    def _stale(self) -> list[int]:
        rule = StalenessRule(self._version, self.limits.max_staleness, self._branch)
        if self._judged[0] != rule:
            self._judged = rule, {}
        known = self._judged[1]
        stale = []
        for ordinal, group in self._ledger.in_state(QUEUED).items():
            if (is_stale := known.get(group.versions)) is None:
                is_stale = known[group.versions] = bool(rule.refused(group.versions))
            if is_stale:
                stale.append(ordinal)
        return stale

    def choose_again(self) -> None:
        """Puts the groups that were chosen of the next step back into the queue: the step will be made of others."""
        for ordinal in list(self._ledger.in_state(CHOSEN)):
            self._ledger.queued(ordinal)

    def failed(self, ordinals: Iterable[int]) -> list[int]:
        """The step in progress was not made, since the trainer cannot compute with these groups of it: they are
        dropped, and the step is chosen again. Returns those whose data nobody needs any more."""
        self.choose_again()
        dropped = [ordinal for ordinal in ordinals if self._ledger.state(ordinal) is QUEUED]
        for ordinal in dropped:
            self._ledger.drop(ordinal, TRAIN_FAILED)
        return dropped

    def choose(self) -> ChosenPart | None:
        """The next part of the next step, which may be all of it; None while there are too few groups, one is waited
        for, or all are chosen. Raises IllegalTransition while a queued group is too stale: ``take_stale`` comes
        first.

        A group that must not wait for another step finds room in this one, although parts of it may be chosen: it is
        leased while fewer groups than a step's are open, the chosen ones among them, or it was there before the first
        part.
        """
        if self.has_stale:
            raise IllegalTransition("a queued group is too stale to be trained")
        queued, chosen = self._ledger.in_state(QUEUED), self._ledger.count(CHOSEN)
        left = self.limits.groups_per_step - chosen
        size = min(self.limits.groups_per_part or left, left)
        if not left or len(queued) < size or self._must_wait():
            return None
        part = sorted(heapq.nsmallest(size, queued, lambda o: (o not in self._ledger.stale, queued[o].place)))
        for ordinal in part:
            self._ledger.chosen(ordinal)
        return ChosenPart(tuple(part), not chosen, self._whole_step() if size == left else None)

    def _whole_step(self) -> ChosenStep:
        chosen = self._ledger.in_state(CHOSEN)
        ages = [max(0, self._version - group.versions[0]) for group in chosen.values()]
        return ChosenStep(tuple(sorted(chosen)), self._ledger.consumption(chosen),
                          StalenessSpread(min(ages), sum(ages) / len(ages), max(ages)))

    def _must_wait(self) -> bool:
        """Whether one more step would make a group too stale that already was."""
        after = self._version + 1 - self.limits.max_staleness
        coming = (self._ledger.in_state(state).get(ordinal) for ordinal in self._ledger.stale
                  for state in (LEASED, GENERATED))
        return any(group is not None and group.versions[0] < after for group in coming)

    @property
    def depth(self) -> Depth:
        count = self._ledger.count
        return Depth(count(LEASED), count(QUEUED, GENERATED), count(CHOSEN))
