"""Re-indexing: what permuting, reshaping, slicing and taking do to the fields of a tensor's type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conserved.inference.types.tensor_type import (
    Atoms,
    Field,
    Image,
    Strand,
    Type,
    Virtual,
    moved_key,
    tidy,
    without_constant_axes,
)


class Move(ABC):
    """Entries of a tensor in new places, without arithmetic."""

    @abstractmethod
    def array(self, dims: tuple[int, ...], array: Atoms, leading: int) -> tuple[tuple[int, ...], Atoms]:
        """Return a field's axes and array, `leading` axes of the latter being virtual, after the move."""

    @abstractmethod
    def carry(self, dim: int) -> tuple[int, ...]:
        """Return the axes of the result that an axis of the source becomes."""

    def field(self, field: Field) -> Field:
        """Return a field after the move."""
        virtual = tuple(Virtual(axis.key, *self.array(axis.dims, axis.slots, 0)) for axis in field.virtual)
        dims, atoms = self.array(field.dims, field.atoms, len(field.virtual))
        copies = None if field.copies is None else self.array(field.dims, field.copies, len(field.virtual))[1]
        return Field(dims, atoms, field.weight, virtual, copies)

    def image(self, image: Image) -> Image:
        """Return an image of a shift after the move: another map, unless no axis it varies along is touched."""
        varies = frozenset(new for dim in image.varies for new in self.carry(dim))
        mark = self.mark(image.varies)
        return replace(image, varies=varies, key=image.key if mark is None else moved_key(image.key, mark))

    @abstractmethod
    def mark(self, varies: frozenset[int]) -> Hashable | None:
        """Return what the move does to a tensor that varies along some axes only; None if nothing."""

    def type(self, type_: Type) -> Type:
        """Return a type after the move."""
        return Type(
            tuple(map(self.field, type_.factors)),
            tuple(map(self.field, type_.shifts)),
            tuple(map(self.image, type_.images)),
            type_.zero,
            frozenset(new for dim in type_.centred for new in self.keeps(dim)),
            tuple(Strand(self.field(strand.field), self.field(strand.data)) for strand in type_.strands),
        )

    def keeps(self, dim: int) -> tuple[int, ...]:
        """Return the axis of the result whose entries are just those of an axis of the source, if there is one."""
        return ()


@dataclass(frozen=True, slots=True)
class Renumber(Move):
    """Axis d of the source is axis `targets[d]` of the result; None for an axis of size one that is gone."""

    targets: tuple[int | None, ...]

    def array(self, dims: tuple[int, ...], array: Atoms, leading: int) -> tuple[tuple[int, ...], Atoms]:
        if all(self.targets[dim] == dim for dim in dims):
            return dims, array
        axes = []
        for dim in dims:
            index = self.targets[dim]
            assert index is not None
            axes.append(index)
        return tidy(axes, array, leading)

    def carry(self, dim: int) -> tuple[int, ...]:
        index = self.targets[dim]
        return () if index is None else (index,)

    def mark(self, varies: frozenset[int]) -> Hashable | None:
        changed = tuple((dim, self.targets[dim]) for dim in sorted(varies) if self.targets[dim] != dim)
        return ("renumber", changed) if changed else None

    def keeps(self, dim: int) -> tuple[int, ...]:
        return self.carry(dim)


@dataclass(frozen=True, slots=True)
class Take(Move):
    """Entries `index` along one axis: a number removes the axis, a list chooses along it."""

    dim: int
    index: int | Atoms

    def array(self, dims: tuple[int, ...], array: Atoms, leading: int) -> tuple[tuple[int, ...], Atoms]:
        if self.dim in dims:
            array = np.asarray(np.take(array, self.index, leading + dims.index(self.dim)))
            dims = dims if not isinstance(self.index, int) else tuple(dim for dim in dims if dim != self.dim)
        if isinstance(self.index, int):
            dims = tuple(dim - (dim > self.dim) for dim in dims)
        return tidy(dims, array, leading)

    def carry(self, dim: int) -> tuple[int, ...]:
        if isinstance(self.index, int):
            return () if dim == self.dim else (dim - (dim > self.dim),)
        return (dim,)

    def mark(self, varies: frozenset[int]) -> Hashable | None:
        if self.dim in varies:
            index = self.index if isinstance(self.index, int) else np.asarray(self.index).tobytes()
            return ("take", self.dim, index)
        if isinstance(self.index, int):
            changed = tuple((dim, dim - 1) for dim in sorted(varies) if dim > self.dim)
            return ("renumber", changed) if changed else None
        return None


