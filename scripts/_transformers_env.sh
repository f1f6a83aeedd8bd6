# Sourced by scripts/test: makes .cache/transformers, an environment with transformers, diffusers and accelerate, for their tests.
#
# Of its own, since they bring packages that headrace does not ask for. Idempotent, as _env.sh, which has to be sourced before.

TRANSFORMERS_PACKAGES=(transformers==5.19.0 diffusers==0.42.1 accelerate==1.15.0 safetensors==0.8.0)
TRANSFORMERS_VENV="$ROOT/.cache/transformers"
TRANSFORMERS_PYTHON="$TRANSFORMERS_VENV/bin/python"

_transformers_stamp() {
    {
        echo "$ROOT ${TRANSFORMERS_PACKAGES[*]}"
        "$TRANSFORMERS_PYTHON" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"
    } | sha256sum | cut -d' ' -f1
}

_transformers_is_ready() {
    [ -x "$TRANSFORMERS_PYTHON" ] && [ "$(cat "$TRANSFORMERS_VENV/.ready" 2>/dev/null)" = "$(_transformers_stamp)" ]
}

_install_transformers() {
    _transformers_is_ready && return  # another script was faster
    "$TRANSFORMERS_PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$TRANSFORMERS_VENV"
    say "installing ${TRANSFORMERS_PACKAGES[*]} into .cache/transformers (about 2 GB; minutes the first time)"
    local log="$TRANSFORMERS_VENV/set-up.log"
    local pip=("$TRANSFORMERS_PYTHON" -m pip install --disable-pip-version-check -c "$ROOT/scripts/constraints.txt")
    {
        "${pip[@]}" 'hatchling>=1.24' editables &&
            "${pip[@]}" torch==2.13.0 && # before anything that asks for torch by an open range
            "${pip[@]}" "${TRANSFORMERS_PACKAGES[@]}" pytest pytest-timeout hypothesis pillow &&
            "${pip[@]}" --no-build-isolation -e "$ROOT[s3,gcs]"
    } </dev/null >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "set-up failed (all of it in .cache/transformers/set-up.log; the first run needs the package index)"
    }
    _transformers_stamp >"$TRANSFORMERS_VENV/.ready"
}

ensure_transformers() {
    _transformers_is_ready && return
    mkdir -p "$TRANSFORMERS_VENV"
    if command -v flock >/dev/null; then
        (flock 7 && _install_transformers) 7>"$ROOT/.cache/transformers.lock"
    else
        _install_transformers
    fi
}
