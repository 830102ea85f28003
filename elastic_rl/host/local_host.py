"""This host as a member of its cluster: its name, the address of its servers, and their certificate."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

from pydantic import ValidationError

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.record import Record
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net import authority
from elastic_rl.net.addresses import LOOPBACK, UNSPECIFIED
from elastic_rl.net.authority import Authority
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def host_name() -> str:
    """The name of this host in a cluster where nothing else was said: its host name, as keys and URLs can have it."""
    return re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:100] or "host"


class LocalHost(Record):
    """What a cluster knows this host by; kept in the cluster's folder."""

    name: str
    """Its id in the cluster."""
    address: str = LOOPBACK
    """Where etcd, the coordinators and the DCS nodes of this host listen."""
    labels: dict[str, str] = {}

    @classmethod
    def of(cls, paths: ClusterPaths) -> LocalHost:
        """The host as the cluster's folder describes it; without a file, a host on loopback with its own name. Raises
        ConfigError for a damaged file."""
        try:
            return cls.decode(paths.local_host.read_bytes())
        except FileNotFoundError:
            return cls(name=host_name())
        except (OSError, ValidationError) as e:
            raise ConfigError(f"{paths.local_host} cannot be read: {e}", hint=(
                "`elastic-rl down`, delete the file, and give --name and --address to `elastic-rl up`")) from e

    def named(self, name: str, address: str) -> LocalHost:
        """The host with another name or address; what is empty stays. Raises ConfigError."""
        if name and (not _NAME.fullmatch(name) or _is_address(name)):
            raise ConfigError(f"--name={name} cannot name a host",
                              hint="take letters, digits, dots, hyphens and underscores, at most 100")
        try:
            found = ip_address(address) if address else None
        except ValueError as e:
            raise ConfigError(f"--address={address} is no IP address", hint="give one that `ip addr` lists") from e
        if found is not None and (found.is_unspecified or found.is_multicast):
            raise ConfigError(f"--address={address} is no address that others can reach",
                              hint="give one that `ip addr` lists")
        return self.replace(name=name or self.name, address=str(found) if found is not None else self.address)

    @property
    def is_local(self) -> bool:
        """Whether no other host can reach its servers, so that they need no TLS."""
        return ip_address(self.address).is_loopback

    def listens_at(self, setting: str) -> str:
        """Where a server of this host listens: at the host's address, unless its setting names another one than the
        default."""
        return self.address if setting == LOOPBACK else setting

    def save(self, paths: ClusterPaths) -> None:
        replace_file(paths.local_host, self.encode(), private=True, durable=True)

    # -- its certificate ---------------------------------------------------------------------------------------------
    def tls(self, paths: ClusterPaths) -> TlsFolder | None:
        """The files of its certificate; None for a host that needs none."""
        return None if self.is_local else paths.tls

    def certify(self, paths: ClusterPaths, cluster: str, secret: ClusterSecret, *, also: Iterable[str] = (),
                now: float | None = None) -> bool:
        """Makes the certificate of its servers, and the authority's, unless good ones are there; whoever uses them
        follows the files. The private key stays the same for as long as the cluster's secret does, so that it fits the
        certificate at every moment; another secret withdraws it. ``also``: further addresses and names that servers of
        this host are called by. Returns whether one was made. Raises OSError."""
        tls, issuer, now = paths.tls, Authority.derived(secret.authority(), cluster), now or time.time()
        names = [*dict.fromkeys([self.address, LOOPBACK, "localhost", self.name,
                                 *(name for name in also if name not in UNSPECIFIED)])]
        tls.folder.mkdir(mode=0o700, exist_ok=True)
        same_secret = issuer.is_own(_read(tls.ca))
        key = _read(tls.key) if same_secret else b""
        if not (why := issuer.objection(_read(tls.cert), key, names, now)):
            return False
        log.info("a certificate is made for %s: %s", self.address, why)
        try:
            made = issuer.issue(key, names, now)
        except ValueError:  # there is no key, or it is damaged
            made = issuer.issue(key := authority.new_key(), names, now)
            replace_file(tls.key, key, private=True, durable=True)
        replace_file(tls.cert, made, private=True, durable=True)
        if not same_secret:  # last: until then the next call finds another authority, and makes all three again
            replace_file(tls.ca, issuer.certificate, durable=True)
        return True


def _is_address(name: str) -> bool:
    """Whether a name is an IP address. As the name of a host it would be in its certificate, for another machine."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def with_address(cfg: Config, before: LocalHost, after: LocalHost, tls: TlsFolder) -> Config:
    """The settings with which a cluster is reached that a host serves at its address: those of ``before`` that followed
    from its address, and were not chosen, follow from that of ``after``. So do those that have the host's certificate,
    of whichever address: a start that was killed may have stored them. ``tls``: the files of this host. Pure. Raises
    ConfigError for certificates of an etcd that the cluster starts itself."""
    own = {"tls_cert": str(tls.cert), "tls_key": str(tls.key), "tls_ca": str(tls.ca)}
    none = dict.fromkeys(own, "")
    coordinator, etcd = cfg.coordinator, cfg.etcd
    certified = coordinator.tls_cert == own["tls_cert"] and coordinator.host not in UNSPECIFIED
    if certified or coordinator.host == before.address:
        coordinator = coordinator.model_copy(update={"host": LOOPBACK})
    coordinator = coordinator.model_copy(update={"host": after.listens_at(coordinator.host)})
    if coordinator.tls_cert in ("", own["tls_cert"]):
        coordinator = coordinator.model_copy(update=none if after.is_local else own)
    if not etcd.endpoints:
        if etcd.tls_ca not in ("", own["tls_ca"]):
            raise ConfigError("etcd.tls_ca is for an etcd that someone else runs", hint=(
                "set etcd.endpoints; the certificates of a cluster's own etcd are made by `elastic-rl up`"))
        etcd = etcd.model_copy(update=none if after.is_local else own)
    return cfg.model_copy(update={"coordinator": coordinator, "etcd": etcd})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
