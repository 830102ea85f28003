"""Files that `elastic-rl up` makes, for tests of parts that need them and no cluster."""

from __future__ import annotations

from elastic_rl.config import Config
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.cluster_secret import ClusterSecret


def make_secret(cfg: Config) -> ClusterSecret:
    """Makes the secret of the cluster of these settings, unless it is there, and returns it."""
    path = ClusterPaths.of(cfg).secret
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        ClusterSecret.generate().save(path)
    return ClusterSecret.read(path)
