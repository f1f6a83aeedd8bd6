# Sourced by scripts/test --runai: makes .cache/runai/venv, an environment with Run:ai Model Streamer and its parts for stores.
#
# Of its own, and without headrace: programs are run with it, and with headrace from .venv. Its extra for Azure asks for a
# version that was not published, so that part is named here. Idempotent, as _env.sh, which has to be sourced before.

RUNAI_PACKAGES=('runai-model-streamer[s3,gcs]==0.17.1' runai-model-streamer-azure==0.17.0 azure-storage-blob azure-identity)
RUNAI_VENV="$ROOT/.cache/runai/venv"
RUNAI_PYTHON="$RUNAI_VENV/bin/python"

runai_is_ready() { [ -x "$RUNAI_PYTHON" ] && [ "$(cat "$RUNAI_VENV/.ready" 2>/dev/null)" = "${RUNAI_PACKAGES[*]}" ]; }

_install_runai() {
    runai_is_ready && return  # another script was faster
    say "installing ${RUNAI_PACKAGES[*]} into .cache/runai (1 GB; minutes the first time)"
    local log="$ROOT/.cache/runai/set-up.log"
    local pip=("$RUNAI_PYTHON" -m pip install --disable-pip-version-check)
    {
        "$PYTHON" -m venv --clear "$RUNAI_VENV" &&
            "${pip[@]}" torch==2.13.0 numpy && # before anything that asks for torch by an open range
            "${pip[@]}" "${RUNAI_PACKAGES[@]}"
    } </dev/null >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "set-up failed (all of it in .cache/runai/set-up.log; the first run needs the package index)"
    }
    echo "${RUNAI_PACKAGES[*]}" >"$RUNAI_VENV/.ready"
}

ensure_runai() {
    runai_is_ready && return
    mkdir -p "$ROOT/.cache/runai"
    if command -v flock >/dev/null; then
        (flock 7 && _install_runai) 7>"$ROOT/.cache/runai/.lock"
    else
        _install_runai
    fi
}
