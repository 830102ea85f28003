"""Which conditions are alerts, and who receives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class AlertRoute(Section):
    """Who gets some of the alerts."""

    url: str
    """Apprise URL."""
    tags: list[str] = []
    """It gets alerts that have one of these tags; none: every alert. An alert has the tags of its severity
    (``alerts.tags``), its kind, such as ``engine.dead``, and the kind's first part, such as ``engine``."""
    name: str = ""
    """What the receiver is called in records and answers; empty: made from the URL, without what is secret in it."""


class AlertConfig(Section):
    urls: list[str] = []
    """Apprise URLs that get every alert."""
    routes: list[AlertRoute] = []
    """Apprise URLs that get some alerts, by tags: a pager only errors, a chat all."""
    config_file: str = ""
    """An Apprise configuration file (YAML or text) with more URLs and their tags, which mean the same as in
    ``routes``; its tag ``always`` means every alert."""
    tags: dict[Literal["info", "warning", "error"], list[str]] = {
        "info": ["info"], "warning": ["warning"], "error": ["error", "critical"]}
    """Apprise tags of an alert by its severity; a severity that is not named here has its own name."""
    timeout_s: Seconds = 4.0
    """Longest wait for one notification service."""
    group_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """A message waits so long for other alerts of the same moment; they then are one message."""
    messages_per_minute: Positive = 10
    """Messages to one receiver, repetitions included. What comes faster waits, and is told together."""

    engine_lag_versions: Positive = 8
    """An engine so many policy versions behind the head is an alert."""
    engine_lag_s: Seconds = 120.0
    """And one that for so long has not had a version that was there."""
    durable_lag_s: Seconds = 900.0
    """A stream of which no newer version became durable for so long, though there is one, is an alert."""
    full_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A node's disk (its arena, where it has no disk) that is fuller than this is an alert, and an etcd database that
    fills more of its quota."""
    leaderless_s: Seconds = 15.0
    """When nobody led for longer than this, the next leader tells of it."""
    etcd_slow_s: Seconds = 0.5
    """An etcd whose reads take longer than this, for 30 s, is an alert."""
