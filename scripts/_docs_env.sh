# Sourced by scripts/docs and scripts/test: makes .cache/docs ready, an environment with mkdocs that builds the site. Sets DOCS_PYTHON.
#
# Of its own (210 MB), since nothing else asks for its packages. _env.sh has to be sourced before.

DOCS_VENV="$ROOT/.cache/docs"
DOCS_PYTHON="$DOCS_VENV/bin/python"

_docs_needs() { grep -E '^docs = ' "$ROOT/pyproject.toml" && cat "$ROOT/scripts/constraints.txt"; }

_docs_install() {
    pip+=(-c "$ROOT/scripts/constraints.txt")
    "${pip[@]}" 'hatchling>=1.24' editables &&
        "${pip[@]}" --no-build-isolation -e "$ROOT[docs]"
}

ensure_docs() { ensure_own docs "$DOCS_VENV" "mkdocs into .cache/docs (a minute the first time)"; }
