"""Generate functions of a user's code: in real processes, and the loop that goes by what becomes of their groups."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.data.batch import collate
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest
from elastic_rl.engine.own_generate import ClientOptions, OwnGenerate
from elastic_rl.errors import ConfigError, EngineFailed, Fenced
from elastic_rl.pipeline.sampling.generating import GroupRequests
from elastic_rl.pipeline.sampling.samples import Sampler
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugin_process import PluginProcess, ProcessLost
from elastic_rl.roles.rollout import GenerationRequest, RolloutRole, of_each
from elastic_rl.runtime import wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLE = Sample((Segment((1,), (-0.5,), version=3),))
MODULE = '''
import asyncio, os, threading
from dataclasses import replace
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.errors import EngineFailed

def sample(ids=(1, 2), logprobs=(-0.5, -0.5), **more):
    segment = Segment((1,), (-0.5,), version=3)
    for name, value in {"token_ids": ids, "logprobs": logprobs, **more}.items():
        object.__setattr__(segment, name, value)
    return Sample((segment,), metadata={"tool": "calculator"})

async def generate(request, engines):
    what, n = request.prompt.text, request.samples
    await asyncio.sleep(0)
    if what == "raise": raise ValueError("the tool is away")
    if what == "engine": raise EngineFailed("no engine")
    if what == "hang": await asyncio.Event().wait()
    if what == "block": threading.Event().wait()
    if what == "die": os._exit(3)
    if what == "token": return [sample((1, 99)) for _ in range(n)]
    if what == "nan": return [sample(logprobs=(-0.5, float("nan"))) for _ in range(n)]
    if what == "lengths": return [sample(logprobs=(-0.5,)) for _ in range(n)]
    if what == "long": return [sample((1,) * 50, (-0.5,) * 50) for _ in range(n)]
    if what == "few": return [sample() for _ in range(n - 1)]
    if what == "text": return "nothing"
    return [sample() for _ in range(n)]

not_async = 3
'''


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_generate.py").write_text(MODULE)
    sys.path[:0] = [str(folder), str(EXAMPLES)]
    yield
    sys.path.remove(str(folder))
    sys.path.remove(str(EXAMPLES))


def _request(ordinal: int, text: str = "", samples: int = 2) -> PromptRequest:
    return PromptRequest(ordinal, Prompt((5,), text), Sampling(12, seed=7), samples)


def _generate(role: RolloutRole, *whats: str) -> list[Generated]:
    async def all_of_them() -> list[Generated]:
        return await asyncio.gather(*(role._bounded(_request(i, what), 1) for i, what in enumerate(whats)))
    return asyncio.run(all_of_them())


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutRole]:
    monkeypatch.setattr("elastic_rl.plugin_process.CANCEL_S", 0.5)
    made = RolloutRole.__new__(RolloutRole)
    cfg = config.load(overrides=["--rollout.generate=my_generate:generate", "--rollout.generate_timeout_s=2"])
    own = OwnGenerate("my_generate:generate", ClientOptions("http://127.0.0.1:9", 5.0, 1, 50))
    made.ctx = SimpleNamespace(config=cfg, model_dir="")  # type: ignore[assignment]
    made.generate_fn, made._vocabulary = own, 50
    made.client = None  # type: ignore[assignment]
    made._first_sample = SimpleNamespace(first_of=lambda samples: 0)  # type: ignore[assignment]
    made._published = SimpleNamespace(beyond=AsyncMock(return_value=0))  # type: ignore[assignment]
    yield made
    own.close()


@pytest.mark.parametrize(("what", "named"), [
    ("raise", "ValueError: the tool is away"), ("hang", "took longer than 2 s for group 1.*generate_timeout_s"),
    ("token", "a token id that is no int from 0 to 49"), ("nan", "a log-prob that is not finite"),
    ("lengths", "2 tokens with 1 log-probs"), ("long", "a response of 50 tokens, and the data source allows 12"),
    ("few", "must give 2 samples"), ("text", "must give 2 samples")])
def test_what_fails_or_is_nonsense_costs_its_group_only(role: RolloutRole, what: str, named: str) -> None:
    good, bad = _generate(role, "", what)
    assert isinstance(good, list) and good[0].segments[0].token_ids == (1, 2) and good[0].oldest_version == 3
    assert good[1].metadata == {"tool": "calculator"} and good[1].segments[0].logprobs == (-0.5, -0.5)
    assert isinstance(bad, GenerateFault) and not bad.shared
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(bad.why)


@pytest.mark.parametrize("what", ["block", "die"])
def test_process_that_ends_is_replaced_and_names_nobody(role: RolloutRole, what: str) -> None:
    assert all(isinstance(g, list) or g.shared for g in _generate(role, "", what, ""))
    [bad] = _generate(role, what)
    assert isinstance(bad, GenerateFault) and bad.shared
    assert isinstance(_generate(role, "")[0], list)


def test_process_takes_no_call_before_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call would be given up while the user's module is imported, and take the process with it."""
    begun, released = tmp_path / "begun", tmp_path / "released"
    (tmp_path / "slow_generate.py").write_text(
        f"import os, time\nopen({str(begun)!r}, 'w').close()\n"
        f"while not os.path.exists({str(released)!r}): time.sleep(0.05)\nfrom my_generate import generate\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = PluginProcess("the test", "elastic_rl.engine.own_generate:serve", "slow_generate:generate",
                            ClientOptions("", 1.0, 1, 50))
    started: list[None] = []
    threads = [threading.Thread(target=lambda: started.append(process.start())) for _ in range(3)]

    async def call() -> Any:
        async with asyncio.timeout(60):
            return await process.call(_request(0))

    try:
        for thread in threads:
            thread.start()
        wait_until(begun.exists, timeout_s=60, what="the import")
        with pytest.raises(ProcessLost, match="is being started"):
            asyncio.run(call())
        assert not started
        released.touch()
        for thread in threads:
            thread.join(60)
        assert len(started) == 3 and len(asyncio.run(call())["samples"]) == 2
    finally:
        process.close()


