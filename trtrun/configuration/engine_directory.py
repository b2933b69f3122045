"""What an engine directory says of itself: engine.json, beside config.json and a shard of weights for each rank.

It knows names and numbers. It does not know weights (trtrun.loading.engine_shards), or how an engine is built
(trtrun.tools.building).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from trtrun.errors import CheckpointError, one_line, shorten_path, wrap_errors

ENGINE_FILE = "engine.json"
FORMAT = 2
"""Of engine directories; others are not read. Format 1 had no checksums."""

_NO_DIGEST = "0" * 64
"""Stands in the text that `EngineDescription.sha256` is of, in its place."""

ANYWHERE = "any"
"""`EngineDescription.built_for` of engines whose weights are held alike on CPUs and on all GPUs."""

_FOREIGN = ("*.engine", "*.plan")
"""Files of TensorRT's own, which hold code for one version of it."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Word = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,100}\Z")]
"""That stands in messages."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What rounds of an engine's jobs may be, at most; None where it has no limit.

    Attributes:
        max_batch_size, max_num_tokens, max_seq_len: as in the scheduler's section.
        max_draft_len: tokens of a row's draft.
    """

    max_batch_size: Count | None = None
    max_num_tokens: Count | None = None
    max_seq_len: Count | None = None
    max_draft_len: Count | None = None


class ShardDescription(msgspec.Struct, frozen=True):
    """The file of one rank's weights.

    Attributes:
        file: its name.
        bytes: of the file.
        header_sha256: of its first bytes: a number of the build, the rank, and names, dtypes, shapes and places of all
            tensors.
        checksums: of each tensor's bytes, by name (trtrun.loading.engine_checksums).
    """

    file: Word
    bytes: int
    header_sha256: str
    checksums: dict[str, str]


class EngineDescription(msgspec.Struct, frozen=True):
    """engine.json.

    Attributes:
        format: see FORMAT.
        trtrun: the version that has built it.
        architecture: as in config.json.
        dtype: of activations, and of weights that are not quantized.
        quantization: as in the YAML file.
        quant_method: what the checkpoint called the way in which it was quantized; None where it was not.
        built_for: ANYWHERE, "cpu", or "cuda sm_90" where weights are held as such a GPU multiplies with them.
        limits: see there.
        shards: one for each tensor-parallel rank.
        checkpoint: name of the directory that it was built from.
        config_sha256: of config.json, which says how the weights are computed with.
        kv_scales: of each layer's attention, by the checkpoint's names, those of keys and of values, one for each KV
            head; none where the checkpoint has none.
        sha256: of this file, with zeros in the place of these digits.
    """

    format: int
    trtrun: Word
    architecture: Word
    dtype: Word
    quantization: Word
    quant_method: Word | None
    built_for: Word
    limits: Limits
    shards: list[ShardDescription]
    checkpoint: str
    config_sha256: str
    kv_scales: dict[str, tuple[list[float], list[float]]] = msgspec.field(default_factory=dict)
    sha256: str = _NO_DIGEST

    @property
    def tp_size(self) -> int:
        """Ranks that it was built for."""
        return len(self.shards)

    def describe(self) -> str:
        """In words: "an engine of llama-8b for cuda sm_90, fp8; at most 32 as max_batch_size"."""
        where = "any device" if self.built_for == ANYWHERE else self.built_for
        how = self.quant_method or self.quantization
        keys = self.limits.__struct_fields__
        limits = [f"{limit} as {key}" for key in keys if (limit := getattr(self.limits, key)) is not None]
        most = f"; at most {', '.join(limits)}" if limits else ""
        name = shorten_path(Path(self.checkpoint))
        return f"an engine of {name} for {where}, {self.dtype if how == 'none' else how}{most}"


class _Begin(msgspec.Struct):
    """What stands in the engine.json of every format."""

    format: Count
    trtrun: Word


def is_engine(path: Path) -> bool:
    """Whether a model directory is an engine, whole or not."""
    return (path / ENGINE_FILE).is_file()


def was_built(path: Path) -> bool:
    """Whether it is an engine of ours, of any format; other programs may have a file of the same name.

    Raises:
        OSError: it cannot be read.
    """
    if not is_engine(path):
        return False
    try:
        msgspec.json.decode((path / ENGINE_FILE).read_bytes(), type=_Begin)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return False
    return True


def read_engine(path: Path) -> EngineDescription | None:
    """What an engine directory says of itself; None where it is no engine.

    Raises:
        CheckpointError: it is another runtime's, of another format, or damaged, or it or its config.json is not what
            was built; one line.
    """
    with wrap_errors(path, CheckpointError):
        if not is_engine(path):
            refuse_foreign(path)
            return None
    with wrap_errors(shorten_path(path / ENGINE_FILE), CheckpointError):
        text = (path / ENGINE_FILE).read_bytes()
    with wrap_errors(shorten_path(path / "config.json"), CheckpointError):
        config = (path / "config.json").read_bytes() if (path / "config.json").is_file() else None
    try:
        begin = msgspec.json.decode(text, type=_Begin)
        if begin.format != FORMAT:
            raise CheckpointError(
                f"{shorten_path(path)} is an engine of format {begin.format}, built by trtrun {begin.trtrun}, and this "
                f"version reads {FORMAT}: build it again with this one, or run it with that one"
            )
        found = msgspec.json.decode(text, type=EngineDescription)
        if not found.shards or any(Path(shard.file).name != shard.file for shard in found.shards):
            raise ValueError("its shards are not named")
    except (ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{shorten_path(path / ENGINE_FILE)} is damaged ({one_line(error)}): build the engine again"
        ) from None
    _check_digests(path, found, text, config)
    return found


def _check_digests(path: Path, engine: EngineDescription, text: bytes, config: bytes | None) -> None:
    """Raise CheckpointError for an engine.json or config.json that has changed; that there is none says whoever needs
    it."""
    own = text.replace(engine.sha256.encode(errors="surrogatepass"), _NO_DIGEST.encode(), 1)
    files = [(ENGINE_FILE, own, engine.sha256), ("config.json", config, engine.config_sha256)]
    for name, content, digest in files:
        if content is not None and hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(
                f"{shorten_path(path / name)} is not the file that was built: copy the engine again, or build it again"
            )


def refuse_foreign(path: Path) -> None:
    """Raise CheckpointError for a directory of TensorRT's engines."""
    with wrap_errors(path, CheckpointError):
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return
        foreign = sorted(file.name for pattern in _FOREIGN for file in path.glob(pattern))
    if foreign:
        raise CheckpointError(
            f"{shorten_path(path)} is an engine of TensorRT ({foreign[0]}), which runs in its own version alone: build "
            "one of the checkpoint with `trtrun build`"
        )


def engine_json(description: EngineDescription) -> str:
    """The text of engine.json, with its own digest."""
    unsigned = msgspec.structs.replace(description, sha256=_NO_DIGEST)
    text = msgspec.json.format(msgspec.json.encode(unsigned), indent=2).decode() + "\n"
    head, _, tail = text.rpartition(_NO_DIGEST)
    return f"{head}{hashlib.sha256(text.encode()).hexdigest()}{tail}"
