"""The whole configuration of a job: its sections, and the checks between them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from elastic_rl.config import reading
from elastic_rl.config.alerts import AlertConfig
from elastic_rl.config.algorithm import AlgorithmConfig
from elastic_rl.config.coordinator import CoordinatorConfig
from elastic_rl.config.data import DataConfig
from elastic_rl.config.dcs import DcsConfig
from elastic_rl.config.device import DeviceConfig
from elastic_rl.config.engine import EngineConfig
from elastic_rl.config.etcd import EtcdConfig
from elastic_rl.config.failure_policy import FailurePolicyConfig
from elastic_rl.config.model import ModelConfig
from elastic_rl.config.rollout import RolloutConfig
from elastic_rl.config.section import Section
from elastic_rl.config.sft import SftConfig
from elastic_rl.config.telemetry import TelemetryConfig
from elastic_rl.config.train import TrainConfig
from elastic_rl.config.trainer import TrainerConfig


class Config(Section):
    """The whole configuration of a job."""

    job: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "quickstart"
    """Name of the job, at most 40 lowercase letters, digits and hyphens. It prefixes the job's keys in etcd and its
    shared-memory segments."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights, the data and the sampling."""
    run_dir: Path = Path("runs")
    """Folder of all jobs: reports are in ``<run_dir>/<job>``; logs, pids and addresses of the cluster in
    ``<run_dir>/<job>/cluster``."""
    device: DeviceConfig = DeviceConfig()
    etcd: EtcdConfig = EtcdConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    failure_policy: FailurePolicyConfig = FailurePolicyConfig()
    alerts: AlertConfig = AlertConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    dcs: DcsConfig = DcsConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        tp = self.trainer.tensor_parallel
        for name, n in (("model.num_heads", self.model.num_heads), ("model.num_kv_heads", self.model.num_kv_heads)):
            if n % tp:
                raise ValueError(f"{name}={n} is not a multiple of trainer.tensor_parallel={tp}")
        if self.dcs.host in ("", "0.0.0.0", "::") and not self.dcs.advertise_host:
            raise ValueError(f"dcs.host={self.dcs.host!r} is not an address that others can reach: set "
                             "dcs.advertise_host")
        if self.model.num_layers % self.trainer.pipeline_parallel:
            raise ValueError(f"model.num_layers={self.model.num_layers} is not a multiple of "
                             f"trainer.pipeline_parallel={self.trainer.pipeline_parallel}")
        if self.train.prompts_per_step % self.trainer.data_parallel:
            raise ValueError("train.prompts_per_step must be a multiple of trainer.data_parallel")
        if any(tls := (self.dcs.tls_cert, self.dcs.tls_key, self.dcs.tls_ca)) and not all(tls):
            raise ValueError("dcs.tls_cert, dcs.tls_key and dcs.tls_ca belong together: set all three or none")
        if bool(self.coordinator.tls_cert) != bool(self.coordinator.tls_key):
            raise ValueError("coordinator.tls_cert and coordinator.tls_key belong together: set both or none")
        if self.coordinator.tls_ca and not self.coordinator.tls_cert:
            raise ValueError("coordinator.tls_ca needs coordinator.tls_cert and coordinator.tls_key")
        coordinator = self.coordinator
        if coordinator.reconcile_deadline_s <= max(self.etcd.retry_budget_s, coordinator.reconcile_interval_s):
            raise ValueError("coordinator.reconcile_deadline_s must be longer than etcd.retry_budget_s and "
                             "coordinator.reconcile_interval_s")
        ports = self.coordinator.ports
        if ports and len(ports) != self.coordinator.replicas:
            raise ValueError(f"coordinator.ports has {len(ports)} ports for {self.coordinator.replicas} replicas")
        return self

    @property
    def job_dir(self) -> Path:
        """Folder of everything that this job writes."""
        return self.run_dir / self.job

    @property
    def cluster_dir(self) -> Path:
        """Folder of the cluster's logs, pids and addresses."""
        return self.job_dir / "cluster"

    @property
    def log_dir(self) -> Path:
        """Folder of the logs of the cluster's processes."""
        return self.cluster_dir / "logs"

    @property
    def ray_dir(self) -> Path:
        """Ray's folder of the job. Its path is short, since Ray puts sockets below it, whose paths are limited to 107
        bytes."""
        name = hashlib.sha256(str(self.cluster_dir.resolve()).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"erl-{name}"


def load(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.sub=value`` overrides (a leading ``--`` is allowed; values are YAML).

    Raises ConfigError, which names the file or the key and, for an unknown key, the nearest known one.
    """
    return parse(reading.values(path, overrides))


def parse(values: Mapping[str, Any]) -> Config:
    """Validates a nested mapping. Raises ConfigError with every fault in it."""
    return reading.validate(Config, values)
