"""The sender process of notifications with Apprise and its plug-ins loaded already, which takes two CPU seconds: for
``support.forked``."""

from __future__ import annotations

import apprise

from elastic_rl.coordinator.alerts import sender_process

main = sender_process.main
apprise.Apprise().add("json://localhost")  # loads every plug-in
