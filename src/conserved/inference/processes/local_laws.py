"""Laws of a program with collectives that one process can test by itself.

A law between a replicated parameter and parameters in pieces is an identity of sums over all processes: a gain against
the columns of readers that are spread over a group. Tested by one process, right gradients seem wrong and wrong ones
right. Without a layout, values say which parameters are in pieces; where they do not, what one process can test are
laws among maps whose space neither enters nor leaves a function that exchanges tensors: heads and hidden units that it
holds alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from conserved.inference.derivation import Derivation
from conserved.inference.processes.gathered_rows import runs_over
from conserved.inference.processes.shared_values import Holding, holdings
from conserved.inference.typing import Typing
from conserved.laws import Dropped, LawSet
from conserved.layout import named_parameters_of
from conserved.symmetry import Symmetry

SPREAD = "it is an identity of sums over several processes, and which parameters are in pieces is not known"
"""Why a law is not tested by one process."""

_LAYOUT_ATTRIBUTES = ("tensor_model_parallel", "partition_dim")
"""Attributes by which a stack tells which parameters are in pieces, if some parameter has them."""


def laws_of_one_process(laws: LawSet, model: nn.Module) -> tuple[LawSet, dict[str, Holding]]:
    """Return the laws that processes can test, alone or together, if nothing on parameters says which are in pieces.

    Which parameters are replicated is then decided by their values. A law of a space that is exchanged, as the residual
    stream, is one of sums over processes if some leg is replicated. A law of a space that is not, as heads and hidden
    units, is one of this process if all legs are its own.

    Args:
        laws: the laws of the model.
        model: the model.

    Returns:
        All laws of a program that exchanges no tensors, or whose parameters tell their layout. Otherwise those that can
        be tested; the others are in `dropped`. By name, how parameters are held, where values were asked.
    """
    derivation = laws.derivation
    if not isinstance(derivation, Derivation) or not derivation.typing.program.communicates:
        return laws, {}
    named = named_parameters_of(model)
    marked = any(hasattr(p, name) for p in named.values() for name in _LAYOUT_ATTRIBUTES)
    if marked or all(hasattr(p, "full_tensor") for p in named.values()):
        return laws, {}
    arrays = [item.reshape(-1) for several in derivation.typing.assumed.values() for item in several]
    exchanged = np.unique(np.abs(np.concatenate(arrays))) if arrays else np.zeros(0, dtype=np.int64)
    holdings_by_name = holdings(model) or {}
    typing = derivation.typing
    exchanged_laws = {
        law.name for law in laws if holdings_by_name and any(runs_over(leg, typing, exchanged) for leg in law.legs)
    }
    for item in laws:
        for leg in item.legs:
            # A vector along an exchanged space has no axis that could be cut.
            if (
                item.name in exchanged_laws
                and len(leg.view.shape) == 1
                and holdings_by_name.get(leg.view.parameter) == "constant"
            ):
                holdings_by_name[leg.view.parameter] = "replica"
    local = {
        law.name
        for law in laws
        if (
            _can_be_summed(law, holdings_by_name, law.name in exchanged_laws)
            if holdings_by_name
            else _is_local(law, typing, exchanged)
        )
    }
    spread = sorted(law.name for law in laws if law.name not in local)
    few = replace(
        laws,
        symmetries=tuple(law for law in laws if law.name in local),
        dropped=(*laws.dropped, *(Dropped(name, SPREAD) for name in spread)),
    )
    return few, holdings_by_name


def _can_be_summed(symmetry: Symmetry, holdings: Mapping[str, Holding], exchanged: bool) -> bool:
    """Return whether it is known which legs of a law are added up over processes."""
    roles = {holdings.get(leg.view.parameter, "constant") for leg in symmetry.legs}
    # Pieces alone in a space that is exchanged may be cut along it, as the classes of a head are.
    return "constant" not in roles and ("replica" in roles or not exchanged)


def _is_local(symmetry: Symmetry, typing: Typing, exchanged: np.ndarray) -> bool:
    """Return whether a law is among maps of one process: vectors may be replicated, and their gradients sums of all."""
    for leg in symmetry.legs:
        if len(leg.view.shape) < 2 or len(symmetry.parameters) < 2:
            return False
        if runs_over(leg, typing, exchanged):
            return False
    return True
