"""All the laws of a model at once: values, identities, drift, the error of equation (10), independence, files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from conserved.laws.baselines import spoil
from conserved.laws.change import Change, Reference
from conserved.laws.coverage import Coverage
from conserved.laws.identities import Balance, balance_of
from conserved.laws.independence import rank_of_gradients
from conserved.laws.law_table import rows, table_lines, totals
from conserved.laws.program_check import ProgramCheck
from conserved.laws.verification import verify
from conserved.moment import Direction, LawPairs, Magnitudes, Plan, Point
from conserved.output import html
from conserved.output.lines import counted, join_lines
from conserved.plain_data import record_of, text
from conserved.symmetry import Symmetry, Tensors
from conserved.verdict import Verdict

FORMAT = "conserved/laws/1"

T = TypeVar("T")


Law = Symmetry
"""A conserved quantity is the moment map of a symmetry at the parameters: one class serves under both names."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A symmetry that the architecture has and this model does not keep, and the reason."""

    name: str
    reason: str


@runtime_checkable
class LawExplanation(Protocol):
    """Protocol of objects that explain why laws hold, such as the derivation of inferred laws."""

    def explain(self, symmetry: Symmetry) -> str:
        """Return why the symmetry holds, in plain text."""
        ...

    def verdict(self, symmetry: Symmetry) -> Verdict:
        """Return the verdict on one law: VERIFIED if its identity held on the program in float64."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class LawSet:
    """The symmetries of a model and, through them, its conservation laws.

    `parameters` are the model's own tensors, so values follow training. Every method that reads them also takes other
    tensors of the same names (a checkpoint, an average); a set loaded from a file has none of its own.
    """

    symmetries: tuple[Symmetry, ...]
    parameters: Tensors = field(default_factory=dict)
    unclaimed: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operations without a typing rule, and how often each occurred; tensors they touch are taken to be fixed."""
    derivation: LawExplanation | None = None
    checked: ProgramCheck | None = None
    """The test of all exact laws on the program in float64; None for laws that were not inferred from a program."""
    plan: Plan = field(init=False)
    """The plan that evaluates the moment maps of all laws together."""
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(symmetry.name for symmetry in self.symmetries)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"Expected unique names of symmetries, got {twice!r} twice. Set `part` of one of them.")
        object.__setattr__(self, "plan", Plan.of(self.symmetries))
        object.__setattr__(self, "names", names)

    @property
    def laws(self) -> tuple[Law, ...]:
        """The symmetries, each with its conserved quantity: `.name`, `.formula`, `.latex`, `.numbers`, `.exact`."""
        return self.symmetries

    @property
    def numbers(self) -> int:
        """Conserved numbers, added up law by law; `independent()` says how many of them are independent."""
        return sum(symmetry.numbers for symmetry in self.symmetries)

    def __len__(self) -> int:
        return len(self.symmetries)

    def __iter__(self) -> Iterator[Symmetry]:
        return iter(self.symmetries)

    def __getitem__(self, name: str) -> Symmetry:
        for symmetry in self.symmetries:
            if symmetry.name == name:
                return symmetry
        raise KeyError(
            f"Expected the name of a law, got {name!r}. The first of {len(self)} is {self.symmetries[0].name!r}."
            if self.symmetries
            else f"Expected the name of a law, got {name!r}. The set is empty."
        )

    def __repr__(self) -> str:
        return (
            f"<LawSet: {counted(len(self), 'law')}, {counted(self.numbers, 'conserved number')}, "
            f"{counted(len(self.unclaimed), 'unclaimed parameter')}>"
        )

    def __str__(self) -> str:
        return self.summary()

    def select(self, keep: Callable[[Symmetry], bool]) -> LawSet:
        """Return the set of the laws for which `keep(symmetry)` is true."""
        return replace(self, symmetries=tuple(filter(keep, self.symmetries)))

    def with_check(self, check: ProgramCheck) -> LawSet:
        """Return the set without the laws that the check left out; each is named in `dropped`, with the reason."""
        symmetries = tuple(symmetry for symmetry in self.symmetries if symmetry.name not in check.left_out)
        words = tuple(Dropped(name, check.words(name)) for name in check.left_out)
        return replace(self, symmetries=symmetries, dropped=(*self.dropped, *words), checked=check)

    def explain(self, name: str) -> str:
        """Return why the law of this name holds: the operations its space passes through, with modules and lines."""
        return self._derived().explain(self[name])

    def verdict(self, name: str) -> Verdict:
        """Return how well the law of this name is known: VERIFIED if its identity held on the program in float64.

        A typed law is never PROVED: see `conserved.certify` for proofs.
        """
        return self._derived().verdict(self[name])

    def _derived(self) -> LawExplanation:
        if self.derivation is None:
            raise ValueError(
                "Expected laws that were inferred from a program, got laws without a derivation. Call "
                "conserved.recognize(model, x)."
            )
        return self.derivation

    @property
    def coverage(self) -> Coverage:
        """The share of trained parameters that some law spans, by number of entries; `.tree` has it by module."""
        return Coverage.of(self.symmetries, self.parameters)

    def values(self, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the conserved quantity h(θ) of every law; gradients are not recorded.

        Args:
            parameters: tensors by name; by default the model's own, as they are now.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By name of the law, a tensor of its conserved numbers.
        """
        theta = self._theta(parameters)
        with torch.no_grad():
            return self._named(self.plan.evaluate([Point(theta)], LawPairs([(0, 0)]), dtype=dtype).values())

    def identities(
        self, gradients: Tensors | None = None, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the left-hand side μ(θ, G) of every gradient identity.

        They are zero up to rounding if the gradients are right.

        Args:
            gradients: tensors by parameter name; by default the `.grad` of the parameters.
            parameters: tensors by name; by default the model's own.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By name of the law, the tensor μ(θ, G).
        """
        theta = self._theta(parameters)
        sources = Point(theta), Direction(self._gradients(theta, gradients))
        with torch.no_grad():
            return self._named(self.plan.evaluate(sources, [(0, 1)], dtype=dtype).values())

    def residuals(
        self, gradients: Tensors | None = None, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None
    ) -> dict[str, float]:
        """Return the relative size of every identity's left-hand side: ‖μ(θ, G)‖ over the size of its terms.

        Args:
            gradients: tensors by parameter name; by default the `.grad` of the parameters.
            parameters: tensors by name; by default the model's own.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By name of the law, a number in [0, 1].
        """
        return self._named(self.balance(gradients, parameters, dtype=dtype).residuals.tolist())

    def balance(
        self, gradients: Tensors | None = None, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None
    ) -> Balance:
        """Return the residual of every identity together with the size it is relative to.

        See `conserved.laws.identities`.

        Args:
            gradients: tensors by parameter name; by default the `.grad` of the parameters.
            parameters: tensors by name; by default the model's own.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            Arrays in the order of the laws, on the host.
        """
        theta = self._theta(parameters)
        needed = {name: theta[name] for name in self.plan.needs}
        resolved = self._gradients(theta, gradients)
        return balance_of(self.plan, needed, resolved, dtype=dtype)

    def drift(
        self, updates: Tensors, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the exact change h(θ − U) − h(θ) of every law in one step.

        Args:
            updates: the step U by parameter name: the parameters before it minus the parameters after it.
            parameters: the parameters θ before the step; by default the model's own, as they are now.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By name of the law, the change of its conserved numbers.

        Raises:
            ValueError: a parameter or its update is missing.
        """
        theta = self._theta(parameters)
        updates = self._directions(updates)
        sources = Point(theta), Direction(updates)
        with torch.no_grad():
            moments = self.plan.evaluate(sources, LawPairs([(0, 1), (1, 0), (1, 1)]), dtype=dtype)
            pairs = zip(*(moments.values(pair) for pair in range(3)), strict=True)
            return self._named([uu - tu - ut for tu, ut, uu in pairs])

    def reference(self, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None) -> Reference:
        """Return the current values of the laws, to pass to `errors` later.

        Args:
            parameters: tensors by name; by default the model's own.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            The value of every law and the size of its terms, copied.
        """
        theta = self._theta(parameters)
        with torch.no_grad():
            scales = self.plan.evaluate([Magnitudes(Point(theta))], LawPairs([(0, 0)]), dtype=dtype).values()
        values = {name: value.clone() for name, value in self.values(theta, dtype=dtype).items()}
        return Reference(values, self._named(scales))

    def errors(
        self,
        reference: Reference,
        parameters: Tensors | None = None,
        *,
        by: Literal["block", "family", "law"] = "block",
        relative_to: Literal["value", "scale"] = "value",
        dtype: torch.dtype | None = None,
    ) -> dict[str, float]:
        """Return Equation (10): the mean over laws of ‖h_i(θ) − h_i(θ_0)‖ / ‖h_i(θ_0)‖, for every block, family or law.

        A law whose reference value is below 1e-6 of the terms it is made of (balanced initialisation, a factor that
        starts at zero against one that does not) is measured against the size of those terms instead. If the terms are
        zero as well, the change itself is reported.

        Args:
            reference: the laws at θ_0, from `reference()`.
            parameters: tensors by name; by default the model's own, as they are now.
            by: whether one number is given for each "block", "family" or "law".
            relative_to: "value" divides by ‖h_i(θ_0)‖, "scale" always by the size of the terms.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By block, family or law, the mean relative change.

        Raises:
            ValueError: `by` or `relative_to` is another word, or the reference was taken of other laws.
        """
        if by not in ("block", "family", "law") or relative_to not in ("value", "scale"):
            raise ValueError(
                f'Expected by="block", "family" or "law" and relative_to="value" or "scale", got {by!r} and '
                f"{relative_to!r}. Pass one of each."
            )
        groups: dict[str, list[Tensor]] = defaultdict(list)
        changes = self.changes(reference, parameters, dtype=dtype)
        for symmetry in self.symmetries:
            key = symmetry.name if by == "law" else getattr(symmetry, by)
            groups[key].append(changes[symmetry.name].relative(to=relative_to))
        return {key: float(torch.cat(parts).mean()) for key, parts in groups.items()}

    def changes(
        self, reference: Reference, parameters: Tensors | None = None, *, dtype: torch.dtype | None = None
    ) -> dict[str, Change]:
        """Return the distance of every law h_i of equation (10) from its reference, without recording gradients.

        Args:
            reference: the laws at θ_0, from `reference()`.
            parameters: tensors by name; by default the model's own, as they are now.
            dtype: the precision to compute in; by default that of the parameters.

        Returns:
            By name of the symmetry, distance and size of each law it adds to equation (10).

        Raises:
            ValueError: the reference was taken of other laws.
        """
        missing = [symmetry.name for symmetry in self.symmetries if symmetry.name not in reference.values]
        if missing:
            raise ValueError(
                f"Expected a reference of these laws, got one without {missing[0]}. Call `laws.reference(…)` again."
            )
        current = self.values(parameters, dtype=dtype)
        norm = partial(torch.linalg.vector_norm, dim=-1)
        result = {}
        for symmetry in self.symmetries:
            units = symmetry.kind.units
            start = units(reference.values[symmetry.name])
            result[symmetry.name] = Change(
                distance=norm(units(current[symmetry.name]) - start),
                size=norm(start),
                terms=norm(units(reference.scales[symmetry.name])),
            )
        return result

    def independent(self, parameters: Tensors | None = None, *, exact: bool = False) -> int:
        """Return the number of functionally independent conserved numbers at θ.

        This is the rank of the gradients of all laws, in float64.

        Args:
            parameters: tensors by name; by default the model's own.
            exact: True leaves out the laws that hold only up to a normalisation's ε.

        Returns:
            The rank.
        """
        chosen = [symmetry for symmetry in self.symmetries if symmetry.exact or not exact]
        return rank_of_gradients(chosen, self._theta(parameters))

    def verify(self, loss_fn: Callable[[], Tensor]) -> Verdict:
        """Run one backward pass in the model's own precision and test every gradient identity against rounding.

        Args:
            loss_fn: computes the loss of the model, without arguments.

        Returns:
            One verdict; `.parts` holds one for every law. Rounding is that of the coarsest precision the pass used.
        """
        return verify(self, self._theta(None), loss_fn)

    def summary(self) -> str:
        """Return a table by block, as text."""
        dropped = [(item.name, item.reason) for item in self.dropped]
        return join_lines(table_lines(self.symmetries, self.unclaimed, dropped, None, 120), 120)

    def _repr_html_(self) -> str:
        """Return the table of `summary`, for notebooks."""
        listed = [
            (r.block, r.family, r.formula, r.group, f"{r.copies:,}", f"{r.numbers:,}") for r in rows(self.symmetries)
        ]
        heads = ("where", "law", "conserved", "group", "×", "numbers")
        parts = [html.paragraph(totals(self.symmetries, None))]
        if listed:
            parts.append(html.table(heads, listed, numbers=(4, 5), wraps=2))
        if self.dropped:
            names = ", ".join(item.name for item in self.dropped[:3]) + (", …" if len(self.dropped) > 3 else "")
            parts.append(html.paragraph(f"Not conserved in this model: {len(self.dropped)} ({names})", quiet=True))
        if self.unclaimed:
            parts.append(
                html.paragraph(f"Nothing is claimed about {counted(len(self.unclaimed), 'parameter')}.", quiet=True)
            )
        return html.panel(*parts)

    def baselines(self) -> LawSet:
        """Return quantities made of the same weights that look like these laws and are not conserved.

        Returns:
            For every law that has one, a form with a sign or a pairing spoiled (the paper's Appendix E.2); its family
            is that of the law with `not_` before it. A law's drift is to be compared with its baseline's.
        """
        return LawSet(symmetries=spoil(self.symmetries), parameters=self.parameters)

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON; parameter values are not part of it."""
        return {"format": FORMAT, **record_of(self, "symmetries unclaimed dropped unknown")}

    @staticmethod
    def from_dict(data: Mapping[str, Any], parameters: Tensors | None = None) -> LawSet:
        """Read a law set from the plain data that `record` returned.

        Args:
            data: a law set as plain data.
            parameters: a model's tensors by name, to attach; without them, methods that read parameters need them
                passed.

        Returns:
            The law set, without a derivation.

        Raises:
            ValueError: the data is of another format or damaged.
        """
        if data.get("format") != FORMAT:
            raise ValueError(
                f"Expected a law set in format {FORMAT!r}, got {data.get('format')!r}. Write it with LawSet.save."
            )
        try:
            return LawSet(
                symmetries=tuple(Symmetry.from_dict(item) for item in data["symmetries"]),
                parameters=parameters or {},
                unclaimed=tuple(text(name) for name in data["unclaimed"]),
                dropped=tuple(Dropped(text(item["name"]), text(item["reason"])) for item in data["dropped"]),
                unknown={text(name): int(count) for name, count in data.get("unknown", {}).items()},
            )
        except KeyError as problem:
            raise ValueError(
                f"Expected a whole law set, got one without {problem}. Write it with LawSet.save."
            ) from problem
        except (TypeError, AttributeError) as problem:
            raise ValueError(
                f"Expected a whole law set, got a damaged one ({problem}). Write it with LawSet.save."
            ) from problem

    def save(self, path: str | Path) -> None:
        """Write the laws (not the weights) as JSON to the file `path`."""
        Path(path).write_text(json.dumps(self.record(), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: str | Path, parameters: Tensors | None = None) -> LawSet:
        """Read a file that `save` wrote.

        Args:
            path: the file.
            parameters: a model's tensors by name, to attach.

        Returns:
            The law set, without a derivation.

        Raises:
            ValueError: the file does not hold a law set; one line that names the file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as problem:
            # Not UTF-8, not JSON, numbers of thousands of digits, or nested deeper than anyone would write.
            raise ValueError(
                f"Expected a JSON file that can be read, got {path}: {problem}. Write it with LawSet.save."
            ) from problem
        if not isinstance(data, dict):
            raise ValueError(f"Expected a law set in {path}, got a {type(data).__name__}. Write it with LawSet.save.")
        try:
            return LawSet.from_dict(data, parameters)
        except ValueError as problem:
            raise ValueError(f"{problem} The file is {path}.") from problem

    def _theta(self, parameters: Tensors | None) -> Tensors:
        theta = self.parameters if parameters is None else parameters
        for name, symmetry in self.plan.needs.items():
            if name not in theta:
                raise ValueError(
                    f"Expected the parameters of {symmetry}, got {len(theta)} tensors without {name}. Pass the "
                    "model's named parameters."
                )
        return theta

    def _gradients(self, theta: Tensors, gradients: Tensors | None) -> Tensors:
        if gradients is not None:
            return self._directions(gradients)
        needed = self.plan.needs
        missing = sorted(name for name in needed if theta[name].grad is None)
        if missing:
            count = f"{len(missing)} of {len(needed)} have none"
            raise ValueError(f"Expected a gradient of {missing[0]}, got none ({count}). Call backward() first.")
        return {name: grad for name in needed if (grad := theta[name].grad) is not None}

    def _directions(self, given: Tensors) -> Tensors:
        """Return gradients or updates for every parameter that is read."""
        missing = [name for name in self.plan.needs if not isinstance(given.get(name), Tensor)]
        if missing:
            raise ValueError(
                f"Expected a tensor for each parameter, got none for {missing[0]}. Pass zeros if it did not move."
            )
        return given

    def _named(self, values: Sequence[T]) -> dict[str, T]:
        return dict(zip(self.names, values, strict=True))
