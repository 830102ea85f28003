"""The settings of a job in its record: readable and writable with the cluster's secret only."""

from __future__ import annotations

import pytest

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import job_settings
from elastic_rl.net.cluster_secret import ClusterSecret

SECRET = ClusterSecret.generate()
CLUSTER = config.parse({"job": "any", "run_dir": "/runs", "coordinator": {"replicas": 3},
                        "etcd": {"endpoints": ["10.0.0.1:2379"]}})
CFG = config.parse({"job": "j", "run_dir": "/elsewhere", "seed": 7, "alerts": {"urls": ["json://user:pass@host"]},
                    "rollout": {"reward_options": {"none": None, "large": 1e300, "text": "ä"}}})


def test_opened_settings_are_those_of_the_job_with_the_sections_of_its_cluster() -> None:
    opened = job_settings.opened(job_settings.sealed(CFG, SECRET), "j", SECRET, CLUSTER)
    of_cluster = {name: getattr(CLUSTER, name) for name in ("run_dir", "etcd", "coordinator")}
    assert opened == CFG.model_copy(update=of_cluster)


def test_record_shows_no_setting() -> None:
    sealed = job_settings.sealed(CFG, SECRET)
    assert "pass" not in sealed and "seed" not in sealed


@pytest.mark.parametrize(("job", "secret"), [("other", SECRET), ("j", ClusterSecret.generate())],
                         ids=["settings of another job", "another secret"])
def test_settings_that_were_sealed_for_something_else_are_refused(job: str, secret: ClusterSecret) -> None:
    with pytest.raises(ConfigError, match=f"job {job} were not sealed"):
        job_settings.opened(job_settings.sealed(CFG, SECRET), job, secret, CLUSTER)


@pytest.mark.parametrize("settings", ["", "{}", "gAAAAA", "\u00e4"])
def test_settings_that_were_not_sealed_are_refused(settings: str) -> None:
    with pytest.raises(ConfigError, match="were not sealed"):
        job_settings.opened(settings, "j", SECRET, CLUSTER)


def test_changed_byte_is_found() -> None:
    sealed = job_settings.sealed(CFG, SECRET)
    middle = len(sealed) // 2
    other = "A" if sealed[middle] != "A" else "B"
    with pytest.raises(ConfigError, match="were not sealed"):
        job_settings.opened(sealed[:middle] + other + sealed[middle + 1:], "j", SECRET, CLUSTER)
