"""Equal units and rotatable spaces: discrete and orthogonal symmetries, which have no law and no type.

Exchanging hidden units, or rotating a residual stream, is no scaling, so typing does not list it. But the places that
such a move touches are those that a scaling would touch if every function of single entries passed scales on and norms
were not there. So the program is typed once more with those rules relaxed; what is then free are *candidates*: sets of
parameter axes that move together. Which of them are symmetries is decided by moving the model and comparing outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from conserved._torch_compat import tree_leaves
from conserved.inference.types.parameter_types import first_use
from conserved.laws import LawSet
from conserved.symmetry import Kind, Leg, Symmetry, Tensors
from conserved.transform.activations import Call, call_with
from conserved.transform.finding import as_a_function, example_call
from conserved.transform.lawless_kinds import Exchange, Orthogonal, RotationAboutOnes, across_ones
from conserved.transform.moving import ABOUT_GRADIENTS, STORED, act_on, is_plain, write
from conserved.transform.objectives import is_matrix

SAME = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Relative change of the outputs below which a move left them alone; libraries compute norms in single precision."""

SEEN = {torch.float64: 1e-3, torch.float32: 1e-2}
"""The same against the change that one leg makes alone: what outputs hardly see cannot be judged by a small change."""

_NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm")


def _relaxed_rules() -> dict[str, Any]:
    """Return typing rules by which functions of entries pass charges on as ReLU does, and norms as the identity."""
    from conserved.inference.program.captured_program import ValueRef
    from conserved.inference.rules import RULES, Step
    from conserved.inference.rules.products import FIXING, power
    from conserved.inference.rules.step import fix_all, number
    from conserved.inference.rules.sums import add
    from conserved.inference.types.engine import ReadPart
    from conserved.inference.types.reindexing import Renumber
    from conserved.inference.types.tensor_type import FIXED, Field, Type

    def entrywise(s: Step) -> Any:
        shape, out = tuple(s.shape(s.arg(0))), tuple(s.out)
        first = len(out) - len(shape)
        if first < 0 or out[first:] != shape:
            # A loss, or a function that broadcasts its input.
            return fix_all(s)
        scaled = power(s, s.type(s.arg(0)), Fraction(1))
        # With many exponents powers have more axes than what they are taken of.
        return Renumber(tuple(range(first, len(out)))).type(scaled) if first else scaled

    def norm(s: Step) -> Any:
        count, shape = len(s.out), s.arg(1)
        dims = list(range(count - len(shape), count))
        renumber = Renumber(tuple(dims))
        bias = s.arg(3) if "layer_norm" in s.operation.name else None
        result = Type(power(s, s.type(s.arg(0)), Fraction(1)).factors)
        if s.arg(2) is not None:
            result = Type((*result.factors, *renumber.type(s.type(s.arg(2))).factors))
        if bias is not None:
            known = s.raw(bias)
            if isinstance(known, ReadPart):
                within = [factor for factor in result.factors if set(factor.dims) <= set(dims)]
                fields = [Field(tuple(map(dims.index, factor.dims)), factor.atoms, factor.weight) for factor in within]
                known = first_use(s.engine, known, fields, role="bias", entries=False)
            result = add(s.engine, result, renumber.type(known))
        return [Type(result.factors)] + [FIXED] * (len(s.operation.results) - 1)

    def size(s: Step) -> Any:
        """Type a mean that keeps its axis as fixed: a norm divides by it."""
        keeps = s.arg(2, "keepdim", False) or s.arg(3, "keepdim", False)
        return FIXED if keeps else RULES["aten::mean"](s)

    def plus(s: Step) -> Any:
        """Type the addition of a number as part of a function of single entries."""
        alone = number(s.arg(1), s) is not None and isinstance(s.arg(0), ValueRef)
        return entrywise(s) if alone else RULES["aten::add"](s)

    functions = {f"aten::{name}": entrywise for name in (*FIXING, "exp", "log", "pow")}
    norms = {f"aten::{name}": norm for name in _NORMS}
    return {**RULES, **functions, **norms, "aten::mean": size, "aten::add": plus}


