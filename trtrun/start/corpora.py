"""The corpus of a drafting method that looks texts up: read and sorted by one rank, the same on all of the group.

It knows the configuration. It does not know what is looked up.
"""

from __future__ import annotations

import numpy
import torch

from parallel.communicator import Communicator
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.text_methods import SuffixSection
from trtrun.errors import ConfigError, TrtrunError, wrap_errors
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
    with wrap_errors(f"speculation.suffix_corpus: {section.suffix_corpus}", ConfigError):
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
            sorted_places, num_places = sort_places(torch.from_numpy(tokens), most)
            order = sorted_places[: int(num_places)].numpy()
            if not len(order):
                where = f"speculation.suffix_corpus: {section.suffix_corpus}"
                raise ConfigError(f"{where} holds no text of two tokens or more")
        except TrtrunError as error:
            failure = error
    # The others wait for what was read, and are told where nothing comes. What is wrong is the reader's to say.
    shared = [_share(None if failure else values, communicator, device) for values in (tokens, order)]
    if failure is not None:
        raise failure
    of_tokens, of_order = shared
    return None if of_tokens is None or of_order is None else SortedCorpus(of_tokens, of_order, most)


def _share(values: numpy.ndarray | None, communicator: Communicator, device: torch.device) -> torch.Tensor | None:
    """What the rank that reads has, on all of them: [n] int32; None where that is None."""
    own = None if values is None else torch.from_numpy(values).to(device)
    if communicator.size == 1:
        return own
    count = int(communicator.broadcast(torch.tensor([-1 if own is None else len(own)], device=device), _READS))
    if count < 0:
        return None
    place = own if own is not None and len(own) == count else torch.empty(count, dtype=torch.int32, device=device)
    return communicator.broadcast(place, _READS)