@pytest.mark.parametrize("replaced", [2, 1 << 20])
def test_group_waits_for_a_process_that_is_replaced(role: RolloutRole, monkeypatch: pytest.MonkeyPatch, replaced: int
                                                    ) -> None:
    left = [replaced]

    async def call(request: PromptRequest, engines: Any) -> list[Sample]:
        left[0] -= 1
        if left[0] >= 0:
            raise ProcessLost("it is being started")
        return [SAMPLE] * request.samples

    monkeypatch.setattr(OwnGenerate, "__call__", lambda self, request, engines: call(request, engines))
    [found] = _generate(role, "")
    assert found == [SAMPLE] * 2 if replaced == 2 else isinstance(found, GenerateFault) and found.shared


def test_engines_that_fail_are_no_fault_of_the_function(role: RolloutRole) -> None:
    with pytest.raises(EngineFailed, match="no engine"):
        _generate(role, "engine")


def test_what_is_no_function_is_a_wrong_setting() -> None:
    for name in ("my_generate:not_async", "my_generate:missing", "no_such_module:f"):
        with pytest.raises(ConfigError, match="rollout.generate"):
            OwnGenerate(name, ClientOptions("", 1.0, 1, 1))


# -- the example -------------------------------------------------------------------------------------------------------


class Engine(BaseHTTPRequestHandler):
    """Answers as SGLang does, with the number of the prompt's tokens."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers = [{"output_ids": [len(ids)], "meta_info": {
            "finish_reason": {"type": "stop"}, "weight_version": "3",
            "output_token_logprobs": [[-0.25, len(ids), None]]}}
            for ids in body["input_ids"]]
        raw = json.dumps(answers).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...


def test_example_of_two_turns_is_trained_on_what_the_policy_wrote() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = OwnGenerate("two_turns:generate", ClientOptions(f"http://127.0.0.1:{server.server_port}", 60.0, 2, 50))
    try:
        request = _request(0)
        samples = asyncio.run(own(request, None))  # type: ignore[arg-type]
    finally:
        own.close()
        server.shutdown()
        server.server_close()
    assert [[(s.token_ids, s.logprobs, s.loss, s.version) for s in sample.segments] for sample in samples] == [
        [((1,), (-0.25,), True, 3), ((5,), (), False, 0), ((3,), (-0.25,), True, 3)]] * 2
    batch = collate([(request.prompt, s) for s in samples], [1.0, -1.0])
    assert torch.equal(batch["loss_mask"][0], torch.tensor([False, True, False, True]))


# -- the loop ----------------------------------------------------------------------------------------------------------


class Loop:
    """A sampler on generate functions of which some groups fail, in an order that the calls show."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generate: Callable[[list[int]], Sequence[Generated]],
                 *more: str, waits: int = 100_000) -> None:
        stopping, self.calls, self.texts = threading.Event(), list[list[int]](), list[str]()
        self.failed: list[tuple[str, list[int]]] = []

        def call(prompts: Sequence[PromptRequest], min_version: int) -> Sequence[Generated]:
            self.calls.append([p.ordinal for p in prompts])
            return generate([p.ordinal for p in prompts])

        def report(stage: str, kind: str, what: str) -> None:
            if kind:
                self.texts.append(f"{kind}: {what}")
                if len(self.texts) > waits:
                    stopping.set()

        monkeypatch.setattr("elastic_rl.pipeline.sampling.generating._RETRY_S", (0.001, 0.002))
        cfg = config.load(overrides=["--rollout.groups_per_request=4", "--rollout.reward_attempts=2",
                                     "--train.prompts_per_step=16", *more])
        source = make_source(cfg)
        self.prompts = [source.train[i] for i in range(64)]
        self.sampler = Sampler(cfg, source, call, Waits(report, stopping), on_failed=lambda part, ordinals, why:
                               self.failed.append((part, list(ordinals))))

    def groups(self, count: int) -> list[Group]:
        try:
            return [g for g, _ in self.sampler.training_groups(list(enumerate(self.prompts[:count])), 0)]
        finally:
            self.sampler.close()


