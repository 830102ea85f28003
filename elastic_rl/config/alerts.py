"""Alerts: when a condition is one, and who is notified."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import PathText, Positive, Seconds, Section


class AlertRoute(Section):
    """A receiver of some alerts."""

    url: str
    """Apprise URL of the notification service."""
    tags: list[str] = []
    """The receiver gets alerts that have one of these tags; an empty list means every alert. An alert has the tags of
    its severity (``alerts.severity_tags``), its kind, such as ``engine.dead``, and the first part of its kind, such as
    ``engine``."""
    name: str = ""
    """Name of the receiver in records and API answers. Empty: made from the URL, without the secrets in it."""


class AlertConfig(Section):
    urls: list[str] = []
    """Apprise URLs of notification services that get every alert."""
    routes: list[AlertRoute] = []
    """Notification services that get some alerts, selected by tag: a pager only errors, a chat everything."""
    config_file: PathText = ""
    """Path of an Apprise configuration file (YAML or text) with more URLs and tags. Tags select alerts as those of
    ``alerts.routes`` do; the tag ``always`` selects every alert."""
    severity_tags: dict[Literal["info", "warning", "error"], list[str]] = {
        "info": ["info"], "warning": ["warning"], "error": ["error", "critical"]}
    """Tags of an alert by its severity. A severity that is missing here has its own name as its tag."""
    send_timeout_s: Seconds = 4.0
    """Seconds a notification service may take for one notification. The process that sends it is then killed, and the
    notification is retried after a backoff of 2 to 60 seconds."""
    group_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds to wait for further alerts before a notification is sent; alerts of that time are one notification."""
    max_notifications_per_minute: Positive = 10
    """Largest number of notifications to one receiver within a minute, retries included. Alerts beyond it wait and are
    sent together."""

    engine_lag_versions: Positive = 8
    """An engine that serves policy weights this many versions behind the newest raises ``engine.lagging``."""
    engine_lag_s: Seconds = 120.0
    """An engine that has not loaded a newer policy version for this many seconds, though there was one, raises
    ``engine.lagging``."""
    durable_lag_s: Seconds = 900.0
    """A stream with a newer version that has not been copied to the durable store for this many seconds raises
    ``durable.behind``."""
    under_replicated_s: Seconds = 120.0
    """Committed versions that have fewer copies than ``dcs.replicas`` says, some at any time of more than this many
    seconds, raise ``dcs.under_replicated``."""
    full_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A DCS node whose disk (its arena, without a disk) is filled beyond this fraction raises ``dcs.full``, and an etcd
    database beyond this fraction of its quota ``etcd.full``."""
    run_waiting_s: Seconds = 60.0
    """A run that waits for the same part of the system for more than this many seconds raises ``run.waiting``, and so
    does one that no actor process runs for so long. Set it above the time that an engine of the model takes to start,
    if the start of a run is not to raise it."""
    engines_idle_s: Seconds = 300.0
    """Routable engines of the policy's pool that could process twice as many requests, or more, for this many seconds,
    while a limit on what is in flight keeps the run from sending any, raise ``pool.idle``, which names the limit."""
    update_kl: Annotated[float, Field(gt=0)] = 1.0
    """Divergence of the policy from the one that sampled, in nats a token, from which on the updates of a step raise
    ``update.large``. Usual ones are below 0.1."""
    eval_fall_errors: Annotated[float, Field(gt=0)] = 3.0
    """An evaluation whose mean reward is this many standard errors below that of step 0 raises ``eval.fell``. Of a
    policy that is as it was, about one evaluation in 700 is that low by chance with 3."""
    leader_gap_s: Seconds = 15.0
    """The next leader reports ``leader.absent`` when no coordinator led for more than this many seconds."""
    etcd_slow_s: Seconds = 0.5
    """An etcd whose reads take longer than this many seconds, for 30 seconds, raises ``etcd.slow``."""
