#!/usr/bin/env python3
"""Asks a server the same thing with each client that is installed: the openai package, tritonclient. For serve_demo.sh.

python scripts/serve_demo_clients.py URL GRPC_ADDRESS MODEL
"""

from __future__ import annotations

import importlib.util
import sys

PROMPT, MAX_TOKENS = "def main(", 24


def ask_openai(url: str, model: str) -> None:
    """A stream by the openai package."""
    import openai

    print(f"\nopenai {openai.__version__}: {PROMPT}", end="")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, stream=True)
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()


def ask_triton(address: str) -> None:
    """Triton's BLS model by tritonclient over gRPC, drafting three tokens a round."""
    import numpy as np
    import tritonclient.grpc as triton

    values = {
        "text_input": (np.array([[PROMPT]], dtype=np.object_), "BYTES"),
        "max_tokens": (np.array([[MAX_TOKENS]], dtype=np.int32), "INT32"),
        "temperature": (np.array([[0.0]], dtype=np.float32), "FP32"),
        "num_draft_tokens": (np.array([[3]], dtype=np.int32), "INT32"),
    }
    inputs = []
    for name, (value, datatype) in values.items():
        tensor = triton.InferInput(name, list(value.shape), datatype)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("tensorrt_llm_bls", inputs)
    print(f"\ntritonclient: {answer.as_numpy('text_output').ravel()[0].decode()}")


def main() -> None:
    """Ask with all that are there."""
    url, address, model = sys.argv[1:]
    for package, ask in (
        ("openai", lambda: ask_openai(url, model)),
        ("tritonclient", lambda: ask_triton(address)),
    ):
        if importlib.util.find_spec(package) is not None:
            ask()
        else:
            print(f"\n{package} is not installed: pip install {package}")


if __name__ == "__main__":
    main()