def candidates(model: nn.Module, call: Call, still: Sequence[str] = ()) -> list[Symmetry]:
    """Return axes of parameters that move together in the relaxed program, leaving those in `still` alone."""
    from conserved.inference.infer import recognize_unchecked

    parameters = dict(model.named_parameters())
    with as_a_function(model):
        for name in still:
            parameters[name].requires_grad_(False)
        try:
            law_set = recognize_unchecked(_relaxed_rules(), model, *call.args, **call.kwargs)
        finally:
            for name in still:
                parameters[name].requires_grad_(True)
    return [s for s in law_set if s.kind.shared == "rows" and _movable(s, parameters)]


def _movable(symmetry: Symmetry, tensors: Tensors) -> bool:
    """Return whether all that a symmetry moves is plain numbers."""
    return all(is_plain(tensors[name]) and tensors[name].dtype in STORED for name in symmetry.parameters)


def output_vector(model: nn.Module, call: Call) -> Tensor:
    """Return all numbers a model returns, as one vector."""
    with torch.no_grad():
        outputs = [t for t in tree_leaves(call_with(model, call)) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat([t.detach().double().flatten() for t in outputs])


def _after(model: nn.Module, steps: Sequence[tuple[Symmetry, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    """Return parameters in float64, moved along some symmetries: those that moved, and those asked for."""
    own = dict(model.named_parameters())
    every = dict.fromkeys([*names, *(name for symmetry, _ in steps for name in symmetry.parameters)])
    work = {name: own[name].detach().to(torch.float64, copy=True).contiguous() for name in every}
    for symmetry, element in steps:
        act_on(symmetry, element, work)
    return work


def _outputs_at(model: nn.Module, call: Call, at: Tensors) -> Tensor:
    """Return what a model returns with other values of some parameters, which are put back."""
    own = dict(model.named_parameters())
    former = {name: own[name].detach().clone() for name in at}
    try:
        for name, value in at.items():
            own[name].data.copy_(value)
        return output_vector(model, call)
    finally:
        for name, value in former.items():
            own[name].data.copy_(value)


def holds(
    model: nn.Module,
    call: Call,
    symmetry: Symmetry,
    elements: Sequence[Tensor],
    first: Sequence[tuple[Symmetry, Tensor]] = (),
) -> bool:
    """Return whether outputs stay when a symmetry is moved by each element, after `first`, and see its largest leg
    alone.

    What outputs do not see, as everything before a head of zeros, is not known to be a symmetry and does not hold.
    """
    own = dict(model.named_parameters())
    dtype = own[symmetry.parameters[0]].dtype
    with as_a_function(model), torch.no_grad():
        before = output_vector(model, call)
        work = _after(model, first, symmetry.parameters)
        for element in elements:
            legs = symmetry.matrices(work)
            moved = [symmetry.kind.act(element.to(leg.device), leg, 1) for leg in legs]
            sizes = [float((there - here).norm()) for there, here in zip(moved, legs, strict=True)]
            index = sizes.index(max(sizes))
            largest = symmetry.legs[index].view
            alone = {**work, largest.parameter: work[largest.parameter].clone()}
            write(largest, alone[largest.parameter], moved[index])
            together = {name: value.clone() for name, value in work.items()}
            act_on(symmetry, element, together)
            change, seen = (float((_outputs_at(model, call, at) - before).norm()) for at in (together, alone))
            if not change <= SAME.get(dtype, 0.05) * float(before.norm()):
                return False
            if not seen > 0 or change > SEEN.get(dtype, 0.1) * seen:
                return False
    return True


def exchanges(model: nn.Module, *args: Any, laws: LawSet | None = None, **kwargs: Any) -> list[Symmetry]:
    """Return units of a model that are alike and may change places: hidden units, channels, heads. Each is probed.

    Args:
        model: a module.
        *args: example inputs, as it is called; they may be left out where the model says how.
        laws: its symmetries if they are known, from which heads are read.
        **kwargs: more example inputs, by name.

    Returns:
        Symmetries of the kind `Exchange`, one for each set of equal units.
    """
    from conserved.transform.finding import symmetries_of

    call = example_call(model, args, kwargs)
    laws = symmetries_of(model, *call.args, **call.kwargs) if laws is None else laws
    units = [
        replace(s, kind=Exchange(), legs=tuple(Leg(leg.view) for leg in s.legs), family="units", source="probed")
        for s in candidates(model, call)
        if s.n > 1
    ]
    own = dict(model.named_parameters())
    symmetries = _join(units) + [head for head in _heads(laws) if _movable(head, own)]
    return _number([s for s in symmetries if holds(model, call, s, _cycles(s.n))])


def coupled_spaces(model: nn.Module, *args: Any, **kwargs: Any) -> list[Symmetry]:
    """Return axes of parameters that can only move together, read off the program without running it.

    Whether a space may be exchanged or rotated is not said: `exchanges` and `rotatable` probe that. Every exchange of
    hidden units, channels or streams is one of a space listed here.

    Args:
        model: a module, also on the meta device.
        *args: example inputs, as it is called; they may be left out where the model says how.
        **kwargs: more example inputs, by name.
    """
    spaces = [s for s in candidates(model, example_call(model, args, kwargs)) if s.n > 1]
    return _number(
        [
            replace(s, kind=Exchange(), legs=tuple(Leg(leg.view) for leg in s.legs), family="units", source="probed")
            for s in _join(spaces)
        ]
    )


def _cycles(n: int) -> list[Tensor]:
    """Return the cycle of all n and that of all but one, which together make every permutation."""
    order = torch.arange(n)
    return [order.roll(1), torch.cat([order[:-1].roll(1), order[-1:]])][: n - 1]


def _join(units: Sequence[Symmetry]) -> list[Symmetry]:
    """Return candidates that share a leg move together, as the two branches of a gated network do."""
    groups: list[list[Symmetry]] = []
    for unit in units:
        views = {leg.view for leg in unit.legs}
        touching = [group for group in groups if any(views & {leg.view for leg in member.legs} for member in group)]
        groups = [group for group in groups if group not in touching] + [[unit, *(s for g in touching for s in g)]]
    result = []
    for group in groups:
        legs = tuple(dict.fromkeys(leg for member in group for leg in member.legs))
        if len({leg.view.n for leg in legs}) == 1:
            result.append(replace(max(group, key=lambda member: len(member.legs)), legs=legs))
    return result


def _number(symmetries: Sequence[Symmetry]) -> list[Symmetry]:
    """Give symmetries names of their own."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    result = []
    for symmetry in symmetries:
        number = counts[symmetry.block, symmetry.family]
        counts[symmetry.block, symmetry.family] += 1
        result.append(replace(symmetry, part=str(number)))
    return result


def _heads(laws: LawSet) -> list[Symmetry]:
    """Return heads as units: symmetries that lie side by side in the same parameters, all of a block together."""
    groups: dict[tuple[Any, ...], list[Symmetry]] = defaultdict(list)
    for s in laws.symmetries:
        if s.family not in ABOUT_GRADIENTS and not s.kind.linear and s.part and s.kind.shared != "nothing":
            groups[s.block, s.family, type(s.kind), s.n, s.parameters, len(s.legs)].append(s)
    sides = [group for group in groups.values() if len(group) > 1]
    # Queries with keys and values with outputs are permuted together: groups of one size that share a module.
    together: dict[tuple[int, str], list[list[Symmetry]]] = defaultdict(list)
    for group in sides:
        together[len(group), _attention(group[0])].append(group)
    heads = []
    for (count, block), members in together.items():
        legs = tuple(leg for group in members for leg in _side_by_side(group))
        if legs and len({leg.view.n for leg in legs}) == 1 and legs[0].view.n == count:
            heads.append(Symmetry(block=block, family="heads", kind=Exchange(), legs=legs, source="probed"))
    return heads


def _attention(symmetry: Symmetry) -> str:
    """Return the innermost module that holds the first leg's layer."""
    return symmetry.legs[0].view.parameter.rpartition(".")[0].rpartition(".")[0]


def _side_by_side(group: Sequence[Symmetry]) -> list[Leg]:
    """Return for every place in the legs of a group of heads, the view whose rows are the heads."""
    legs = []
    for index in range(len(group[0].legs)):
        views = [symmetry.legs[index].view for symmetry in group]
        first = views[0]
        axes = [axis for axis in range(len(first.grid)) if len({view.pick[axis] for view in views}) > 1]
        same = all(view.grid == first.grid and view.rows == first.rows and view.axes == first.axes for view in views)
        if not same or len(axes) != 1:
            return []
        (axis,) = axes
        starts = [pick if isinstance(pick, int) else pick[0] if pick else -1 for pick in (v.pick[axis] for v in views)]
        widths = {1 if isinstance(p, int) else p[1] - p[0] for p in (v.pick[axis] for v in views) if p is not None}
        if len(widths) != 1 or -1 in starts:
            return []
        (width,) = widths
        if first.grid[axis] % width or any(start % width for start in starts):
            return []
        grid = (*first.grid[:axis], first.grid[axis] // width, width, *first.grid[axis + 1 :])
        picks = [*first.pick[:axis], None, None, *first.pick[axis + 1 :]]
        rows = tuple(start // width for start in starts)
        complete = rows == tuple(range(grid[axis]))
        view = replace(first, grid=grid, axes=(axis,), pick=tuple(picks), rows=None if complete else rows)
        legs.append(Leg(view))
    return legs


def foldable(laws: LawSet, tensors: Tensors) -> dict[Symmetry, Tensor]:
    """Return elements that make the gains of norms one, their scales going to the maps that read them.

    Only positive gains are folded.
    """
    gains = {}
    for symmetry in laws.symmetries:
        gain = symmetry.legs[0]
        if symmetry.family != "gain" or not symmetry.exact or is_matrix(gain) or gain.degree != 1:
            continue
        if not _movable(symmetry, tensors):
            continue
        values = gain.view.of_point(tensors[gain.view.parameter].detach())[:, 0].double()
        if bool((values > 0).all()):
            gains[symmetry] = 1 / values
    return gains


def rotatable(model: nn.Module, call: Call, laws: LawSet) -> tuple[list[Symmetry], dict[Symmetry, Tensor]]:
    """Return spaces that allow rotations once gains are folded into their readers, and the elements that fold them.

    Of a space whose norms centre, the rotations that keep (1, …, 1) are left; such a space has the family
    "rotation_about_ones". Without any such space nothing is folded.
    """
    folds = foldable(laws, dict(model.named_parameters()))
    known = [{leg.view for leg in s.legs} for s in laws.symmetries if s.kind.defines(Kind.rotation_element)]
    rotations = []
    for space in candidates(model, call, [symmetry.legs[0].view.parameter for symmetry in folds]):
        views = {leg.view for leg in space.legs}
        if space.n < 2 or views in known or len(views) < 3:
            continue
        legs = tuple(Leg(view) for view in dict.fromkeys(leg.view for leg in space.legs))
        rotation = replace(
            space, kind=Orthogonal(), legs=legs, family="rotation", part="", source="probed", epsilon=0.0
        )
        first = list(folds.items())
        if holds(model, call, rotation, _turns(space.n), first):
            rotations.append(rotation)
        elif space.n > 2 and holds(model, call, rotation, [keeping_ones(g) for g in _turns(space.n - 1)], first):
            rotations.append(replace(rotation, kind=RotationAboutOnes(), family="rotation_about_ones"))
    return _number(rotations), folds if rotations else {}


def _turns(n: int) -> list[Tensor]:
    """Return two orthogonal matrices in general position, one of them a mirror: a space that allows both allows any."""
    generator = torch.Generator().manual_seed(0)
    turns = [torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for _ in range(2)]
    for matrix, sign in zip(turns, (1, -1), strict=True):
        matrix[0] *= sign * torch.linalg.det(matrix).sign()
    return turns


def keeping_ones(matrix: Float[Tensor, "k k"]) -> Float[Tensor, "n n"]:
    """Return a rotation of the space across (1, …, 1) from any invertible matrix of one size less."""
    n = matrix.shape[0] + 1
    mirror = across_ones(n)
    inner = torch.eye(n, dtype=torch.float64)
    q, r = torch.linalg.qr(matrix)
    inner[1:, 1:] = q * r.diagonal().sign()
    return mirror @ inner @ mirror
