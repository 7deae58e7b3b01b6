"""The statements that operators make about types: equal, zero, multiplied, contracted, summed, normalised.

An `Engine` holds the unknowns (charges, shifts, which atoms mix) and the few relations from which all rules for
operators are built. Every relation is sound by itself: it allows only motions of its inputs and outputs that the
operation commutes with. Where a general case would need more than is written here, atoms are set to zero, which
loses symmetries and never invents one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as member
from fractions import Fraction
from math import isfinite, prod

import numpy as np

from conserved.inference.types.field_groups import (
    axes_of,
    cancel,
    components,
    coordinates_of,
    has_axis,
    terms_of,
    within,
)
from conserved.inference.types.mixable_atoms import Partition
from conserved.inference.types.reindexing import Move, Renumber
from conserved.inference.types.system import LinearSystem
from conserved.inference.types.tensor_type import Atoms, Field, Image, Strand, Type, Virtual, distinct, spread, tidy

Number = int | float | complex

LARGEST = 20_000_000
"""Equations in one batch; more are not written out, and the charges involved are set to zero instead."""

IMAGES = 16
"""Images of shifts that are followed apart through a product; a norm of a residual stream has two or three."""

RELATIONS = 1_000_000
"""Entries of an exponential up to which a shift of its argument may become a scale."""

ENTRIES = 4_000_000
"""Parameters up to this size may be shifted entry by entry."""


@dataclass(frozen=True, eq=False, slots=True)
class ReadPart:
    """A parameter, or a part of it, before its first use: for every axis of the parameter the index that is read.

    `offset` is a number that was added, as in a norm that multiplies by 1 + γ; `scale` one that was multiplied with.
    """

    name: str
    shape: tuple[int, ...]
    coordinates: tuple[Field, ...]
    offset: int | float = 0.0
    scale: int | float = 1.0

    def moved(self, move: Move) -> ReadPart:
        """Return the view after a move."""
        return replace(self, coordinates=tuple(map(move.field, self.coordinates)))


@dataclass(slots=True)
class Region:
    """A part of a parameter that is used as one: a product of index sets, and its type over the parameter's axes."""

    name: str
    shape: tuple[int, ...]
    sets: tuple[Atoms, ...]
    type: Type
    offset: int | float
    origin: int
    role: str = ""
    """How it was first used: "map" (contracted: its first factor is what it makes, the others what it reads), "gain"
    (multiplied), "bias" (added), "table" (looked up)."""


@dataclass(slots=True)
class Ending:
    """Where charges were set to zero, or shifts made to vanish: which atoms, by which operation."""

    atoms: Atoms
    origin: int
    shift: bool


@dataclass(slots=True)
class SoftenedCharges:
    """Charges that a normalisation with this ε makes vanish only as far as ε is small: what it divides by."""

    fields: tuple[Field, ...]
    origin: int
    epsilon: int | float


@dataclass(frozen=True, eq=False, slots=True)
class ExponentialRelation:
    """By how much the result of exp or log moves, as the sum of how its argument does, entry by entry.

    The result of exp is scaled by what is added to its argument; to the result of log is added what scales its.
    """

    result: Atoms
    argument: tuple[tuple[Fraction, Atoms], ...]
    origin: int
    log: bool
    """Whether the result is a shift and the argument charges, and not the reverse."""


