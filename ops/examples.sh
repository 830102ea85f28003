#!/usr/bin/env bash
# Sets everything up, and the sandbox that the reward of examples/code.yaml needs; then trains examples and checks what
# each run learned against examples/thresholds.toml. Exit code 1 if one fails.
#
#   bash ops/examples.sh                            all examples, with seed 0
#   bash ops/examples.sh code sft --seeds 0,1,2     some examples, with several seeds
#
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash ops/setup.sh --dev
PATH=$PWD/.venv/bin:$PATH exec .venv/bin/python examples/run_examples.py "$@"
