#!/usr/bin/env bash
# The target over four GPUs of one node, the draft on another, as a Slurm job:  two_nodes.sh FOLDER [SUBMIT_OPTION…]
# such as --partition gpu, or --dry-run to see the script of the job. At its time limit the job lets what is in flight
# finish, and goes back into the queue for the rows that are left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
folder="${1:?name a folder that the nodes see}"
shift
trtrun submit --config ../launch/configs/two_nodes_slurm.yaml \
    --set target.model=asset:target --set draft.model=asset:draft \
    --job-name two-nodes --time 1:00:00 "$@" \
    -- run --prompts "$PWD/prompts.jsonl" --output "$folder/rows.jsonl" --max-tokens 32
