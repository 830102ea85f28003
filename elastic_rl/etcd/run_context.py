"""What a process of a run has to know to take part in it: one JSON file, handed over by path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.keys import Keys

if TYPE_CHECKING:
    from elastic_rl.etcd.client import EtcdClient


class RunContext(BaseModel):
    """One incarnation of a run: the configuration, where its truth lives, and the fencing epoch it may write under."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    config: Config
    etcd_endpoints: list[str] = Field(min_length=1)
    """``host:port`` of the etcd members in use, also when ``elastic-rl up`` started them itself."""
    job: str
    epoch: int
    """Fencing epoch of the run; a write of a lower epoch is refused."""
    model_dir: str
    """Folder of the HF model that weights, shape and tokenizer start from."""
    router_url: str = ""
    """Base URL of the SGLang router; empty where no engine takes part."""
    host: str = "127.0.0.1"
    """Address under which others of the run reach this host."""

    def save(self, path: Path | str) -> Path:
        """Writes the file whole or not at all, readable by its owner only, and returns its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.touch(mode=0o600)
        partial.write_text(self.model_dump_json(indent=1))
        partial.replace(target)
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
        # Imported here because most readers of a context (engine children, tools) never open a store, and gRPC is slow.
        from elastic_rl.etcd.client import EtcdClient
        return EtcdClient.from_config(self.config.etcd, self.etcd_endpoints)

    @property
    def keys(self) -> Keys:
        """The keyspace of the job."""
        return Keys(self.job)
