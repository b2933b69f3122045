"""The protocols that clients speak: of OpenAI, Anthropic, and Triton (KServe)."""
