#!/usr/bin/env bash
# Sets everything up, then runs checks and tests.
#
#   bash ops/test.sh                  every check, every unit test, each wiring of real parts once, one whole run
#   bash ops/test.sh --all            everything there is, with thousands of seeds for every state machine (takes hours)
#   bash ops/test.sh tests/unit -x    checks, then pytest with these arguments, in one process
#   bash ops/test.sh --durations      where the time of the last run went, by file and by fixture
#   bash ops/test.sh --list-full      what runs with --all only, why, and where its rule is proved by default
#
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    --durations | --list-full)
        [ -x .venv/bin/python ] || { echo "there is no environment yet: bash ops/setup.sh --dev" >&2; exit 2; } ;;
    *) bash ops/setup.sh --dev || exit 1 ;;
esac
PATH=$PWD/.venv/bin:$PATH exec python ops/run_tests.py "$@"
