# Sourced by every script here: makes the project's own .venv ready. Sets ROOT, BIN and PYTHON.
#
# Idempotent: a stamp in .venv records what was installed and for which folder and interpreter; while it matches, nothing is done
# and no network is needed. Installs with plain pip, as that machine has it configured.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
BIN="$VENV/bin"
PYTHON="$BIN/python"

say() { printf 'headrace: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Tests must not depend on what a person has set for their own runs.
forget_options() {
    local name
    for name in $(compgen -e | grep -E '^(HEADRACE|RUNAI_STREAMER)_' || true); do unset "$name"; done
}

_find_python() {
    local candidate
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.10 or newer, and found none on PATH"
}

_stamp() {
    {
        echo "$ROOT"
        "$PYTHON" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"
    } | sha256sum | cut -d' ' -f1
}

_is_ready() { [ -x "$PYTHON" ] && [ "$(cat "$VENV/.ready" 2>/dev/null)" = "$(_stamp)" ]; }

# Runs a step quietly; its output is shown only if it fails.
_step() {
    local log="$VENV/set-up.log"
    "$@" </dev/null >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    die "set-up failed at: ${*##*/} (all of it in .venv/set-up.log; the first run needs the package index)"
}

_set_up() {
    _is_ready && return  # another script was faster
    local python
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1 || [ "$(cat "$VENV/.root" 2>/dev/null || echo "$ROOT")" != "$ROOT" ]; then
        python="$(_find_python)"
        say "creating .venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$VENV" || die "could not create .venv (on Debian and Ubuntu: apt-get install python3-venv)"
    fi
    printf '%s\n' "$ROOT" >"$VENV/.root"
    : >"$VENV/set-up.log"
    say "installing the packages that pyproject.toml names (minutes the first time)"
    local pip=("$PYTHON" -m pip install --disable-pip-version-check -c "$ROOT/scripts/constraints.txt")
    _step "${pip[@]}" 'hatchling>=1.24' editables
    _step "${pip[@]}" torch==2.13.0 # before anything that asks for torch by an open range
    _step "${pip[@]}" --no-build-isolation -e "$ROOT[dev]"
    _stamp >"$VENV/.ready"
    say "ready"
}

ensure_env() {
    _is_ready && return
    mkdir -p "$VENV"
    if command -v flock >/dev/null; then
        (flock 9 && _set_up) 9>"$ROOT/.venv.lock"
    else
        _set_up
    fi
}

# Environments of their own, below .cache, for packages that .venv must not hold. The script of one called NAME defines
#   _NAME_needs     prints what it is made of: when that changes, it is set up again
#   _NAME_install   installs, by "${pip[@]}"; steps are joined by &&
#   _NAME_python    prints the Python that it is made with, where not every one will do
# and calls ensure_own NAME FOLDER WHAT.
ensure_own() {
    _own_is_ready "$@" && return
    mkdir -p "$2"
    if command -v flock >/dev/null; then
        (flock 7 && _set_up_own "$@") 7>"$ROOT/.cache/$1.lock"
    else
        _set_up_own "$@"
    fi
}

_own_stamp() {
    {
        echo "$ROOT"
        "$2/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
        "_$1_needs"
    } | sha256sum | cut -d' ' -f1
}

_own_is_ready() { [ -x "$2/bin/python" ] && [ "$(cat "$2/.ready" 2>/dev/null)" = "$(_own_stamp "$@")" ]; }

_set_up_own() {
    _own_is_ready "$@" && return  # another script was faster
    local name="$1" venv="$2" log="$2/set-up.log" python=_find_python
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        ! declare -F "_${name}_python" >/dev/null || python="_${name}_python"
        python="$("$python")"
        "$python" -m venv --clear "$venv"
    fi
    say "installing $3"
    "_${name}_install" </dev/null >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "set-up failed (all of it in ${log#"$ROOT/"}; the first run needs the package index)"
    }
    _own_stamp "$@" >"$venv/.ready"
}

# What this machine has that the tests can use.
gpu_kind() {
    if [ -e /dev/nvidiactl ]; then echo CUDA; elif [ -e /dev/kfd ]; then echo ROCm; fi
}

# The emulator of Azure's store comes from npm, once, into .cache. Whatever fails here only skips the tests that need it.
AZURITE_VERSION=3.37.0
AZURITE="$ROOT/.cache/azurite"

azurite_is_ready() { [ "$(cat "$AZURITE/.ready" 2>/dev/null)" = "$AZURITE_VERSION" ]; }

_install_azurite() {
    azurite_is_ready && return  # another script was faster
    say "installing the Azure emulator by npm (a minute the first time)"
    local npm=(npm install --prefix "$AZURITE" --ignore-scripts --no-audit --no-fund --fetch-retries 1)
    timeout 300 "${npm[@]}" "azurite@$AZURITE_VERSION" </dev/null >"$AZURITE/set-up.log" 2>&1 || return 0
    printf '%s\n' "$AZURITE_VERSION" >"$AZURITE/.ready"
}

ensure_azurite() {
    if azurite_is_ready || ! command -v node >/dev/null || ! command -v npm >/dev/null; then return 0; fi
    mkdir -p "$AZURITE" || return 0
    if command -v flock >/dev/null; then
        (flock 8 && _install_azurite) 8>"$AZURITE/.lock" || return 0
    else
        _install_azurite
    fi
}

[ -n "${OWN_ENVIRONMENT:-}" ] || ensure_env  # scripts that need nothing of .venv say so before
