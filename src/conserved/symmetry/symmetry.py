r"""A symmetry of a model's parameters, its moment map, and the four things that follow from it.

Let a group act on the rows of several legs (views of parameters) and leave the model's function unchanged. For two
parameter-shaped collections A, B the moment map adds up the legs,

    μ(A, B) = Σ_{+ legs} A_ℓ B_ℓᵀ − Σ_{− legs} (A_ℓ B_ℓᵀ)ᵀ        (or the part of it that the group's generators see).

Everything else is a consequence of bilinearity and of f(g·θ) = f(θ), with θ the parameters, G a gradient of any loss
of f, and U the update of any optimizer, θ' = θ − U:

    law          h(θ) = μ(θ, θ)                            constant in gradient flow
    identity     μ(θ, G) = 0                               exact, at every step, for any loss and data
    drift        h(θ') − h(θ) = −μ(θ,U) − μ(U,θ) + μ(U,U)   exact, for any optimizer
    act          + legs ← g·leg, − legs ← g^{-T}·leg        leaves f unchanged
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from conserved.plain_data import real, record_of, size, text
from conserved.symmetry.evaluation import Evaluation, evaluator
from conserved.symmetry.formulas import formula
from conserved.symmetry.kind import Degree, Kind
from conserved.symmetry.kinds import KINDS
from conserved.symmetry.pairs import Direction, LawPairs, Pair, Point, Tensors
from conserved.symmetry.view import View


def moment_map(
    kind: Kind, degrees: Sequence[Degree], a: Sequence[Float[Tensor, "..."]], b: Sequence[Float[Tensor, "..."]]
) -> Float[Tensor, "..."]:
    """Return the moment map μ(A, B) of legs that are given as matrices.

    Args:
        kind: the group.
        degrees: the degree of every leg.
        a: for every leg an (…, n, m) matrix of parameters; leading axes are batched over.
        b: for every leg a matrix of a gradient or an update, of the same shape.

    Returns:
        μ(A, B), in the shape the kind gives it, after the leading axes.
    """
    batch = torch.broadcast_shapes(*(matrix.shape[:-2] for matrix in (*a, *b)))
    legs = [[matrix.expand(*batch, *matrix.shape[-2:]) for matrix in side] for side in (a, b)]
    plan = evaluator().of_matrices(kind, degrees, [matrix.shape for matrix in legs[0]])
    theta, gradients = (dict(zip(plan.needs, side, strict=True)) for side in legs)
    values = torch.stack(plan.evaluate((Point(theta), Direction(gradients)), [(0, 1)]).values())
    return values.reshape(batch + values.shape[1:])


@dataclass(frozen=True, slots=True)
class Leg:
    """A view and how it moves: degree +1 by g, −1 by g^{-T}, other degrees by that power of a scale."""

    view: View
    degree: Degree = 1
    logarithmic: bool = False
    """Whether the degree times the logarithm of the scale is added, as to the argument of an exponential."""

    def turned(self) -> Leg:
        """Return the leg that moves the other way."""
        return replace(self, degree=-self.degree)

    def acted(self, kind: Kind, element: Tensor, matrix: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Apply a group element to the matrix that the leg reads, and return the result."""
        if not self.logarithmic:
            return kind.act(element, matrix, self.degree)
        shift = self.degree * element.log()
        return matrix + (shift[:, None] if shift.ndim else shift)

    def polarised(self) -> tuple[Leg, ...]:
        """Return legs that are multiplied only and have the same moment map together.

        A shift reads 1 where a scale reads its leg. With c the 1 of a point and the 0 of a direction,
        c_A ⟨1, B⟩ + c_B ⟨A, 1⟩ = ½ ⟨A + c_A, B + c_B⟩ − ½ ⟨A − c_A, B − c_B⟩.
        """
        if not self.logarithmic:
            return (self,)
        halves = ((1.0, self.degree / 2), (-1.0, -self.degree / 2))
        return tuple(Leg(replace(self.view, offset=offset), degree) for offset, degree in halves)

    def __str__(self) -> str:
        sign = "+" if self.degree > 0 else "−"
        name = f"exp({self.view})" if self.logarithmic else f"{self.view}"
        return f"{name} ({sign})" if abs(self.degree) == 1 else f"{name} ({sign}{abs(self.degree):g})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Symmetry:
    """A group acting on legs. `block` is the module it lives in, `family` the sort of law, `part` which one (a head).

    `epsilon` is 0 for an exact symmetry. Otherwise the symmetry holds up to a normalisation's ε: instead of zero the
    identity is Σ_t ε/(s_t + ε) ⟨y_t, ∂L/∂y_t⟩ over all that is normalised, with s_t its mean square, y_t the output.
    """

    block: str
    family: str
    part: str = ""
    kind: Kind
    legs: tuple[Leg, ...]
    epsilon: float = 0.0
    source: str = "typed"
    """How the symmetry was obtained: "typed" (by typing the program), "probed" (by moving inputs of a function that
    is not known), "assumed" (it passes through a function whose backward is its author's own)."""

    def __post_init__(self) -> None:
        if not self.legs:
            raise ValueError(f"Expected at least one leg, got none in {self.name}. Pass legs.")
        try:
            self.kind.check(tuple(leg.degree for leg in self.legs), self.n)
            if self.logarithmic and not self.kind.positive:
                raise ValueError(
                    f"Expected a kind with the logarithm of a scale, got {self.kind.title}, which adds none to a "
                    "leg. Use a scaling of rows."
                )
        except ValueError as problem:
            raise ValueError(f"{self.name}: {problem}") from None
        for shared, sizes in (
            ("rows", {leg.view.n for leg in self.legs}),
            ("columns", {leg.view.m for leg in self.legs}),
        ):
            if self.kind.shared == shared and len(sizes) > 1:
                listing = ", ".join(f"{leg.view}: {leg.view.n} × {leg.view.m}" for leg in self.legs)
                raise ValueError(
                    f"Expected legs of a {self.kind.title} to have the same number of {shared}, got {listing} in "
                    f"{self.name}. Check the axes of the views."
                )

    @property
    def name(self) -> str:
        """The name of the symmetry and of its law, unique in a model: block.family[part]."""
        stem = f"{self.block}.{self.family}" if self.block else self.family
        return f"{stem}[{self.part}]" if self.part else stem

    @property
    def n(self) -> int:
        """Rows of the first leg; for most kinds, of every leg."""
        return self.legs[0].view.n

    @property
    def m(self) -> int:
        """Columns of the first leg."""
        return self.legs[0].view.m

    @property
    def exact(self) -> bool:
        """Whether it holds exactly, and not only up to a normalisation's ε."""
        return self.epsilon == 0

    @property
    def numbers(self) -> int:
        """Conserved numbers in the law."""
        return self.kind.numbers(self.n, self.m)

    @property
    def identities(self) -> int:
        """Scalar gradient identities."""
        return self.kind.identities(self.n, self.m)

    @property
    def entries(self) -> int:
        """Entries of all legs together."""
        return sum(leg.view.n * leg.view.m for leg in self.legs)

    @property
    def inert(self) -> bool:
        """Whether the identity says that a gradient is itself zero, with nothing to cancel against."""
        return self.kind.linear and sum(leg.view.n for leg in self.legs) == 1

    @property
    def of_loss(self) -> bool:
        """Whether it leaves the loss as it is and not the outputs: a shift of all logits."""
        return self.family == "class_shift"

    @property
    def logarithmic(self) -> bool:
        """Whether some leg is shifted by the logarithm of the scale that multiplies others."""
        return any(leg.logarithmic for leg in self.legs)

    @cached_property
    def polarised(self) -> Symmetry:
        """The same moment map by legs that are multiplied only, which is how it is evaluated."""
        if not self.logarithmic:
            return self
        return replace(self, legs=tuple(part for leg in self.legs for part in leg.polarised()))

    @property
    def degrees(self) -> tuple[Degree, ...]:
        """The degree of every leg, in order."""
        return tuple(leg.degree for leg in self.legs)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters it moves, each once, in leg order."""
        return tuple(dict.fromkeys(leg.view.parameter for leg in self.legs))

    def matrices(self, theta: Tensors, dtype: torch.dtype | None = None) -> list[Shaped[Tensor, "_ _"]]:
        """Return every leg of parameters as an n × m matrix, all in one precision.

        Args:
            theta: the parameters by name.
            dtype: the precision; by default the common one of the legs, at least float32.

        Returns:
            One matrix per leg, in order.

        Raises:
            KeyError: a parameter is missing.
        """
        self._refuse_less_than_needed(theta)
        views = [leg.view.of_point(theta[leg.view.parameter]) for leg in self.legs]
        precision = dtype or reduce(torch.promote_types, (matrix.dtype for matrix in views), torch.float32)
        return [matrix.to(precision) for matrix in views]

    def _refuse_less_than_needed(self, tensors: Tensors) -> None:
        missing = [name for name in self.parameters if name not in tensors]
        if missing:
            raise KeyError(
                f"Expected the tensors of {self.name}, got {len(tensors)} without {missing[0]}. Pass the model's "
                "named parameters."
            )

    @cached_property
    def plan(self) -> Evaluation:
        """The plan that evaluates this symmetry alone, with PyTorch operations instead of kernels."""
        return evaluator().of([self], kernels=False)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the fields, not the plan."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def moment_map(
        self,
        a: Tensors | Point | Direction,
        b: Tensors | Point | Direction,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the moment map μ(A, B).

        Args:
            a: tensors of A by parameter name: parameters, or a `Direction`.
            b: tensors of B by parameter name: a gradient or an update, unless it is A itself or a `Point`.
            dtype: the precision; by default the common one of the legs, at least float32.

        Returns:
            μ(A, B), in the shape the kind gives it.
        """
        first = a if isinstance(a, Point | Direction) else Point(a)
        second = b if isinstance(b, Point | Direction) else first if b is a else Direction(b)
        same = type(first) is type(second) and first.tensors is second.tensors
        return self._moments((first,) if same else (first, second), [(0, 0 if same else 1)], dtype)[0]

    def _moments(
        self, sources: Sequence[Point | Direction], pairs: Sequence[Pair], dtype: torch.dtype | None
    ) -> list[Tensor]:
        """Return μ for pairs of sources."""
        for source in sources:
            self._refuse_less_than_needed(source.tensors)
        moments = self.plan.evaluate(sources, pairs, dtype=dtype)
        return [moments.values(pair)[0] for pair in range(len(pairs))]

    def law(self, theta: Tensors, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return h(θ) = μ(θ, θ), the conserved quantity of gradient flow.

        Args:
            theta: the parameters by name.
            dtype: the precision; by default the common one of the legs, at least float32.

        Returns:
            The conserved numbers in the shape of the kind: for example a symmetric n × n matrix for the general linear
            group, one number per row for scalings.
        """
        return self._moments([Point(theta)], LawPairs([(0, 0)]), dtype)[0]

    def identity(self, theta: Tensors, gradient: Tensors, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return μ(θ, G): zero, up to rounding, for the gradient of any loss of the model.

        Args:
            theta: the parameters by name.
            gradient: their gradients by name.
            dtype: the precision; by default the common one of the legs, at least float32.

        Returns:
            The left-hand side of the identity.
        """
        return self._moments((Point(theta), Direction(gradient)), [(0, 1)], dtype)[0]

    def drift(self, theta: Tensors, update: Tensors, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return h(θ − U) − h(θ), exactly, from the update alone.

        Args:
            theta: the parameters before the step, by name.
            update: the step U by name: the parameters before it minus the parameters after it.
            dtype: the precision; by default the common one of the legs, at least float32.

        Returns:
            The change of the law.
        """
        pairs = LawPairs([(0, 1), (1, 0), (1, 1)])
        first, mirror, second = self._moments((Point(theta), Direction(update)), pairs, dtype)
        return second - first - mirror

    def act(self, theta: Tensors, g: Tensor) -> dict[str, Tensor]:
        """Move parameters along the symmetry; the model's function stays the same.

        Args:
            theta: the parameters by name.
            g: a group element, as `element` makes it.

        Returns:
            All parameters by name; those that no leg names are passed on as they are.
        """
        moved = dict(theta)
        for leg in self.legs:
            tensor = moved[leg.view.parameter]
            matrix = leg.view.of_point(tensor)
            precision = torch.promote_types(matrix.dtype, torch.float32)
            element = g.to(matrix.device, torch.promote_types(precision, g.dtype) if g.is_complex() else precision)
            new = leg.acted(self.kind, element, matrix.to(precision))
            moved[leg.view.parameter] = leg.view.written(tensor, new.to(matrix.dtype))
        return moved

    def element(self, *, spread: float = 0.3, generator: torch.Generator | None = None) -> Tensor:
        """Return a random group element near the identity.

        Args:
            spread: about how far it is from the identity.
            generator: where random numbers come from; torch's own if None.

        Returns:
            The element in float64, for `act`.
        """
        return self.kind.element(self.n, self.m, spread=spread, generator=generator)

    @property
    def formula(self) -> str:
        """The law as a formula in plain text."""
        return formula(self.kind, ((leg.view, leg.degree, leg.logarithmic) for leg in self.legs), latex=False)

    @property
    def latex(self) -> str:
        """The law as LaTeX."""
        return formula(self.kind, ((leg.view, leg.degree, leg.logarithmic) for leg in self.legs), latex=True)

    def __repr__(self) -> str:
        legs = ", ".join(map(str, self.legs))
        nearly = "" if self.exact else f", up to ε = {self.epsilon:g}"
        return f"<{self.name}: {self.kind.group(self.n, self.m)} on {legs}; {self.numbers} conserved{nearly}>"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            **record_of(self, "block family part epsilon source"),
            "kind": self.kind.code,
            "legs": [
                record_of(leg.view, "parameter shape grid axes pick rows offset")
                | {"degree": leg.degree}
                | ({"logarithmic": True} if leg.logarithmic else {})
                for leg in self.legs
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Symmetry:
        """Read a symmetry from the plain data that `record` returned.

        Args:
            data: a symmetry as plain data.

        Returns:
            The symmetry.

        Raises:
            ValueError: the kind is unknown or a number is out of its range.
            TypeError: a field is of another type.
            KeyError: a field is missing.
        """
        code = text(data["kind"])
        if code not in KINDS:
            raise ValueError(f"Expected a kind among {', '.join(KINDS)}, got {code!r}. Correct the code.")
        epsilon = real(data["epsilon"])
        if epsilon < 0:
            raise ValueError(f"Expected ε of at least 0, got {epsilon}. Pass 0 for an exact law.")
        return Symmetry(
            block=text(data["block"]),
            family=text(data["family"]),
            part=text(data["part"]),
            kind=KINDS[code],
            epsilon=epsilon,
            source=text(data.get("source", "typed")),
            legs=tuple(_leg(leg) for leg in data["legs"]),
        )


def _leg(data: Mapping[str, Any]) -> Leg:
    """Return one leg of `Symmetry.record`."""
    degree = real(data["degree"])
    return Leg(
        View(
            parameter=text(data["parameter"]),
            shape=_sizes(data["shape"]),
            grid=_sizes(data["grid"]),
            axes=_sizes(data["axes"]),
            pick=tuple(None if p is None else _range(p) if isinstance(p, list) else size(p) for p in data["pick"]),
            rows=None if data["rows"] is None else _sizes(data["rows"]),
            offset=real(data["offset"]),
        ),
        int(degree) if degree.is_integer() else degree,
        logarithmic=data.get("logarithmic") is True,
    )


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(size, values))


def _range(values: list[Any]) -> tuple[int, int]:
    start, stop = map(size, values)
    return start, stop
