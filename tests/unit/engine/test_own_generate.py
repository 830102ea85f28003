"""Generate functions of a user's code, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import psutil
import pytest
import torch
from support import http_servers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data.batch import collate
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest
from elastic_rl.engine.own_generate import ClientOptions, OwnGenerate, answering, make_generate
from elastic_rl.errors import ConfigError, EngineFailed, PluginFailed, Unanswered
from elastic_rl.host.job_secrets import engine_key, engine_key_file, remove_secret_files
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.plugins.process import PluginProcess, ProcessLost
from elastic_rl.roles.actor_requests import ActorRequests
from elastic_rl.roles.rollout import GenerationRequest, RolloutRole, decoded
from elastic_rl.runtime.process import runs

pytestmark = pytest.mark.usefixtures("forked_plugins")

EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLE = Sample((Segment((1,), (-0.5,), version=3),))
MODULE = '''
import asyncio, numpy, os, threading
from dataclasses import replace
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.errors import EngineFailed

def sample(ids=(1, 2), logprobs=(-0.5, -0.5), **more):
    segment = Segment((1,), (-0.5,), version=3)
    for name, value in {"token_ids": ids, "logprobs": logprobs, **more}.items():
        object.__setattr__(segment, name, value)
    return Sample((segment,), metadata={"tool": "calculator", "took_s": numpy.float32(0.5), "right": numpy.bool_(True)})

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
    if what == "none": return [sample(version=None) for _ in range(n)]
    if what == "zero": return [sample(version=0) for _ in range(n)]
    if what == "metadata": return [replace(sample(), metadata={"took_s": float("inf")}) for _ in range(n)]
    if what == "own": return [sample(version=2) for _ in range(n)]
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


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if runs(p)}


def _generate(role: RolloutRole, *whats: str) -> list[Generated]:
    async def all_of_them() -> list[Generated]:
        return await asyncio.gather(*(role._bounded(_request(i, what), 3) for i, what in enumerate(whats)))
    return asyncio.run(all_of_them())


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutRole]:
    monkeypatch.setattr("elastic_rl.plugins.process.CANCEL_S", 0.5)
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
    ("metadata", "metadata that are not passed on: a number is inf"), ("few", "must give 2 samples"),
    ("text", "must give 2 samples"), ("none", "version is no int .*engines.generate"),
    ("zero", "trained on, with version=0, and 3 .*engines.generate"),
    ("own", "samples of policy version 2, and 3 or newer")])
def test_what_fails_or_is_nonsense_costs_its_group_only(role: RolloutRole, what: str, named: str) -> None:
    good, bad = _generate(role, "", what)
    assert isinstance(good, list) and good[0].segments[0].token_ids == (1, 2) and good[0].oldest_version == 3
    assert good[1].metadata == {"tool": "calculator", "took_s": 0.5, "right": True}
    assert good[1].segments[0].logprobs == (-0.5, -0.5)
    assert isinstance(bad, GenerateFault) and not bad.shared
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(bad.why)


class _Behind(GenerateClient):
    """A client of engines that answer with these versions, one after the other."""

    def __init__(self, *versions: int) -> None:
        self._left = list(versions)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, n: int, route: str = "") -> list[Sample]:
        version = self._left.pop(0)
        return [Sample((Segment((1,), (-0.5,), version=version),)) for _ in range(n)]


@pytest.mark.parametrize(("answered", "says", "fails"), [
    ((7, 8), 7, ""), ((7, 8), 0, "version=0, and 7 or newer"), ((7, 8), 3, "samples of policy version 3, and 7 or"),
    ((8, 8), 6, "samples of policy version 6, and 7 or"), ((7, 3), 3, ""), ((3, 8), 2, ""), ((), 3, "version 3")])
def test_function_is_at_fault_for_old_samples_unless_an_engine_was_behind(answered: tuple[int, ...], says: int,
                                                                          fails: str) -> None:
    """The role waits for engines that are behind, without end; for a function it would do so in vain."""
    async def generate(request: PromptRequest, engines: GenerateClient) -> list[Sample]:
        for _ in answered:
            await engines.generate((5,), request.sampling, 1)
        return [Sample((Segment((1,), (-0.5,), version=says), Segment((2,), loss=False)))] * 2

    call = answering(generate, SimpleNamespace(make=lambda: _Behind(*answered), vocabulary=50))  # type: ignore[arg-type]
    with pytest.raises(PluginFailed, match=fails) if fails else contextlib.nullcontext():
        assert len(asyncio.run(call(replace(_request(1), min_version=7)))["samples"]) == 2


@pytest.mark.parametrize("what", ["block", "die"])
def test_process_that_ends_is_replaced_and_names_nobody(role: RolloutRole, what: str) -> None:
    assert all(isinstance(g, list) or g.shared for g in _generate(role, "", what, ""))
    [bad] = _generate(role, what)
    assert isinstance(bad, GenerateFault) and bad.shared
    assert isinstance(_generate(role, "")[0], list)


def test_groups_in_probation_have_another_process_while_they_are_tried(
        role: RolloutRole, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends it ends no other group, and it does not stay: it takes as much memory as the other one."""
    monkeypatch.setattr("elastic_rl.engine.own_generate._UNUSED_S", 0.05)
    before, own = _children(), role.generate_fn
    assert isinstance(own, OwnGenerate)

    async def both() -> None:
        held = asyncio.create_task(role._bounded(_request(0, "hang"), 1))
        try:
            bad = await role._bounded(_request(1, "die"), 1, in_probation=True)
            assert isinstance(bad, GenerateFault) and bad.shared
            assert isinstance(await role._bounded(_request(2), 1, in_probation=True), list)
            assert not held.done()
            while own.for_probation._process._process is not None:
                await asyncio.sleep(0.01)
        finally:
            held.cancel()
            await asyncio.wait([held])

    role.ctx = SimpleNamespace(model_dir="", config=config.load(overrides=[  # type: ignore[assignment]
        "--rollout.generate=my_generate:generate", "--rollout.generate_timeout_s=600"]))
    asyncio.run(both())
    wait_until(lambda: _children() <= before, what="the end of the process of probation")


