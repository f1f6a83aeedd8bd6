# Sourced by scripts/test: makes .cache/transformers, an environment with transformers, diffusers and accelerate, for their tests.
#
# Of its own, since they bring packages that headrace does not ask for. _env.sh has to be sourced before.

TRANSFORMERS_PACKAGES=(transformers==5.19.0 diffusers==0.42.1 accelerate==1.15.0 safetensors==0.8.0)
TRANSFORMERS_VENV="$ROOT/.cache/transformers"
TRANSFORMERS_PYTHON="$TRANSFORMERS_VENV/bin/python"

_transformers_needs() { echo "${TRANSFORMERS_PACKAGES[*]}" && cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt"; }

_transformers_install() {
    pip+=(-c "$ROOT/scripts/constraints.txt")
    "${pip[@]}" 'hatchling>=1.24' editables &&
        "${pip[@]}" torch==2.13.0 && # before anything that asks for torch by an open range
        "${pip[@]}" "${TRANSFORMERS_PACKAGES[@]}" pytest pytest-timeout hypothesis pillow &&
        "${pip[@]}" --no-build-isolation -e "$ROOT[s3,gcs]"
}

ensure_transformers() {
    local what="${TRANSFORMERS_PACKAGES[*]}"
    ensure_own transformers "$TRANSFORMERS_VENV" "$what into .cache/transformers (about 2 GB; minutes the first time)"
}
