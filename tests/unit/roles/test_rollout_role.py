"""Which samples the rollout role takes, and what becomes of a prompt that engines must not get."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.config import Config
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.dcs.catalog import reads
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest, single_turn
from elastic_rl.engine.own_generate import OwnGenerate
from elastic_rl.errors import EngineFailed, EtcdUnavailable, PluginFailed
from elastic_rl.etcd import fencing
from elastic_rl.roles import rollout
from elastic_rl.roles.rollout import PublishedVersions, RolloutRole


def _role(client: Any) -> RolloutRole:
    role = RolloutRole.__new__(RolloutRole)
    role.ctx = SimpleNamespace(config=Config(), model_dir="")  # type: ignore[assignment]
    role.generate_fn, role.client, role._vocabulary = single_turn, client, 16
    role._published = PublishedVersions(None, None, 1)  # type: ignore[arg-type]
    role._first_sample = SimpleNamespace(first_of=lambda samples: 0)  # type: ignore[assignment]
    return role


def _generate(role: RolloutRole, *token_ids: int, min_version: int = 1) -> Generated:
    return asyncio.run(role._bounded(PromptRequest(7, Prompt(token_ids), Sampling(4), 2), min_version))


def test_prompt_with_unknown_token_ids_is_a_fault_of_its_group() -> None:
    client = GenerateClient("http://127.0.0.1:9", timeout_s=1.0, retries=1, vocabulary=16)
    found = _generate(_role(client), 1, 16)
    assert isinstance(found, GenerateFault) and not found.away
    assert "group 7" in found.why and "token id 16" in found.why


class _Engines:
    """Answer with one version after the other, the last one again and again."""

    def __init__(self, *versions: int) -> None:
        self._versions: Iterator[int] = itertools.chain(versions, itertools.repeat(versions[-1]))
        self.asked = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, n: int, route: str = "") -> list[Sample]:
        self.asked += 1
        version = next(self._versions)
        return [Sample((Segment((2,), (-0.1,), version=version),)) for _ in range(n)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is reported; the head is version 3, and no pause is made."""
    found: list[Any] = []
    monkeypatch.setattr(reads, "head", lambda *a: SimpleNamespace(number=3))
    monkeypatch.setattr(fencing, "emit", lambda *a, **k: found.append(a[3].name))
    monkeypatch.setattr(rollout, "_RETRY_S", (0.0, 0.0))
    return found


def test_sample_of_a_version_that_was_never_published_is_generated_again(events: list[Any]) -> None:
    """A foreign worker of the router answered, until the driver took it out."""
    engines = _Engines(999999, 3)
    found = _generate(_role(engines), 1, 2, min_version=3)
    assert isinstance(found, list) and {s.versions for s in found} == {(3,)} and engines.asked == 2
    assert events == ["samples.unpublished"]


def test_samples_of_versions_that_were_never_published_are_no_samples(events: list[Any]) -> None:
    with pytest.raises(EngineFailed, match="policy version 4, and none so new was published"):
        _generate(_role(_Engines(4)), 1, 2)
    role = _role(_Engines(2**62))
    role.generate_fn = OwnGenerate.__new__(OwnGenerate)
    own_calls = role.client.generate
    role._generate = lambda prompt, generate_fn: own_calls((), prompt.sampling, 2)  # type: ignore[method-assign,assignment]
    with pytest.raises(PluginFailed, match=f"gave a sample of policy version {2**62}"):
        asyncio.run(role._group(PromptRequest(7, Prompt((1,)), Sampling(4), 2), 1, role.generate_fn))
    assert events == ["samples.unpublished"] * 2  # once for each role, however often it is tried


def test_samples_that_are_older_than_what_was_asked_for_are_generated_again(events: list[Any]) -> None:
    """Such samples are of an engine that has just joined, or has not seen the head."""
    engines = _Engines(2, 0, 3)
    found = _generate(_role(engines), 1, 2, min_version=3)
    assert isinstance(found, list) and {s.versions for s in found} == {(3,)} and engines.asked == 3
    with pytest.raises(EngineFailed, match="no engine generated samples of policy version 3 or newer"):
        _generate(_role(_Engines(2)), 1, 2, min_version=3)
    assert not events


def test_engine_may_serve_a_version_before_the_role_knows_of_it(events: list[Any], monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    role = _role(_Engines(3, 4, 4))
    assert isinstance(_generate(role, 1, 2), list)
    heads = []
    monkeypatch.setattr(reads, "head", lambda *a: heads.append(4) or SimpleNamespace(number=4))
    assert isinstance(_generate(role, 1, 2), list) and isinstance(_generate(role, 1, 2), list)
    assert heads == [4] and not events


def test_unknown_version_without_etcd_is_no_fault_of_the_group(events: list[Any],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any) -> Any:
        raise EtcdUnavailable("no member answers")

    role = _role(_Engines(3, 3, 4))
    assert isinstance(_generate(role, 1, 2), list)
    monkeypatch.setattr(reads, "head", away)
    assert isinstance(_generate(role, 1, 2), list)  # is known
    with pytest.raises(EngineFailed, match="not known which policy versions are published"):
        _generate(role, 1, 2)
