#!/usr/bin/env bash
# Medusa heads for a target:  train_drafter.sh FOLDER [TRAINING_OPTION…]     such as --minutes 60 --batch-size 32
# The target answers the prompts, heads learn from its answers, and a run drafts with them. Six prompts teach nothing: a
# drafter worth having takes thousands (docs/training.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
folder="${1:?name a folder for the output}"
shift
config=../launch/configs/one_process_cpu.yaml
trtrun generate-data --config "$config" --prompts prompts.jsonl --output "$folder/data.jsonl" --max-tokens 48
trtrun train-drafter --config "$config" --set draft=null --method medusa --num-tokens 2 \
    --data "$folder/data.jsonl" --output "$folder/heads" --epochs 2 --batch-size 2 --heldout-rows 2 "$@"
trtrun run --config "$config" --set draft=null --speculation medusa --set draft.model="$folder/heads" \
    --set speculation.draft_len=2 --prompt "def main(" --max-tokens 32
