#!/usr/bin/env bash
# From a bare machine with Python 3.11 or newer to text: makes .venv, installs, runs the shipped pair on 4 ranks.
# Arguments go to the demo; try --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
exec .venv/bin/python -m launch.cli demo "$@"
