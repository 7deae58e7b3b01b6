"""Matrix algebra without sizes: sums of products of named matrices and their transposes, compared word by word.

Products do not commute, and (AB)ᵀ = BᵀAᵀ. Two sums that agree word by word are equal for matrices of every size that
can be multiplied so. Under a trace, words may also be turned round and transposed.

>>> a, b = matrices("AB")
>>> (a @ b).T == b.T @ a.T
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

Word = tuple[str, ...]


class Words:
    """A sum of words with rational coefficients; a transposed letter ends in an apostrophe."""

    def __init__(self, terms: dict[Word, Fraction]) -> None:
        self.terms = {word: factor for word, factor in terms.items() if factor}

    def __add__(self, other: Words) -> Words:
        result = dict(self.terms)
        for word, factor in other.terms.items():
            result[word] = result.get(word, Fraction(0)) + factor
        return Words(result)

    def __neg__(self) -> Words:
        return -1 * self

    def __sub__(self, other: Words) -> Words:
        return self + -other

    def __rmul__(self, factor: int | Fraction) -> Words:
        return Words({word: factor * value for word, value in self.terms.items()})

    def __matmul__(self, other: Words) -> Words:
        result: dict[Word, Fraction] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                result[left + right] = result.get(left + right, Fraction(0)) + a * b
        return Words(result)

    @property
    def T(self) -> Words:  # noqa: N802
        """The transpose."""
        return Words({transposed(word): factor for word, factor in self.terms.items()})

    def replace(self, rules: dict[Word, Word]) -> Words:
        """Words with known products replaced, such as C Cᵀ by C, until none is left."""
        return self._map(lambda word: _rewritten(word, rules))

    def without(self, letter: str) -> Words:
        """Return the sum without the words in which a letter occurs: what is left if that matrix is zero."""
        return Words({word: f for word, f in self.terms.items() if letter not in word and letter + "'" not in word})

    def trace(self) -> Words:
        """Return what the trace sees: each word as the least of its rotations and their transposes."""
        return self._map(lambda word: min(_same_trace(word)))

    def _map(self, change: Callable[[Word], Word]) -> Words:
        result: dict[Word, Fraction] = {}
        for word, factor in self.terms.items():
            result[change(word)] = result.get(change(word), Fraction(0)) + factor
        return Words(result)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.terms.items())))

    def __bool__(self) -> bool:
        return bool(self.terms)


def transposed(word: Word) -> Word:
    """Return the transpose of a product."""
    return tuple(letter[:-1] if letter.endswith("'") else letter + "'" for letter in reversed(word))


def matrices(names: Iterable[str]) -> list[Words]:
    """Return one matrix for every name."""
    return [Words({(name,): Fraction(1)}) for name in names]


def _same_trace(word: Word) -> list[Word]:
    turned = [word[i:] + word[:i] for i in range(len(word))] or [word]
    return turned + [transposed(one) for one in turned]


def _rewritten(word: Word, rules: dict[Word, Word]) -> Word:
    for old, new in rules.items():
        for i in range(len(word) - len(old) + 1):
            if word[i : i + len(old)] == old:
                return _rewritten(word[:i] + new + word[i + len(old) :], rules)
    return word
