"""Embedding and vocabulary head of draft heads that are decoder layers: their own or the target's, and which
of the target's tokens they know.

It knows weights and shapes. It does not know the layers between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.errors import CheckpointError
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.weight import Axis, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from parallel.communicator import Communicator
    from trtrun.heads.heads import HeadsTarget
    from trtrun.layers.embedding import KnownLogits
    from trtrun.models.config import ModelConfig
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class EmbeddingAndHeadPlan:
    """Plan of the embedding and the vocabulary head of one directory's heads.

    Attributes:
        files: where they are; None where these are the target's.
        target_vocab_size: of the target.
        hidden_size: of the heads' states.
        embedding: name of their embedding; None where the target's serves.
        head: name of the matrix to their vocabulary; None where the target's serves.
        num_lines: tokens of their vocabulary.
        d2t: name of the tensor that says how far each of their tokens is from the target's id; None where they agree.
        t2d: name of the tensor that says which of the target's tokens they know; None where nothing does.
        scales_embedding: whether they read the target's embedding with its factor, where it has one (Gemma's) and they
            have none of their own; else its rows as files have them.
    """

    files: Checkpoint | None
    target_vocab_size: int
    hidden_size: int
    embedding: str | None
    head: str | None
    num_lines: int
    d2t: str | None = None
    t2d: str | None = None
    scales_embedding: bool = False

    @property
    def embedding_weight(self) -> Weight | None:
        """[vocabulary share, hidden]."""
        return None if self.embedding is None else self._of_vocabulary(self.embedding, self.target_vocab_size)

    @property
    def head_weight(self) -> Weight | None:
        """[share of its vocabulary, hidden]."""
        if self.head is None:
            return None
        return Weight(self._of_vocabulary(self.head, self.num_lines).parts, "head")

    def _of_vocabulary(self, name: str, size: int) -> Weight:
        lines = Axis(size, loaded_vocabulary_range, padded=vocabulary_range)
        return Weight((StoredTensor(name, (lines, Axis(self.hidden_size))),))

    def weights(self) -> Sequence[Weight]:
        """Weights of their own."""
        return [weight for weight in (self.embedding_weight, self.head_weight) if weight is not None]

    def of_target(self, target: ModelConfig) -> Sequence[Weight]:
        """The target's that serve."""
        borrowed = ((self.embedding, target.embedding), (self.head, target.head))
        return [weight for own, weight in borrowed if own is None]

    def describe(self) -> str:
        """Describe in words which tokens they know."""
        return f"{self.num_lines} of {self.target_vocab_size} tokens"

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> EmbeddingAndHead:
        """What computes them on this rank.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.layers.embedding import DECIDES, KnownLogits, VocabularyEmbedding, VocabularyHead

        token_ids = self._read_token_ids()
        head_weight, embedding_weight = self.head_weight, self.embedding_weight
        logits: Callable[[torch.Tensor], torch.Tensor] = target.logits
        embedding = target.embed if self.scales_embedding else target.stored_rows
        if head_weight is not None:
            logits = VocabularyHead(reader.linear(head_weight), self.num_lines, communicator, DECIDES)
        if embedding_weight is not None:
            first = vocabulary_range(self.target_vocab_size, *reader.share).start
            embedding = VocabularyEmbedding(reader.tensor(embedding_weight), first, communicator)
        ids = None if token_ids is None else token_ids.to(reader.device)
        return EmbeddingAndHead(embedding, KnownLogits(logits, ids, self.target_vocab_size, communicator))

    def _read_token_ids(self) -> torch.Tensor | None:
        """[num_lines] int64: the target's id of each of their tokens; None where they are the same."""
        import torch

        files, d2t, t2d = self.files, self.d2t, self.t2d
        num_lines, target_vocab_size = self.num_lines, self.target_vocab_size
        if d2t is None or files is None:
            return None
        file, own = files.file(d2t), torch.arange(num_lines)
        token_ids = own + files.integers(d2t)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= target_vocab_size:
            raise CheckpointError(
                f"{file}: {d2t} leads to ids from {int(token_ids.min())} to {int(token_ids.max())}, but the "
                f"target has {target_vocab_size} tokens: it must hold how far each token's id is from the target's"
            )
        if len(set(token_ids.tolist())) < num_lines:
            raise CheckpointError(f"{file}: {d2t} leads to an id twice")
        if t2d is not None and num_lines < target_vocab_size:
            known = files.flags(t2d).nonzero().flatten()
            if not torch.equal(known, token_ids.sort().values):
                raise CheckpointError(f"{file}: {d2t} and {t2d} do not name the same tokens: one of them was not saved")
        elif num_lines < target_vocab_size and torch.equal(token_ids, own):
            raise CheckpointError(
                f"{file}: {d2t} is zero everywhere for {num_lines} of {target_vocab_size} tokens: it "
                "was not saved, and nothing says which tokens the head knows"
            )
        return None if torch.equal(token_ids, own) else token_ids


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Ends on one rank.

    Attributes:
        embedding: tokens [n] int64 to [n, hidden].
        logits: of [n, hidden] of the end.
    """

    embedding: Callable[[torch.Tensor], torch.Tensor]
    logits: KnownLogits
