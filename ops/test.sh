#!/usr/bin/env bash
# Sets everything up, then runs every check and every test (not the soak tests). Arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash ops/setup.sh --dev || exit 1
PATH=$PWD/.venv/bin:$PATH
failed=()

check() {
    local name=$1
    shift
    printf '[test] %s\n' "$name"
    "$@" || failed+=("$name")
}

check "ruff" ruff check --quiet .
check "mypy" mypy --no-error-summary
check "import directions" lint-imports --no-cache

printf '[test] pytest: unit, integration, e2e, chaos\n'
out=$(mktemp)
trap 'rm -f "$out"' EXIT
if [ $# -gt 0 ]; then selection=("$@"); else selection=(tests/unit tests/integration tests/e2e chaos_tests); fi
pytest -m "not soak" "${selection[@]}" 2>&1 | tee "$out"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("pytest")

if [ ${#failed[@]} -gt 0 ]; then
    printf '[test] FAILED: %s\n' "${failed[*]}"
else
    printf '[test] all checks passed\n'
fi
tail -n 1 "$out"
[ ${#failed[@]} -eq 0 ]
