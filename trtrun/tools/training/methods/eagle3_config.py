"""What an EAGLE-3 head for a target is like: the layers that it reads, its sizes, the tokens that it can propose.

It knows config.json and numbers of tokens. It does not know tensors of the head, or how it learns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import ConfigError
from trtrun.tools.training.data import DataRow
from trtrun.tools.training.settings import option

LAYERS = option("eagle3_layers_to_capture")
FEWEST = 7
"""Layers of a target from which on the usual boundaries are three."""


def choose_boundaries(num_layers: int, captured: Sequence[int] | None) -> tuple[int, ...]:
    """Where the target is tapped: boundary i is what enters layer i, and N what leaves the last of N layers.

    Usual are 2, N // 2 and N - 3, as in the reference. A target of fewer than seven layers has three that lie side by
    side in its middle.

    Args:
        num_layers: of the target.
        captured: the setting: layers whose output is read, from 0, and -1 for the embedding; None leaves it to us.

    Raises:
        ConfigError: they are not the target's, one stands there twice, or readers would take them for others.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if captured is None:
        if num_layers < 2:
            raise ConfigError(
                f"--method eagle3 reads three places of the target, and one of {num_layers} layer has two: name them "
                f"with {LAYERS} -1,0"
            )
        middle = (num_layers + 1) // 2
        return usual if num_layers >= FEWEST else (middle - 1, middle, middle + 1)
    wrong = next((layer for layer in captured if not -1 <= layer < num_layers), None)
    if wrong is not None:
        raise ConfigError(
            f"{LAYERS}: the target has no layer {wrong}: name some from -1, the embedding, to {num_layers - 1}"
        )
    if len(set(captured)) < len(captured):
        raise ConfigError(f"{LAYERS}: a layer stands there twice")
    if tuple(captured) == usual:
        # The usual ones, by the other way of counting; files of both ways are about.
        raise ConfigError(
            f"{LAYERS}: runtimes take {','.join(map(str, usual))} for inputs of layers, not outputs: name others, or "
            f"{','.join(str(boundary - 1) for boundary in usual)}, which is the default"
        )
    return tuple(layer + 1 for layer in captured)


def make_config(
    target: Mapping[str, Any], boundaries: Sequence[int], num_tokens: int, dtype_name: str
) -> dict[str, Any]:
    """config.json of a head of one layer, shaped as those of the target.

    SpecForge's way: layers by their output, below `eagle_config`; and rotation as all versions of transformers read it.

    Args:
        target: its config.json.
        boundaries: see `choose_boundaries`.
        num_tokens: tokens of the head.
        dtype_name: of its weights.
    """
    hidden, num_heads = target["hidden_size"], target["num_attention_heads"]
    rope = dict(target.get("rope_parameters") or target.get("rope_scaling") or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    rope = dict(nested[0]) if nested else rope  # an entry a kind of layer, which are the same where trtrun runs it
    theta = rope.pop("rope_theta", None) or target.get("rope_theta") or 10000.0
    is_ordinary = rope.get("rope_type", "default") == "default"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": target.get("num_key_value_heads") or num_heads,
        "head_dim": target.get("head_dim") or hidden // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": None if is_ordinary else rope,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": num_tokens,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries],
        },
    }


def commonest_tokens(rows: Sequence[DataRow], vocab_size: int, count: int | None) -> list[int]:
    """Ids of the tokens that completions hold most often, in rising order; of equals the first.

    Args:
        rows: to train on.
        vocab_size: of the target.
        count: how many; None takes all of the target's.

    Raises:
        ConfigError: the target has fewer.
    """
    if count is None:
        return list(range(vocab_size))
    if count > vocab_size:
        raise ConfigError(f"{option('draft_vocab_size')} is {count}, but the target has {vocab_size} tokens")
    times = Counter(token for row in rows for token in row.tokens[row.prompt_length :])
    return sorted(sorted(range(vocab_size), key=lambda token: (-times[token], token))[:count])
