"""The ends of a target without its layers: the embedding and the vocabulary head that heads on a rank of their own
compute with, where they have none themselves. Read from the target's own files, by the one rank.

It knows weights. It does not know heads, or what they make of the ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parallel.communicator import Communicator
from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.model_sections import ModelSection
from trtrun.kvcache.formats import PLAIN
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.linear.quantization import QUANTIZATIONS, Quantization
from trtrun.linear.quantization.base import count_bytes
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.loading.engine_ends import EngineEnds
from trtrun.loading.loading import shares_tied_embedding
from trtrun.loading.weight_check import check_held
from trtrun.models.config import ModelConfig
from trtrun.tensors import DTYPES, inference
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import HeldWeight, Share, Weight
from trtrun.weights.weight_files import WeightFiles
from trtrun.weights.weight_loader import CheckpointLoader
from trtrun.weights.weight_reader import WeightReader

_WHOLE = Share(0, 1)


@dataclass(frozen=True)
class TargetEnds:
    """See `heads.HeadsTarget`; of what was not asked for there is nothing.

    Attributes:
        dtype, device: of the target's activations, and of the weights.
        bytes_read: from files.
    """

    dtype: torch.dtype
    device: torch.device
    embedding: VocabularyEmbedding | None
    head: VocabularyHead | None
    bytes_read: int

    @inference
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden]."""
        assert self.embedding is not None, "heads say which ends they compute with"
        return self.embedding(tokens)

    @inference
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the end → [n, vocab_size] float32."""
        assert self.head is not None, "heads say which ends they compute with"
        return self.head(hidden)


def ends_bytes(
    config: ModelConfig, ends: Sequence[Weight], dtype: torch.dtype, device: torch.device, quantization: str
) -> int:
    """Bytes that `ends` of a target take on a device, told from shapes alone."""
    size = sum(
        count_bytes(held.create(weight, dtype, device.type)) for weight, held in _held(config, ends, quantization)
    )
    if len(ends) > 1 and shares_tied_embedding(config, device, dtype, QUANTIZATIONS.get(quantization)):
        size -= config.embedding.cut(_WHOLE).num_elements * dtype.itemsize
    return size


def check_ends(section: ModelSection, config: ModelConfig, ends: Sequence[Weight]) -> None:
    """Look at the headers of the target's files for `ends`.

    Raises:
        NoWeightsError: the directory has no weights.
        CheckpointError: they are not there, or not of their shapes.
    """
    if section.load_format != "dummy" and ends:
        check_held(_open(section), _held(config, ends, section.quantization))


def load_ends(
    section: ModelSection,
    config: ModelConfig,
    ends: Sequence[Weight],
    communicator: Communicator,
    device: torch.device,
    dtype: torch.dtype,
) -> TargetEnds:
    """Read `ends` of a target.

    Args:
        section: of the target.
        config: of the target.
        ends: its embedding, its head, both or none.
        communicator: of one rank.
        device: where they go.
        dtype: of the target's activations.

    Raises:
        CheckpointError: anything wrong with the files, in one line.
    """
    default = QUANTIZATIONS.get(section.quantization)
    is_made_up, stored = section.load_format == "dummy", DTYPES[config.checkpoint_dtype]
    if not ends:
        return TargetEnds(dtype, device, None, None, 0)
    files: WeightFiles = DummyWeights(section.model, stored, device, config) if is_made_up else _open(section)
    total = check_held(files, _held(config, ends, section.quantization))
    quantization_of = partial(config.quantization_of, default=default)
    loader = CheckpointLoader(files, _WHOLE, device, dtype, quantization_of, total, None)
    # As the target's own are multiplied with.
    reader = WeightReader(loader, communicator, batch_invariant=True, kv_format=PLAIN)
    embedding = reader.tensor(config.embedding) if config.embedding in ends else None
    head = None
    if config.head in ends:
        is_shared = embedding is not None and shares_tied_embedding(config, device, dtype, default)
        head = VocabularyHead(
            reader.linear(config.head, present=embedding if is_shared else None), config.vocab_size, communicator
        )
    reader.release_buffer()
    reader.close()
    looked_up = None if embedding is None else VocabularyEmbedding(embedding, 0, communicator)
    return TargetEnds(dtype, device, looked_up, head, reader.bytes_read)


def _open(section: ModelSection) -> WeightFiles:
    engine = read_engine(section.model)
    return open_checkpoint(section.model) if engine is None else EngineEnds(section.model, engine)


def _held(config: ModelConfig, ends: Sequence[Weight], quantization: str) -> list[tuple[HeldWeight, Quantization]]:
    """Both, whole, and how they are held: as the target's own."""
    default = QUANTIZATIONS.get(quantization)
    return [(weight.cut(_WHOLE), config.quantization_of(weight, default)) for weight in ends]
