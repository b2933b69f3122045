"""openai's client with `trtrun serve`: python openai_client.py [http://127.0.0.1:8000]

A completion as it comes, the answer of a chat where the model has a chat template, and a text of a JSON schema. A
router sends requests with the same X-Session-Id to the same server.
"""

from __future__ import annotations

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key="-", default_headers={"X-Session-Id": "an example"})
model = client.models.list().data[0].id

for chunk in client.completions.create(model=model, prompt="def main(", max_tokens=32, temperature=0, stream=True):
    print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
print()

chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Write a loop."}], max_tokens=32, temperature=0
)
print(chat.choices[0].message.content)

schema = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
guided = client.completions.create(
    model=model, prompt="The size: ", max_tokens=32, temperature=0,
    extra_body={"guided_json": {**schema, "additionalProperties": False}},
)  # fmt: skip
print(guided.choices[0].text)
