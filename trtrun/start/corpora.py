"""The corpus of a drafting method that looks texts up: read and sorted by one rank, the same on all of the group.

It knows the configuration. It does not know what is looked up.
"""

from __future__ import annotations

import numpy
import torch

from parallel.communicator import Communicator
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting_methods import SuffixSection
from trtrun.errors import ConfigError, TrtrunError, reading
from trtrun.speculation.suffixes.corpus import SortedCorpus, bytes_of_corpus, sort_places
from trtrun.tokens.corpus import read_corpus

_READS = 0
"""Of the group the rank that reads the file: ranks with other texts would propose other tokens, and part for ever."""


def corpus_bytes(config: RuntimeConfig) -> int:
    """Upper bound of what the corpus takes on each rank of the target; 0 without one."""
    section = config.speculation
    if not isinstance(section, SuffixSection) or section.suffix_corpus is None:
        return 0
    # A token is a byte of a file or more, but for those that a tokenizer puts in front of a text.
    with reading(f"speculation.suffix_corpus: {section.suffix_corpus}", ConfigError):
        most = min(section.suffix_corpus_max_tokens, 2 * section.suffix_corpus.stat().st_size)
    return bytes_of_corpus(most, section.suffix_decoding_max_tree_depth)


def load_corpus(
    config: RuntimeConfig, vocab_size: int, communicator: Communicator, device: torch.device
) -> SortedCorpus | None:
    """The corpus on this rank's device; None where the configuration names none, or the start has failed on the rank
    that reads it. Collective over the target's group.

    Raises:
        ConfigError: its file cannot be used; on the rank that reads it.
    """
    section = config.speculation
    if not isinstance(section, SuffixSection) or section.suffix_corpus is None:
        return None
    most, tokenizer = section.suffix_decoding_max_tree_depth, config.tokenizer or config.target.model
    tokens = order = numpy.empty(0, numpy.int32)
    failure: TrtrunError | None = None
    if communicator.rank == _READS:
        try:
            tokens = read_corpus(section.suffix_corpus, tokenizer, vocab_size, section.suffix_corpus_max_tokens)
            order = sort_places(tokens, most)
            if not len(order):
                where = f"speculation.suffix_corpus: {section.suffix_corpus}"
                raise ConfigError(f"{where} holds no text of two tokens or more")
        except TrtrunError as error:
            failure = error
    # The others wait for what was read: they are told first that nothing comes. What is wrong is the reader's to say.
    if not _is_true_at_reader(failure is None, communicator, device):
        if failure is not None:
            raise failure
        return None
    return SortedCorpus(_share(tokens, communicator, device), _share(order, communicator, device), most)


def _is_true_at_reader(value: bool, communicator: Communicator, device: torch.device) -> bool:
    if communicator.size == 1:
        return value
    return bool(communicator.broadcast(torch.tensor([int(value)], device=device), _READS))


def _share(values: numpy.ndarray, communicator: Communicator, device: torch.device) -> torch.Tensor:
    """What the rank that reads has, on all of them: [n] int32."""
    if communicator.size == 1:
        return torch.from_numpy(values).to(device)
    count = communicator.broadcast(torch.tensor([len(values)], device=device), _READS)
    wide = torch.zeros(int(count), dtype=torch.int64, device=device)
    if communicator.rank == _READS:
        wide.copy_(torch.from_numpy(values))
    return communicator.broadcast(wide, _READS).to(torch.int32)
