#!/usr/bin/env bash
# From a bare machine with Python 3.11 or newer to a server: makes .venv, installs, serves the shipped pair on 4 CPU ranks,
# asks it something with curl and with each client that is installed, and says where the page is. Ctrl-C ends it.
#
#   scripts/serve_demo.sh [--once] [OPTION of trtrun serve]…      such as:  scripts/serve_demo.sh --http-port 0
#
# --once ends it when all have asked.
# TRTRUN_PYTHON: a Python that has everything already (nothing is installed then).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

once=no
if [[ "${1:-}" == --once ]]; then
    once=yes
    shift
fi
python="${TRTRUN_PYTHON:-}"
if [[ -z "$python" ]]; then
    bash scripts/install.sh serve
    python="$PWD/.venv/bin/python"
fi

folder="$(mktemp -d)"
server=''
end() {
    trap '' INT TERM
    if [[ -n "$server" ]]; then
        kill -s TERM "$server" 2>/dev/null || true # it drains
        wait "$server" || true
    fi
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# In a process group of its own: Ctrl-C reaches this script alone, which lets the server drain.
set -m
"$python" -m launch.cli serve --config launch/configs/cpu_pair.yaml "$@" 2> >(tee "$folder/log" >&2) &
server=$!
set +m

until grep -q ' is served at ' "$folder/log" 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || { echo "serve_demo.sh: the server did not start" >&2; exit 1; }
    sleep 0.2
done
line="$(grep -m 1 ' is served at ' "$folder/log")"
model="$(sed -E 's/^trtrun: (.*) is served at .*/\1/' <<<"$line")"
url="$(sed -E 's/.* is served at ([^,]+),.*/\1/' <<<"$line")"
grpc="$(sed -E 's/.*, gRPC at //' <<<"$line")"

body="{\"model\": \"$model\", \"prompt\": \"def main(\", \"max_tokens\": 24, \"temperature\": 0}"
if command -v curl >/dev/null; then
    printf "\n$ curl %s/v1/completions -d '%s'\n" "$url" "$body"
    curl --silent --show-error --fail-with-body "$url/v1/completions" -d "$body"
    echo
fi
"$python" scripts/serve_demo_clients.py "$url" "$grpc" "$model"
printf '\nThe page: %s/\n' "$url"
[[ $once == yes ]] && exit 0
echo "Ctrl-C ends it."
wait "$server"
