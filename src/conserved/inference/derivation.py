"""Why a law is one, and why something is none: the operations that a symmetry passes through and those that end one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from conserved.inference.laws_up_to_epsilon import ForgottenScale, ForgottenScales, count_calls
from conserved.inference.program.captured_program import Operation
from conserved.inference.rules import Known, base_name
from conserved.inference.symmetries.assembly import Assembly
from conserved.inference.types.engine import ReadPart
from conserved.inference.types.tensor_type import Type, spread
from conserved.inference.typing import Typing
from conserved.laws import ProgramCheck
from conserved.symmetry import Symmetry
from conserved.verdict import Evidence, Verdict


class Derivation:
    """The typing of a program, to be asked about its laws."""

    def __init__(
        self,
        typing: Typing,
        assembly: Assembly,
        symmetries: Iterable[Symmetry] = (),
        *,
        classes: int | None = None,
    ) -> None:
        self.typing = typing
        self.assembly = assembly
        self.classes = classes
        self._symmetries = tuple(symmetries)
        self.call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        """The arguments the program was followed with, to run it again with moved parameters."""
        self.program_check: ProgramCheck | None = None
        """The test of the laws on the program in float64."""
        self._forgets: ForgottenScales | None = None
        self._modules: dict[str, frozenset[str]] | None = None

    def dropped(self, laws: Iterable[Symmetry]) -> Iterator[tuple[str, str]]:
        """Yield what is not a law: parameters that none moves, then spaces of others, each with the operation that ends
        it.
        """
        moved = {name for symmetry in laws for name in symmetry.parameters}
        program = self.typing.program
        shared = set(program.shared)
        for name, regions in self.typing.engine.regions.items():
            if name in moved:
                continue
            if name in shared:
                yield name, "it shares memory with another parameter, so that steps of one move the other"
                continue
            reason = self._ending(
                name,
                np.unique(
                    np.concatenate(
                        [f.atoms.reshape(-1) for r in regions for f in r.type.factors] or [np.zeros(0, np.int64)]
                    )
                ),
            )
            yield name, reason or "nothing about it is free"
        # The argument of an exponential moves by a shift: that its scales end there is how its law comes about.
        shifted = {leg.view.parameter for symmetry in laws for leg in symmetry.legs if leg.logarithmic}
        yield from self._almost(moved - shared - shifted)

    def _almost(self, moved: set[str]) -> Iterator[tuple[str, str]]:
        """Yield spaces of parameters that keep another law, each with the operation that ended it.

        Layers that are alike are reported once.
        """
        engine, program = self.typing.engine, self.typing.program
        if engine.charges.count > MOST_ATOMS:
            return
        first = np.full(engine.charges.count, -1, dtype=np.int64)
        for number in range(len(engine.endings) - 1, -1, -1):
            if not engine.endings[number].shift:
                first[engine.endings[number].atoms.reshape(-1)] = number
        endings: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for name in engine.regions:
            for region in engine.regions[name] if name in moved else ():
                for index, factor in enumerate(region.type.factors):
                    atoms = np.unique(factor.atoms)
                    if atoms.size < 2 or not self.assembly.charges.still(atoms).all():
                        continue
                    numbers = first[atoms[first[atoms] >= 0]]
                    ending = engine.endings[int(numbers.min())] if numbers.size else None
                    if ending is None or not 0 <= ending.origin < len(program.operations):
                        continue
                    side = "" if region.role != "map" else ", outputs" if index == 0 else ", inputs"
                    reason = self._sentence(program.operations[ending.origin])
                    endings.setdefault((_layers(name) + side, _layers(reason)), set()).add((name + side, reason))
        for (name, reason), alike in endings.items():
            yield next(iter(alike)) if len(alike) == 1 else (f"{name} ({len(alike)} of them)", reason)

    def _sentence(self, operation: Operation) -> str:
        """Return an operation and where it stands."""
        name = base_name(operation.name).removeprefix("aten::").lstrip("_")
        return f"{name} in {operation.module}.{operation.line}" if operation.module else f"{name} in {operation.line}"

    def _ending(self, parameter: str, atoms: np.ndarray) -> str:
        """Return the first operation that fixed some of the charges of a parameter."""
        fixed = atoms[self.assembly.charges.still(atoms)]
        program = self.typing.program
        for ending in self.typing.engine.endings:
            if not ending.shift and np.isin(fixed, ending.atoms).any():
                if ending.origin >= len(program.operations) or ending.origin < 0:
                    return "it makes the output, which a loss may see in any way"
                operation = program.operations[ending.origin]
                used = program.parameters[parameter] in operation.inputs()
                frozen = "" if used else self._frozen(operation)
                return f"{frozen} is frozen ({self._sentence(operation)})" if frozen else self._sentence(operation)
        return ""

    def _frozen(self, operation: Operation) -> str:
        """Return a parameter that is not trained and goes into an operation, perhaps turned around on the way."""
        program = self.typing.program
        names = {value: name for name, value in program.parameters.items()}
        for value in operation.inputs():
            while value not in names:
                maker = program.maker(value)
                if maker is None or len(maker.inputs()) != 1:
                    break
                value = maker.inputs()[0]
            if value in names and program.values[value].parameter is None:
                return names[value]
        return ""

    def laws_by_module(self) -> Mapping[str, frozenset[str]]:
        """Return the laws whose spaces are in each module that computes something depending on parameters.

        A law without a space (a parameter that moves nothing) occurs where its parameters are read.
        """
        if self._modules is None:
            self._modules = self._surviving_parts()
        return self._modules

    def _surviving_parts(self) -> dict[str, frozenset[str]]:
        program, known = self.typing.program, self.typing.known
        owners: tuple[_Owners, _Owners] = (_Owners(), _Owners())
        spaceless: dict[str, list[str]] = {}
        for symmetry in self._symmetries:
            if symmetry.name in self.assembly.parts:
                owners[symmetry.kind.linear].add(symmetry.name, self._atoms(symmetry))
            for name in () if symmetry.name in self.assembly.parts else symmetry.parameters:
                spaceless.setdefault(name, []).append(symmetry.name)
        moving = {value for name, value in program.parameters.items() if program.values[value].parameter is not None}
        result: dict[str, set[str]] = {}
        for number in self.typing.live:
            operation = program.operations[number]
            inputs = operation.inputs()
            if moving.isdisjoint(inputs):
                continue
            moving.update(operation.results)
            laws_here = result.setdefault(operation.module, set())
            for value in (*inputs, *operation.results):
                for type_ in self._types(known.get(value)):
                    laws_here.update(*(owners[False].of(factor.atoms) for factor in type_.factors))
                    laws_here.update(*(owners[True].of(shift.atoms) for shift in type_.shifts))
                    laws_here.update(*(owners[True].of(image.atoms) for image in type_.images))
                laws_here.update(spaceless.get(program.values[value].parameter or "", ()))
        return {module: frozenset(names) for module, names in result.items()}

    def _types(self, known: Known | None) -> list[Type]:
        """Return the type of a value; of a part of a parameter, those of the regions it overlaps."""
        if not isinstance(known, ReadPart):
            return [] if known is None else [known]
        return [
            region.type
            for region in self.typing.engine.regions.get(known.name, [])
            if all(
                np.isin(coordinate.atoms, atoms_of_set).any()
                for coordinate, atoms_of_set in zip(known.coordinates, region.sets, strict=True)
            )
        ]

    def forgettings(self, symmetry: Symmetry) -> tuple[ForgottenScale, ...]:
        """Return the normalisations that make a law one up to ε, with its charges there.

        Raises ValueError if they are not known.
        """
        if self._forgets is None:
            self._forgets = ForgottenScales(self.typing, self.assembly.parts, self.assembly.charges)
        return self._forgets.of(symmetry)

    def normalisations(self) -> Mapping[tuple[str, bool], int]:
        """Return how many normalisations run in each module, those that are one operation apart from those written
        out.
        """
        return count_calls(self.typing)

    def explain(self, symmetry: Symmetry) -> str:
        """Return the operations that a symmetry's space passes through, in order."""
        lines = [f"{symmetry.name}: {symmetry.kind.group(symmetry.n, symmetry.m)}"]
        lines += [f"  {'+' if leg.degree > 0 else '−'} {leg.view}" for leg in symmetry.legs]
        atoms = self._atoms(symmetry)
        program = self.typing.program
        for number in self.typing.live:
            operation = program.operations[number]
            inputs = [v for v in operation.inputs() if self._carries(v, atoms)]
            results = [v for v in operation.results if self._carries(v, atoms)]
            named = [n for v in operation.inputs() if (n := program.values[v].parameter) in symmetry.parameters]
            if not inputs and not results and not named:
                continue
            name = base_name(operation.name).removeprefix("aten::").lstrip("_")
            event = "ends" if inputs and not results else "begins" if results and not inputs else "passes"
            if named and not inputs and not results:
                continue
            lines.append(f"  {event:6s} {name} in {operation.module or 'the program'}, {operation.line}")
        return "\n".join(_fold(lines))

    def verdict(self, symmetry: Symmetry) -> Verdict:
        """Return how well a law is known: VERIFIED if its identity held on the program in float64.

        Typing rules are not a proof: nothing checks them but tests of the operators. PROVED is what certificates say.
        """
        if symmetry.source == "assumed":
            if decisions := self.typing.program.decisions:
                return _open(f"It is assumed: it holds on the way the program took, which may depend on {decisions}.")
            return _open(
                "It is assumed: it passes through an autograd function or a hook whose backward is its author's own, "
                "or a size that it depends on is decided by values."
            )
        check = self.program_check
        residual = None if check is None else check.residuals.get(symmetry.name)
        if check is None or residual is None:
            reason = "not checked on the program in float64" if check is None or check.points else str(check)
            return _open(f"Read off the program, and {reason}.")
        scope = "" if symmetry.exact else f"with ε of {symmetry.epsilon:g} taken for zero"
        evidence = Evidence(
            what="largest residual of its identity over random parameters and inputs in float64",
            value=residual,
            limit=check.limit,
            samples=check.points,
        )
        how = "Read off the program" if symmetry.source == "typed" else "Found by moving parameters"
        return Verdict(status=Verdict.VERIFIED, message=f"{how}, and {check}.", evidence=(evidence,), scope=scope)

    def moved_values(self, symmetry: Symmetry) -> set[int]:
        """Return the values of the program that are scaled when the parameters of a law move."""
        rows = self.assembly.charges.expand
        # The free numbers of the law are those that its own entries depend on; one drawn direction stands for all.
        columns = np.unique(rows[self._atoms(symmetry)].indices)
        direction = np.zeros(rows.shape[1])
        direction[columns] = np.random.default_rng(0).random(columns.size) + 1
        charges = rows @ direction
        result = set()
        for value, known in self.typing.known.items():
            for type_ in self._types(known):
                shape = self.typing.program.values[value].shape
                dims = range(len(shape))
                total = sum(float(factor.weight) * charges[spread(factor, dims, shape)] for factor in type_.factors)
                if np.abs(total).max(initial=0.0) > 1e-9:
                    result.add(value)
        return result

    def _atoms(self, symmetry: Symmetry) -> np.ndarray:
        """Return the atoms that a symmetry moves by."""
        atoms = [np.zeros(0, dtype=np.int64)]
        for part in self.assembly.parts.get(symmetry.name, []):
            type_ = part.region.type
            if part.shift and not symmetry.kind.linear:
                # Shifts have numbers of their own: such a law is followed by its scales.
                continue
            if symmetry.kind.linear:
                atoms.append(type_.shifts[part.factor].atoms.reshape(-1)[part.indices.reshape(-1)])
            elif part.factor < 0:
                atoms += [factor.atoms.reshape(-1) for factor in type_.factors]
            else:
                atoms.append(type_.factors[part.factor].atoms.reshape(-1)[part.indices.reshape(-1)])
        return np.unique(np.concatenate(atoms))

    def _carries(self, value: int, atoms: np.ndarray) -> bool:
        known = self.typing.known.get(value)
        return isinstance(known, Type) and any(
            np.isin(field.atoms, atoms).any() for field in (*known.factors, *known.shifts)
        )


