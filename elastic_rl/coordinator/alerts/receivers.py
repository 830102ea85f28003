"""Receivers of alerts: the notification services of the configuration, and which alerts each of them gets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apprise

from elastic_rl.config import AlertConfig
from elastic_rl.config.secrets import redacted_receiver
from elastic_rl.coordinator.alerts.state_machine import TEST, Alert
from elastic_rl.errors import ConfigError

ALWAYS = "always"


@dataclass(frozen=True)
class Receiver:
    """A receiver by its name; without tags it gets every alert."""

    name: str
    tags: frozenset[str] = frozenset()

    def accepts(self, tags: Iterable[str]) -> bool:
        return not self.tags or ALWAYS in self.tags or not self.tags.isdisjoint(tags)


def receiver_name(url: str) -> str:
    """A short stable name for an Apprise URL; the URL itself holds secrets and is never stored or logged."""
    digest = hashlib.blake2s(url.encode(), digest_size=4).hexdigest()
    scheme = url.partition(":")[0]
    return f"{scheme}-{digest}" if scheme.isalnum() else digest


def tags_of(alert: Alert, by_severity: Mapping[Any, Sequence[str]]) -> set[str]:
    """The tags of an alert: those of its severity, its kind, and the first part of its kind."""
    severity = alert.severity.value
    return {*by_severity.get(severity, (severity,)), alert.kind, alert.kind.partition(".")[0]}


def audience(alert: Alert, receivers: Sequence[Receiver], by_severity: Mapping[Any, Sequence[str]]) -> list[str]:
    """Names of the receivers that an alert is for; a test is for all."""
    tags = tags_of(alert, by_severity)
    return [r.name for r in receivers if alert.kind == TEST or r.accepts(tags)]


def load(cfg: AlertConfig) -> dict[Receiver, str]:
    """The receivers of the configuration and their Apprise URLs. Raises ConfigError for a URL that Apprise does not
    know; the error holds no secret."""
    found: dict[str, tuple[Receiver, str]] = {}

    def add(where: str, url: str, tags: Iterable[str], name: str = "") -> None:
        if not apprise.Apprise().add(url):
            raise ConfigError(f"{where} is not a URL that Apprise knows ({redacted_receiver(url)})",
                              hint="the services are listed at https://github.com/caronc/apprise")
        name, wanted = name or receiver_name(url), frozenset(tags)
        if name in found:
            before, other_url = found[name]
            if other_url != url:
                raise ConfigError(f"{where}: another receiver has the name {name!r} already",
                                  hint="give each route a name of its own")
            wanted = before.tags | wanted if before.tags and wanted else frozenset()  # it gets what either gets
        found[name] = (Receiver(name, wanted), url)

    for n, url in enumerate(cfg.urls):
        add(f"alerts.urls[{n}]", url, ())
    for n, route in enumerate(cfg.routes):
        add(f"alerts.routes[{n}].url", route.url, route.tags, route.name)
    for service in _in_file(cfg.config_file):
        add("alerts.config_file", service.url(), map(str, service.tags))
    return dict(found.values())


def names(cfg: AlertConfig) -> list[str]:
    """Names of the receivers of the configuration. Raises ConfigError."""
    return [r.name for r in load(cfg)]


def _in_file(path: str) -> list[apprise.NotifyBase]:
    if not path:
        return []
    file = Path(path).expanduser()
    listing = apprise.AppriseConfig()
    client = apprise.Apprise()
    # Apprise reports no error for a file that cannot be read.
    if not file.is_file() or not listing.add(str(file)) or not client.add(listing) or not list(client.find()):
        raise ConfigError(f"alerts.config_file {path} names no notification service",
                          hint="it must be a readable Apprise configuration, see https://github.com/caronc/apprise/wiki")
    return list(client.find())
