"""The loop that sends groups to be generated, and goes by what becomes of them."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data.samples import GENERATE_FAILED, Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import Answers, Generated, GenerateFault, PromptRequest
from elastic_rl.errors import Fenced, RoleUnavailable
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling import group_requests
from elastic_rl.pipeline.sampling.fault_isolation import Lane
from elastic_rl.pipeline.sampling.group_requests import GroupRequests, groups_at_once
from elastic_rl.pipeline.sampling.sampler import Sampler
from elastic_rl.pipeline.waits import Waits
from elastic_rl.roles.registry import ROLES


def _request(ordinal: int) -> PromptRequest:
    return PromptRequest(ordinal, Prompt((5,)), Sampling(12, seed=7), 2)



class Loop:
    """A sampler on generate functions of which some groups fail, in an order that the calls show."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generate: Callable[..., Sequence[Generated]],
                 *more: str, waits: int = 100_000) -> None:
        stopping, self.calls, self.texts = threading.Event(), list[list[int]](), list[str]()
        self.failed: list[tuple[str, list[int]]] = []

        def call(prompts: Sequence[PromptRequest], min_version: int, probation: bool) -> Iterator[Answers]:
            self.calls.append([p.ordinal for p in prompts])
            yield [*enumerate(generate([p.ordinal for p in prompts], probation))]

        def report(stage: str, kind: str, what: str) -> None:
            if kind:
                self.texts.append(f"{kind}: {what}")
                if len(self.texts) > waits:
                    stopping.set()

        monkeypatch.setattr("elastic_rl.pipeline.sampling.group_requests._RETRY_S", (0.001, 0.002))
        cfg = config.load(overrides=["--rollout.groups_per_request=4", "--rollout.reward_attempts=2",
                                     "--train.prompts_per_step=16", *more])
        source = make_source(cfg)
        self.prompts = [source.train[i] for i in range(64)]
        self.sampler = Sampler(cfg, source, call, Waits(report, stopping), on_failed=lambda part, ordinals, why:
                               self.failed.append((part, list(ordinals))))

    def groups(self, count: int, min_version: int = 0) -> list[Group]:
        try:
            return [g for g, _ in self.sampler.training_groups(list(enumerate(self.prompts[:count])), min_version)]
        finally:
            self.sampler.close()


_UNANSWERED = GenerateFault("no whole answer within 600 s", away="engines", unanswered=True)


def _good(ordinal: int) -> list[Sample]:
    return [Sample((Segment((1,), (-0.5,), version=1),))]


def test_group_that_cannot_be_generated_is_dropped_if_another_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda ordinals, _: [GenerateFault("bad") if i == 5 else _good(i) for i in ordinals])
    found = loop.groups(8)
    assert [g.ordinal for g in found if g.failed] == [5] and found[5].samples == () and found[5].failed == "bad"
    sent = [i for call in loop.calls for i in call]
    assert set(sent) == set(range(8))
    assert len(sent) - sent.count(5) - 7 <= sent.count(5), "at most one other is generated again for each failure"
    assert loop.failed == [("generate", [5])]


