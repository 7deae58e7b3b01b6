"""Look-up tables whose gradient is not that of the loss: padding, renormalised rows, gradients scaled by frequency.

An embedding's `padding_idx` row takes part in the forward pass and gets no gradient from it. A law that scales the
table is then one only while that row is zero, and a law that adds up the rows of a table is none. `max_norm` writes to
rows as they are looked up, `scale_grad_by_freq` divides gradients by the count of a row; both break every law.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from conserved.symmetry import Leg, Symmetry, whole

Loses = Callable[[Symmetry, Leg], str]
"""Why a symmetry with a leg on a table is not a law; empty if it is one."""


def tables(model: nn.Module) -> dict[str, Loses]:
    """Return by the name of a parameter that is looked up in such a way: which laws that takes away."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result: dict[str, Loses] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in names:
            name = names[id(module.weight)]
            if module.max_norm is not None:
                result[name] = _always(f"{name} is renormalised when it is looked up (max_norm)")
            elif module.scale_grad_by_freq:
                result[name] = _always(f"the gradient of {name} is scaled by how often a row occurs")
            elif module.padding_idx is not None:
                result.setdefault(name, _padded(name, module.weight, module.padding_idx))
    return result


def lost(symmetry: Symmetry, losses: dict[str, Loses]) -> str:
    """Return why a symmetry is not a law of a model with these tables; empty if it is one."""
    reasons = (losses[leg.view.parameter](symmetry, leg) for leg in symmetry.legs if leg.view.parameter in losses)
    return next(filter(None, reasons), "")


def _always(reason: str) -> Loses:
    return lambda symmetry, leg: reason


def _padded(name: str, weight: Tensor, row: int) -> Loses:
    def loses(symmetry: Symmetry, leg: Leg) -> str:
        view = leg.view
        plain = view.grid == view.shape and view.rows is None
        start, stop = chosen if isinstance(chosen := view.pick[0], tuple) else (0, len(weight))
        if plain and not isinstance(chosen, int) and (not start <= row < stop or stop - start == 1):
            # The row is not part of it, or is all of it: that a row without gradient stays is a law.
            return ""
        if symmetry.kind.linear:
            # Along the other axis each row has a law of its own.
            by_row = plain and 0 not in view.axes
            return "" if by_row else f"row {row} of {name} is padding (padding_idx) and does not move with the others"
        # Without memory nothing is known of the row; fresh tables have a zero there, which scales to itself.
        if weight.is_meta or not bool(whole(weight.detach())[row].any()):
            return ""
        return f"row {row} of {name} is padding (padding_idx), gets no gradient where it is looked up, and is not zero"

    return loses