def _good(ordinal: int) -> list[Sample]:
    return [Sample((Segment((1,), (-0.5,), version=1),))]


def test_group_that_cannot_be_generated_is_dropped_and_one_other_shows_that_it_works(monkeypatch: pytest.MonkeyPatch
                                                                                     ) -> None:
    loop = Loop(monkeypatch, lambda ordinals: [GenerateFault("bad") if i == 5 else _good(i) for i in ordinals])
    found = loop.groups(8)
    assert [g.ordinal for g in found if g.failed] == [5] and found[5].samples == () and found[5].failed == "bad"
    sent = [i for call in loop.calls for i in call]
    assert set(sent) == set(range(8))
    assert len(sent) - sent.count(5) - 7 <= sent.count(5), "at most one other is generated again for each failure"
    assert loop.failed == [("generate", [5])]


def test_group_that_ends_the_process_costs_none_of_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Loop

    def generate(ordinals: list[int]) -> list[Generated]:
        if 6 in ordinals:
            return [GenerateFault("the process died", shared=True) for _ in ordinals]
        return [_good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert [g.ordinal for g in loop.groups(8) if g.failed] == [6]
    assert loop.calls.count([6]) == 3, "once with half of those that were there, and two attempts alone"


class _Process:
    """A process that has the groups of several requests at once, and ends with all of them when it has one of the
    ``culprits``. In the place of the threads that call it, so that the test says what runs at the same time."""

    def __init__(self, culprits: Sequence[int]) -> None:
        self._culprits, self._running = set(culprits), list[tuple[Future[Sequence[Generated]], list[int]]]()
        self.ends, self.turns = 0, 0

    def submit(self, _call: object, requests: Sequence[PromptRequest], _min_version: int
               ) -> Future[Sequence[Generated]]:
        self._running.append((Future(), [request.ordinal for request in requests]))
        return self._running[-1][0]

    def shutdown(self, **_: bool) -> None:
        pass

    def turn(self, *, ends: bool = False) -> None:
        """What runs comes to its end."""
        running, self._running = self._running, []
        self.turns += bool(running)
        ends = ends or any(i in self._culprits for _, ordinals in running for i in ordinals)
        self.ends += ends
        for future, ordinals in running:
            future.set_result([GenerateFault("the process died", shared=True) if ends else _good(i) for i in ordinals])


def _requests(monkeypatch: pytest.MonkeyPatch, process: _Process) -> GroupRequests:
    monkeypatch.setattr("elastic_rl.pipeline.sampling.generating._RETRY_S", (0.001, 0.002))
    cfg = config.load(overrides=["--rollout.groups_per_request=1", "--rollout.reward_attempts=2",
                                 "--train.prompts_per_step=64"])
    made = GroupRequests(cfg, lambda prompts, version: [], Waits(lambda *_: None, threading.Event()), no_engine=str,
                         other=lambda: _request(-1), on_failed=lambda ordinals, why: None)
    made.close()
    made._threads = process  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("culprits", [(), (9,), (9, 40)])
def test_end_of_a_process_with_many_groups_takes_few_turns_to_explain(monkeypatch: pytest.MonkeyPatch,
                                                                      culprits: tuple[int, ...]) -> None:
    """One group after the other would take hours where an episode takes minutes."""
    process, failed = _Process(culprits), set[int]()
    requests = _requests(monkeypatch, process)
    requests.add([_request(i) for i in range(64)], 0)
    requests.poll(0.01)
    process.turn(ends=True)
    while requests.pending:
        failed |= {group.ordinal for group in requests.poll(0.01)[1]}
        process.turn()
    assert failed == set(culprits)
    # The first one, another group that shows that the function works, and two halves that live. For each culprit, at
    # each of six halvings, the half that ends the process, that other group and the half that lives; and two attempts
    # alone with that other group.
    assert process.turns <= 4 + len(culprits) * (3 * 6 + 4), process.turns


def test_process_that_one_group_ends_is_ended_a_few_times_only_while_others_are_given(monkeypatch: pytest.MonkeyPatch
                                                                                     ) -> None:
    """Groups that were added to those that are on trial would end with them, and would be suspects too."""
    process, failed, done = _Process((3,)), list[int](), 0
    requests, ordinals = _requests(monkeypatch, process), itertools.count()
    under_way = 0
    while not failed and process.turns < 100:
        if requests.takes_more:
            requests.add([_request(next(ordinals)) for _ in range(8 - under_way)], 0)
            under_way = 8
        answered, given_up = requests.poll(0.01)
        failed += [group.ordinal for group in given_up]
        done, under_way = done + len(answered), under_way - len(answered) - len(given_up)
        process.turn()
    assert failed == [3] and done >= 7
    assert process.ends <= 6, "of all, of halves with the one in them, and two attempts with it alone"


def test_group_that_ends_the_process_gets_its_turn_alone_however_many_groups_are_given(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups that are given for as long as there is room, something else would always run."""
    released = threading.Event()

    def generate(ordinals: list[int]) -> list[Generated]:
        if 0 in ordinals:
            return [GenerateFault("the process died", shared=True) for _ in ordinals]
        released.wait(0.02)
        return [_good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate, "--rollout.groups_per_request=1")
    ordinals = iter(range(len(loop.prompts)))
    given, found = list[int](), dict[int, bool]()

    def more(wait_s: float) -> tuple[list[tuple[int, Prompt]], int] | None:
        if len(given) - len(found) < 4 and (ordinal := next(ordinals, None)) is not None:
            given.append(ordinal)
            return [(ordinal, loop.prompts[ordinal])], 0
        return None if len(given) == len(loop.prompts) else ([], 0)

    try:
        for group, _ in loop.sampler.training_stream(more):
            found[group.ordinal] = bool(group.failed)
    finally:
        loop.sampler.close()
    assert found == {ordinal: ordinal == 0 for ordinal in range(len(loop.prompts))}
    assert list(found).index(0) < 32, "long before the last one was given"


def test_function_that_fails_for_every_group_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [30]

    def generate(ordinals: list[int]) -> list[Generated]:
        left[0] -= len(ordinals)
        return [GenerateFault("the tool is away") if left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert not any(g.failed for g in loop.groups(8)) and not loop.failed
    assert any(text.startswith("plugin: the tool is away") for text in loop.texts)


def test_function_that_fails_for_every_group_for_a_while_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has worked: what it calls may be away for all groups at any time."""
    left = [0]

    def generate(ordinals: list[int]) -> list[Generated]:
        left[0] -= len(ordinals)
        return [GenerateFault("the tool is away") if left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    loop.sampler.training_groups(list(enumerate(loop.prompts[:8])), 0)
    left[0] = 200
    assert not any(g.failed for g in loop.groups(16)) and not loop.failed
    assert left[0] <= 0 and any(text.startswith("plugin: the tool is away") for text in loop.texts)


@pytest.mark.parametrize("kind", ["engines", "plugin"])
def test_group_that_waits_for_what_is_away_is_tried_again_alone_and_without_end(monkeypatch: pytest.MonkeyPatch,
                                                                                kind: str) -> None:
    """As where a tool's service is away: groups that do not need it are generated meanwhile."""
    left = [30]

    def generate(ordinals: list[int]) -> list[Generated]:
        left[0] -= 5 in ordinals
        return [GenerateFault("no answer", away=kind) if i == 5 and left[0] > 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert not any(g.failed for g in loop.groups(16)) and not loop.failed
    assert any(text == f"{kind}: no answer" for text in loop.texts)
    assert loop.calls.count([5]) == 29 and sum(len(call) for call in loop.calls) == 16 + 29


def test_group_that_no_engine_answered_is_repeated_alone() -> None:
    good, fault, away = [SAMPLE], GenerateFault("bad"), EngineFailed("no engine")
    assert of_each([good, away, fault]) == [good, GenerateFault("the engines to generate: no engine", away="engines"),
                                            fault]
    assert of_each([good]) == [good]
    for found, raised in (([away, away], EngineFailed), ([good, RuntimeError("x"), away], RuntimeError)):
        with pytest.raises(raised):
            of_each(found)


def test_request_ends_when_all_of_its_groups_have(role: RolloutRole) -> None:
    """What still ran would go on beside the repeated one."""
    role.working = lambda groups: contextlib.nullcontext()  # type: ignore[assignment,method-assign]
    ended: list[int] = []

    async def bounded(prompt: PromptRequest, min_version: int) -> Generated:
        if prompt.ordinal == 0:
            raise EngineFailed("no engine")
        await asyncio.sleep(0.05)
        ended.append(prompt.ordinal)
        return [SAMPLE] * prompt.samples

    role._bounded = bounded  # type: ignore[method-assign]
    found = asyncio.run(role._generated(GenerationRequest((_request(0), _request(1), _request(2)), 1)))
    assert ended == [1, 2] and isinstance(found[0], GenerateFault) and found[0].away == "engines"


def test_too_many_groups_that_fail_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda ordinals: [GenerateFault("bad") if i else _good(i) for i in ordinals], waits=400)
    with pytest.raises(Fenced):
        loop.groups(16)
    assert len(loop.failed) == 8 and any("rollout.max_failed_rewards" in text for text in loop.texts)


def test_first_group_that_cannot_be_generated_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the actor: held-out prompts, of which some fail too, show that the function works."""
    held_out = iter(range(1000))

    def generate(ordinals: list[int]) -> list[Generated]:
        return [GenerateFault("bad") if i == 0 or next(held_out) % 2 == 0 else _good(i) for i in ordinals]

    loop = Loop(monkeypatch, generate)
    assert [bool(g.failed) for g in loop.groups(1)] == [True]
    assert [-1] in loop.calls


def test_first_group_is_waited_for_while_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda ordinals: [GenerateFault("the tool is away") for _ in ordinals], waits=200)
    with pytest.raises(Fenced):
        loop.groups(1)
    assert not loop.failed


@settings(max_examples=seeds(20), deadline=None)
@given(bad=st.dictionaries(st.integers(0, 15), st.booleans(), max_size=4))
def test_each_group_is_generated_or_dropped_for_its_own_fault(bad: dict[int, bool]) -> None:
    """``bad``: groups that fail and, if True, take those down that are generated at the same time."""
    running: list[int] = []
    lock = threading.Lock()

    def generate(ordinals: list[int]) -> list[Generated]:
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