def test_role_that_gives_older_samples_than_asked_for_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one group, which is dropped; or for all, for which the run waits and says so: it has the faults of a
    function."""
    def of(version: int) -> list[Sample]:
        return [Sample((Segment((1,), (-0.5,), version=v),)) for v in (4, version)]

    lies = {5}
    loop = Loop(monkeypatch, lambda ordinals, _: [of(3 if i in lies else 4) for i in ordinals])
    found = loop.groups(8, min_version=4)
    assert [g.ordinal for g in found if g.failed] == [5] and loop.failed == [("generate", [5])]
    assert "gave samples of policy version 3, and 4 or newer was asked for" in found[5].failed
    loop = Loop(monkeypatch, lambda ordinals, _: [of(3) for _ in ordinals], waits=200)
    with pytest.raises(Fenced):
        loop.groups(8, min_version=4)
    assert not loop.failed and loop.texts[-1].startswith("plugin: the rollout role gave samples of policy version 3")


def test_group_that_ends_the_process_costs_none_of_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Loop

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        if 6 in ordinals:
            return [GenerateFault("the process died", shared=True) for _ in ordinals]
        return [_good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert [g.ordinal for g in loop.groups(8) if g.failed] == [6]
    assert loop.calls.count([6]) <= 4, "once with half of those that were there, and a few attempts alone"


def test_group_that_no_engine_answers_is_dropped_and_named_while_others_are_answered(monkeypatch: pytest.MonkeyPatch
                                                                                      ) -> None:
    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        if ordinals == [5]:
            return [_UNANSWERED]  # a request of which no group is answered
        return [_UNANSWERED if i == 5 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    found = loop.groups(8)
    assert [g.ordinal for g in found if g.failed] == [5] and "no whole answer" in found[5].failed
    assert found[5].failure == GENERATE_FAILED and loop.failed == [("generate", [5])]


@pytest.mark.parametrize("error", [Fenced("over"), RuntimeError("of ours")])
@pytest.mark.parametrize("of_probe", [False, True])
def test_error_that_is_no_outage_ends_the_loop(monkeypatch: pytest.MonkeyPatch, error: Exception, of_probe: bool
                                               ) -> None:
    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        if (ordinals == [-1]) is of_probe:
            raise error
        return [GenerateFault("bad")] * len(ordinals)

    with pytest.raises(type(error), match=str(error)):
        Loop(monkeypatch, generate).groups(4)


def test_engines_that_are_all_away_drop_nothing_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        if 1 <= next(calls) < 400:
            return [_UNANSWERED] * len(ordinals)
        return [_good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert not any(g.failed for g in loop.groups(24)) and not loop.failed
    assert any(text.startswith("engines: ") for text in loop.texts)


def _ordinals(sent: Any) -> list[int]:
    return [asked.request.ordinal for asked in sent.groups]


class _Fleet:
    """Two engines, of which each has every second request, in the place of the threads that call them. One that has a
    culprit ends, with all requests that it has, and is replaced."""

    def __init__(self, seed: int, culprits: Collection[int]) -> None:
        self._random, self._culprits = random.Random(seed), culprits
        self._running: list[list[Any]] = [[], []]
        self.requests: GroupRequests
        self.ends = 0

    def submit(self, _call: object, sent: Any) -> None:
        self._random.choice(self._running).append(sent)

    def shutdown(self, **_: bool) -> None:
        pass

    def turn(self) -> None:
        for number, running in enumerate(self._running):
            self._running[number] = []
            dies = any({*_ordinals(sent)} & {*self._culprits} for sent in running)
            self.ends += dies
            for sent in running:
                self.requests._answered(sent, [(place, _UNANSWERED if dies else _good(i))
                                               for place, i in enumerate(_ordinals(sent))])
                self.requests._ended(sent)


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(0, 10 ** 6), st.sets(st.integers(0, 31), max_size=3))
def test_only_the_prompts_that_end_engines_are_dropped(seed: int, culprits: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fleet, failed = _Fleet(seed, culprits), set[int]()
        requests = _requests(patch, fleet)
        requests.add([_request(i) for i in range(32)], 0)
        while requests.pending:
            failed |= {group.ordinal for group in requests.poll(0.01)[1]}
            fleet.turn()
        assert failed == culprits
        assert fleet.ends <= 30 * len(culprits)


class _Processes:
    """Two processes, of probation and of others, that have the groups of several requests at once, and end with all of
    them when they have one of the ``culprits``. In the place of the threads that call them, so that the test says what
    runs at the same time."""

    def __init__(self, culprits: Sequence[int] = ()) -> None:
        self.culprits = set(culprits)
        self._running: dict[bool, list[Any]] = {False: [], True: []}
        self.requests: GroupRequests
        self.ends, self.turns = {False: 0, True: 0}, {False: 0, True: 0}
        self.starts = True
        """Whether a process of probation can be started."""

    def submit(self, _call: object, sent: Any) -> None:
        self._running[sent.lane is Lane.PROBATION].append(sent)

    def shutdown(self, **_: bool) -> None:
        pass

    def turn(self, probation: bool, *, ends: bool = False) -> None:
        """What runs in that process comes to its end."""
        running, self._running[probation] = self._running[probation], []
        self.turns[probation] += bool(running)
        ends = ends or any(i in self.culprits for sent in running for i in _ordinals(sent))
        self.ends[probation] += ends
        fault = GenerateFault("the process died", shared=True) if self.starts or not probation else (
            GenerateFault("no memory for another process", away="plugin"))
        for sent in running:
            self.requests._answered(sent, [(place, fault if ends or (probation and not self.starts) else _good(i))
                                           for place, i in enumerate(_ordinals(sent))])
            self.requests._ended(sent)


def _requests(monkeypatch: pytest.MonkeyPatch, processes: _Processes | _Fleet, running: int = 0) -> GroupRequests:
    monkeypatch.setattr("elastic_rl.pipeline.sampling.group_requests._RETRY_S", (0.001, 0.002))
    cfg = config.load(overrides=["--rollout.groups_per_request=1", "--rollout.reward_attempts=2",
                                 "--train.prompts_per_step=64"])
    made = GroupRequests(cfg, lambda prompts, version, probation: [], Waits(lambda *_: None, threading.Event()),
                         no_engine=str, other=lambda number: _request(-1), on_failed=lambda ordinals, why: None,
                         running=lambda: running)
    made.close()
    made._threads = processes  # type: ignore[assignment]
    processes.requests = made
    return made


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 10))
def test_groups_in_flight_follow_what_the_engines_decode_at_once(running: int, samples: int) -> None:
    most = groups_at_once(running, samples, 64)
    assert 64 <= most <= groups_at_once(running + 512, samples, 64)
    assert most == 64 or running < most * samples <= 1.5 * running + samples


@pytest.mark.parametrize(("running", "sent"), [(0, 64), (128, 96), (10_000, 400)])
def test_further_requests_are_sent_to_a_larger_pool(monkeypatch: pytest.MonkeyPatch, running: int, sent: int) -> None:
    """Each request has two sequences."""
    processes = _Processes()
    requests = _requests(monkeypatch, processes, running)
    requests.add([_request(i) for i in range(400)], 0)
    requests.poll(0.0)
    assert len(processes._running[False]) == sent
    assert requests.generation_cap is (GenerationCap.POOL if sent < 400 else GenerationCap.NONE)
    while requests.pending:
        processes.turn(False)
        requests.poll(0.0)


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(0, 10 ** 6))
def test_groups_are_answered_as_they_end_and_only_those_of_a_lost_replica_are_asked_for_again(seed: int) -> None:
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        processes = _Processes()
        requests = _requests(patch, processes)
        requests._groups_per_request = 4
        requests.add([_request(i) for i in range(24)], 0)
        left: dict[Any, list[int]] = {}
        answered: list[int] = []
        done: list[int] = []
        asked: Counter[int] = Counter()
        lost: Counter[int] = Counter()
        while requests.pending:
            found, failed = requests.poll(0.001)
            done += [request.ordinal for request, _ in found]
            assert sorted(done) == sorted(answered), "a group waits for no other"
            assert not failed
            for sent in processes._running[False]:
                left[sent] = list(range(len(sent.groups)))
                asked.update(_ordinals(sent))
            processes._running[False] = []
            for sent, places in [*left.items()]:
                some = [place for place in places if draw.random() < 0.4]
                if some:
                    left[sent] = [place for place in places if place not in some]
                    answered += [_ordinals(sent)[place] for place in some]
                    requests._answered(sent, [(place, _good(_ordinals(sent)[place])) for place in some])
                if not left[sent] or draw.random() < 0.2:
                    lost.update(_ordinals(sent)[place] for place in left.pop(sent))
                    requests._ended(sent, RoleUnavailable("the replica is gone"))
        assert sorted(done) == list(range(24)) and asked == Counter(range(24)) + lost


def test_rest_of_a_forgotten_request_is_closed() -> None:
    goes_on, closed = threading.Event(), threading.Event()

    def generate(prompts: Sequence[PromptRequest], min_version: int, probation: bool) -> Iterator[Answers]:
        try:
            for place, prompt in enumerate(prompts):
                yield [(place, _good(prompt.ordinal))]
                assert goes_on.wait(60)
        finally:
            closed.set()

    requests = GroupRequests(config.Config(), generate, Waits(lambda *_: None, threading.Event()), no_engine=str,
                             other=lambda number: _request(-1), on_failed=lambda ordinals, why: None)
    requests.add([_request(i) for i in range(3)], 0)
    answered: list[Any] = []
    while not answered:
        answered, _ = requests.poll(0.1)
    requests.begin()
    goes_on.set()
    assert closed.wait(60) and not requests.pending and requests.poll(0.0) == ([], [])
    requests.close()


def test_more_requests_than_there_may_be_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a thread for as long as its slowest group takes."""
    monkeypatch.setattr(group_requests, "_MOST", 70)
    processes = _Processes()
    requests = _requests(monkeypatch, processes, 10_000)
    requests.add([_request(i) for i in range(100)], 0)
    requests.poll(0.0)
    assert len(processes._running[False]) == 70 and requests.generation_cap is GenerationCap.REQUESTS
    while requests.pending:
        processes.turn(False)
        requests.poll(0.0)
    assert requests.generation_cap is GenerationCap.NONE