@dataclass(slots=True)
class Engine:
    """The unknowns of a program and the relations between them."""

    charges: LinearSystem = member(default_factory=LinearSystem)
    shifts: LinearSystem = member(default_factory=LinearSystem)
    partition: Partition = member(default_factory=Partition)
    regions: dict[str, list[Region]] = member(default_factory=dict)
    endings: list[Ending] = member(default_factory=list)
    forgotten: list[Ending] = member(default_factory=list)
    """Shifts that an operation does not see."""
    softened: list[SoftenedCharges] = member(default_factory=list)
    """Normalisations that forget a scale up to ε."""
    passed: dict[str, list[Atoms]] = member(default_factory=dict)
    """Charges that went through a kind of operation, such as "homogeneous"."""
    exponentials: list[ExponentialRelation] = member(default_factory=list)
    """Relations between charges and shifts, which are set to zero before each is solved alone."""
    gates: list[tuple[int, Atoms]] = member(default_factory=list)
    """Charges that were multiplied with something that differs from entry to entry, and by which operation."""
    origin: int = -1
    _keys: int = 0
    _still: np.ndarray = member(default_factory=lambda: np.zeros(1024, dtype=bool))
    """Shifts that are known to vanish."""

    def key(self) -> int:
        """Return a number that was not used before."""
        self._keys += 1
        return self._keys

    def fresh(
        self, dims: Sequence[int], sizes: Sequence[int], virtual: Sequence[Virtual] = (), counts: Sequence[int] = ()
    ) -> Field:
        """Return new charges over some axes, in one block; different entries of virtual axes never mix."""
        atoms = self.charges.fresh((*counts, *sizes))
        self.partition.fresh(atoms, self.key())
        dims, atoms = tidy(dims, atoms, len(virtual))
        if virtual:
            keys = np.arange(prod(counts)).reshape(tuple(counts) + (1,) * (atoms.ndim - len(virtual)))
            self.partition.split(atoms, keys, batch=True)
        return Field(dims, atoms, Fraction(1), tuple(virtual))

    def alone(
        self, dims: Sequence[int], sizes: Sequence[int], virtual: Sequence[Virtual] = (), counts: Sequence[int] = ()
    ) -> Field:
        """Return new charges that do not mix with each other."""
        result = self.fresh(dims, sizes, virtual, counts)
        self.partition.shatter(result.atoms)
        return result

    def equate(
        self, left: Sequence[Field], right: Sequence[Field], *, soft: int | float = 0.0, shift: bool = False
    ) -> None:
        """Require Σ left = Σ right at every place, one equation for each group of fields that share axes."""
        fields = cancel([*left, *(field.times(-1) for field in right)])
        if not fields:
            return
        if soft:
            self.softened.append(SoftenedCharges(fields, self.origin, soft))
        system = self.shifts if shift else self.charges
        groups = components(fields)
        rest: list[tuple[Fraction, Atoms]] = []
        for group in groups:
            if not shift:
                self.match(group, soft=bool(soft))
            terms, size = terms_of(group)
            if size > LARGEST:
                self.erase(group, shift=shift)
                continue
            if len(groups) > 1:
                scalar = system.fresh(())
                if not shift:
                    self.partition.fresh(scalar, self.key())
                terms.append((Fraction(-1), scalar))
                rest.append((Fraction(1), scalar))
            elif len(terms) == 1 and not soft:
                self.endings.append(Ending(terms[0][1], self.origin, shift))
            system.add(terms, soft=soft, origin=self.origin)
        if rest:
            system.add(rest, soft=soft, origin=self.origin)
            if len(groups) > 1 and not soft:
                self.endings += [Ending(field.atoms, self.origin, shift) for group in groups for field in group]

    def match(self, group: Sequence[Field], *, soft: bool = False) -> None:
        """Record what an equation between charges means for mixing: two fields over the same axes match one to one."""
        if soft:
            return
        ordered = sorted(group, key=lambda field: -len(field.dims) - len(field.virtual))
        wide, narrow = ordered[:2], ordered[2:]
        if (
            len(wide) == 2
            and abs(wide[0].weight) == abs(wide[1].weight)
            and all(within(field, wide[0]) for field in ordered)
        ):
            a, b = wide
            right = spread(b, a.dims, a.atoms.shape, a.virtual)
            for field in narrow:
                keys = coordinates_of(a, field.dims)
                if keys is not None:
                    self.partition.split(a.atoms, keys, batch=False)
                    self.partition.split(right, keys, batch=False)
            self.partition.pair(a.atoms, right, dual=a.weight == b.weight)
            return
        for field in group:
            self.partition.shatter(field.atoms)

    def exponential(self, type_: Type) -> Type:
        """Return the type of exp(x): it is scaled by what is added to x, and x may not be scaled."""
        self.zero(Type(type_.factors))
        self.drop(type_.images)
        self.let_go(type_)
        shifts = cancel(self.moving(type_).shifts)
        virtual, dims, sizes, _ = axes_of(shifts)
        if not shifts or virtual or prod(sizes) > RELATIONS:
            self.steady(type_)
            return Type()
        charge = self.alone(dims, sizes)
        self._relate(charge, shifts, log=False)
        return Type((charge,))

    def logarithm(self, type_: Type) -> Type:
        """Return the type of log(x): what scales x is added to it, and nothing may be added to x."""
        self.steady(type_)
        factors = cancel(type_.factors)
        virtual, dims, sizes, _ = axes_of(factors)
        if not factors or virtual or prod(sizes) > RELATIONS:
            self.zero(Type(type_.factors))
            return Type()
        for factor in factors:
            self.partition.shatter(factor.atoms)
        shift = Field(*tidy(dims, self.shifts.fresh(sizes)))
        self._relate(shift, factors, log=True)
        return Type((), (shift,))

    def _relate(self, result: Field, argument: Sequence[Field], *, log: bool) -> None:
        _, dims, sizes, _ = axes_of(argument)
        arrays = [np.broadcast_to(spread(field, dims, sizes), sizes) for field in (result, *argument)]
        terms = tuple(zip((field.weight for field in argument), arrays[1:], strict=True))
        self.exponentials.append(ExponentialRelation(arrays[0], terms, self.origin, log))

    def erase(self, fields: Iterable[Field], *, shift: bool = False) -> None:
        """Set every atom of these fields to zero."""
        system = self.shifts if shift else self.charges
        for field in fields:
            atoms = distinct(field.atoms)
            system.add([(Fraction(1), atoms)], origin=self.origin)
            self.endings.append(Ending(atoms, self.origin, shift))
            if not shift:
                self.partition.shatter(atoms)

    def uniform(self, fields: Sequence[Field], dims: Sequence[int], virtual: Sequence[Virtual] = ()) -> list[Field]:
        """Require that Σ fields is constant along `dims` and the virtual axes `virtual`.

        Return what remains of the fields.

        Entries that differ along `dims` alone are matched, so that an operation that is linear along the other axes
        may still mix those; one that is not shatters them itself.
        """
        gone = set(dims)
        touching = [field for field in fields if field.touches(gone) or any(has_axis(field, axis) for axis in virtual)]
        result = [field for field in fields if not any(field is other for other in touching)]
        # What is summed over nothing is zero, and moves with nothing.
        for group in components(cancel([field for field in touching if field.atoms.size])):
            result += self._level(group, gone, virtual)
        return result

    def _level(self, group: Sequence[Field], gone: set[int], virtual: Sequence[Virtual]) -> list[Field]:
        """Return one group of fields made the same along some axes."""
        if len(group) == 1:
            (field,) = group
            array = field.atoms
            axes = [axis for axis in field.virtual if gone & set(axis.dims) or any(axis.same(v) for v in virtual)]
            kept_virtual = tuple(axis for axis in field.virtual if not any(axis is other for other in axes))
            order = [n for n, axis in enumerate(field.virtual) if any(axis is other for other in kept_virtual)]
            order += [len(field.virtual) + n for n, dim in enumerate(field.dims) if dim not in gone]
            lost = [n for n in range(array.ndim) if n not in order]
            array = array.transpose(order + lost).reshape((*tuple(array.shape[n] for n in order), -1))
            if array.shape[-1] > 1:
                self.partition.split(array, np.arange(array.shape[-1]), batch=False)
                self.partition.pair(array[..., 1:], array[..., :1], dual=False)
                self.charges.add([(Fraction(1), array[..., 1:]), (Fraction(-1), array[..., :1])], origin=self.origin)
                self.endings.append(Ending(field.atoms, self.origin, False))
            kept_dims = tuple(dim for dim in field.dims if dim not in gone)
            return [Field(kept_dims, array[..., 0], field.weight, kept_virtual)]
        for field in group:
            self.partition.shatter(field.atoms)
        remainder = self._remainder(group, gone, virtual)
        if remainder:
            self.endings += [Ending(field.atoms, self.origin, False) for field in group]
        return remainder

    def _remainder(self, group: Sequence[Field], gone: set[int], virtual: Sequence[Virtual] = ()) -> list[Field]:
        """Return the sum of the fields, constant along removed axes.

        The result is empty, and all fields are set to zero, if there are too many axes.
        """
        axes_v, dims, sizes, counts = axes_of(group)
        kept_v = [
            n for n, axis in enumerate(axes_v) if not (gone & set(axis.dims)) and not any(axis.same(v) for v in virtual)
        ]
        kept_d = [n for n, dim in enumerate(dims) if dim not in gone]
        remainder = self.alone(
            [dims[n] for n in kept_d],
            [sizes[n] for n in kept_d],
            [axes_v[n] for n in kept_v],
            [counts[n] for n in kept_v],
        )
        terms, size = terms_of([*group, remainder.times(-1)])
        if size > LARGEST:
            self.erase(group)
            return []
        self.charges.add(terms, origin=self.origin)
        return [remainder]

    def zero(self, type_: Type) -> None:
        """Require that the tensor does not move."""
        self.equate(type_.factors, ())
        for factor in type_.factors:
            self.partition.shatter(factor.atoms)
        self.steady(type_)

    def steady(self, type_: Type) -> None:
        """Require that nothing is added to the tensor."""
        type_ = self.moving(type_)
        if len(type_.shifts) == 1:
            self._vanish(type_.shifts[0].atoms)
        else:
            self.equate(type_.shifts, (), shift=True)
        self.drop(type_.images)
        self.let_go(type_)

    def let_go(self, type_: Type) -> None:
        """Set the separate shifts of a map's rows to zero, because the next operation sees rows apart."""
        for strand in type_.strands:
            self._vanish(strand.field.atoms)

    def drop(self, images: Iterable[Image]) -> None:
        """Set the shifts behind these images to zero."""
        for image in images:
            self._vanish(image.atoms)

    def _vanish(self, atoms: Atoms) -> None:
        if self.vanished(atoms):
            return
        self.shifts.add([(Fraction(1), atoms)], origin=self.origin)
        self.endings.append(Ending(atoms, self.origin, True))
        self._still[atoms.reshape(-1)] = True

    def vanished(self, atoms: Atoms) -> bool:
        """Return whether all of these shifts are known to be zero."""
        if self.shifts.count > self._still.size:
            wider = np.zeros(2 * self.shifts.count, dtype=bool)
            wider[: self._still.size] = self._still
            self._still = wider
        flat = atoms.reshape(-1)
        return not flat.size or bool(self._still[flat[0]] and self._still[flat].all())

    def moving(self, type_: Type) -> Type:
        """Return a type without the shifts that are known to vanish."""
        if not type_.shifted:
            return type_
        return replace(
            type_,
            shifts=tuple(shift for shift in type_.shifts if not self.vanished(shift.atoms)),
            images=tuple(image for image in type_.images if not self.vanished(image.atoms)),
            strands=tuple(strand for strand in type_.strands if not self.vanished(strand.field.atoms)),
        )

    def forget_shift(self, type_: Type, dims: Sequence[int]) -> None:
        """Type an operation that ignores anything added uniformly along `dims`."""
        gone = set(dims)
        type_ = self.moving(type_)
        seen = [shift.atoms for shift in type_.shifts] + [image.atoms for image in type_.images]
        self.forgotten += [Ending(atoms, self.origin, True) for atoms in seen]
        touching = [shift for shift in type_.shifts if shift.touches(gone)]
        for group in components(cancel(touching)):
            axes_v, all_dims, sizes, counts = axes_of(group)
            kept_d = [n for n, dim in enumerate(all_dims) if dim not in gone]
            kept_v = [n for n, axis in enumerate(axes_v) if not gone & set(axis.dims)]
            atoms = self.shifts.fresh(tuple(counts[n] for n in kept_v) + tuple(sizes[n] for n in kept_d))
            remainder = Field(tuple(all_dims[n] for n in kept_d), atoms, Fraction(-1), tuple(axes_v[n] for n in kept_v))
            terms, size = terms_of([*group, remainder])
            if size > LARGEST:
                self.erase(group, shift=True)
            else:
                self.shifts.add(terms, origin=self.origin)
                self.endings += [Ending(field.atoms, self.origin, True) for field in group]
        self.drop(image for image in type_.images if image.varies & gone)
        for strand in type_.strands:
            self._level_strand(strand, gone)

    def _level_strand(self, strand: Strand, gone: set[int]) -> None:
        """Level rows that a norm or softmax ignores when all are moved alike by the same data."""
        field, data = strand.field, strand.data
        apart = [n for n, dim in enumerate(data.dims) if dim in gone]
        if any(bool((data.atoms != np.take(data.atoms, [0], n)).any()) for n in apart):
            self._vanish(field.atoms)
            return
        for axis in (n for n, dim in enumerate(field.dims) if dim in gone):
            first = np.take(field.atoms, [0], axis)
            self.shifts.add([(Fraction(1), field.atoms), (Fraction(-1), first)], origin=self.origin)

    def net(self, shifts: Sequence[Field]) -> tuple[Field, ...]:
        """Return shifts that are added, with one field for each group that shares axes.

        What cancels here cancels later on.

        One that is the same along some axes joins one that varies along them, as the mean that a norm takes away.
        """
        result = []
        groups: list[list[Field]] = []
        for group in sorted(
            components(cancel(shifts)), key=lambda component: -len({d for f in component for d in f.dims})
        ):
            plain = all(not component.dims and not component.virtual for component in group)
            if groups and plain:
                groups[0] += group
            else:
                groups.append(list(group))
        for group in groups:
            if len(group) > 1:
                virtual, dims, sizes, counts = axes_of(group)
                total = Field(tuple(dims), self.shifts.fresh((*counts, *sizes)), Fraction(1), tuple(virtual))
                terms, _ = terms_of([*group, total.times(-1)])
                self.shifts.add(terms, origin=self.origin)
                group = [total]
            result += group
        return tuple(result)

    def split_by(self, fields: Iterable[Field], dims: Iterable[int], *, batch: bool) -> None:
        """Separate atoms at different places along `dims`, because something varies there."""
        wanted = tuple(sorted(set(dims)))
        for field in fields:
            keys = coordinates_of(field, wanted)
            if keys is not None:
                self.partition.split(field.atoms, keys, batch=batch)

    def imaged(self, type_: Type, along: Iterable[int], without: Iterable[int] = ()) -> tuple[Image, ...]:
        """Return shifts of a tensor after a product with something that varies along `along`, summed over `without`."""
        extra, gone = set(along), set(without)
        type_ = self.moving(type_)
        images = [
            Image(self.key(), frozenset((shift.occupied | extra) - gone), distinct(shift.atoms))
            for shift in type_.shifts
        ]
        images += [Image(self.key(), frozenset((image.varies | extra) - gone), image.atoms) for image in type_.images]
        return tuple(images) if len(images) <= IMAGES else self._bundle(images)

    def _bundle(self, images: Sequence[Image]) -> tuple[Image, ...]:
        """Return images with the same axes as one, that vanishes if any of their shifts has to.

        Every map of a chain adds an image of its own bias to those of all maps before it, so that without this a chain
        of n maps takes n² steps. A bundle can cancel only as a whole, which loses symmetries and never invents one.
        """
        bundles: dict[frozenset[int], list[Image]] = {}
        for image in images:
            bundles.setdefault(image.varies, []).append(image)
        return tuple(
            Image(self.key(), varies, distinct(np.concatenate([member.atoms.reshape(-1) for member in members])))
            for varies, members in bundles.items()
        )

    def multiply(self, left: Type, right: Type, varies: tuple[set[int], set[int]]) -> Type:
        """Return an entrywise product; `varies` are the axes along which each of the two has more than one entry."""
        if left.zero or right.zero:
            return Type(zero=True)
        self.split_by(left.factors, varies[1], batch=False)
        self.split_by(right.factors, varies[0], batch=False)
        for type_, other in ((left, varies[1]), (right, varies[0])):
            gated = [f.atoms for f in type_.factors if f.touches(other)]
            self.gates += [(self.origin, atoms) for atoms in gated]
        return Type(
            cancel([*left.factors, *right.factors]),
            (),
            self.imaged(left, varies[1]) + self.imaged(right, varies[0]),
        )

    def contract(
        self,
        left: Type,
        right: Type,
        *,
        summed: set[int],
        batch: set[int],
        own_dims: set[int],
        other: set[int],
        sizes: Mapping[int, int],
    ) -> Type:
        """Return Σ over `summed` of left · right, in a common numbering of axes.

        `batch` axes belong to both and stay, `mine` and `other` to one of them. For every group of fields that touch a
        summed axis the charges add up to something that does not depend on it.
        """
        if left.zero or right.zero:
            return Type(zero=True)
        self.split_by(left.factors, batch, batch=True)
        self.split_by(right.factors, batch, batch=True)
        fields = [*left.factors, *right.factors]
        touching = [field for field in fields if field.touches(summed)]
        if own_dims and other:
            # Every entry of one operand meets every entry of the other: scores, as of queries and keys.
            self.passed.setdefault("scores", []).extend(field.atoms for field in touching)
        passing = [field for field in fields if not any(field is t for t in touching)]
        for group in components(cancel(touching)):
            passing += self._contracted(group, summed, batch)
        left, right = _unseen(left, right, summed), _unseen(right, left, summed)
        images = self.imaged(left, batch | other, summed) + self.imaged(right, batch | own_dims, summed)
        strands = self._carry(left, summed, batch | other, sizes) + self._carry(right, summed, batch | own_dims, sizes)
        return Type(cancel(passing), (), images, strands=strands)

    def _carry(self, type_: Type, summed: set[int], along: set[int], lengths: Mapping[int, int]) -> tuple[Strand, ...]:
        """Return strands of a factor of a contraction: the other one is data that may vary along `along`."""
        images = []
        for strand in self.moving(type_).strands:
            dims = sorted((set(strand.data.dims) | along) - summed)
            sizes = [lengths[dim] for dim in dims]
            if strand.field.touches(summed) or strand.field.virtual or prod(sizes) > ENTRIES:
                self._vanish(strand.field.atoms)
            else:
                images.append(Strand(strand.field, Field(tuple(dims), np.arange(prod(sizes)).reshape(sizes))))
        return tuple(images)

    def _contracted(self, group: Sequence[Field], summed: set[int], batch: set[int]) -> list[Field]:
        axes_v, dims, sizes, counts = axes_of(group)
        pairable = len(group) == 2 and abs(group[0].weight) == abs(group[1].weight)
        if pairable:
            a, b = sorted(group, key=lambda field: -len(field.dims) - len(field.virtual))
            pairable = all(has_axis(a, axis) for axis in b.virtual) and set(a.dims) & summed == set(b.dims) & summed
            pairable = pairable and prod(sizes) * prod(counts) <= LARGEST
        if pairable:
            # One matrix acts along the summed axes of both, whatever the place along their other axes.
            self.split_by([a], set(a.dims) - summed, batch=True)
            self.split_by([b], set(b.dims) - summed, batch=True)
            left_atoms, right_atoms = (spread(field, dims, sizes, axes_v) for field in (a, b))
            self.partition.pair(left_atoms, right_atoms, dual=a.weight == b.weight)
        elif len(group) == 1:
            return self.uniform(group, sorted(summed))
        else:
            for field in group:
                self.partition.shatter(field.atoms)
        return self._remainder(group, summed)


