# Sourced by scripts/docs and scripts/test: makes .cache/docs ready, an environment with mkdocs that builds the site. Sets DOCS_PYTHON.
#
# Of its own (210 MB), since nothing else asks for its packages. Idempotent, as _env.sh, which has to be sourced before.

DOCS_VENV="$ROOT/.cache/docs"
DOCS_PYTHON="$DOCS_VENV/bin/python"

_docs_stamp() {
    {
        echo "$ROOT"
        "$DOCS_PYTHON" -c 'import sys; print(sys.version)' 2>/dev/null || echo "no python"
        grep -E '^docs = ' "$ROOT/pyproject.toml"
        cat "$ROOT/scripts/constraints.txt"
    } | sha256sum | cut -d' ' -f1
}

_docs_is_ready() { [ -x "$DOCS_PYTHON" ] && [ "$(cat "$DOCS_VENV/.ready" 2>/dev/null)" = "$(_docs_stamp)" ]; }

_install_docs() {
    _docs_is_ready && return  # another script was faster
    "$DOCS_PYTHON" -m pip --version >/dev/null 2>&1 || "$(_find_python)" -m venv --clear "$DOCS_VENV"
    say "installing mkdocs into .cache/docs (a minute the first time)"
    local log="$DOCS_VENV/set-up.log"
    local pip=("$DOCS_PYTHON" -m pip install --disable-pip-version-check -c "$ROOT/scripts/constraints.txt")
    {
        "${pip[@]}" 'hatchling>=1.24' editables &&
            "${pip[@]}" --no-build-isolation -e "$ROOT[docs]"
    } </dev/null >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "set-up failed (all of it in .cache/docs/set-up.log; the first run needs the package index)"
    }
    _docs_stamp >"$DOCS_VENV/.ready"
}

ensure_docs() {
    _docs_is_ready && return
    mkdir -p "$DOCS_VENV"
    if command -v flock >/dev/null; then
        (flock 7 && _install_docs) 7>"$ROOT/.cache/docs.lock"
    else
        _install_docs
    fi
}
