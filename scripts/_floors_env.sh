# Sourced by scripts/test --floors: makes .cache/floors ready, an environment with the lowest versions that pyproject.toml allows.
#
# Of its own. torch of that age comes with CUDA (6 GB), and it and numpy have builds for Python 3.10 and 3.11. Tools of the tests are
# those of scripts/constraints.txt. Idempotent, as _env.sh, which has to be sourced before. Sets FLOORS_PYTHON.

FLOORS_VENV="$ROOT/.cache/floors"
FLOORS_PYTHON="$FLOORS_VENV/bin/python"

_floors_stamp() {
    {
        echo "$ROOT"
        "$FLOORS_PYTHON" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
        sed -n '/^\[project\]/,/^\[project.scripts\]/p' "$ROOT/pyproject.toml"
        cat "$ROOT/scripts/constraints.txt" "$ROOT/scripts/_floors.py" "$ROOT/scripts/_floors_env.sh"
    } | sha256sum | cut -d' ' -f1
}

_floors_is_ready() { [ -x "$FLOORS_PYTHON" ] && [ "$(cat "$FLOORS_VENV/.ready" 2>/dev/null)" = "$(_floors_stamp)" ]; }

_find_floors_python() {
    local candidate
    for candidate in python3 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "the lowest versions need Python 3.10 or 3.11, and found none on PATH"
}

_install_floors() {
    _floors_is_ready && return  # another script was faster
    "$FLOORS_PYTHON" -m pip --version >/dev/null 2>&1 || "$(_find_floors_python)" -m venv --clear "$FLOORS_VENV"
    "$PYTHON" "$ROOT/scripts/_floors.py" >"$FLOORS_VENV/constraints.txt"
    say "installing the lowest versions that pyproject.toml allows into .cache/floors (6 GB; minutes the first time)"
    local log="$FLOORS_VENV/set-up.log"
    local pip=("$FLOORS_PYTHON" -m pip install --disable-pip-version-check -c "$FLOORS_VENV/constraints.txt")
    {
        "${pip[@]}" 'hatchling>=1.24' editables &&
            "${pip[@]}" --no-build-isolation -e "$ROOT[dev,torch,s3,gcs,azure,checksums,fsspec,progress,bench]"
    } </dev/null >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "set-up failed (all of it in .cache/floors/set-up.log; the first run needs the package index)"
    }
    _floors_stamp >"$FLOORS_VENV/.ready"
}

ensure_floors() {
    _floors_is_ready && return
    mkdir -p "$FLOORS_VENV"
    if command -v flock >/dev/null; then
        (flock 7 && _install_floors) 7>"$ROOT/.cache/floors.lock"
    else
        _install_floors
    fi
}
