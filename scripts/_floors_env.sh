# Sourced by scripts/test --floors: makes .cache/floors ready, an environment with the lowest versions that pyproject.toml allows.
#
# Of its own. torch of that age comes with CUDA (6 GB), and it and numpy have builds for Python 3.10 and 3.11. Tools of the tests are
# those of scripts/constraints.txt. _env.sh has to be sourced before. Sets FLOORS_PYTHON.

FLOORS_VENV="$ROOT/.cache/floors"
FLOORS_PYTHON="$FLOORS_VENV/bin/python"

_floors_needs() {
    sed -n '/^\[project\]/,/^\[project.scripts\]/p' "$ROOT/pyproject.toml"
    cat "$ROOT/scripts/constraints.txt" "$ROOT/scripts/_floors.py" "$ROOT/scripts/_floors_env.sh"
}

_floors_python() {
    local candidate
    for candidate in python3 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "the lowest versions need Python 3.10 or 3.11, and found none on PATH"
}

_floors_install() {
    "$PYTHON" "$ROOT/scripts/_floors.py" >"$FLOORS_VENV/constraints.txt" || return
    pip+=(-c "$FLOORS_VENV/constraints.txt")
    "${pip[@]}" 'hatchling>=1.24' editables &&
        "${pip[@]}" --no-build-isolation -e "$ROOT[dev,torch,s3,gcs,azure,checksums,fsspec,progress,bench]"
}

ensure_floors() {
    ensure_own floors "$FLOORS_VENV" "the lowest versions that pyproject.toml allows into .cache/floors (6 GB; minutes the first time)"
}
