"""The coverage of an audit: parameters and modules that tested identities span, and those that none does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from conserved.auditing.sensitivity import STATED, Sensitivity
from conserved.inference.derivation import Derivation
from conserved.laws import LawSet
from conserved.laws.coverage import constrained_directions, seen_entries
from conserved.plain_data import record_of
from conserved.symmetry import Symmetry, View

_SHOWN = 6
"""Names that a text lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCoverage:
    """Shares of a model that tested identities constrain, and what they leave out.

    `parameters` is the share of trained entries that are tested: an identity of several legs holds the gradient of each
    against those of the others, and counts for a leg if an error of 10 % of it would have been seen. An identity of one
    leg (a sum over classes, a router's rows) holds for any gradient that sums to zero. It constrains `identities` of
    the leg's directions and counts as that share of its entries: over 32,000 classes as 1/32,000. `directions` is the
    share of the gradients' directions that all tested identities see: a wrong factor of a tensor lies in all of them,
    an error of a single entry in few. `touched` is the share of entries that take part in any tested identity, which is
    what coverage usually means and says least. `modules` is the share of the modules in which something
    that depends on trained parameters was computed, and through which the space of a tested identity passes: a function
    in the middle of a module may be wrong although all weights around it are spanned.
    """

    parameters: float
    directions: float
    touched: float
    modules: float
    untested: Mapping[str, float]
    """Trained parameters that are not wholly tested, with the share of their entries that is not."""
    seen: Mapping[str, float]
    """By trained parameter, the share of its gradient's directions that tested identities see."""
    untested_modules: tuple[str, ...]
    counted: int
    """Modules that were counted."""

    @property
    def percent(self) -> str:
        """The share of parameters; everything but nothing less is 100 %."""
        return percent(self.parameters)

    def lines(self) -> list[str]:
        """Return sentences for a summary."""
        spanned = self.counted - len(self.untested_modules)
        text = (
            f"Covers {self.percent} of trained parameters, {percent(self.directions)} of their gradients' directions "
        )
        text += f"and {spanned} of {self.counted} modules."
        result = [text]
        if self.untested:
            listed = [
                name if share == 1 else f"{name} ({percent(share)} of it)" for name, share in self.untested.items()
            ]
            result.append(f"  not tested: {_named(listed)}")
        if self.untested_modules:
            result.append(
                f"  nor passes through {_named([name or 'the model itself' for name in self.untested_modules])}"
            )
        return result

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = record_of(self, "parameters directions touched modules untested seen untested_modules")
        return fields | {"counted_modules": self.counted}

    def __str__(self) -> str:
        return "\n".join(self.lines())


def percent(share: float) -> str:
    """Return a share in words: 100 % and 0 % mean all and nothing."""
    rounded = round(100 * share)
    if rounded == 100 and share < 1:
        return "over 99 %"
    if rounded > 0 or share <= 0:
        return f"{rounded} %"
    return f"{100 * share:.2g} %" if share >= 1e-4 else "under 0.01 %"


def coverage(
    laws: LawSet, tested: Collection[str], trained: Mapping[str, Tensor], seen: Sensitivity | None = None
) -> AuditCoverage:
    """Return what the laws named in `tested` span of some trained parameters, and of the program they were read off."""
    chosen = [symmetry for symmetry in laws if symmetry.name in tested]
    compared = [symmetry for symmetry in chosen if len(symmetry.legs) > 1]
    touched = _free(chosen, trained, None)
    free = _constrained(chosen, _free(compared, trained, seen))
    total = sum(parameter.numel() for parameter in trained.values())
    owners = _owners(laws, trained)
    if isinstance(laws.derivation, Derivation):
        typed = laws.derivation.laws_by_module()
        owners = {module: names | owners.get(module, frozenset()) & _probed(laws) for module, names in typed.items()}
    missed = tuple(sorted(module for module, names in owners.items() if names.isdisjoint(tested)))
    untested = sum(free.values())
    spanned = {name: parameter.numel() - touched[name] for name, parameter in trained.items()}
    constrained = constrained_directions(chosen, spanned)
    return AuditCoverage(
        parameters=1 - untested / total if total else 0.0,
        directions=sum(constrained.values()) / total if total else 0.0,
        touched=1 - sum(touched.values()) / total if total else 0.0,
        modules=1 - len(missed) / len(owners) if owners else 0.0,
        untested={name: count / trained[name].numel() for name, count in free.items() if count},
        seen={name: count / max(1, trained[name].numel()) for name, count in constrained.items()},
        untested_modules=missed,
        counted=len(owners),
    )


def _constrained(chosen: list[Symmetry], free: Mapping[str, int]) -> dict[str, float]:
    """Return entries left untested once identities of one leg count for the directions they constrain."""
    shares: dict[str, float] = defaultdict(float)
    for symmetry in chosen:
        if len(symmetry.legs) == 1:
            view = symmetry.legs[0].view
            # Several identities of one parameter constrain different rows, or the same ones: the larger share counts.
            share = min(1.0, symmetry.identities / prod(view.shape))
            shares[view.parameter] = max(shares[view.parameter], share)
    return {name: count * (1 - shares[name]) if name in shares else float(count) for name, count in free.items()}


def _free(chosen: list[Symmetry], trained: Mapping[str, Tensor], seen: Sensitivity | None) -> dict[str, int]:
    """Return how many entries of each trained parameter no leg sees, or not to the stated size."""
    views: dict[str, set[View]] = defaultdict(set)
    for symmetry in chosen:
        for leg in symmetry.legs:
            size = 0.0 if seen is None else seen.legs.get((symmetry.name, leg.view.parameter), 0.0)
            if leg.view.parameter in trained and size <= STATED:
                views[leg.view.parameter].add(leg.view)
    return {
        name: parameter.numel() - seen_entries(frozenset(views[name]), tuple(parameter.shape))
        for name, parameter in trained.items()
    }


def _owners(laws: LawSet, trained: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return laws without a program: the modules that own trained parameters, and the laws that move these."""
    owners: dict[str, set[str]] = {name.rpartition(".")[0]: set() for name in trained}
    for symmetry in laws:
        for name in symmetry.parameters:
            owners.setdefault(name.rpartition(".")[0], set()).add(symmetry.name)
    return {module: frozenset(names) for module, names in owners.items()}


def _probed(laws: LawSet) -> frozenset[str]:
    """Return laws that the program's types do not know of."""
    return frozenset(symmetry.name for symmetry in laws if symmetry.source == "probed")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
