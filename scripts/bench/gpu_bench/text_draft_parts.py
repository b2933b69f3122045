"""What drafts out of texts gain with a target of made-up weights, whose own texts repeat nothing: a corpus has
something behind each token, and how much of it is right is forced.

It knows configurations and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import json
import random

from scripts.bench.gpu_bench.models import SHAPES
from scripts.bench.gpu_bench.placements import ONE
from scripts.bench.gpu_bench.workbench import Workbench

TEXT_DRAFT_PAIRS = ("30b-a3b", "gpt-oss-120b")
DRAFT_LEN, ACCEPTED = 4, 3.5


def play_text_drafts(bench: Workbench, pair: str) -> None:
    """What a verification takes in which all tokens choose experts, and what that gains."""
    corpus = bench.folder / f"corpus-{pair}.jsonl"
    tokens = list(range(SHAPES[bench.pair(pair).target].vocabulary))
    random.Random(1).shuffle(tokens)
    corpus.write_text(json.dumps({"prompt_token_ids": tokens[:1], "token_ids": tokens[1:]}) + "\n", encoding="utf-8")
    source = {"method": "suffix", "suffix_corpus": str(corpus), "suffix_corpus_max_tokens": len(tokens)}
    forced = {"draft_len": DRAFT_LEN, "forced_acceptance": ACCEPTED, "pacing": "fixed"}
    config = bench.config(pair, ONE, drafts=False, **source, **forced)
    columns = ("rows", "tokens a round", "tokens/s", "plain tokens/s", "÷ plain", "round ms", "round ÷ plain step")
    table = bench.table(f"{pair}-shaped target, {DRAFT_LEN} tokens out of a corpus", *columns)
    for entry in bench.bench(config, bench.options.scale.rows)["results"]:
        plain, drafted = entry["plain"], entry["speculative"]
        rates, times = ([case[name] for case in (drafted, plain)] for name in ("tokens_per_s", "round_wall_ms"))
        gained = (drafted["mean_acceptance_length"], *rates, rates[0] / rates[1])
        table.add(entry["rows"], *gained, times[0], times[0] / times[1])
