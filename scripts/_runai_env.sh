# Sourced by scripts/test --runai: makes .cache/runai/venv, an environment with Run:ai Model Streamer and its parts for stores.
#
# Of its own, and without headrace: programs are run with it, and with headrace from .venv. Its extra for Azure asks for a
# version that was not published, so that part is named here. _env.sh has to be sourced before.

RUNAI_PACKAGES=('runai-model-streamer[s3,gcs]==0.17.1' runai-model-streamer-azure==0.17.0 azure-storage-blob azure-identity)
RUNAI_VENV="$ROOT/.cache/runai/venv"

_runai_needs() { echo "${RUNAI_PACKAGES[*]}"; }

_runai_install() {
    "${pip[@]}" torch==2.13.0 numpy && # before anything that asks for torch by an open range
        "${pip[@]}" "${RUNAI_PACKAGES[@]}"
}

ensure_runai() { ensure_own runai "$RUNAI_VENV" "${RUNAI_PACKAGES[*]} into .cache/runai (1 GB; minutes the first time)"; }
