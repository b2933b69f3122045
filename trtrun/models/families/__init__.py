"""The product's own families, one file each, or one for a few that are alike. Importing this package registers them."""

from trtrun.models.families import (
    apertus,
    deepseek,
    dense,
    gemma,
    gemma4,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    mixtures,
    olmo,
    olmoe,
    phi3,
    qwen3_next,
    scored_mixtures,
    smollm3,
)

__all__ = [
    "apertus",
    "deepseek",
    "dense",
    "gemma",
    "gemma4",
    "glm",
    "glm_moe",
    "gpt_oss",
    "granite",
    "mixtures",
    "olmo",
    "olmoe",
    "phi3",
    "qwen3_next",
    "scored_mixtures",
    "smollm3",
]
