"""Which atoms may be mixed with each other: what makes GL(n) out of n scales.

Atoms that one axis of a parameter introduces form a block, and a priori any linear combination along it is allowed.
The operations of the program refine the blocks: an operation that treats two atoms differently (a slice, a batch
axis, a product with something that varies) *splits* them; one that matches atoms one to one (a sum, a contraction
with the dual) *pairs* them, and mixing two on one side then means mixing their partners on the other. What is left
is the greatest partition that is stable under both, found by refining until nothing changes. Labels are 64-bit
hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from conserved.inference.types import Atoms

Labels = np.ndarray

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LAST = np.uint64(0x94D049BB133111EB)


def mix(a: Labels) -> Labels:
    """A hash of every entry."""
    with np.errstate(over="ignore"):
        a = a.astype(np.uint64) + _ODD
        a = (a ^ (a >> np.uint64(30))) * _MIX
        a = (a ^ (a >> np.uint64(27))) * _LAST
        return a ^ (a >> np.uint64(31))


def combine(a: Labels, b: Labels) -> Labels:
    """A hash of two labels, in order."""
    with np.errstate(over="ignore"):
        return mix(mix(a) * _MIX + mix(b))


@dataclass(slots=True)
class Partition:
    """Blocks of atoms, refined by what a program does with them."""

    labels: Labels = field(default_factory=lambda: np.zeros(1024, dtype=np.uint64))
    spaces: Labels = field(default_factory=lambda: np.zeros(1024, dtype=np.uint64))
    """The same without the splits by products: what belongs to one head, neuron layer or channel axis."""
    pairs: list[tuple[Atoms, Atoms, bool]] = field(default_factory=list)
    count: int = 1

    def fresh(self, atoms: Atoms, block: int) -> None:
        """New atoms, all in one block."""
        if not atoms.size:
            return
        stop = int(atoms.reshape(-1)[-1]) + 1
        while stop > len(self.labels):
            self.labels = np.concatenate([self.labels, np.zeros_like(self.labels)])
            self.spaces = np.concatenate([self.spaces, np.zeros_like(self.spaces)])
        label = mix(np.array([block]))[0]
        self.labels[atoms.reshape(-1)] = label
        self.spaces[atoms.reshape(-1)] = label
        self.count = max(self.count, stop)

    def split(self, atoms: Atoms, keys: Atoms, *, batch: bool) -> None:
        """Keep apart atoms that occur at different keys; `batch` says that they belong to different spaces, too."""
        flat, keys = np.broadcast_arrays(atoms, keys)
        flat, keys = flat.reshape(-1), keys.reshape(-1)
        if flat.size < 2 or bool((flat[1:] > flat[:-1]).all()):
            unique, signature = flat, mix(keys)
        else:
            unique, inverse = np.unique(flat, return_inverse=True)
            signature = np.zeros(unique.size, dtype=np.uint64)
            with np.errstate(over="ignore"):
                np.add.at(signature, inverse, mix(keys))
        self.labels[unique] = combine(self.labels[unique], signature)
        if batch:
            self.spaces[unique] = combine(self.spaces[unique], signature)

    def shatter(self, atoms: Atoms) -> None:
        """No mixing at all."""
        flat = atoms.reshape(-1)
        self.labels[flat] = combine(self.labels[flat], flat.astype(np.uint64))

    def pair(self, left: Atoms, right: Atoms, *, dual: bool) -> None:
        """Match atoms position by position; `dual` where one moves by the inverse transpose of the other."""
        a, b = np.broadcast_arrays(left, right)
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        if not np.array_equal(a, b) or dual:
            self.pairs.append((a, b, dual))

    def solve(self) -> tuple[Atoms, Atoms, Labels, Labels]:
        """For every atom its class, its orientation in it (±1), its block and its space, all labels of classes.

        A class whose block label is its own alone is not mixed with anything.
        """
        count = self.count
        classes, orientation, twisted = _classes(count, self.pairs)
        labels = _stable(self.labels[:count].copy(), classes, orientation, twisted, shatter=True)
        spaces = _stable(self.spaces[:count].copy(), classes, orientation, np.zeros_like(twisted), shatter=False)
        return classes, orientation, labels, spaces


def _classes(count: int, pairs: list[tuple[Atoms, Atoms, bool]]) -> tuple[Atoms, Atoms, np.ndarray]:
    """Atoms that pairs connect, and whether each moves along or against its class; twisted ones do both."""
    if not pairs:
        return np.arange(count), np.ones(count, dtype=np.int64), np.zeros(count, dtype=bool)
    left = np.concatenate([a for a, _, _ in pairs])
    right = np.concatenate([b for _, b, _ in pairs])
    flip = np.concatenate([np.full(a.size, int(dual)) for a, _, dual in pairs])
    keep = (left != 0) & (right != 0)
    left, right, flip = left[keep], right[keep], flip[keep]
    source = np.concatenate([2 * left, 2 * left + 1])
    target = np.concatenate([2 * right + flip, 2 * right + 1 - flip])
    graph = sparse.coo_matrix((np.ones(source.size, dtype=np.int8), (source, target)), (2 * count, 2 * count))
    label = connected_components(graph, directed=False)[1].astype(np.int64)
    plus, minus = label[0::2], label[1::2]
    orientation = np.where(plus <= minus, 1, -1)
    classes = compact(np.minimum(plus, minus))
    return classes, orientation, plus == minus


def _stable(labels: Labels, classes: Atoms, orientation: Atoms, twisted: np.ndarray, *, shatter: bool) -> Labels:
    """Labels of classes, refined until atoms of one block have partners in the same blocks."""
    count = labels.size
    size = int(classes.max(initial=0)) + 1
    if shatter:
        alone = twisted.copy()
        labels[alone] = combine(labels[alone], np.arange(count, dtype=np.uint64)[alone])
    previous = -1
    while True:
        if shatter:
            # Two atoms of one block in one class: the class cannot be mixed within the block.
            key = combine(labels, classes.astype(np.uint64))
            order = np.argsort(key)
            equal = key[order][1:] == key[order][:-1]
            clash = np.zeros(count, dtype=bool)
            clash[order[1:]] = equal
            clash[order[:-1]] |= equal
            labels[clash] = combine(labels[clash], np.arange(count, dtype=np.uint64)[clash])
        oriented = combine(labels, orientation.astype(np.uint64)) if shatter else labels
        signature = np.zeros(size, dtype=np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(signature, classes, mix(oriented) if shatter else _once(classes, oriented, size))
        labels = combine(labels, signature[classes])
        found = _count(labels)
        if found == previous:
            return signature
        previous = found


def compact(labels: Labels) -> Atoms:
    """Labels from 0 on without gaps, in the same order; for labels that are small non-negative numbers."""
    used = np.zeros(int(labels.max(initial=-1)) + 1, dtype=np.int64)
    used[labels] = 1
    return (np.cumsum(used) - 1)[labels]


def _count(labels: Labels) -> int:
    """The number of different labels."""
    ordered = np.sort(labels)
    return int((ordered[1:] != ordered[:-1]).sum()) + 1


def _once(classes: Atoms, labels: Labels, size: int) -> Labels:
    """Hashes of labels, with every label counted once in a class."""
    order = np.lexsort((labels, classes))
    owner, label = classes[order], labels[order]
    repeated = np.zeros(labels.size, dtype=bool)
    repeated[order[1:]] = (owner[1:] == owner[:-1]) & (label[1:] == label[:-1])
    return np.where(repeated, np.uint64(0), mix(labels))
