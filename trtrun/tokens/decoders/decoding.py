"""What tokens add to a text, and where a text stands behind a prompt.

It knows token ids, their names and the chain of their decoder, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from trtrun.tokens.decoders.chain import Chain


class Decoding:
    """One tokenizer's tokens, with or without special ones. Tables are filled as tokens come.

    Attributes:
        names: the string of each token as a list, empty for a token that gives no text: one that is left out, or that
            the tokenizer does not know.
        own_texts: what each token adds to a text in which nothing is kept, whatever that is; empty where that depends
            on the tokens before or behind it, and where there is nothing.
    """

    def __init__(self, chain: Chain, name_of: Callable[[int], str | None], left_out: Container[str]) -> None:
        """Take a decoder's chain, the string of each token, and strings that are left out of texts."""
        self._beginning, self._settled = chain, chain.settled()
        self.names: Mapping[int, list[str]] = _Names(name_of, left_out)
        self.own_texts: Mapping[int, str] = _OwnTexts(self._settled, self.names)
        self._anchors = _Anchors(self._settled, self.names)

    def behind(self, prompt_token_ids: Sequence[int]) -> Chain:
        """A chain that stands where it would if it had been fed with a prompt.

        It takes the prompt's first tokens, which may be written in another way than those behind them, and of the rest
        those behind which it does not matter what came before: one as a rule, all bytes of a run of them. Only where
        such a place cannot be known (a decoder that replaces what several tokens spell) does it take the whole prompt.
        """
        chain = self._beginning.copied()
        begin, size = 0, 1
        while begin < len(prompt_token_ids) and not chain.is_settled:
            self._feed(chain, prompt_token_ids[begin : begin + size])
            begin, size = begin + size, 2 * size
        for place in range(len(prompt_token_ids) - 1, begin - 1, -1):
            if self._anchors[prompt_token_ids[place]]:
                chain, begin = self._settled.copied(), place
                break
        self._feed(chain, prompt_token_ids[begin:])
        return chain

    def _feed(self, chain: Chain, token_ids: Sequence[int]) -> None:
        chain.feed([name for token in token_ids for name in self.names[token]])


class _Names(dict[int, list[str]]):
    def __init__(self, name_of: Callable[[int], str | None], left_out: Container[str]) -> None:
        super().__init__()
        self._name_of, self._left_out = name_of, left_out

    def __missing__(self, token_id: int) -> list[str]:
        name = self._name_of(token_id)
        self[token_id] = found = [] if name is None or name in self._left_out else [name]
        return found


class _OwnTexts(dict[int, str]):
    def __init__(self, settled: Chain, names: Mapping[int, list[str]]) -> None:
        super().__init__()
        self._settled, self._names = settled, names

    def __missing__(self, token_id: int) -> str:
        chain = self._settled.copied()
        text = chain.feed(self._names[token_id])
        self[token_id] = text = text if chain.is_neutral else ""
        return text


class _Anchors(dict[int, bool]):
    def __init__(self, settled: Chain, names: Mapping[int, list[str]]) -> None:
        super().__init__()
        self._settled, self._names = settled, names

    def __missing__(self, token_id: int) -> bool:
        self[token_id] = found = any([self._settled.is_anchor(name) for name in self._names[token_id]])
        return found
