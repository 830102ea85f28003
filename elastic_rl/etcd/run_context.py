"""What a process needs to know to take part in a run: one JSON file, whose path it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_rl.config import Config, PoolSettings
from elastic_rl.config.groups import ACTOR, CRITIC, TRAINER_GROUPS, TrainerGroupSpec
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.keys import Keys
from elastic_rl.runtime.files import replace_file

if TYPE_CHECKING:
    from elastic_rl.etcd.client import EtcdClient
    from elastic_rl.etcd.fencing import FencedWriter


class RunContext(BaseModel):
    """One incarnation of a run: its configuration, its etcd, and the fencing epoch under which it may write."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    config: Config
    etcd_endpoints: list[str] = Field(min_length=1)
    """``host:port`` of the etcd members in use, also when ``elastic-rl up`` started them itself."""
    job: str
    epoch: int
    """Fencing epoch of the run; a write of a lower epoch is refused."""
    generation: int = 0
    """Fencing generation of the driver that uses the context; its parts write under the epoch alone. 0: of no driver.
    """
    assignment: int = 0
    """Generation of the driver's assignment, under which a driver begins; 0: it was started without one."""
    submission: int = 0
    """Number of the job's submission that is carried out; 0: it was not submitted."""
    model_dir: str
    """Folder of the HF model with the initial weights, the architecture and the tokenizer."""
    router_urls: dict[str, str] = {}
    """Base URL of the SGLang router of each pool, by the pool's name."""
    group_name: str = ACTOR.name
    """Trainer group that the process belongs to, if to any: ``of_group`` makes the context of one."""
    formation: int = 0
    """Number of the formation of that group (``Formation``); its ranks publish while it is the newest. 0: of none."""
    host: str
    """Address at which other processes of the run reach this host."""

    def save(self, path: Path | str) -> Path:
        """Writes the file whole or not at all, readable by its owner only, and returns its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, self.model_dump_json(indent=1), mark=str(os.getpid()), private=True)
        return target

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads what ``save`` wrote. Raises ConfigError, which names the file."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as e:
            raise ConfigError(f"cannot read the run context {path}: {e.strerror}") from e
        except ValidationError as e:
            raise ConfigError(f"{path} is not a run context: {e}",
                              hint="it must come from the same release as this process") from e

    def connect(self) -> EtcdClient:
        """A new connection to etcd; the caller closes it."""
        # Imported here because most readers of a context (engine children, tools) use no etcd, and importing gRPC is
        # slow.
        from elastic_rl.etcd.client import EtcdClient
        return EtcdClient.from_config(self.config.etcd, self.etcd_endpoints)

    def pool(self, name: str) -> PoolSettings:
        """What the engines of a pool are. Raises KeyError for one that the job does not have."""
        return self.config.pool_settings(self.model_dir)[name]

    @property
    def group(self) -> TrainerGroupSpec:
        """Trainer group that the process belongs to, if to any."""
        return TRAINER_GROUPS[self.group_name]

    def of_group(self, group: TrainerGroupSpec) -> RunContext:
        """The context of the processes of a trainer group: settings and model are the group's."""
        own = self.config.critic.model if group is CRITIC else ""
        return self.model_copy(update={"config": self.config.of_group(group), "group_name": group.name,
                                       "model_dir": own or self.model_dir})

    def writer_of_group(self, etcd: EtcdClient) -> FencedWriter:
        """The writer of the trainer group that the process belongs to: its token is epoch and formation."""
        from elastic_rl.etcd.fencing import FencedWriter  # as in ``connect``
        return FencedWriter.of_formation(etcd, self.keys, self.epoch, self.group_name, self.formation)

    @property
    def keys(self) -> Keys:
        """The keyspace of the job."""
        return Keys(self.job)
