# Sourced by the commands in scripts/. `prepare_environment EXTRAS MODULES` leaves the interpreter to use in $PYTHON:
# that of a virtual environment in the checkout, made and filled when it is missing or older than pyproject.toml, or the
# machine's own when no package index can be reached and it already has MODULES.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

base_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.11 or newer found as python3; install one (Debian, Ubuntu: sudo apt install python3 python3-venv)"
}

# The CUDA extra that suits the machine's driver; cuda12 where there is none, since its compiler needs no GPU.
cuda_extra() {
    local major
    major=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA[A-Za-z ]*Version: *([0-9]+)\..*/\1/p' | head -n 1) || true
    if [ "${major:-0}" -ge 13 ]; then echo cuda13; else echo cuda12; fi
}

has_modules() {
    local python=$1
    shift
    "$python" - "$@" 2>/dev/null <<'PY'
import importlib.util
import sys

sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))
PY
}

use_system_python() {
    local base=$1 reason=$2
    shift 2
    has_modules "$base" "$@" || return 1
    say "$reason; using $base, which already has what is needed"
    PYTHON=$base
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# What the environment was made from: a change of any of it means installing again.
fingerprint() {
    { "$1" --version; echo "$2"; cat "$ROOT/pyproject.toml"; } | cksum
}

index_reachable() {
    local scratch result=0
    scratch=$(mktemp -d)
    "$1" -m pip download --quiet --no-deps --retries 1 --timeout 15 --dest "$scratch" hatchling >/dev/null 2>&1 || result=1
    rm -rf "$scratch"
    return "$result"
}

# Installs a wheel that brings a module, unless it is there; fails quietly.
offer() {
    has_modules "$1" "$2" ||
        "$1" -m pip install --quiet --retries 1 --timeout 30 --only-binary=:all: "$3" >/dev/null 2>&1
}

# torch is an extra witness for the tests, which skip what needs it. Unless they may not, only a CPU build is asked for:
# the "+cpu" version exists nowhere but where pip has been pointed at CPU builds, so several GB of CUDA packages cannot
# come along.
offer_torch() {
    offer "$1" torch "torch==2.13.0+cpu" ||
        { [ "${TEST_REQUIRES:-}" = all ] && offer "$1" torch "torch==2.13.0"; } ||
        say "no CPU build of torch to be had here: the tests that use it will be skipped"
}

# Tests compile C++ to run kernels without a GPU: where the machine has no compiler, one comes from a wheel.
offer_compiler() {
    command -v c++ >/dev/null || offer "$1" ziglang "ziglang>=0.13" ||
        say "no C++ compiler to be had here: the tests that run kernels without a GPU will be skipped"
}

# Sets $PYTHON when the environment is there and made from the present pyproject.toml.
use_ready_environment() {
    local python=$ROOT/.venv/bin/python stamp=$ROOT/.venv/.installed-$1
    [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$python" "$1")" ] && PYTHON=$python
}

make_environment() {
    local extras=$1 base python=$ROOT/.venv/bin/python quiet=--quiet
    shift
    base=$(base_python)
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        use_system_python "$base" "$base cannot make virtual environments" "$@" && return
        die "$base cannot make virtual environments; install the venv module (Debian, Ubuntu: sudo apt install python3-venv)"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$ROOT/.venv"
    if ! index_reachable "$python"; then
        use_system_python "$base" "pip reaches no package index" "$@" && return
        die "pip reaches no package index, and $base lacks some of: $*"
    fi
    say "installing cupymla[$extras] into .venv (with the CUDA toolkit packages about 1.5 GB; the first time takes minutes)"
    if [ -t 2 ]; then quiet=; fi
    "$python" -m pip install $quiet --disable-pip-version-check --editable "$ROOT[$extras]" >&2 ||
        die "installing cupymla[$extras] failed; pip's message is above"
    case $extras in *dev*)
        offer_torch "$python"
        offer_compiler "$python"
        ;;
    esac
    fingerprint "$python" "$extras" >"$ROOT/.venv/.installed-$extras"
    PYTHON=$python
}

prepare_environment() {
    use_ready_environment "$1" && return
    # Two commands started at once must not fill the same environment.
    {
        if command -v flock >/dev/null; then flock 9; fi
        use_ready_environment "$1" || make_environment "$@"
    } 9<"$ROOT/pyproject.toml"
}