def test_replica_of_the_role_takes_all_requests_at_once() -> None:
    assert ROLES["rollout"].max_ongoing_requests == group_requests._MOST + group_requests._IN_PROBATION


@pytest.mark.parametrize("culprits", [(), (9,), (9, 40)])
def test_end_of_a_process_with_many_groups_takes_few_turns_to_explain(monkeypatch: pytest.MonkeyPatch,
                                                                      culprits: tuple[int, ...]) -> None:
    """One group after the other would take hours where an episode takes minutes."""
    processes, failed = _Processes(culprits), set[int]()
    requests = _requests(monkeypatch, processes)
    requests.add([_request(i) for i in range(64)], 0)
    requests.poll(0.01)
    processes.turn(False, ends=True)
    while requests.pending:
        failed |= {group.ordinal for group in requests.poll(0.01)[1]}
        processes.turn(True)
    assert failed == set(culprits) and processes.turns[False] == 1
    # Two halves that live. For each culprit, at each of six halvings, the half that ends the process and the one that
    # lives; and three attempts alone, with another group after each that shows that the function works.
    assert processes.turns[True] <= 2 + len(culprits) * (2 * 6 + 6), processes.turns


def test_groups_are_generated_while_others_are_in_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group in probation may take minutes, and ends the process of probation only."""
    processes, ordinals = _Processes((3,)), itertools.count()
    requests = _requests(monkeypatch, processes)
    requests.add([_request(next(ordinals)) for _ in range(8)], 0)
    requests.poll(0.01)
    processes.turn(False)  # it ends with all eight
    done, failed = list[int](), list[int]()

    def poll() -> None:
        answered, given_up = requests.poll(0.01)
        done.extend(request.ordinal for request, _ in answered)
        failed.extend(group.ordinal for group in given_up)

    while not processes._running[True]:
        poll()
    for _ in range(50):  # the round of probation does not end meanwhile
        requests.add([_request(next(ordinals))], 0)
        poll()
        processes.turn(False)
    poll()
    assert done == list(range(8, 58)) and processes.ends == {False: 1, True: 0}
    while requests.pending:
        poll()
        processes.turn(True)
    assert failed == [3] and sorted(done) == [i for i in range(58) if i != 3]
    assert processes.ends[True] <= 5, "of halves with the culprit in them, and attempts with it alone"


def test_process_of_probation_that_does_not_start_costs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without memory for two: what is generated in the other process says nothing of this one."""
    processes, ordinals = _Processes((3,)), itertools.count()
    requests, failed, done = _requests(monkeypatch, processes), list[int](), list[int]()
    processes.starts = False
    requests.add([_request(next(ordinals)) for _ in range(8)], 0)
    while processes.turns[True] < 20 or requests.pending:
        answered, given_up = requests.poll(0.01)
        done += [request.ordinal for request, _ in answered]
        failed += [group.ordinal for group in given_up]
        for probation in (False, True):
            processes.turn(probation)
        if processes.turns[True] < 20:
            assert not failed and not set(done) & set(range(8))
            requests.add([_request(next(ordinals))], 0)
        else:
            processes.starts = True
    assert failed == [3] and processes.ends[False] == 1


