"""What is kept of a job that has ended is looked at on its disk, and that another seed is refused is asked of the
product: where either is not so, the run breaks a rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.chaos_log import START, Log, of_kind

from chaos_tests import kept_job
from chaos_tests.event_log import EventLog, Kind, read
from chaos_tests.target import Target
from chaos_tests.validate import judge
from chaos_tests.validate.running import Decisions, KeptAfterStop
from chaos_tests.validate.verdict import Checker, State, Verdict
from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.config.fixed_settings import fixed_settings
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobSpec, Version, VersionState
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.paths import ClusterPaths, JobPaths

Edit = Callable[[Config, list[Version]], object]


# -- what is on disk ---------------------------------------------------------------------------------------------------
def stored(folder: Path, data: bytes) -> str:
    digest = digest_of(data)
    path = folder / digest[:2] / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return digest


@pytest.fixture
def job(tmp_path: Path) -> tuple[Config, list[Version]]:
    """A job on a cluster of its own that is down: its settings, and the heads of its streams."""
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    paths = JobPaths.of(cfg)
    (ClusterPaths.of(cfg).etcd / "member").mkdir(parents=True)
    ClusterPaths.of(cfg).folder.chmod(0o700)
    cluster_settings.save(cfg, paths.submitted_settings)
    paths.steps.write_text("".join(json.dumps({"kind": "step", "at": 1.0, "step": step}) + "\n" for step in (1, 2, 2)))
    disk = kept_state.chunks(cfg)
    heads = []
    for number, stream in enumerate(kept_job.STREAMS, 1):
        chunks = {stored(disk, f"{stream} {n}".encode()): 9 for n in range(3)}
        manifest = stored(disk, Manifest((), chunks).encode())
        heads.append(Version(stream=stream, number=number, state=VersionState.COMMITTED, epoch=1, manifest=manifest,
                             created_at=5.0))
    return cfg, heads


def chunk(cfg: Config, version: Version, nth: int | None) -> Path:
    """The file of a chunk; None: that of the manifest."""
    folder, digest = kept_state.chunks(cfg), version.manifest
    if nth is not None:
        digest = [*Manifest.decode((folder / digest[:2] / digest).read_bytes()).chunks][nth]
    return folder / digest[:2] / digest


def test_job_that_is_whole_lacks_nothing(job: tuple[Config, list[Version]]) -> None:
    found = kept_job.on_disk(*job)
    assert found == {"lacks": [], "steps": 2, "versions": [
        {"stream": stream, "number": number, "created_at": 5.0, "chunks": 4, "lost": 0}
        for number, stream in ((1, "policy"), (2, "trainer_state"), (3, "chaos"))]}


@pytest.mark.parametrize(("edit", "lost"), [
    (lambda cfg, heads: chunk(cfg, heads[1], 0).unlink(), 1),
    (lambda cfg, heads: chunk(cfg, heads[1], 2).write_bytes(b"torn"), 1),
    (lambda cfg, heads: chunk(cfg, heads[1], None).unlink(), 1),
    (lambda cfg, heads: chunk(cfg, heads[1], None).write_bytes(b"{}"), 1),
    (lambda cfg, heads: [chunk(cfg, heads[1], n).unlink() for n in (0, 1)], 2)],
    ids=["a chunk is gone", "a chunk is torn", "the manifest is gone", "the manifest is damaged", "two are gone"])
def test_chunks_that_are_not_whole_are_counted(job: tuple[Config, list[Version]], edit: Edit, lost: int) -> None:
    edit(*job)
    assert [version["lost"] for version in kept_job.on_disk(*job)["versions"]] == [0, lost, 0]


@pytest.mark.parametrize(("edit", "lacks"), [
    (lambda cfg, heads: JobPaths.of(cfg).submitted_settings.unlink(), "its settings: "),
    (lambda cfg, heads: JobPaths.of(cfg).submitted_settings.write_text("{"), "its settings: "),
    (lambda cfg, heads: shutil.rmtree(ClusterPaths.of(cfg).etcd), "the data of its etcd")],
    ids=["no settings", "damaged settings", "no etcd"])
def test_files_that_are_missing_are_named(job: tuple[Config, list[Version]], edit: Edit, lacks: str) -> None:
    edit(*job)
    [what] = kept_job.on_disk(*job)["lacks"]
    assert what.startswith(lacks)


def test_job_without_a_disk_keeps_no_version(job: tuple[Config, list[Version]]) -> None:
    cfg, heads = job
    cfg = cfg.model_copy(update={"dcs": cfg.dcs.model_copy(update={"disk_bytes": 0})})
    assert kept_job.on_disk(cfg, heads)["versions"] is None


# -- what the checker says of it ---------------------------------------------------------------------------------------
KEPT: dict[str, Any] = {"lacks": [], "steps": 12, "versions": [
    {"stream": "policy", "number": 14, "created_at": START + 1000.0, "chunks": 4, "lost": 0},
    {"stream": "trainer_state", "number": 3, "created_at": START + 1000.0, "chunks": 9, "lost": 0}]}


def ended(**end: Any) -> Log:
    log = Log()
    log.records[-1].update(end)
    return log


def kept(**changed: Any) -> Log:
    return ended(kept={**KEPT, **changed})


def lost(stream: int, chunks: int = 1) -> list[dict[str, Any]]:
    return [{**version, "lost": chunks} if n == stream else version for n, version in enumerate(KEPT["versions"])]


def said(log: Log, checker: type[Checker]) -> list[str]:
    return [violation.what for violation in judge.broken(log.records, [checker])]


def verdict(log: Log, rule: str) -> Verdict:
    return next(verdict for verdict in judge.judge(log.records) if verdict.rule == rule)


@pytest.mark.parametrize(("log", "what"), [
    (kept(lacks=["its settings: they are gone"]), "its settings: they are gone"),
    (kept(steps=11), "the records of 11 steps, and had written those of 12"),
    (kept(versions=lost(0)), "of policy, the head, has 1 of 4 chunks that are not whole"),
    (kept(versions=lost(1, 9)), "of trainer_state, the head, has 9 of 9 chunks"),
    (kept(versions=KEPT["versions"][1:]), "etcd has no head of policy any more")],
    ids=["settings", "steps", "policy", "trainer_state", "head"])
def test_what_a_job_that_has_ended_does_not_keep_breaks_the_rule(log: Log, what: str) -> None:
    [found] = said(log, KeptAfterStop)
    assert what in found and verdict(log, "I15").state is State.VIOLATED


def test_job_that_keeps_all_keeps_the_rule() -> None:
    found = verdict(kept(), "I15")
    assert found.state is State.KEPT and "12 steps and 2 heads whole on disk" in found.evidence
    assert verdict(kept(versions=None), "I15").state is State.KEPT, "it has no disk"


def test_log_of_an_earlier_release_is_judged_by_its_etcd_and_one_that_did_not_look_is_not() -> None:
    assert verdict(Log(), "I15").state is State.KEPT
    assert verdict(ended(kept=None), "I15").state is State.UNSEEN


@pytest.mark.parametrize("name", ["chunks_torn", "chunk_bits_flipped"])
def test_version_whose_chunks_a_fault_has_damaged_is_not_judged(name: str) -> None:
    """One that was begun once the fault had healed is."""
    log = kept(versions=lost(0))
    fault = next(of_kind(log.records, Kind.FAULT))
    fault["name"] = name
    assert len(said(log, KeptAfterStop)) == 1, "it was over"
    fault["healed_at"] = START + 2000.0
    assert said(log, KeptAfterStop) == []
    fault["healed_at"] = None
    assert said(log, KeptAfterStop) == []
    fault["injected_at"] = None
    assert len(said(log, KeptAfterStop)) == 1, "it has not happened"
    fault.update(injected_at=START, name="dcs_killed")
    assert len(said(log, KeptAfterStop)) == 1, "it damages none"


# -- another seed ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("refused", "wrong"), [
    ("seed was 1 and is now 2: it draws the prompts", 0), ("", 1), ("it cannot be resumed", 1)],
    ids=["named", "not refused", "not named"])
def test_job_is_not_resumed_with_another_seed(refused: str, wrong: int) -> None:
    log = ended(refused=refused)
    assert len(said(log, Decisions)) == wrong
    assert verdict(log, "I13").state is (State.VIOLATED if wrong else State.KEPT)
    assert wrong or "another seed was refused" in verdict(log, "I13").evidence


def test_decision_that_nobody_tried_to_change_is_no_evidence_of_a_run_that_was_to() -> None:
    assert verdict(ended(refused=None), "I13").state is State.UNSEEN
    assert "nobody tried" in verdict(Log(), "I13").evidence, "of an earlier release"


def target(cfg: Config, records: dict[str, bytes]) -> Target:
    """A target of whose etcd only these keys are asked."""
    etcd = cast(Any, SimpleNamespace(get=lambda key: SimpleNamespace(value=records[key], mod_revision=1, version=1,
                                                                     key=key) if key in records else None))
    cluster = cast(Any, SimpleNamespace(cfg=cfg))
    return Target(cluster, cast(Any, None), etcd, etcd, Keys(cfg.job), cast(Any, None), own=True)


def test_product_refuses_another_seed_and_names_it_alone(tmp_path: Path) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path), "data": {"template_date": "2026-01-01"}})
    keys = Keys("j")
    spec = JobSpec(settings={**fixed_settings(cfg), "data.source": "a secret"}, created_at=1.0)
    begun = {keys.job_spec(): spec.encode(), keys.stream_head("policy"): b"{}"}
    found = target(cfg, begun).refused()
    assert found is not None and found.startswith(f"seed was {cfg.seed} and is now {cfg.seed + 1}")
    assert "secret" not in found
    assert target(cfg, {keys.job_spec(): spec.encode()}).refused() is None, "nothing is committed"
    other = JobSpec(settings={**fixed_settings(cfg), "seed": cfg.seed + 1}, created_at=1.0)
    assert target(cfg, {**begun, keys.job_spec(): other.encode()}).refused() == "", "it is the job's"


# -- the log -----------------------------------------------------------------------------------------------------------
def test_end_of_a_log_has_what_is_kept(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(Kind.RUN, form=1)
    log.write(Kind.END, kept=KEPT, refused=None)
    assert [*read(log.path)][-1]["kept"] == KEPT
    bad = EventLog(tmp_path / "bad.jsonl")
    bad.write(Kind.RUN, form=1)
    bad.write(Kind.END, kept={**KEPT, "versions": [{"stream": "policy"}]})
    with pytest.raises(ValueError, match="kept of end is of another form"):
        [*read(bad.path)]
