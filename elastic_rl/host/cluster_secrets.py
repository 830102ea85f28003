"""The secret in a cluster's folder, and the tokens of the admin API that are made from it."""

from __future__ import annotations

import json
from collections.abc import Callable

from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import replace_file


def write_secrets(paths: ClusterPaths, say: Callable[[str], None]) -> None:
    """Writes the files that are missing: the secret, the credentials from the secret, the others from the credentials.
    An existing table is replaced with the secret only, and then keeps the tokens that users have added, since these are
    theirs to withdraw. ``say``: gets a warning where the table does not list the credentials that were made. Raises
    ConfigError for a damaged secret, damaged credentials or a damaged table."""
    credentials, table = paths.credentials, paths.tokens
    secret = ClusterSecret.read(paths.secret) if paths.secret.exists() else _new_secret(paths, say)
    made = not credentials.exists()
    if made:
        _write_credentials(paths, secret)
    if not paths.viewer_token.exists():
        replace_file(paths.viewer_token, read_token(credentials, auth.Role.VIEWER), private=True)
    if not table.exists():
        auth.write_table(table, {role.value: read_token(credentials, role) for role in auth.Role})
    elif made and not auth.TokenTable(table).find(secret.api(auth.Role.OPERATOR)):
        say(f"warning: {credentials} was missing and has been made from the secret, and {table.name} does not list its "
            f"operator's token: add it, or delete {table.name} to withdraw all tokens that are not from the secret")


def _new_secret(paths: ClusterPaths, say: Callable[[str], None]) -> ClusterSecret:
    """Makes the secret. Credentials that are there come from an earlier one, which others may know: they are withdrawn
    and replaced. The secret is saved last, so that the next start does all of this again where one is killed halfway.
    """
    secret = ClusterSecret.generate()
    paths.viewer_token.unlink(missing_ok=True)
    if paths.credentials.exists():
        if paths.tokens.exists():
            old = {read_token(paths.credentials, role) for role in auth.Role}
            auth.replace_tokens(paths.tokens, old, _api_tokens(secret))
        _write_credentials(paths, secret)
        say(f"{paths.secret} was missing: another secret is made, and the tokens in {paths.credentials.name} are "
            f"withdrawn and replaced")
    secret.save(paths.secret)
    return secret


def _api_tokens(secret: ClusterSecret) -> dict[str, str]:
    return {role.value: secret.api(role) for role in auth.Role}


def _write_credentials(paths: ClusterPaths, secret: ClusterSecret) -> None:
    replace_file(paths.credentials, json.dumps(_api_tokens(secret), indent=2), private=True)
