#!/usr/bin/env bash
# A file of prompts:  offline_batch.sh FOLDER     FOLDER: of the output
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
folder="${1:?name a folder for the output}"
config=../launch/configs/one_process_cpu.yaml

# In one go. Each row is written as it is done, so the same command with --resume goes on where this one ended.
trtrun run --config "$config" --prompts prompts.jsonl --output "$folder/rows.jsonl" --max-tokens 32
trtrun run --config "$config" --prompts prompts.jsonl --output "$folder/rows.jsonl" --max-tokens 32 --resume

# In two parts, on machines that know nothing of each other; then the same rows again, in their order.
for part in 1 2; do
    trtrun run --config "$config" --prompts prompts.jsonl --part "$part/2" --output "$folder/part$part.jsonl" --max-tokens 32
done
trtrun merge --prompts prompts.jsonl --max-tokens 32 --output "$folder/merged.jsonl" "$folder/part1.jsonl" "$folder/part2.jsonl"