def fraction(number: int | float) -> Fraction:
    """Return a fraction that is the number to 1e-11, which is rounding in the identities of laws.

    The result is zero if there is no such fraction.

    Positions that are divided by √d move against embeddings, so that fractions with small denominators do not do.
    Denominators stay below 2²⁰: equations are written in whole numbers of 64 bits.
    """
    if not isfinite(number):
        return Fraction(0)
    nearest = Fraction(number).limit_denominator(1 << 20)
    return nearest if abs(float(nearest) - number) <= 1e-11 * abs(number) else Fraction(0)


def scaled(engine: Engine, type_: Type, number: Number) -> Type:
    """Return a type after a product with a number."""
    if number == 1:
        return type_
    if isinstance(number, complex):
        if number.imag:
            return Type(type_.factors, (), engine.imaged(type_, ()), type_.zero, strands=type_.strands)
        number = number.real
    weight = fraction(number)
    if weight:
        return Type(
            type_.factors,
            tuple(shift.times(weight) for shift in type_.shifts),
            tuple(replace(image, weight=image.weight * weight) for image in type_.images),
            type_.zero,
            strands=type_.strands,
        )
    return Type(type_.factors, (), engine.imaged(type_, ()), type_.zero, strands=type_.strands)


def renumbered(type_: Type, indices: dict[int, int], count: int) -> Type:
    """Return a type with its axes renamed."""
    if all(old == new for old, new in indices.items()):
        return type_
    return Renumber(tuple(indices.get(dim) for dim in range(count))).type(type_)


def _unseen(type_: Type, partner: Type, summed: set[int]) -> Type:
    """Return a type without the shifts that a partner which sums to zero along a summed axis does not see."""
    along = partner.centred & summed
    if not along or not type_.shifts:
        return type_
    return replace(type_, shifts=tuple(shift for shift in type_.shifts if shift.occupied & along))
