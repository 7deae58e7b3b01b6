"""Move a model, or a dictionary of weights, along its symmetries: other weights, the same function."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.laws.shared_memory import memory_of, overlapping
from conserved.output.lines import counted
from conserved.output.result import PrintableResult
from conserved.symmetry import Symmetry, UnmovableError, View, whole
from conserved.transform.elements import validate_element

STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Precisions in which weights are numbers and not codes."""

ABOUT_GRADIENTS = ("inert_padding", "unused", "frozen")
"""Families of laws that say that a gradient is zero; they say nothing about the function."""

Elements = Mapping[Symmetry | str, Tensor] | Mapping[str, Tensor] | Mapping[Symmetry, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MovedWeights(PrintableResult):
    """The result of a move: the elements that undo it, and the laws before and after."""

    moved: tuple[str, ...]
    """Names of the symmetries, in the order they were applied."""
    inverse: dict[Symmetry, Tensor]
    """Elements that undo the move, in the order to apply them in."""
    before: dict[str, Tensor]
    """The laws of these symmetries before, in float64."""
    after: dict[str, Tensor]
    parameters: tuple[str, ...]
    """Names of the tensors that were written."""
    notes: tuple[str, ...] = ()
    """Cautions: symmetries that hold up to ε, for the loss alone, or by assumption."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The moved weights, where a dictionary was given; tensors that did not move are the ones given."""

    @property
    def count(self) -> str:
        """How many symmetries moved how many tensors, in words."""
        several = len(self.moved), len(self.parameters)
        return f"{counted(several[0], 'symmetry', 'symmetries')} moved {counted(several[1], 'tensor')}"

    def __repr__(self) -> str:
        return f"<MovedWeights: {self.count}>"

    def summary(self) -> str:
        """Return what was done, and what was left alone, as text."""
        return "\n  ".join([self.count, *self.notes])


def move(
    target: nn.Module | Mapping[str, Tensor] | Weights,
    elements: Elements,
    *,
    laws: LawSet | Iterable[Symmetry] = (),
    values: bool = True,
) -> MovedWeights:
    """Move weights along symmetries, so that the function they compute stays the same.

    Legs are moved in float64 and rounded once, to the precision they are stored in. Scales that are powers of two are
    exact, and undone bit for bit, as long as no number falls below the normal range of its precision. Symmetries that
    share tensors are written together, once all of them are known to be in range, so that the function is intact
    whenever something is refused.

    Args:
        target: a module, moved in place; or a dictionary of tensors, which stays as it is (`MovedWeights.state` has the
            result); or a `Checkpoint` of safetensors files.
        elements: for each symmetry, or its name in `laws`, the group element to move it by
            (`conserved.transform.elements` lists the form for every kind). They are applied in this order.
        laws: the symmetries that names are looked up in, as `conserved.recognize` gives them.
        values: whether to evaluate the laws before and after.

    Returns:
        A `MovedWeights`: the laws before and after, the elements that undo the move, and notes of caution.

    Raises:
        UnmovableError: a name is unknown, an element is none of its group, a tensor is missing or quantised, or a moved
            number leaves the range of its precision.
    """
    steps = _steps(elements, laws)
    named = laws.parameters if isinstance(laws, LawSet) else ()
    tensors = target if isinstance(target, Weights) else Weights(target, named)
    undo = {symmetry: symmetry.kind.inverse(element) for symmetry, element in reversed(steps)}
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    with tensors.complete():
        for symmetry, _ in steps:
            for name in symmetry.parameters:
                tensors.movable(name, symmetry)
        for component in sharing_tensors(steps):
            _move_together(component, tensors, before, after, values=values)
    order = [symmetry.name for symmetry, _ in steps]
    return MovedWeights(
        moved=tuple(order),
        inverse=undo,
        before={name: before[name] for name in dict.fromkeys(order) if name in before},
        after={name: after[name] for name in dict.fromkeys(order) if name in after},
        parameters=tuple(tensors.written),
        notes=tuple(notes(symmetry for symmetry, _ in steps)),
        state=tensors.state,
    )


def _steps(elements: Elements, laws: LawSet | Iterable[Symmetry]) -> list[tuple[Symmetry, Tensor]]:
    """Return symmetries with checked elements; names are looked up."""
    known = {symmetry.name: symmetry for symmetry in (laws.symmetries if isinstance(laws, LawSet) else laws)}
    result = []
    for key, element in elements.items():
        if not isinstance(key, str | Symmetry):
            raise UnmovableError(
                f"Expected symmetries or their names as keys of elements, got {key!r}. Use names of the laws."
            )
        if isinstance(key, str) and key not in known:
            listed = ", ".join(list(known)[:3]) + (", …" if len(known) > 3 else "")
            raise UnmovableError(
                f"There is no symmetry {key!r} among the {len(known)} given"
                + (f" ({listed})." if known else ". Pass laws=conserved.recognize(model, *inputs).")
            )
        symmetry = known[key] if isinstance(key, str) else key
        result.append((symmetry, validate_element(symmetry, element)))
    return result


def sharing_tensors(
    steps: Sequence[tuple[Symmetry, Tensor]],
) -> Iterator[list[tuple[Symmetry, Tensor]]]:
    """Yield steps that share tensors, together; each group by itself leaves the function unchanged."""
    groups: list[tuple[set[str], list[int]]] = []
    for index, (symmetry, _) in enumerate(steps):
        names, members = set(symmetry.parameters), [index]
        apart = []
        for group in groups:
            if names.isdisjoint(group[0]):
                apart.append(group)
            else:
                names |= group[0]
                members = group[1] + members
        groups = [*apart, (names, members)]
    for _, members in sorted(groups, key=lambda group: min(group[1])):
        yield [steps[index] for index in sorted(members)]


def _move_together(
    steps: Sequence[tuple[Symmetry, Tensor]],
    tensors: Weights,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    *,
    values: bool,
) -> None:
    names = dict.fromkeys(name for symmetry, _ in steps for name in symmetry.parameters)
    work = {name: tensors.read(name) for name in names}
    with torch.no_grad():
        if values:
            before |= {symmetry.name: symmetry.law(work) for symmetry, _ in steps}
        for symmetry, element in steps:
            act_on(symmetry, element, work)
        if values:
            after |= {symmetry.name: symmetry.law(work) for symmetry, _ in steps}
        tensors.write(work)


def act_on(symmetry: Symmetry, element: Tensor, work: Mapping[str, Tensor]) -> None:
    """Move contiguous tensors in place by one element."""
    scales = symmetry.kind.row_scales(element)
    for leg in symmetry.legs:
        tensor = work[leg.view.parameter]
        if scales is not None and not leg.logarithmic and leg.view.rows is None and not leg.view.offset:
            faced = leg.view.face(tensor)
            lengths = [*faced.shape[: len(leg.view.axes)], *[1] * len(leg.view.rest)] if scales.ndim else []
            faced.mul_((scales**leg.degree).reshape(lengths).to(tensor))
            continue
        write(leg.view, tensor, leg.acted(symmetry.kind, element.to(tensor.device), leg.view.of_point(tensor)))


def write(view: View, tensor: Tensor, matrix: Tensor) -> None:
    """Make a view of a contiguous tensor see a matrix, in place."""
    matrix = matrix - view.offset if view.offset else matrix
    target = view.face(tensor)
    if view.rows is None:
        target.copy_(matrix.reshape(target.shape))
        return
    rows = target.reshape(-1, view.m).clone()
    rows[torch.tensor(view.rows, device=rows.device)] = matrix
    target.copy_(rows.reshape(target.shape))


def notes(symmetries: Iterable[Symmetry]) -> list[str]:
    """Return caveats of moving along these symmetries, one line for each kind."""
    several: dict[str, list[str]] = defaultdict(list)
    for symmetry in symmetries:
        if not symmetry.exact:
            several[
                f"holds up to a norm's ε = {symmetry.epsilon:g}: scaling its input by c changes its output by about "
                "½ε(1 − c⁻²)/s, with s the mean square of the input"
            ].append(symmetry.name)
        if symmetry.of_loss:
            several["leaves the loss unchanged, and not the outputs: logits are shifted"].append(symmetry.name)
        if symmetry.family in ABOUT_GRADIENTS:
            several["is about gradients: the function may read these entries for other inputs"].append(symmetry.name)
        if symmetry.source == "assumed":
            several["holds on the path that the example inputs took"].append(symmetry.name)
        if symmetry.source == "probed":
            several["was found by moving the model and comparing outputs, not by a proof"].append(symmetry.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}."
        for text, names in several.items()
    ]


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its own numbers, perhaps in shards, and no code of a quantiser's."""
    return type(tensor) in (Tensor, nn.Parameter) or hasattr(tensor, "full_tensor")


