"""Text to numbers for ``small``: words, each with an id, in a table as wide as the longest caption."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

PAD, UNKNOWN = 0, 1
"""Ids of an empty place and of a word without an entry; words follow from 2."""
MOST_WORDS, SHORTEST, LONGEST = 32768, 8, 64


def words_of(text: str) -> list[str]:
    """Words in any script, lower case; marks between them are dropped."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


class WordTokenizer:
    """A vocabulary and a length.

    Args:
        words: the known words, each once.
        length: L, places a text; words behind the last place are dropped.

    Raises:
        ValueError: for a word that stands twice, or no place.
    """

    def __init__(self, words: list[str], length: int) -> None:
        if length < 1:
            raise ValueError(f"a text needs at least one place, got length {length}")
        self.words, self.length = list(words), length
        self._ids = {word: number for number, word in enumerate(self.words, start=UNKNOWN + 1)}
        if len(self._ids) != len(self.words):
            twice, _ = Counter(self.words).most_common(1)[0]
            raise ValueError(f"a vocabulary holds every word once, {twice!r} stands twice")

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> WordTokenizer:
        """The words of ``texts`` (the 32768 most frequent), as long as the longest text but within 8..64 places.

        Raises:
            ValueError: when there is no word in them.
        """
        counts: Counter[str] = Counter()
        longest = 0
        for text in texts:
            words = words_of(text)
            counts.update(words)
            longest = max(longest, len(words))
        if not counts:
            raise ValueError("the vocabulary is made from texts, and these hold no word; pass the training captions")
        # Equal counts in the order of the alphabet: the order of the texts must not matter.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[:MOST_WORDS], min(max(longest, SHORTEST), LONGEST))

    def __len__(self) -> int:
        """Number of ids."""
        return len(self.words) + UNKNOWN + 1

    def __call__(self, texts: list[str]) -> Tensor:
        """LongTensor [n, L]: ids of the words from the left, then ``PAD``; a text without words is all ``PAD``."""
        tokens = torch.full((len(texts), self.length), PAD)
        for row, text in zip(tokens, texts, strict=True):
            ids = [self._ids.get(word, UNKNOWN) for word in words_of(text)[: self.length]]
            row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
        return tokens
