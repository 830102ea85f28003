"""Every setting of a run: typed, documented, one module a section. One YAML file, each key also ``--key.sub=value``.

Names carry their unit (``_s`` seconds, ``_bytes`` bytes). An unknown key is an error that names the nearest known one.
"""

from elastic_rl.config.alerts import AlertConfig, AlertRoute
from elastic_rl.config.algorithm import AlgorithmConfig
from elastic_rl.config.coordinator import CoordinatorConfig
from elastic_rl.config.critic import CriticConfig
from elastic_rl.config.data import DataConfig
from elastic_rl.config.dcs import DcsConfig, Stream
from elastic_rl.config.device import DeviceConfig
from elastic_rl.config.engine import EngineConfig
from elastic_rl.config.etcd import EtcdConfig
from elastic_rl.config.eval import EvalConfig
from elastic_rl.config.failure_policy import FailurePolicyConfig
from elastic_rl.config.host_selector import LABEL, LABEL_VALUE, HostSelector, selector_text
from elastic_rl.config.model import ModelConfig
from elastic_rl.config.pools import ROLLOUT_POOL, PoolConfig, PoolSettings
from elastic_rl.config.rejection import RejectionConfig
from elastic_rl.config.roles import RoleConfig
from elastic_rl.config.rollout import ENVIRONMENT, RolloutConfig
from elastic_rl.config.root import JOB_NAME, Config, given, load, parse
from elastic_rl.config.section import Positive, Seconds, Section
from elastic_rl.config.sft import SftConfig
from elastic_rl.config.telemetry import TelemetryConfig
from elastic_rl.config.train import TrainConfig
from elastic_rl.config.trainer import TrainerConfig

__all__ = [
    "JOB_NAME",
    "ENVIRONMENT",
    "AlertConfig",
    "AlertRoute",
    "AlgorithmConfig",
    "Config",
    "CoordinatorConfig",
    "CriticConfig",
    "DataConfig",
    "DcsConfig",
    "DeviceConfig",
    "EngineConfig",
    "EtcdConfig",
    "EvalConfig",
    "HostSelector",
    "LABEL",
    "LABEL_VALUE",
    "ModelConfig",
    "FailurePolicyConfig",
    "PoolConfig",
    "PoolSettings",
    "Positive",
    "ROLLOUT_POOL",
    "RejectionConfig",
    "RoleConfig",
    "RolloutConfig",
    "Seconds",
    "Section",
    "Stream",
    "TelemetryConfig",
    "TrainConfig",
    "TrainerConfig",
    "SftConfig",
    "given",
    "load",
    "parse",
    "selector_text",
]
