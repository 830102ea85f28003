"""The tokens of the admin API in a cluster's folder, made from the cluster's secret."""

from __future__ import annotations

import json
from collections.abc import Callable

from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import replace_file


def write_tokens(paths: ClusterPaths, secret: ClusterSecret, say: Callable[[str], None]) -> None:
    """Writes the files of tokens that are missing: the credentials from the secret, the others from the credentials. An
    existing table is never replaced, since its tokens are the users' to add and to withdraw. ``say``: gets a warning
    where the table does not list the credentials that were made. Raises ConfigError for damaged credentials or a
    damaged table."""
    credentials, table = paths.credentials, paths.tokens
    made = not credentials.exists()
    if made:
        tokens = {role.value: secret.api(role) for role in auth.Role}
        replace_file(credentials, json.dumps(tokens, indent=2), private=True)
    if not paths.viewer_token.exists():
        replace_file(paths.viewer_token, read_token(credentials, auth.Role.VIEWER), private=True)
    if not table.exists():
        auth.write_table(table, {role.value: read_token(credentials, role) for role in auth.Role})
    elif made and not auth.TokenTable(table).find(secret.api(auth.Role.OPERATOR)):
        say(f"warning: {credentials} was missing and has been made from the secret, and {table.name} does not list its "
            f"operator's token: add it, or delete {table.name} to withdraw all tokens that are not from the secret")
