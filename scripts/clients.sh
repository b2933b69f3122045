#!/usr/bin/env bash
# Clients that nobody here wrote, unmodified, against a server with the shipped pair, or with a made-up chat model that calls
# tools: installs each into an environment of its own below build/clients, runs it, and prints a table. Before a release;
# its table is in docs/serve.md.
#
#   scripts/clients.sh [--only NAME]… [--backend DIR]      such as:  scripts/clients.sh --only guidellm
#
# --backend: a checkout of tensorrtllm_backend at v0.18.0, for its scripts.
# TRTRUN_PYTHON: a Python that has trtrun and its extras `serve` and `train` already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${TRTRUN_PYTHON:-}"
if [[ -z "$python" ]]; then
    bash scripts/install.sh test
    python="$PWD/.venv/bin/python"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" scripts/clients/run_clients.py "$@"
