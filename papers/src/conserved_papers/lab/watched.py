"""Quantities measured along a run: laws, baselines and claimed laws of all seeds at once, by the one moment map."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from conserved.inference import recognize
from conserved.laws import Change, LawSet, Reference
from conserved.moment import Direction, LawPairs, Magnitudes
from conserved.symmetry import Leg, Symmetry, Translation, View
from conserved_papers.blocks import MixtureOfExperts
from conserved_papers.lab.data.examples import Examples, LossName
from conserved_papers.lab.recipes import Recipe
from conserved_papers.lab.trajectory import Quantity, Role

Stacked = Mapping[str, Tensor]
"""Parameters by name, with a first axis over seeds."""

_PRECISION = torch.float64
"""Laws are small differences of large sums; they are always computed in this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """Quantities of a model and the role each family plays."""

    laws: LawSet
    roles: Mapping[str, Role]

    def reference(self, theta: Stacked) -> Reference:
        """Return all quantities of every seed now."""

        def of_one(stacked: Stacked) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            result = self.laws.reference(stacked, dtype=_PRECISION)
            return dict(result.values), dict(result.scales)

        values, scales = _over_seeds(of_one, dict(theta))
        return Reference(values, scales)

    def changes(self, reference: Reference, theta: Stacked) -> dict[str, Change]:
        """Return `LawSet.changes` of every seed; each tensor has a first axis over seeds."""

        def of_one(stacked: Stacked, values: Stacked, scales: Stacked) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
            result = self.laws.changes(Reference(values, scales), stacked, dtype=_PRECISION)
            return {name: (change.distance, change.size, change.terms) for name, change in result.items()}

        result = _over_seeds(of_one, dict(theta), dict(reference.values), dict(reference.scales))
        return {name: Change(distance=d, size=s, terms=t) for name, (d, s, t) in result.items()}

    def steepness(self, gradients: Stacked) -> dict[str, Tensor]:
        """Return for every h_i of every quadratic law an upper bound of τ⁻² |h_i(θ − τG) − h_i(θ)|: ½ C_h ‖G‖² of (9).

        A step of gradient descent changes a law by τ² μ(G, G); the sum of absolute values bounds that whatever cancels.
        """
        laws = self.laws.select(lambda s: not s.kind.linear and self.roles[s.family] == "law")
        if not laws.symmetries:
            return {}

        def of_one(grads: Stacked) -> dict[str, Tensor]:
            result = laws.plan.evaluate([Magnitudes(Direction(grads))], LawPairs([(0, 0)]), dtype=_PRECISION)
            return {
                s.name: torch.linalg.vector_norm(s.kind.units(value), dim=-1)
                for s, value in zip(laws, result.values(), strict=True)
            }

        return dict(_over_seeds(of_one, dict(gradients)))


def _over_seeds(of_one: Callable[..., Any], *stacks: dict[str, Tensor]) -> Any:
    """Return a function of one model for all of a stack; of a single one as it is, which is faster."""
    if len(next(iter(stacks[0].values()))) > 1:
        return vmap(of_one)(*stacks)
    result = of_one(*({name: tensor[0] for name, tensor in stack.items()} for stack in stacks))
    return tree_map(lambda tensor: tensor.unsqueeze(0), result)


def watch(model: nn.Module, loss: LossName, inputs: Tensor) -> Watched:
    """Return the exact laws of a model on such inputs, their baselines, and what the paper claims of routers."""
    like = next(model.parameters())
    x = inputs.to(like) if inputs.is_floating_point() else inputs.to(like.device)
    laws = recognize(model, x, loss="cross_entropy" if loss == "cross_entropy" else "any")
    exact = laws.select(lambda symmetry: symmetry.exact)
    false = exact.baselines()
    claimed = tuple(_claimed(model))
    known = {symmetry.name for symmetry in exact}
    extra = [symmetry for symmetry in claimed if symmetry.name not in known]
    roles: dict[str, Role] = dict.fromkeys((s.family for s in exact), "law")
    roles |= dict.fromkeys((s.family for s in false), "impostor")
    roles |= dict.fromkeys((s.family for s in extra), "claim")
    return Watched(laws=LawSet(symmetries=(*exact, *false, *extra)), roles=roles)


def watch_recipe(recipe: Recipe, seed: int, model: nn.Module, examples: Examples) -> Watched:
    """Watch the model that a recipe builds from a seed, on its first two examples."""
    inputs = examples.inputs[:2]
    text = (str(inputs.dtype), tuple(inputs.shape), inputs.double().cpu().numpy().tobytes())
    of = (recipe.architecture, repr(sorted(recipe.sizes.items())), seed, examples.loss, *text)
    if of not in _KEPT:
        if len(_KEPT) == _MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[of] = watch(model, examples.loss, inputs)
    return _KEPT[of]


