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

from conserved.inference.types.signed_sets import SignedSets
from conserved.inference.types.tensor_type import Atoms

Labels = np.ndarray

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LAST = np.uint64(0x94D049BB133111EB)


def mix(a: Labels) -> Labels:
    """Return a hash of every entry."""
    with np.errstate(over="ignore"):
        return _mix(np.atleast_1d(a).astype(np.uint64))


def _mix(a: Labels) -> Labels:
    """Return the hash, in place."""
    a += _ODD
    rest = np.empty_like(a)
    for turn, factor in ((30, _MIX), (27, _LAST), (31, None)):
        np.right_shift(a, np.uint64(turn), out=rest)
        a ^= rest
        if factor is not None:
            a *= factor
    return a


def combine(a: Labels, b: Labels) -> Labels:
    """Return a hash of two labels, in order."""
    with np.errstate(over="ignore"):
        # An odd multiple of a is a bijection, and b is hashed: one more hash of the sum keeps the order.
        return _mix(np.asarray(a, dtype=np.uint64) * _MIX + mix(b))


def shared(labels: Labels) -> np.ndarray:
    """Return positions whose label may occur more than once: all that do, and hardly any that do not."""
    result = np.arange(labels.size)
    bits = min(24, max(8, int(labels.size).bit_length() + 2))
    for turn in (64 - bits, 40 - bits // 2, 0):
        bucket = ((labels[result] >> np.uint64(turn)) & np.uint64((1 << bits) - 1)).astype(np.int64)
        result = result[np.bincount(bucket, minlength=1 << bits)[bucket] > 1]
    return result


@dataclass(slots=True)
class Partition:
    """Blocks of atoms, refined by what a program does with them."""

    labels: Labels = field(default_factory=lambda: np.zeros(1024, dtype=np.uint64))
    spaces: Labels = field(default_factory=lambda: np.zeros(1024, dtype=np.uint64))
    """The same without the splits by products: what belongs to one head, neuron layer or channel axis."""
    pairs: SignedSets = field(default_factory=SignedSets)
    """Atoms that were matched: one moves as the other, or by the inverse transpose."""
    edges: list[tuple[Atoms, Atoms, bool]] = field(default_factory=list)
    """The matches one by one."""
    twisted: list[Atoms] = field(default_factory=list)
    """Atoms that were matched with their own duals."""
    fine: Labels = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    """After solving: labels of atoms, apart where the atoms they were matched with are."""
    count: int = 1

    def fresh(self, atoms: Atoms, block: int) -> None:
        """Add new atoms, all in one block."""
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
        """Forbid all mixing of these atoms."""
        flat = atoms.reshape(-1)
        self.labels[flat] = combine(self.labels[flat], flat.astype(np.uint64))

    def pair(self, left: Atoms, right: Atoms, *, dual: bool) -> None:
        """Match atoms position by position; `dual` where one moves by the inverse transpose of the other."""
        a, b = np.broadcast_arrays(left, right)
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        both = (a != 0) & (b != 0)
        if not both.all():
            a, b = a[both], b[both]
        self.edges.append((a, b, dual))
        self.pairs.grow(self.count)
        torn = self.pairs.join(a, b, -1 if dual else 1)
        if torn.size:
            self.twisted.append(torn)

    def solve(self) -> tuple[Atoms, Atoms, Labels, Labels]:
        """Return for every atom its class, its orientation in it (±1), its block and its space, all labels of classes.

        A class whose block label is its own alone is not mixed with anything.
        """
        self.pairs.grow(self.count)
        root, orientation = self.pairs.roots()
        classes = compact(root)
        size = int(classes.max(initial=0)) + 1
        torn = np.zeros(size, dtype=bool)
        for atoms in self.twisted:
            torn[classes[atoms]] = True
        return classes, orientation.astype(np.int64), self._blocks(classes, orientation, torn), self._spaces(classes)

    def _blocks(self, classes: Atoms, orientation: np.ndarray, torn: np.ndarray) -> Labels:
        """Return labels of classes, alike for those whose atoms may be mixed.

        A class with an atom that shares its label with no other cannot be mixed with anything, and then neither can
        those that only shared a label with it; the few that are left are refined until partners agree.
        """
        labels = self.labels[: self.count]
        alone = torn.copy()
        while True:
            open_ = np.flatnonzero(~alone[classes])
            single = np.ones(open_.size, dtype=bool)
            single[shared(labels[open_])] = False
            if not single.any():
                break
            alone[classes[open_[single]]] = True
        result = mix(np.arange(torn.size, dtype=np.uint64) + _ODD)
        if open_.size:
            remaining, renumbered = np.unique(classes[open_], return_inverse=True)
            self.fine = labels.copy()
            self.fine[open_] = self._by_partners(labels, open_)
            result[remaining] = _stable(self.fine[open_], renumbered, orientation[open_], open_)
        return result

    def _by_partners(self, labels: Labels, atoms: Atoms) -> Labels:
        """Return labels of these atoms, apart where the atoms they were matched with are."""
        position = np.full(self.count, -1, dtype=np.int64)
        position[atoms] = np.arange(atoms.size)
        ends = [(position[a], position[b], dual) for a, b, dual in self.edges]
        ends = [(a[a >= 0], b[a >= 0], dual) for a, b, dual in ends]
        left = np.concatenate([a for a, _, _ in ends]) if ends else position[:0]
        right = np.concatenate([b for _, b, _ in ends]) if ends else position[:0]
        kind = np.concatenate([np.full(a.size, int(dual), dtype=np.uint64) for a, _, dual in ends] or [labels[:0]])
        result = labels[atoms]
        previous = -1
        while (count := _count(result)) != previous:
            previous = count
            seen = np.zeros(result.size, dtype=np.uint64)
            with np.errstate(over="ignore"):
                np.add.at(seen, left, combine(result[right], kind))
                np.add.at(seen, right, combine(result[left], kind))
            result = combine(result, seen)
        return result

    def _spaces(self, classes: Atoms) -> Labels:
        """Return for every class a hash of the spaces that its atoms belong to, refined until nothing changes."""
        labels, size = self.spaces[: self.count], int(classes.max(initial=0)) + 1
        previous = -1
        while True:
            signature = np.zeros(size, dtype=np.uint64)
            with np.errstate(over="ignore"):
                np.add.at(signature, classes, _once(classes, labels, size))
            labels = combine(labels, signature[classes])
            count = _count(signature)
            if count == previous:
                return signature
            previous = count


def _stable(labels: Labels, classes: Atoms, orientation: np.ndarray, names: Atoms) -> Labels:
    """Return labels of classes, refined until atoms of one block have partners in the same blocks."""
    size = int(classes.max(initial=0)) + 1
    previous = -1
    while True:
        # Two atoms of one block in one class: the class cannot be mixed within the block.
        key = combine(labels, classes.astype(np.uint64))
        order = np.argsort(key)
        equal = key[order][1:] == key[order][:-1]
        clash = np.zeros(labels.size, dtype=bool)
        clash[order[1:]] = equal
        clash[order[:-1]] |= equal
        labels[clash] = combine(labels[clash], names[clash].astype(np.uint64))
        signature = np.zeros(size, dtype=np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(signature, classes, mix(combine(labels, orientation.astype(np.uint64))))
        labels = combine(labels, signature[classes])
        count = _count(labels)
        if count == previous:
            return signature
        previous = count


def compact(labels: Labels) -> Atoms:
    """Return labels from 0 on without gaps, in the same order; for labels that are small non-negative numbers."""
    used = np.zeros(int(labels.max(initial=-1)) + 1, dtype=np.int64)
    used[labels] = 1
    return (np.cumsum(used) - 1)[labels]


def _count(labels: Labels) -> int:
    """Return the number of different labels."""
    ordered = np.sort(labels)
    return int((ordered[1:] != ordered[:-1]).sum()) + 1


def _once(classes: Atoms, labels: Labels, size: int) -> Labels:
    """Return hashes of labels, with every label counted once in a class."""
    result = mix(labels)
    several = np.flatnonzero(np.bincount(classes, minlength=size)[classes] > 1)
    key = combine(labels[several], classes[several].astype(np.uint64))
    order = np.argsort(key)
    result[several[order[1:][key[order][1:] == key[order][:-1]]]] = 0
    return result