@dataclass(frozen=True, slots=True)
class Regroup(Move):
    """Another shape for the same entries in the same order."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return runs of source axes and the runs of result axes that hold the same entries."""
        result = []
        i = j = 0
        while i < len(self.old) or j < len(self.new):
            sources, targets = [], []
            left = right = 1
            if i < len(self.old):
                sources.append(i)
                left *= self.old[i]
                i += 1
            if j < len(self.new):
                targets.append(j)
                right *= self.new[j]
                j += 1
            while left != right:
                if left < right:
                    sources.append(i)
                    left *= self.old[i]
                    i += 1
                else:
                    targets.append(j)
                    right *= self.new[j]
                    j += 1
            result.append((tuple(sources), tuple(targets)))
        return result

    def array(self, dims: tuple[int, ...], array: Atoms, leading: int) -> tuple[tuple[int, ...], Atoms]:
        involved = [(s, t) for s, t in self.groups() if any(dim in s for dim in dims)]
        if self._simple(involved):
            axes = {
                next(d for d in s if self.old[d] != 1): next(d for d in t if self.new[d] != 1)
                for s, t in involved
                if any(self.old[d] != 1 for d in s)
            }
            return tidy([axes[dim] for dim in dims], array, leading)
        dims, array = self._wide(involved, dims, array, leading)
        return without_constant_axes(dims, array, leading)

    def field(self, field: Field) -> Field:
        """Return a field after the move; where it is repeated along an axis that is merged, the copies are numbered."""
        virtual = tuple(Virtual(axis.key, *self.array(axis.dims, axis.slots, 0)) for axis in field.virtual)
        leading = len(field.virtual)
        involved = [(s, t) for s, t in self.groups() if any(dim in s for dim in field.dims)]
        if self._simple(involved):
            return replace(Move.field(self, field), virtual=virtual)
        added = [dim for s, _ in involved for dim in s if dim not in field.dims and self.old[dim] != 1]
        dims, atoms = self._wide(involved, field.dims, field.atoms, leading)
        copies: Atoms | None = None
        if added or field.copies is not None:
            all_dims = tuple(sorted({*field.dims, *added}))
            number = np.zeros((1,) * (leading + len(all_dims)), dtype=np.int64)
            if field.copies is not None:
                number = field.copies[
                    (slice(None),) * leading + tuple(slice(None) if dim in field.dims else None for dim in all_dims)
                ]
            for dim in added:
                axis = leading + all_dims.index(dim)
                index = np.arange(self.old[dim]).reshape(tuple(-1 if n == axis else 1 for n in range(number.ndim)))
                number = number * self.old[dim] + index
            number = np.broadcast_to(
                number,
                tuple(atoms_size for atoms_size in field.atoms.shape[:leading])
                + tuple(self.old[dim] for dim in all_dims),
            )
            copies = self._wide(involved, all_dims, number, leading)[1]
        remaining = list(dims)
        for dim in dims:
            axis = leading + remaining.index(dim)
            if bool((atoms == np.take(atoms, [0], axis)).all()):
                atoms = np.take(atoms, 0, axis)
                copies = None if copies is None else np.take(copies, 0, axis)
                remaining.remove(dim)
        if copies is not None and bool((copies == copies.reshape(-1)[0]).all()):
            copies = None
        return Field(tuple(remaining), atoms, field.weight, virtual, copies)

    def _simple(self, involved: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
        """Return whether no axis of a field is merged or cut."""
        return all(
            len([d for d in s if self.old[d] != 1]) <= 1 and len([d for d in t if self.new[d] != 1]) <= 1
            for s, t in involved
        )

    def _wide(
        self, involved: list[tuple[tuple[int, ...], tuple[int, ...]]], dims: tuple[int, ...], array: Atoms, leading: int
    ) -> tuple[tuple[int, ...], Atoms]:
        """Return an array over all axes that are merged or cut with its own, in the new shape."""
        wide = [dim for s, _ in involved for dim in s]
        index = (slice(None),) * leading + tuple(slice(None) if dim in dims else None for dim in wide)
        array = np.broadcast_to(array[index], array.shape[:leading] + tuple(self.old[dim] for dim in wide))
        targets = [dim for _, t in involved for dim in t]
        array = array.reshape(array.shape[:leading] + tuple(self.new[dim] for dim in targets))
        return tidy(targets, array, leading)

    def carry(self, dim: int) -> tuple[int, ...]:
        for sources, targets in self.groups():
            if dim in sources:
                return tuple(target for target in targets if self.new[target] != 1)
        raise AssertionError(dim)

    def mark(self, varies: frozenset[int]) -> Hashable | None:
        wide = [dim for dim in varies if self.old[dim] != 1]
        if all(self.keeps(dim) == (dim,) for dim in wide):
            return None
        return ("regroup", self.old, self.new, tuple(sorted(wide)))

    def keeps(self, dim: int) -> tuple[int, ...]:
        for sources, targets in self.groups():
            if dim in sources:
                same = [t for t in targets if self.new[t] == self.old[dim]]
                alone = all(self.old[d] == 1 for d in sources if d != dim)
                return (same[0],) if alone and len(same) == 1 else ()
        return ()


def permute(order: Sequence[int]) -> Renumber:
    """Permute axes: axis `order[i]` of the source becomes axis i."""
    indices = [0] * len(order)
    for new, old in enumerate(order):
        indices[old] = new
    return Renumber(tuple(indices))


def broadcast(old: Sequence[int], dims: int) -> Renumber:
    """Return axes of a tensor that is broadcast to `dims` axes."""
    offset = dims - len(old)
    return Renumber(tuple(d + offset for d in range(len(old))))