@pytest.mark.parametrize("culprits", [(0,), (0, 5, 11, 12, 30, 50)])
def test_only_groups_that_end_the_process_are_dropped_from_a_stream(monkeypatch: pytest.MonkeyPatch,
                                                                    culprits: tuple[int, ...]) -> None:
    lock, running = threading.Lock(), {False: set[int](), True: set[int]()}
    given, found = list[int](), dict[int, bool]()

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        with lock:
            running[probation] |= set(ordinals)
            down = running[probation] & set(culprits)
        threading.Event().wait(0.002)
        with lock:
            running[probation] -= set(ordinals)
        return [GenerateFault("the process died", shared=True) if down else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate, "--rollout.groups_per_request=1")
    ordinals = iter(range(len(loop.prompts)))

    def more(wait_s: float) -> tuple[list[tuple[int, Prompt]], int] | None:
        if len(given) - len(found) < 8 and (ordinal := next(ordinals, None)) is not None:
            given.append(ordinal)
            return [(ordinal, loop.prompts[ordinal])], 0
        return None if len(given) == len(loop.prompts) else ([], 0)

    try:
        for group, _ in loop.sampler.training_stream(more):
            found[group.ordinal] = bool(group.failed)
    finally:
        loop.sampler.close()
    assert found == {ordinal: ordinal in culprits for ordinal in range(len(loop.prompts))}


