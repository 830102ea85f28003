"""This host as a member of its cluster: its name, the address of its servers, and their certificate."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from pydantic import ValidationError

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.record import Record
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net import authority
from elastic_rl.net.addresses import LOOPBACK, UNSPECIFIED, is_ip_address
from elastic_rl.net.authority import Authority
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

_BROADCAST = IPv4Address("255.255.255.255")
_ONE_OF_ITS_OWN = "give one that `ip addr` lists for an interface that the other hosts reach"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def host_name() -> str:
    """The name of this host in a cluster where nothing else was said: its host name, as keys and URLs can have it."""
    return re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:100] or "host"


class LocalHost(Record):
    """What a cluster knows this host by; kept in the cluster's folder."""

    name: str
    """Its id in the cluster."""
    address: str = LOOPBACK
    """Where etcd, the coordinators, the DCS nodes, routers and engines of this host listen."""
    labels: dict[str, str] = {}
    joined: bool = False
    """Whether it has joined a cluster (`elastic-rl node`) whose etcd and coordinators are elsewhere."""

    coordinator: bool = False
    """Whether a host that has joined runs a coordinator."""

    etcd: bool | None = None
    """Whether a member of the cluster's own etcd runs here; None: only on the host that has begun the cluster."""

    preemption_notice: str = ""
    """Where its provider announces that it takes the machine back (``preemption.checked``); empty: nowhere."""

    @property
    def node(self) -> str:
        """Id of each job's DCS node on this host."""
        return f"host-{self.name}" if self.joined else "node-0"

    @property
    def runs_etcd(self) -> bool:
        """Whether it has a member of the cluster's own etcd, where the cluster has one."""
        return not self.joined if self.etcd is None else self.etcd

    @property
    def described(self) -> str:
        """What it is called, for errors."""
        labels = "".join(f", {name}={value}" for name, value in self.labels.items())
        coordinator = ", with a coordinator" if self.coordinator else ""
        etcd = ", with a member of etcd" if self.joined and self.runs_etcd else ""
        notices = f", with notices of preemption from {self.preemption_notice}" if self.preemption_notice else ""
        return f"{self.name} at {self.address}{labels}{coordinator}{etcd}{notices}"

    @classmethod
    def of(cls, paths: ClusterPaths) -> LocalHost:
        """The host as the cluster's folder describes it; without a file, a host on loopback with its own name. Raises
        ConfigError for a damaged file."""
        try:
            found = cls.decode(paths.local_host.read_bytes())
            return found.named(found.name, found.address)
        except FileNotFoundError:
            return cls(name=host_name())
        except (OSError, ValidationError, ConfigError) as e:
            raise ConfigError(f"{paths.local_host} cannot be read: {e}", hint=(
                "`elastic-rl down`, delete the file, and give --name and --address to `elastic-rl up`")) from e

    def named(self, name: str, address: str) -> LocalHost:
        """The host with another name or address; what is empty stays. Raises ConfigError."""
        # As the name of a host, an IP address would be in its certificate, for another machine.
        if name and (not _NAME.fullmatch(name) or is_ip_address(name)):
            raise ConfigError(f"--name={name} cannot name a host",
                              hint="take letters, digits, dots, hyphens and underscores, at most 100")
        return self.replace(name=name or self.name, address=_plain(address) if address else self.address)

    @property
    def is_local(self) -> bool:
        """Whether no other host can reach its servers, so that they need no TLS."""
        return ip_address(self.address).is_loopback

    def listens_at(self, setting: str) -> str:
        """Where a server of this host listens: at the host's address, unless its setting names another one than the
        default."""
        return self.address if setting == LOOPBACK else setting

    def settings_here(self, cfg: Config, tls: TlsFolder) -> Config:
        """The settings of the cluster as they hold on this host: at its address, with its certificate (``tls``), but
        for what the operator chose. They are not stored: the address may change, and so may the folder. Pure. Raises
        ConfigError for certificates of an etcd that the cluster starts itself."""
        own = {"tls_cert": str(tls.cert), "tls_key": str(tls.key), "tls_ca": str(tls.ca)}
        if not cfg.etcd.endpoints and cfg.etcd.tls_ca not in ("", own["tls_ca"]):
            raise ConfigError("etcd.tls_ca is for an etcd that someone else runs", hint=(
                "set etcd.endpoints; the certificates of a cluster's own etcd are made by `elastic-rl up`"))
        if self.is_local:
            return cfg
        coordinator = cfg.coordinator
        allowed = [*dict.fromkeys([*coordinator.allowed_hosts, self.name])]
        coordinator = coordinator.model_copy(update={
            "host": self.listens_at(coordinator.host), "allowed_hosts": allowed,
            **(own if not coordinator.tls_cert else {})})
        etcd = cfg.etcd if cfg.etcd.endpoints else cfg.etcd.model_copy(update=own)
        return cfg.model_copy(update={"coordinator": coordinator, "etcd": etcd})

    def save(self, paths: ClusterPaths) -> None:
        replace_file(paths.local_host, self.encode(), private=True, durable=True)

    # -- its certificate ---------------------------------------------------------------------------------------------
    def tls(self, paths: ClusterPaths) -> TlsFolder | None:
        """The files of its certificate; None for a host that needs none."""
        return None if self.is_local else paths.tls

    def certify(self, paths: ClusterPaths, cluster: str, secret: ClusterSecret, *, also: Iterable[str] = (),
                renew_only: bool = False, now: float | None = None) -> bool:
        """Makes the certificate of its servers, and the authority's, unless good ones are there; whoever uses them
        follows the files. The private key stays the same for as long as the cluster's secret does, so that it fits the
        certificate at every moment; another secret withdraws it. ``also``: further addresses and names that servers of
        this host are called by. ``renew_only``: servers run with what is there, which another secret must not replace:
        those that they talk to would refuse them. Returns whether one was made. Raises ConfigError for such a secret,
        and OSError."""
        tls, issuer, now = paths.tls, Authority.derived(secret.authority(), cluster), now or time.time()
        names = [*dict.fromkeys([self.address, LOOPBACK, "localhost", self.name,
                                 *(name for name in also if name not in UNSPECIFIED)])]
        tls.folder.mkdir(mode=0o700, exist_ok=True)
        same_secret = issuer.is_own(found := _read(tls.ca))
        if renew_only and not same_secret and authority.is_certificate(found):
            raise ConfigError(f"{paths.secret} is not the secret that {tls.ca} was made with",
                              hint="put that one back; or `elastic-rl down`, then `up`, for another secret")
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


def _plain(address: str) -> str:
    """An IP address of one host, as certificates and URLs have it. Raises ConfigError."""
    try:
        found = ip_address(address)
    except ValueError as e:
        raise ConfigError(f"--address={address} is no IP address", hint=_ONE_OF_ITS_OWN) from e
    # An IPv6 address of a link needs a zone, whose name means something on this host alone.
    if (found.is_unspecified or found.is_multicast or found == _BROADCAST
            or isinstance(found, IPv6Address) and (found.ipv4_mapped or found.is_link_local)):
        raise ConfigError(f"--address={address} is no address that others can reach", hint=_ONE_OF_ITS_OWN)
    return str(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
