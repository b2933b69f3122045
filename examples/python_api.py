"""The Python API: a text as it comes, several at once, and what speculation brought. The devices are in the YAML file;
of several ranks see docs/python.md."""

from __future__ import annotations

from trtrun import LLM, SamplingParams

with LLM(target="asset:target", draft="asset:draft", draft_len=4) as llm:
    for chunk in llm.stream("def main(", SamplingParams(max_tokens=24)):
        print(chunk.text, end="", flush=True)
    print()

    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=24, n=2)
    for output in llm.generate(["import os", "class Tree:"], sampling):
        for completion in output.completions:
            tokens_a_round = completion.statistics.mean_acceptance_length
            print(f"{output.prompt!r}, {tokens_a_round:.2f} tokens a round: {completion.text!r}")