MOST_ATOMS = 3_000_000
"""For models with more unknown charges than this, only parameters without a law are listed."""


def _layers(text: str) -> str:
    """Return a name with the numbers of layers left open."""
    return re.sub(r"(?<=\.)\d+(?=[.\s]|$)", "*", text)


def _open(message: str) -> Verdict:
    return Verdict(status=Verdict.INCONCLUSIVE, message=message)


class _Owners:
    """Which laws move an atom."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._pairs: list[np.ndarray] = []
        self._table: np.ndarray | None = None

    def add(self, name: str, atoms: np.ndarray) -> None:
        """Add a law and its atoms."""
        self._pairs.append(np.stack([atoms, np.full(atoms.shape, len(self._names), dtype=np.int64)], 1))
        self._names.append(name)

    def of(self, atoms: np.ndarray) -> set[str]:
        """Return the laws that move some of these atoms."""
        if not self._pairs:
            return set()
        if self._table is None:
            table = np.concatenate(self._pairs)
            self._table = table[np.argsort(table[:, 0], kind="stable")]
        wanted = np.unique(atoms)
        table = self._table
        low = np.searchsorted(table[:, 0], wanted[wanted > 0], "left")
        high = np.searchsorted(table[:, 0], wanted[wanted > 0], "right")
        laws = {int(law) for a, b in zip(low[high > low], high[high > low], strict=True) for law in table[a:b, 1]}
        return {self._names[law] for law in laws}


def _fold(lines: list[str]) -> list[str]:
    """Return lines with runs of the same step written once."""
    result: list[str] = []
    for line in lines:
        if not result or result[-1] != line:
            result.append(line)
    return result
