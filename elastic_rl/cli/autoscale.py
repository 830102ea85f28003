"""``elastic-rl autoscale``: has the number of engines of a pool follow its load, and shows and ends that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from elastic_rl.cli import completion, tables
from elastic_rl.cli.common import Output, Target, api_command, out, say
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.words import counted

app = typer.Typer()

_COLUMNS = ("pool", "mode", "min_engines", "max_engines", "recommended", "message")
_WIDE = ("source", "by", "at", "queue_high", "token_usage_high", "token_usage_low", "min_trainer_idle", "up_after_s",
         "down_after_s", "up_cooldown_s", "down_cooldown_s", "max_step_up", "max_step_down")


@api_command(app)
def autoscale(cluster: Target,
              pool: Annotated[str, typer.Argument(
                  metavar="POOL", show_default=False, autocompletion=completion.pools, help=(
                      "Pool to change, or to show where no option is given; else all are listed."))] = "",
              min_engines: Annotated[int | None, typer.Option("--min", min=1, help="Fewest engines.")] = None,
              max_engines: Annotated[int | None, typer.Option("--max", min=1, help="Most engines.")] = None,
              dry_run: Annotated[bool, typer.Option("--dry-run", help=(
                  "Have the leader report, as events, what it would set, and set nothing."))] = False,
              external: Annotated[bool, typer.Option("--external", help=(
                  "Hold the bounds only, for a scaler of yours that sets the number."))] = False,
              off: Annotated[bool, typer.Option("--off", help="Disable it; the number of engines stays.")] = False,
              output: Output = Format.TABLE) -> None:
    """Have the number of engines of a pool follow its load; without options show it."""
    changes: dict[str, Any] = {key: value for key, value in (("min_engines", min_engines), ("max_engines", max_engines))
                               if value is not None}
    given = bool(changes) or dry_run or external
    if off and given or dry_run and external:
        raise ConfigError("--off, --external and --dry-run exclude one another, and --off takes no bounds",
                          hint="give one of them")
    if (given or off) and not pool:
        raise ConfigError("no pool is named", hint="name it, as in `elastic-rl autoscale rollout --max 8`")
    with cluster.api(see="elastic-rl pools") as api:
        if off:
            found = api.disable_autoscaling(pool)
        elif given:
            now = api.autoscaling(pool)["mode"]
            mode = "dry_run" if dry_run else "external" if external else now if now != "disabled" else "automatic"
            found = api.set_autoscaling(pool, {"mode": mode, **changes})
        elif pool:
            found = api.autoscaling(pool)
        else:
            tables.show(out, api.items("autoscaling"), _COLUMNS, output, wide=_WIDE)
            return
    if output is Format.JSON:
        tables.write_json(found)
    elif given or off:
        say(_changed(found, cluster.as_options))
    else:
        tables.put(out, tables.facts(found), output)


def _changed(found: dict[str, Any], options: str) -> str:
    pool, bounds = found["pool"], f"{found['min_engines']} to {counted(found['max_engines'], 'engine')}"
    match found["mode"]:
        case "disabled":
            return f"the number of engines of pool {pool} stays as it is"
        case "external":
            return f"pool {pool} has {bounds}; `elastic-rl scale` and its API set the number within"
        case "dry_run":
            return f"a dry run: what would be set, from {bounds}, is in `elastic-rl events --kind 'pool.*'{options}`"
        case _:
            return f"pool {pool} follows its load, from {bounds}; see `elastic-rl autoscale {pool}{options}`"
