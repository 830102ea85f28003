"""What a job decided, in a real etcd: a start with other settings is refused once something depends on them."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
from support.etcd_server import EtcdServers

from elastic_rl import config, train
from elastic_rl.config import Config
from elastic_rl.config.fixed_settings import fixed_settings
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobSpec, JobStatus
from elastic_rl.host import job_spec
from elastic_rl.host.paths import JobPaths


class Job:
    """Starts of one job, up to where its driver would start."""

    def __init__(self, servers: EtcdServers, keys: Keys, folder: Path) -> None:
        self.keys, self._folder = keys, folder
        self.info = ClusterInfo(keys.job, servers.endpoints, [], "")

    def cfg(self, **settings: Any) -> Config:
        return config.parse({"job": self.keys.job, "run_dir": str(self._folder), "train": {"steps": 10},
                             "etcd": {"call_timeout_s": 2.0}, **settings})

    def start(self, **settings: Any) -> Config:
        return train.prepare(self.cfg(**settings), self.info).config


@pytest.fixture
def job(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Job:
    return Job(etcd_servers, keys, tmp_path)


def commit_steps(etcd: EtcdClient, keys: Keys, step: int = 3) -> None:
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=step, steps=10).encode())


def spec(etcd: EtcdClient, keys: Keys) -> JobSpec:
    return JobSpec.decode(etcd.get(keys.job_spec()).value)


def test_start_removes_what_was_derived_from_data_that_it_does_not_use(job: Job) -> None:
    (folder := JobPaths.of(job.cfg()).data).mkdir(parents=True)
    (copy := folder / f"a-{'0' * 16}.arrow").touch()
    job.start()
    assert not copy.exists()


def test_first_start_records_the_settings_and_later_ones_keep_the_record(job: Job, etcd: EtcdClient) -> None:
    job.start(seed=7)
    first = spec(etcd, job.keys)
    assert first.settings["seed"] == 7 and first.settings["train.group_size"] == 8
    commit_steps(etcd, job.keys)
    job.start(seed=7, train={"steps": 99, "lr": 0.5}, rollout={"engines": 4})
    assert spec(etcd, job.keys) == first


def test_stored_settings_of_a_run_are_readable_by_their_owner_only(job: Job) -> None:
    """They hold secrets; an earlier release left them readable by everybody."""
    file = JobPaths.of(job.cfg()).settings
    file.parent.mkdir(parents=True)
    file.write_text("of an earlier release")
    cfg = job.start(alerts={"urls": ["json://user:password@host/"]})
    assert file.stat().st_mode & 0o777 == 0o600
    assert config.load(file) == cfg, "whole, so that it can be given to -c"


def test_resumed_job_with_other_settings_is_refused_with_each_of_them(job: Job, etcd: EtcdClient) -> None:
    job.start()
    commit_steps(etcd, job.keys)
    before = etcd.get(job.keys.job_status()).value
    with pytest.raises(ConfigError) as e:
        job.start(seed=1, train={"steps": 99, "prompts_per_step": 32}, data={"options": {"operand_below": 50}})
    for text in ("seed was 0 and is now 1", "train.prompts_per_step was 64 and is now 32",
                 "data.options was {}"):
        assert text in e.value.message
    assert f"--job=NEW --from-job={job.keys.job}" in e.value.hint
    assert etcd.get(job.keys.job_status()).value == before, "a start that is refused changes nothing"
    with pytest.raises(ConfigError, match=r"model\.hidden_size was 96") as e:
        job.start(model={"hidden_size": 128})
    assert "--from-job" not in e.value.hint, "the weights of that job have another shape"


def test_job_that_has_committed_nothing_may_still_change(job: Job, etcd: EtcdClient) -> None:
    model = JobPaths.of(job.start()).model
    model.mkdir()
    (model / "config.json").write_text("{}")
    job.start(train={"steps": 20})
    assert (model / "config.json").exists(), "it is still the right one"
    job.start(seed=3)
    assert not model.exists(), "it was made with the other seed"
    assert spec(etcd, job.keys).settings["seed"] == 3


def test_job_keeps_the_date_that_its_chat_templates_write(
        job: Job, etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are made after midnight would be others: of a resume, and of a group that was lost."""
    class Day(datetime.date):
        of_month = 25

        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2026, 11, cls.of_month)

    monkeypatch.setattr(job_spec, "date", Day)
    assert job.start().data.template_date == datetime.date(2026, 11, 25)
    Day.of_month = 26
    assert job.start().data.template_date == datetime.date(2026, 11, 25), "it may have made prompts"
    assert job.start(data={"template_date": "2026-11-01"}).data.template_date == datetime.date(2026, 11, 1)
    commit_steps(etcd, job.keys)
    cfg = job.start()
    assert cfg.data.template_date == datetime.date(2026, 11, 1)
    assert config.load(JobPaths.of(cfg).settings).data.template_date == datetime.date(2026, 11, 1)
    with pytest.raises(ConfigError, match=r'data.template_date was "2026-11-01" and is now "2026-11-26"'):
        job.start(data={"template_date": "2026-11-26"})


@pytest.mark.parametrize("stream", ["policy", "trainer_state"])
def test_committed_version_fixes_the_settings(job: Job, etcd: EtcdClient, stream: str) -> None:
    job.start()
    etcd.put(job.keys.stream_head(stream), b"{}")
    with pytest.raises(ConfigError, match="seed was 0"):
        job.start(seed=1)
    if stream == "trainer_state":  # the SFT phase goes on
        job.start(sft={"max_steps": 5})
    else:
        with pytest.raises(ConfigError, match=r"sft\.max_steps was 3000"):
            job.start(sft={"max_steps": 5})


def test_spec_of_a_job_that_has_committed_nothing_contradicts_nothing(job: Job) -> None:
    spec = JobSpec(settings=fixed_settings(job.cfg()))
    decided = job_spec.Decided(spec, epoch=0, committed=False, sft_is_over=False)
    job_spec.require_same(job.cfg(seed=1), decided)
    with pytest.raises(ConfigError):
        job_spec.require_same(job.cfg(seed=1), dataclasses.replace(decided, committed=True))


def test_job_of_a_release_that_recorded_nothing_keeps_its_present_values(job: Job, etcd: EtcdClient) -> None:
    commit_steps(etcd, job.keys)
    job.start(seed=5)
    with pytest.raises(ConfigError, match="seed was 5"):
        job.start(seed=6)


def test_record_that_cannot_be_read_stops_no_start(job: Job, etcd: EtcdClient) -> None:
    etcd.put(job.keys.job_spec(), b"garbage")
    commit_steps(etcd, job.keys)
    job.start()
    assert spec(etcd, job.keys).settings["seed"] == 0


def test_record_is_not_written_beside_a_newer_driver(job: Job, etcd: EtcdClient) -> None:
    decided = job_spec.read(etcd, job.keys)
    fencing.raise_epoch(etcd, job.keys, holder="a driver on another host")
    with pytest.raises(Fenced):
        job_spec.record(etcd, job.keys, job.cfg(), decided)
    assert etcd.get(job.keys.job_spec()) is None


def test_model_that_cannot_be_used_is_refused_before_anything_is_recorded(job: Job, etcd: EtcdClient,
                                                                          tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        job.start(model={"path": str(tmp_path / "nowhere")})
    assert etcd.get(job.keys.job_spec()) is None and etcd.get(job.keys.job_status()) is None
