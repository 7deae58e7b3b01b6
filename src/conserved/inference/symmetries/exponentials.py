"""Laws of a scale against a shift: what exp and log relate.

The exponential turns what is added into what is multiplied: exp(x + δ) = e^δ exp(x), entry by entry, and the logarithm
does the reverse. Each such operation therefore relates charges to shifts by one linear equation for each entry,

    charge of exp(x) = shift of x        shift of log(x) = charge of x

Charges and shifts are otherwise two systems that do not interact. They are still solved apart, with both sides of these
relations set to zero. Here they are solved together as well. A joint solution in which some side is not zero moves
parameters by a scale that a shift undoes. Any other joint solution is one of the two systems' own, so that modulo those
a solution is determined by the sides of the relations alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from conserved.inference.symmetries.unnamed_symmetry import LegPart, UnnamedSymmetry, simple
from conserved.inference.symmetries.views import UnviewableError, rows_view, whole_view
from conserved.inference.types.echelon import Echelon, Equation, simplest
from conserved.inference.types.engine import Ending, Engine, Region
from conserved.inference.types.system import LinearSystem
from conserved.inference.types.tensor_type import Atoms, Field
from conserved.symmetry import Leg, OneScale, Scaling, Translation

MOST_SOLUTIONS = 4096
"""More joint solutions than this are not sorted out, which loses their laws and invents none."""

LOG_SCALE = "log_scale"
"""The family of laws of a scale against a shift."""


@dataclass(frozen=True, slots=True)
class _Motion:
    """A motion of some indices of one field of a region, all with one power."""

    region: int
    field: int
    shift: bool
    power: int | float
    indices: tuple[int, ...]

    @property
    def alike(self) -> tuple[int, int, bool, float]:
        """The key that motions share if they are rows of one law."""
        return self.region, self.field, self.shift, float(self.power)


def separate(engine: Engine) -> None:
    """Set both sides of all relations to zero, so that charges and shifts can be solved apart."""
    for relation in engine.exponentials:
        for terms, shift in (([(Fraction(1), relation.result)], relation.log), (relation.argument, not relation.log)):
            (engine.shifts if shift else engine.charges).add(terms, origin=relation.origin)
            engine.endings += [Ending(atoms, relation.origin, shift) for _, atoms in terms]
    # Reasons name the first operation that ended a law.
    engine.endings.sort(key=lambda ending: ending.origin)


def traded_laws(engine: Engine, regions: Sequence[Region]) -> list[UnnamedSymmetry]:
    """Return symmetries that trade a scale for a shift. Call it before `separate`."""
    if not engine.exponentials or not _some_scale_is_free(engine):
        return []
    joint, first_shift = _joint_system(engine)
    solution = joint.solve()
    motions = _Motions(regions, first_shift)
    sides = [
        _moved(relation.result.reshape(-1), first_shift) if relation.log else relation.result.reshape(-1)
        for relation in engine.exponentials
    ]
    columns: dict[int, Equation] = defaultdict(dict)
    # Each solution is a vector: first the results of all relations, then what it moves.
    row = 0
    for atoms in sides:
        for position, free, value in zip(*solution.exact_entries(atoms), strict=True):
            if not solution.soft[free]:
                columns[free][row + position] = value
        row += atoms.size
    if not columns or len(columns) > MOST_SOLUTIONS:
        return []
    live = set(columns)
    for number, atoms in enumerate(motions.atoms):
        for position, free, value in zip(*solution.exact_entries(atoms), strict=True):
            if not solution.soft[free]:
                columns[free][row + motions.starts[number] + position] = value
    echelon = Echelon()
    # Solutions that move no side are those of one system alone; the others are distinguished by their sides.
    order = sorted(columns, key=lambda free: (free in live, free))
    if len(order) > MOST_SOLUTIONS:
        order = [free for free in order if free in live]
    for free in order:
        echelon.add(columns[free], lambda entries: first if (first := min(entries)) < row else max(entries))
    basis = echelon.basis()
    own = [vector for pivot, vector in basis.items() if pivot >= row]
    traded = [vector for pivot, vector in basis.items() if pivot < row]
    vectors = [
        {entry - row: value for entry, value in _sparser(vector, own, row).items() if entry >= row} for vector in traded
    ]
    return motions.symmetries([vector for vector in vectors if vector])


def _some_scale_is_free(engine: Engine) -> bool:
    """Return whether charges alone would allow some side of a relation that is not zero."""
    charges = engine.charges.solve()
    scales = [atoms for r in engine.exponentials for atoms in ([a for _, a in r.argument] if r.log else [r.result])]
    return not all(charges.still(atoms.reshape(-1)).all() for atoms in scales)


def _joint_system(engine: Engine) -> tuple[LinearSystem, int]:
    """Return charges, shifts and their relations as one system, and the number that comes before the first shift."""
    joint, first_shift = LinearSystem(engine.charges.count), engine.charges.count - 1
    joint.count += engine.shifts.count - 1
    joint.sets.grow(joint.count)
    for system, start in ((engine.charges, 0), (engine.shifts, first_shift)):
        system.sets.grow(system.count)
        root, sign = system.sets.roots()
        atoms = np.arange(root.size)
        for wanted in (1, -1):
            chosen = np.flatnonzero(sign[: root.size] == wanted)
            torn = joint.sets.join(_moved(atoms[chosen], start), _moved(root[chosen], start), wanted)
            joint.sets.join(torn, np.zeros_like(torn), 1)
        joint.batches += [
            replace(batch, atoms=tuple(_moved(array, start) for array in batch.atoms)) for batch in system.batches
        ]
    for relation in engine.exponentials:
        of_argument, of_result = (0, first_shift) if relation.log else (first_shift, 0)
        terms = [(weight, _moved(atoms, of_argument)) for weight, atoms in relation.argument]
        joint.add([*terms, (Fraction(-1), _moved(relation.result, of_result))], origin=relation.origin)
    return joint, first_shift


def _moved(atoms: Atoms, start: int) -> Atoms:
    """Return atoms by their numbers in the joint system; atom 0 stays the one that is always zero."""
    return np.where(atoms > 0, atoms + start, 0)


def _sparser(vector: Equation, own: Sequence[Equation], row: int) -> Equation:
    """Return a solution plus solutions of one system alone, so that it moves fewer parameters."""
    result = dict(vector)
    shorter = True
    while shorter:
        shorter = False
        for other in own:
            for ratio in {simplest(Fraction(result[c]) / other[c]) for c in other if c in result and c >= row}:
                trial = dict(result)
                for entry, value in other.items():
                    total = trial.get(entry, 0) - ratio * value
                    if total:
                        trial[entry] = total
                    else:
                        trial.pop(entry, None)
                if len(trial) < len(result):
                    result, shorter = trial, True
    return result


class _Motions:
    """All indices of parameters that a joint solution may move, in one numbering."""

    def __init__(self, regions: Sequence[Region], first_shift: int) -> None:
        self.regions = regions
        self.fields: list[tuple[int, int, bool, Field]] = [
            (number, index, shift, own_field)
            for number, region in enumerate(regions)
            for shift, fields in ((False, region.type.factors), (True, region.type.shifts))
            for index, own_field in enumerate(fields)
        ]
        self.atoms = [
            _moved(own_field.atoms.reshape(-1), first_shift) if shift else own_field.atoms.reshape(-1)
            for _, _, shift, own_field in self.fields
        ]
        self.starts = np.concatenate([[0], np.cumsum([atoms.size for atoms in self.atoms])]).astype(np.int64).tolist()

    def symmetries(self, vectors: Sequence[Equation]) -> list[UnnamedSymmetry]:
        """Return motions as symmetries: those of single indices of the same fields are rows of one law."""
        alike: dict[tuple[tuple[int, int, bool, float], ...], list[list[_Motion]]] = defaultdict(list)
        for vector in vectors:
            motions = self._motions_of(vector)
            if motions is not None:
                alike[tuple(motion.alike for motion in motions)].append(motions)
        result: list[UnnamedSymmetry] = []
        for members in alike.values():
            members.sort(key=lambda motions: [motion.indices for motion in motions])
            single = all(len(motion.indices) == 1 and motion.field >= 0 for motions in members for motion in motions)
            together = self._symmetry(members) if single and len(members) > 1 else None
            if together is not None:
                result.append(together)
                continue
            for motions in members:
                alone = self._symmetry([motions])
                if alone is not None:
                    result.append(alone)
        return result

    def _motions_of(self, vector: Equation) -> list[_Motion] | None:
        """Return what a motion does to each field; None if a parameter were scaled and shifted at once."""
        numbers = np.searchsorted(self.starts, list(vector), side="right") - 1
        by_field: dict[int, dict[int, Fraction]] = defaultdict(dict)
        for (motion, value), number in zip(vector.items(), numbers.tolist(), strict=True):
            weight = self.fields[number][3].weight
            by_field[number][motion - self.starts[number]] = Fraction(value) * weight
        whole: dict[int, Fraction] = defaultdict(Fraction)
        result = []
        for number, powers in sorted(by_field.items()):
            region, index, shift, own_field = self.fields[number]
            if not shift and len(powers) == own_field.atoms.size and len(set(powers.values())) == 1:
                # A power at all indices scales the region; such scales of one region add up.
                whole[region] += next(iter(powers.values()))
                continue
            for power in sorted(set(powers.values())):
                chosen = tuple(sorted(motion for motion, value in powers.items() if value == power))
                result.append(_Motion(region, index, shift, simple(float(power)), chosen))
        result += [_Motion(region, -1, False, simple(float(power)), ()) for region, power in whole.items() if power]
        scaled = {motion.region for motion in result if not motion.shift}
        if not scaled.isdisjoint(motion.region for motion in result if motion.shift):
            return None
        return sorted(result, key=lambda motion: (motion.shift, self.regions[motion.region].origin, motion.field))

    def _symmetry(self, members: Sequence[Sequence[_Motion]]) -> UnnamedSymmetry | None:
        """Return the symmetry whose row n is the n-th of some motions that are alike."""
        legs, parts = [], []
        shifted = all(motion.shift for motion in members[0])
        several = len(members) > 1
        for column in zip(*members, strict=True):
            motion, region = column[0], self.regions[column[0].region]
            fields = region.type.shifts if motion.shift else region.type.factors
            chosen = np.array([part.indices[0] for part in column] if several else motion.indices, dtype=np.int64)
            try:
                view = whole_view(region) if motion.field < 0 else rows_view(region, fields[motion.field].dims, chosen)
            except UnviewableError:
                return None
            if motion.shift:
                view = replace(view, offset=0.0)
            if shifted and view.m != 1:
                return None
            legs.append(Leg(view, motion.power, logarithmic=motion.shift and not shifted))
            rows = chosen[:, None] if several else chosen[None]
            parts.append(LegPart(region, motion.field, motion.power, rows, shift=motion.shift))
        if shifted:
            # Both sides of a relation, but no scale of a parameter: such numbers are added to several at once.
            return None if several else UnnamedSymmetry(Translation(), tuple(legs), parts).signed()
        return UnnamedSymmetry(Scaling() if several else OneScale(), tuple(legs), parts, family=LOG_SCALE).signed()