def test_function_that_fails_for_every_group_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [30]

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        left[0] -= len(ordinals)
        return [GenerateFault("the tool is away") if left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert not any(g.failed for g in loop.groups(8)) and not loop.failed
    assert any(text.startswith("plugin: the tool is away") for text in loop.texts)


def test_function_that_fails_for_every_group_for_a_while_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has worked: what it calls may be away for all groups at any time."""
    left = [0]

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        left[0] -= len(ordinals)
        return [GenerateFault("the tool is away") if left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    loop.sampler.training_groups(list(enumerate(loop.prompts[:8])), 0)
    left[0] = 200
    assert not any(g.failed for g in loop.groups(16)) and not loop.failed
    assert left[0] <= 0 and any(text.startswith("plugin: the tool is away") for text in loop.texts)


@pytest.mark.parametrize("kind", ["engines", "plugin"])
def test_group_that_waits_for_a_service_is_retried_alone_without_end(monkeypatch: pytest.MonkeyPatch,
                                                                     kind: str) -> None:
    """As where a tool's service is away: groups that do not need it are generated meanwhile."""
    left = [30]

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        left[0] -= 5 in ordinals
        return [GenerateFault("no answer", away=kind) if i == 5 and left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert not any(g.failed for g in loop.groups(16)) and not loop.failed
    assert any(text == f"{kind}: no answer" for text in loop.texts)
    assert loop.calls.count([5]) == 29 and sum(len(call) for call in loop.calls) == 16 + 29


def test_too_many_groups_that_fail_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda ordinals, _: [GenerateFault("bad") if i else _good(i) for i in ordinals], waits=400)
    with pytest.raises(Fenced):
        loop.groups(16)
    assert len(loop.failed) == 8 and any("rollout.max_failed_groups" in text for text in loop.texts)


def test_first_group_that_cannot_be_generated_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the actor: held-out prompts, of which some fail too, show that the function works."""
    held_out = iter(range(1000))

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        return [GenerateFault("bad") if i == 0 or next(held_out) % 2 == 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert [bool(g.failed) for g in loop.groups(1)] == [True]
    assert [-1] in loop.calls


def test_first_group_is_waited_for_while_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda ordinals, _: [GenerateFault("the tool is away") for _ in ordinals], waits=200)
    with pytest.raises(Fenced):
        loop.groups(1)
    assert not loop.failed


@settings(max_examples=seeds(20), deadline=None)
@given(bad=st.dictionaries(st.integers(0, 15), st.booleans(), max_size=4))
def test_each_group_is_generated_or_dropped_for_its_own_fault(bad: dict[int, bool]) -> None:
    """``bad``: groups that fail and, if True, take those down that are generated at the same time."""
    under_way: dict[bool, list[int]] = {False: [], True: []}
    lock = threading.Lock()

    def generate(ordinals: list[int], probation: bool) -> list[Generated]:
        running = under_way[probation]
        with lock:
            running.extend(ordinals)
            down = [i for i in running if bad.get(i)]
        found: list[Generated] = [
            GenerateFault("down", shared=True) if down else GenerateFault("bad") if i in bad else _good(i)
            for i in ordinals]
        with lock:
            for i in ordinals:
                running.remove(i)
        return found

    with pytest.MonkeyPatch.context() as patch:
        loop = Loop(patch, generate)
        found = loop.groups(16)
    assert [g.ordinal for g in found] == list(range(16))
    assert {g.ordinal for g in found if g.failed} == set(bad)


def test_engines_are_looked_for_also_while_each_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they lack is published again there: no engine would ever serve."""
    looks: list[str] = []
    monkeypatch.setattr("elastic_rl.pipeline.sampling.group_requests._RETRY_S", (60.0, 60.0))
    monkeypatch.setattr("elastic_rl.pipeline.sampling.group_requests._SHOW_S", 0.0)

    def refused(*_: object) -> list[Answers]:
        raise RoleUnavailable("the router has no engine")

    def no_engine() -> str:
        looks.append("there is none")
        return looks[-1]

    requests = GroupRequests(config.Config(), refused, Waits(lambda *_: None, threading.Event()),
                             no_engine=no_engine, other=lambda number: _request(-1),
                             on_failed=lambda ordinals, why: None)
    try:
        requests.add([_request(0)], 0)
        wait_until(lambda: bool(requests.poll(0.01)) and len(looks) >= 3, what="looks")
    finally:
        requests.close()
