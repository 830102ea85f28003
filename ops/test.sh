#!/usr/bin/env bash
# Sets everything up, then runs every check and every test.
#
#   bash ops/test.sh                  checks; whole runs (e2e); then unit, integration and chaos tests side by side
#   bash ops/test.sh --all            the same with thousands of seeds for every state machine (takes hours)
#   bash ops/test.sh tests/unit -x    checks, then pytest with these arguments, in one process
#
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Most integration tests wait for other processes more than they compute, so there are more workers than cores. Files that
# take minutes come first: one that begins last would run alone at the end.
WORKERS=${ELASTIC_RL_TEST_WORKERS:-3}
# Whole runs come alone: they start some twenty processes, and what else runs would starve their heartbeats.
SIDE_BY_SIDE=(-n "$WORKERS" --dist loadfile --no-loadscope-reorder
              tests/integration/{driver,engine,pipeline,trainer} chaos_tests tests/integration
              tests/unit tests/gpu)
WHOLE_RUNS=(tests/e2e)

bash ops/setup.sh --dev || exit 1
PATH=$PWD/.venv/bin:$PATH
if [ "${1:-}" = --all ]; then
    shift
    export ELASTIC_RL_SEEDS=${ELASTIC_RL_SEEDS:-3000}
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=()

# Runs checks side by side; each one's output is shown when it has ended.
run_checks() {
    local name
    ruff check --quiet . >"$out/ruff" 2>&1 & pids=("$!")
    mypy --no-error-summary >"$out/mypy" 2>&1 & pids+=("$!")
    lint-imports --no-cache >"$out/imports" 2>&1 & pids+=("$!")
    mkdocs build --strict --quiet --site-dir "$out/site" >"$out/docs" 2>&1 & pids+=("$!")
    for name in ruff mypy imports docs; do
        if wait "${pids[0]}"; then
            printf '[test] %s: ok\n' "$name"
        else
            printf '[test] %s: FAILED\n' "$name"
            cat "$out/$name"
            failed+=("$name")
        fi
        pids=("${pids[@]:1}")
    done
}

run_pytest() {
    local name=$1
    shift
    printf '[test] pytest: %s\n' "$name"
    pytest --durations=10 "$@" 2>&1 | tee "$out/pytest"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("pytest $name")
    closing+=("$(tail -n 1 "$out/pytest")")
}

closing=()
run_checks
if [ $# -gt 0 ]; then
    run_pytest "$*" "$@"
else
    run_pytest "whole runs" "${WHOLE_RUNS[@]}"
    run_pytest "unit, integration, chaos" "${SIDE_BY_SIDE[@]}"
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf '[test] FAILED: %s\n' "${failed[*]}"
else
    printf '[test] all checks passed\n'
fi
printf '%s\n' "${closing[@]}"
[ ${#failed[@]} -eq 0 ]
