"""Sections of the YAML file about engines: models, KV cache and scheduler; and how a section is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from trtrun.configuration.device_lists import parse_devices
from trtrun.configuration.process_sections import FilePath, Number, Section
from trtrun.configuration.yaml_source import describe_kind
from trtrun.errors import MOST_SHOWN, ConfigError, LibraryPanicError, RustLibrary, nearest, shorten

AnySection = TypeVar("AnySection", bound=Section)


def check_section(kind: type[AnySection], values: object, where: str, path: Sequence[str] = ()) -> AnySection:
    """Make a section of what the YAML file holds for it.

    Args:
        kind: class of the section.
        values: what stands in the file.
        where: what to call the file in messages.
        path: keys that lead to the section, for messages.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    try:
        with RustLibrary("pydantic"):
            return kind.model_validate(values)
    except LibraryPanicError as panic:
        raise ConfigError(f"{where} cannot be used: {panic}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error, kind, path)}") from None


def _first_problem(error: ValidationError, kind: type[Section], above: Sequence[str]) -> str:
    """Return the first problem of a validation as one line: `path: what is wrong`. Unknown keys come first, because a
    misspelt key is often why another one is missing."""
    problems = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    problem = problems[0]
    below = [str(part) for part in problem["loc"]]
    path = [*above, *below]
    name = ".".join(part if part.isprintable() and len(part) <= MOST_SHOWN else shorten(part) for part in path)
    message = problem["msg"]
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown key{nearest(path[-1], _known_keys(kind, below[:-1]))}"
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{name}: {message}" if name else message
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        known = _known_keys(kind, below)
        section = f"a section with keys ({', '.join(known)})" if known else "a section of names, each with its value"
        return f"{name}: must be {section}, not {describe_kind(problem['input'])}"
    if problem["type"].startswith("path_"):
        message = "must be the path of a file or directory"
    message = message.replace("Input should be", "must be").split(", unable")[0].split(", got")[0]
    shown = "nothing" if problem["input"] is None else shorten(problem["input"])
    return f"{name}: {message}, not {shown}".replace("\n", " ")


def _known_keys(kind: type[Section], path: Sequence[str]) -> list[str]:
    """Names that the section at `path` inside of `kind` may hold."""
    for name in path:
        field = kind.model_fields.get(name)
        inner = [] if field is None else [field.annotation, *get_args(field.annotation)]
        sections = [item for item in inner if isinstance(item, type) and issubclass(item, Section)]
        if not sections:
            return []
        kind = sections[0]
    return kind.known_keys()


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
        expert_parallel: of models with experts on several devices: each holds some experts, whole, in place of
            features of all. `trtrun plan` compares both.
    """

    model: FilePath
    devices: Annotated[tuple[str, ...], BeforeValidator(parse_devices)]
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    load_format: LoadFormat = "auto"
    quantization: str = "none"
    expert_parallel: bool = False


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
        model: directory with the heads (safetensors), or `org/name` in the Hugging Face cache. Left out with `mtp`,
            unless it names an assistant of Gemma 4.
        devices: one that the target does not have, on which the head of `eagle`, `eagle3` or `mtp` drafts by itself.
            Left out: heads are shared out over the target's devices.
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


MOST_TOKENS = 2**31 - 1
"""Of a round or a request: positions and token counts travel as 32-bit numbers."""

MOST_ROWS = 4096
"""That run at once."""

MOST_STORED_TOKENS = 2**40


class KVCacheSection(Section):
    """The paged store of keys and values.

    Attributes:
        block_size: tokens in a block.
        free_memory_fraction: share of the memory that is left beside the weights and the largest round. Left out: 0.9
            of a GPU, 0.5 of the host.
        max_tokens: tokens to hold, in place of the fraction. No more than all rows can use are kept; where these do
            not fit the start is refused, with the bytes. Layers with a sliding window hold what their windows and a
            round need of each row, and no more than that of all rows.
        enable_block_reuse: share full verified blocks between requests with the same prefix.
        state_snapshots: for models with layers that keep a state of each row: bytes of a rank's engine for snapshots of
            states, behind which other requests with the same prefix begin. Left out: as many as twice the rows. 0:
            no prefix is shared.
        state_dtype: of the matrices in the states of rows; every token rounds them to it. `float16` and `bfloat16` take
            half the memory, and texts differ from those with `float32`.
        dtype: how keys and values are kept. `auto`: as the checkpoint was made for, else as the model has them.
            `plain`: as the model has them. `fp8`, `int8`: a byte for each number, for about twice the tokens.
    """

    block_size: Annotated[int, Number, Field(ge=1, le=1024)] = 16
    free_memory_fraction: Annotated[float, Number, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Number, Field(ge=1, le=MOST_STORED_TOKENS)] | None = None
    enable_block_reuse: bool = True
    state_snapshots: Annotated[int, Number, Field(ge=0)] | None = None
    state_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    dtype: str = "auto"


class SchedulerSection(Section):
    """Limits of one round. Those that engines were built with take the place of defaults, and bound what may stand here
    (docs/engines.md).

    Attributes:
        max_batch_size: rows that run at once.
        max_num_tokens: tokens of one round over all rows, prompts and verification together; longer prompts are
            computed in chunks. Left out: 2048, and more where the drafts of all rows need it; 8192 of a prompt that a
            mixture reads alone on GPUs, as long as no row decodes and no shorter prompt waits.
        max_seq_len: tokens of one request, prompt and output. Left out: the target's context. Models with longrope take
            their long factors where it is beyond the context of their pretraining.
        plans_ahead: 1 sends the next plan before the results of the round before are back, so that a GPU has no gap
            between rounds. Left out: 1 on GPUs, else 0. Always 1 while drafting ahead.
        max_waiting: most completions that may wait for a row; a request beyond is refused with the numbers. Left out:
            no limit.
    """

    max_batch_size: Annotated[int, Number, Field(ge=1, le=MOST_ROWS)] = 32
    max_num_tokens: Annotated[int, Number, Field(ge=1, le=MOST_TOKENS)] | None = None
    max_seq_len: Annotated[int, Number, Field(ge=2, le=MOST_TOKENS)] | None = None
    plans_ahead: Annotated[int, Number, Field(ge=0, le=1)] | None = None
    max_waiting: Annotated[int, Number, Field(ge=1)] | None = None
