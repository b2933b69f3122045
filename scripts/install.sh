#!/usr/bin/env bash
# Makes .venv and installs this checkout into it; a second call finds everything done and returns at once.
#
#   scripts/install.sh [EXTRAS]     EXTRAS: comma-separated extras of setup.py, such as "serve" or "test"
#
# TRTRUN_TORCH_INDEX: address of a package index to take the CPU build of torch from (default: pip's own index).
# PYTHON: the interpreter that makes .venv (default: the newest of python3.14 to python3.11, or python3).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
extras="${1:-}"
cpu_torch="torch==2.13.0"

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

has_nvidia_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; name one in the variable PYTHON"
}

# What the installation depends on; where it changes, pip runs again.
fingerprint() {
    (cd "$root" && cat setup.py pyproject.toml scripts/install.sh && has_nvidia_gpu && echo gpu || true) | cksum
}

is_done() { # EXTRAS: a stamp for these extras, or for these and more, of the same fingerprint
    local stamp
    for stamp in "$venv/.installed-$1" "$venv"/.installed-*; do
        [[ -f "$stamp" && ( -z "$1" || "$stamp" == "$venv/.installed-$1" ) ]] || continue
        [[ "$(cat "$stamp")" == "$(fingerprint)" ]] && "$venv/bin/python" -c '' 2>/dev/null && return 0
    done
    return 1
}

if has_nvidia_gpu; then
    # CuPy and NCCL for the CUDA version that the driver serves.
    major="$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p' | head -n 1)"
    if [[ "${major:-12}" -ge 13 ]]; then cuda="cuda13"; else cuda="cuda12"; fi
    extras="${extras:+$extras,}$cuda"
fi

if is_done "$extras"; then
    exit 0
fi

if [[ ! -x "$venv/bin/python" ]]; then
    python="$(find_python)"
    echo "install.sh: making $venv with $("$python" --version)" >&2
    "$python" -m venv "$venv" || fail "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
fi

# Runs a command that takes minutes: on a terminal pip draws its bars; elsewhere a line every 30 s says that it goes on.
patiently() { # WHAT COMMAND…
    local what="$1" status=0 teller
    shift
    if [[ -t 2 ]]; then
        "$@" >&2
        return
    fi
    ( # Its stdin, and what sleep holds, keep no pipe of the caller's open.
        while sleep 30 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do echo "install.sh: $what: $SECONDS s so far" >&2; done
    ) </dev/null >/dev/null &
    teller=$!
    "$@" --quiet >&2 || status=$?
    kill "$teller" 2>/dev/null || true
    return "$status"
}

pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
if ! has_nvidia_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "install.sh: no NVIDIA GPU found: installing the CPU build of torch" >&2
    patiently "torch" "${pip[@]}" ${TRTRUN_TORCH_INDEX:+--index-url "$TRTRUN_TORCH_INDEX"} "$cpu_torch" \
        || fail "pip could not install $cpu_torch"
fi
echo "install.sh: installing trtrun${extras:+ with the extras $extras}" >&2
patiently "trtrun" "${pip[@]}" --editable "$root${extras:+[$extras]}" || fail "pip could not install trtrun; its message is above"
fingerprint >"$venv/.installed-$extras"
