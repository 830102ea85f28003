#!/usr/bin/env bash
# Sets everything up, brings a local cluster up, trains, shows a live view, writes a report, stops everything.
# Ctrl-C stops everything too. Stopping deletes nothing: the last lines say what is kept, and how to resume.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: bash ops/quickstart.sh [options] [--key.sub=value ...]
  --steps N      optimiser steps of RL (default: the configuration's)
  --engines N    inference engines to start with (default 2)
  --seed N       seed of the whole run (default 0)
  --job NAME     name of the run, which goes to runs/NAME; a run of this name that was stopped resumes
                 (default: a new name, and so a new run, each time)
  --faults       kill an engine, a trainer rank and the leading coordinator, and scale up and down, during the run
  --keep-up      leave the cluster running afterwards and say how to talk to it
Any other argument goes to `elastic-rl train`, such as -c FILE or --trainer.data_parallel=1.
USAGE
}

need() { [ $# -ge 2 ] || { printf 'quickstart: %s needs a value\n\n' "$1" >&2; usage >&2; exit 2; }; }

job="qs-$(date +%m%d-%H%M%S)-$$"
args=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --steps) need "$@"; args+=("--train.steps=$2"); shift ;;
        --steps=*) args+=("--train.steps=${1#*=}") ;;
        --engines) need "$@"; args+=("--rollout.engines=$2"); shift ;;
        --engines=*) args+=("--rollout.engines=${1#*=}") ;;
        --seed) need "$@"; args+=("--seed=$2"); shift ;;
        --job) need "$@"; job=$2; shift ;;
        --job=*) job=${1#*=} ;;
        *) args+=("$1") ;;
    esac
    shift
done

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$here/ops/setup.sh"
cd "$here"
if [ -d "runs/$job/cluster" ]; then
    printf 'quickstart: job %s is there already and resumes; `elastic-rl down --purge --job=%s` deletes it\n' "$job" "$job"
fi
# One process from here on: it owns the cluster and stops it on every way out.
exec "$here/.venv/bin/elastic-rl" train --with-cluster "--job=$job" ${args[@]+"${args[@]}"}