def test_process_of_probation_ends_with_the_role(role: RolloutRole) -> None:
    before = _children()
    assert isinstance(asyncio.run(role._bounded(_request(0), 1, in_probation=True)), list)
    of_probation = _children() - before
    assert of_probation
    role.generate_fn.close()  # type: ignore[attr-defined]
    wait_until(lambda: not _children() & of_probation, what="the end of the process of probation")


def test_process_that_cannot_be_started_is_no_fault_of_the_group(role: RolloutRole, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    def fails(self: OwnGenerate) -> None:
        raise PluginFailed("no memory")

    monkeypatch.setattr(OwnGenerate, "start", fails)
    assert asyncio.run(role._bounded(_request(0), 1, in_probation=True)) == GenerateFault("no memory", away="plugin")


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
        wait_until(begun.exists, what="the import")
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


def test_each_group_is_answered_as_it_ends_whatever_becomes_of_the_others(role: RolloutRole) -> None:
    """A request raises when all of its groups have ended: what still ran would go on beside the repeated one."""
    role.working = lambda: contextlib.nullcontext()  # type: ignore[assignment,method-assign,misc]
    role.requests = ActorRequests(lambda: 1)
    faults: dict[int, Exception] = {1: EngineFailed("away"), 2: Unanswered("late"), 3: RuntimeError("of ours")}

    async def answers() -> list[int]:
        slow = asyncio.Event()
        places: list[int] = []

        async def bounded(prompt: PromptRequest, min_version: int, in_probation: bool) -> Generated:
            if prompt.ordinal == 0:
                await slow.wait()  # set once all others were answered
            if fault := faults.get(prompt.ordinal):
                raise fault
            return [SAMPLE] * prompt.samples

        role._bounded = bounded  # type: ignore[assignment,method-assign]
        with pytest.raises(RuntimeError, match="of ours"):
            async for some in role.generate(GenerationRequest(tuple(map(_request, range(5))), 1), 1):
                found.update(decoded(some))
                places += [place for place, _ in some]
                if len(places) == 3:
                    slow.set()
        return places

    found: dict[int, Generated] = {}
    assert asyncio.run(asyncio.wait_for(answers(), 60)) == [1, 2, 4, 0]
    assert found == {0: [SAMPLE] * 2, 4: [SAMPLE] * 2, **{i: GenerateFault(
        f"the engines to generate: {faults[i]}", away="engines", unanswered=i == 2) for i in (1, 2)}}
    role.requests.close()


# -- the example -------------------------------------------------------------------------------------------------------


class Engine(BaseHTTPRequestHandler):
    """Answers as SGLang does, with the number of the prompt's tokens."""

    keys: ClassVar[list[str | None]] = []
    """What requests have presented."""

    def do_POST(self) -> None:
        self.keys.append(self.headers["authorization"])
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


@pytest.fixture
def engine_url() -> Iterator[str]:
    Engine.keys.clear()
    with http_servers.serving(ThreadingHTTPServer(("127.0.0.1", 0), Engine)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_replaced_process_has_the_key_of_a_file_that_is_gone(tmp_path: Path, engine_url: str) -> None:
    """The file of the key may be removed at any time."""
    cfg = config.parse({"run_dir": str(tmp_path), "rollout": {"generate": "two_turns:generate"}})
    JobPaths.of(cfg).private.mkdir(parents=True)
    ClusterSecret.generate().save(ClusterPaths.of(cfg).secret)
    engine_key_file(cfg)
    own = make_generate(cfg, engine_url, 50, "")
    assert isinstance(own, OwnGenerate)
    try:
        remove_secret_files(JobPaths.of(cfg))
        own._process.replace()
        own.start()
        asyncio.run(own(_request(0), None))  # type: ignore[arg-type]
    finally:
        own.close()
    assert set(Engine.keys) == {f"Bearer {engine_key(cfg)}"}


def test_example_of_two_turns_is_trained_on_what_the_policy_wrote(engine_url: str) -> None:
    own = OwnGenerate("two_turns:generate", ClientOptions(engine_url, 60.0, 2, 50))
    try:
        request = _request(0)
        samples = asyncio.run(own(request, None))  # type: ignore[arg-type]
    finally:
        own.close()
    assert [[(s.token_ids, s.logprobs, s.loss, s.version) for s in sample.segments] for sample in samples] == [
        [((1,), (-0.25,), True, 3), ((5,), (), False, 0), ((3,), (-0.25,), True, 3)]] * 2
    batch = collate([(request.prompt, s) for s in samples], [1.0, -1.0])
    assert torch.equal(batch.by_sample("loss_mask")[0], torch.tensor([False, True, False, True]))