_KEPT: dict[tuple[object, ...], Watched] = {}
"""Laws of models that are trained again; laws do not depend on the step size."""

_MOST_KEPT = 8


def _claimed(model: nn.Module) -> Iterator[Symmetry]:
    """Return Σ_i W_i of every router, which Theorem 4.7 also claims for a normalised sigmoid, and Σ_j W_ij of Appendix
    E.2.
    """
    for path, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            weight = f"{path}.router.weight" if path else "router.weight"
            shape = tuple(module.router.weight.shape)
            for family, axis in (("shift", 0), ("row_sums", 1)):
                if family == "row_sums" or (module.gate == "sigmoid" and module.active > 1):
                    yield Symmetry(
                        block=f"{path}.router" if path else "router",
                        family=f"claimed_{family}",
                        part="weight",
                        kind=Translation(),
                        legs=(Leg(View.of(weight, shape, axes=axis)),),
                    )


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """Collects what was measured at each recorded step, for every seed, as plain numbers."""

    watched: Watched
    reference: Reference
    at: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    measured: list[Tensor] = field(default_factory=list)
    """Per recorded step a (seeds, laws, 3) table: mean relative error, squared distance, squared terms of each law."""
    steepest: dict[str, Tensor] = field(default_factory=dict)

    def note(self, theta: Stacked, gradients: Stacked, loss: Tensor, step: int, time: float, squares: float) -> None:
        """Measure all seeds at a step, given the gradient that the step will follow."""
        changes = self.watched.changes(self.reference, theta)
        rows = [
            torch.stack((c.relative().mean(-1), c.distance.square().sum(-1), c.terms.square().sum(-1)), -1)
            for c in changes.values()
        ]
        self.measured.append(torch.stack(rows, 1).cpu())
        for name, value in self.watched.steepness(gradients).items():
            known = self.steepest.get(name)
            self.steepest[name] = value if known is None else torch.maximum(known, value)
        self.at.append(step)
        self.time.append(time)
        self.squares.append(squares)
        self.losses.append(loss.double().tolist())

    def quantities(self, theta: Stacked) -> list[tuple[Quantity, ...]]:
        """Return every family, for every seed in the order of the stack."""
        units = {name: change.unit() for name, change in self.watched.changes(self.reference, theta).items()}
        # The mean over h_i of C/‖h_i(θ_0)‖: times Σ τ², equation (9) in units of equation (10).
        grads = {name: (value / units[name]).mean(-1).tolist() for name, value in self.steepest.items()}
        families: dict[str, list[int]] = {}
        for index, symmetry in enumerate(self.watched.laws):
            families.setdefault(symmetry.family, []).append(index)
        result = []
        for seed in range(len(self.losses[0])):
            table = torch.stack([step[seed] for step in self.measured])
            of_seed = {name: each[seed] for name, each in grads.items()}
            result.append(tuple(self._quantity(family, table[:, at], at, of_seed) for family, at in families.items()))
        return result

    def _quantity(self, family: str, table: Tensor, indices: list[int], grads: Mapping[str, float]) -> Quantity:
        symmetries = [self.watched.laws.symmetries[index] for index in indices]
        role = self.watched.roles[family]
        # How many h_i of equation (10) each symmetry holds.
        counts = [len(s.kind.units(self.reference.values[s.name][0])) for s in symmetries]
        weights = torch.tensor(counts, dtype=torch.float64)
        blocks: dict[str, list[int]] = {}
        for inner, symmetry in enumerate(symmetries):
            blocks.setdefault(symmetry.block, []).append(inner)
        errors, distance, terms = table.unbind(-1)

        def averaged(chosen: list[int]) -> tuple[float, ...]:
            share = weights[chosen] / weights[chosen].sum()
            return tuple((errors[:, chosen] @ share).tolist())

        size = terms.sum(-1)
        drift = (distance.sum(-1) / torch.where(size > 0, size, torch.ones_like(size))).sqrt()
        bound = None
        if role == "law":
            each = torch.tensor([grads.get(s.name, 0.0) for s in symmetries], dtype=torch.float64)
            grad = float((each * weights).sum() / weights.sum())
            bound = tuple(grad * squares for squares in self.squares)
        return Quantity(
            family=family,
            role=role,
            formula=symmetries[0].formula,
            laws=sum(counts),
            numbers=sum(symmetry.numbers for symmetry in symmetries),
            linear=symmetries[0].kind.linear,
            errors={block: averaged(chosen) for block, chosen in blocks.items()},
            mean=averaged(list(range(len(indices)))),
            drift=tuple(drift.tolist()),
            bound=bound,
        )
