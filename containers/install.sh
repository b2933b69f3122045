#!/usr/bin/env bash
# What all images have, installed as root while one is built; nothing is root's at run time.
#
#   containers/install.sh CHECKOUT [EXTRAS]     EXTRAS: of setup.py, such as "serve" or "serve,cuda12"
#
# trtrun and Open MPI 5 lie in /opt/trtrun/python, MPICH in /opt/trtrun/mpich: both libraries have files of the same
# names. Kernels for this processor are compiled; those for GPUs need one (trtrun warm-up, later).
set -euo pipefail

checkout="$1"
extras="${2:-}"
python="/opt/trtrun/python"

# For Triton, which compiles a launcher for each kernel.
apt-get update
apt-get install --yes --no-install-recommends gcc libc6-dev
rm -rf /var/lib/apt/lists/*

python3 -m venv "$python"
"$python/bin/pip" install --no-cache-dir "$checkout${extras:+[$extras]}"
"$python/bin/pip" install --no-cache-dir --prefix /opt/trtrun/mpich mpich

caches="$(mktemp -d)"
cd / # else Python would import the checkout
"$python/bin/trtrun" warm-up --config "$checkout/launch/configs/one_process_cpu.yaml" --cache "$caches"
mkdir -p "$python/share/trtrun"
mv "$caches/trtrun/kernels" "$python/share/trtrun/kernels"
chmod 755 "$python/share/trtrun/kernels"
chmod 644 "$python/share/trtrun/kernels"/*
rm -rf "$caches" "$checkout"
