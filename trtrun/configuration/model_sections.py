"""The sections of the YAML file that name a model, or heads: which directory, on which devices.

It knows names and types. What is in a directory is the business of `trtrun.models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trtrun.configuration.device_lists import parse_devices
from trtrun.configuration.launch_config import FilePath, Number, Section

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the safetensors of the model's directory, or nowhere (trtrun.loading.dummy_weights)."""

VocabularyWay = Literal["auto", "same", "intersection", "text"]


class ModelSection(Section):
    """One engine: which checkpoint, on which devices (one tensor-parallel rank each), in which dtype.

    Quantized weights take half the bytes of bfloat16 and are rounded as they are read. A quantized target is another
    model than that of the files, and speculative output is its own, to the bit. Quantizing a draft costs a little
    acceptance; greedy output stays the target's own. Checkpoints that others have quantized are read as they are
    (docs/quantized-checkpoints.md), with `quantization` left out.

    `org/name`, where no such directory is there, is what `hf download org/name` has put into the Hugging Face cache of
    each host (`HF_HOME`, `HF_HUB_CACHE`), `org/name@revision` another branch, tag or commit than main. Nothing is
    downloaded.

    Attributes:
        model: Hugging Face directory (safetensors) or engine (`trtrun build`), beside the file or in the working
            directory, or `org/name` in the cache; `asset:target` is shipped, and for it `asset:draft`, `asset:medusa`,
            `asset:eagle3`, `asset:pard_draft`. By host: `{node1: /a/model, default: /b/model}`.
        devices: in tensor-parallel order: `[0, 1]` GPUs, `["cpu:0", "cpu:1"]` CPU slots, `{node1: [0, 1]}` on hosts,
            `{nodes: 2, gpus_per_node: 4}` from the Slurm allocation. A device of both engines is one process.
        dtype: of weights, activations and KV; `auto` takes the checkpoint's.
        load_format: `auto` reads safetensors. `dummy` makes weights up from config.json alone, for benchmarks of models
            whose weights are not at hand; a draft gets the target's where names and shapes agree.
        quantization: `fp8` rounds weights to E4M3, with a scale per output feature, and activations per token;
            `fp8_block` by 128 x 128 weights and 128 activations; `fp8_weight_only` leaves activations as they are;
            `fp8_with_head` rounds the vocabulary head, too, for small drafts; `int8` is for drafts alone.
    """

    model: FilePath
    devices: Annotated[tuple[str, ...], BeforeValidator(parse_devices)]
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    load_format: LoadFormat = "auto"
    quantization: str = "none"


class DraftSection(ModelSection):
    """What stands in `draft` beside the keys of `target`, where the method drafts with a model.

    Attributes:
        vocabulary: what becomes of a draft with another tokenizer: `intersection` drafts among tokens that both have,
            `text` spells what is drafted in the target's, `same` refuses it. `auto` is `intersection` where the draft
            has half of the target's tokens, else `text` (docs/other-tokenizers.md).
    """

    vocabulary: VocabularyWay = "auto"

    @property
    def is_translated(self) -> bool:
        """Whether its tokens are not the target's."""
        return self.vocabulary in ("intersection", "text")


def _parse_own_devices(value: object) -> object:
    return None if value is None else parse_devices(value)


class HeadsSection(Section):
    """What stands in `draft` where the method drafts with heads, which compute in the target's dtype.

    Attributes:
        model: directory with the heads (safetensors), or `org/name` in the Hugging Face cache.
        devices: one that the target does not have, on which the head of `eagle` or `eagle3` drafts by itself. Left out:
            heads are shared out over the target's devices.
    """

    model: FilePath
    devices: Annotated[tuple[str, ...] | None, BeforeValidator(_parse_own_devices)] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys_of_models(cls, values: object) -> object:
        foreign = [key for key in DraftSection.model_fields if key not in cls.model_fields]
        found = next((key for key in foreign if isinstance(values, dict) and key in values), None)
        if found is not None:
            raise ValueError(
                f"{found} does not go with a method with heads, which are read as they are and compute in the target's "
                "dtype: leave it out"
            )
        return values


class AdapterSlotsSection(Section):
    """Room for adapters, which is taken at the start (docs/adapters.md).

    Attributes:
        max_loaded: adapters that may be loaded at once. Left out: as many as `adapters` names.
        max_rank: of an adapter; each slot takes the bytes of this rank on GPUs.
    """

    max_loaded: Annotated[int, Number, Field(ge=1, le=1024)] | None = None
    max_rank: Annotated[int, Number, Field(ge=1, le=256)] = 64


@dataclass(frozen=True)
class OfHeads:
    """What stands in `draft`, where it is for heads."""

    values: object