class Weights:
    """The tensors that are moved: a module's own, written in place, or a dictionary, of which a new one is made."""

    def __init__(self, target: nn.Module | Mapping[str, Tensor], known: Iterable[str] = ()) -> None:
        self._module = isinstance(target, nn.Module)
        given: dict[str, Tensor] = {}
        given.update(target.named_parameters() if isinstance(target, nn.Module) else target)
        # Dictionaries of weights may hold more than weights: the extra state of a module can be anything.
        self._tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        self._shared = overlapping(self._tensors)
        self._aliases = {} if self._module else self._tied(frozenset(known))
        self.state: dict[str, Tensor] = {} if self._module else given
        self.written: list[str] = []

    def _tied(self, known: frozenset[str]) -> dict[str, list[str]]:
        """Return names in a dictionary that stand for one tensor.

        Such names share memory, or an unknown name has equal numbers.
        """
        memory: dict[object, str] = {}
        names_by_tensor: dict[str, list[str]] = defaultdict(list)
        unmatched = [name for name in self._tensors if known and name not in known]
        alike = Counter((tuple(self._tensors[name].shape), self._tensors[name].dtype) for name in unmatched)
        for name in sorted(self._tensors, key=lambda name: name in unmatched):
            tensor = self._tensors[name]
            first = memory.setdefault(memory_of(tensor), name)
            if first != name:
                names_by_tensor[first].append(name)
                self._shared = {a: b for a, b in self._shared.items() if {a, b} != {first, name}}
            elif name not in unmatched and alike.get((tuple(tensor.shape), tensor.dtype)):
                names_by_tensor[name] += [
                    other
                    for other in unmatched
                    if self._tensors[other].shape == tensor.shape and torch.equal(self._tensors[other], tensor)
                ]
        return {name: list(dict.fromkeys(others)) for name, others in names_by_tensor.items()}

    def movable(self, name: str, symmetry: Symmetry) -> None:
        """Refuse, by name, what is not there, not a plain number, without values, or partly someone else's memory."""
        tensor = self._tensors.get(name)
        if tensor is None:
            near = [other for other in self._tensors if other.endswith(name) or name.endswith(other)]
            hint = f" There is {near[0]}: are the names from a wrapped model?" if near else ""
            raise UnmovableError(
                f"Expected the tensors of {symmetry.name}, got {len(self._tensors)} without {name}.{hint}"
            )
        shapes = {leg.view.shape for leg in symmetry.legs if leg.view.parameter == name} - {tuple(tensor.shape)}
        if is_plain(tensor) and shapes:
            raise UnmovableError(
                f"{name} has shape {tuple(tensor.shape)}, and {shapes.pop()} in the model that {symmetry.name} is of."
            )
        if tensor.dtype not in STORED or not is_plain(tensor):
            how = str(tensor.dtype) if is_plain(tensor) else type(tensor).__name__
            raise UnmovableError(
                f"{name} is stored as {how}, codes of a quantiser and not numbers that can be scaled. "
                f"Move the model first and quantise it then, or leave {symmetry.name} out."
            )
        if tensor.is_meta:
            raise UnmovableError(
                f"Expected parameters with values, got {name} on the meta device. Load the weights first."
            )
        if name in self._shared:
            raise UnmovableError(
                f"{name} shares part of its memory with {self._shared[name]}, so that moving one moves the other. "
                "Give them memory of their own, or make them one parameter."
            )

    def read(self, name: str, least: torch.dtype = torch.float64) -> Tensor:
        """Return a contiguous copy in the precision it is stored in, or in a higher one.

        A sharded tensor is gathered.
        """
        tensor = self._tensors[name].detach()
        dtype = torch.promote_types(tensor.dtype, least)
        return whole(tensor).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def precision(self, name: str) -> torch.dtype:
        """Return the precision a tensor is stored in."""
        return self._tensors[name].dtype

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Collect the tensors that are written; those kept elsewhere appear at the end, or not at all."""
        yield

    def rounded(self, name: str, moved: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a moved tensor in the precision it is stored in; refused if numbers left its range, above or below."""
        result = moved.to(dtype)
        if not bool(torch.isfinite(result).all()):
            if not bool(torch.isfinite(self.read(name)).all()):
                raise UnmovableError(f"{name} has entries that are not finite; nothing of its group was written.")
            raise UnmovableError(f"Moving {name} leaves the range of {dtype}; nothing of its group was written.")
        limits = torch.finfo(dtype)
        if torch.count_nonzero(result) < torch.count_nonzero(moved):
            former = self.read(name).abs()
            for axis in range(result.ndim):
                others = [d for d in range(result.ndim) if d != axis]
                now, before = (t.abs().amax(others) if others else t.abs() for t in (moved, former))
                if bool(((now > 0) & (16 * now < before) & (now < 4 * limits.tiny * limits.eps)).any()):
                    raise UnmovableError(
                        f"Moving {name} makes some of it too small for {dtype}, which would round it to nearly "
                        "nothing; nothing of its group was written."
                    )
        return result

    def write(self, work: Mapping[str, Tensor]) -> None:
        """Round and write tensors that belong together, unless one of them left the range of its precision."""
        rounded = {name: self.rounded(name, value, self._tensors[name].dtype) for name, value in work.items()}
        for name, value in rounded.items():
            former = self._tensors[name]
            if hasattr(former, "full_tensor"):
                from torch.distributed.tensor import DTensor, distribute_tensor

                assert isinstance(former, DTensor)
                value = distribute_tensor(value, former.device_mesh, former.placements)
            self.written.append(name)
            if self._module:
                former.data.copy_(value)
                continue
            for alias in (name, *self._aliases.get(name, ())):
                self.state[alias] = self._tensors[alias] = value.to(former.device)
