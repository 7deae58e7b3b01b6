"""Which layers scale against which: the mappings that quantisers ask for, read off a model's symmetries."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from conserved.laws import LawSet
from conserved.output.result_list import ResultList
from conserved.symmetry import Leg, Symmetry
from conserved.transform.activations import activation_sizes
from conserved.transform.finding import as_a_function, example_call, symmetries_of
from conserved.transform.objectives import is_matrix
from conserved.transform.smoothing import makers, readers, reading_side

FORMATS = ("plain", "llmcompressor", "autoround")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMapping:
    """Channels that one layer makes and others read: divide them in the first, multiply them in the others."""

    smooth: tuple[str, ...]
    """Modules that make the channels: a norm with a gain, or a linear map."""
    balance: tuple[str, ...]
    """Modules that read them; all of them, so that nothing is left uncompensated."""
    channels: int
    """How many scales there are."""
    symmetries: tuple[str, ...]
    """The symmetries it comes from, one for each head where there are heads."""
    reason: str
    """Why the function does not see these scales."""
    one_to_one: bool
    """Whether reader channel i is maker channel i; not so where heads share their values."""


def mappings(
    model: nn.Module,
    *args: Any,
    format: str = "plain",  # noqa: A002
    laws: LawSet | None = None,
    **kwargs: Any,
) -> list[LayerMapping] | list[dict[str, Any]]:
    """Return the layers of a model that can be smoothed, and the layers that have to be balanced for it.

    Args:
        model: a module of any architecture; one forward pass is run.
        *args: example inputs, as it is called; they may be left out where the model says how.
        format: "plain" for a list of `LayerMapping`, which prints as a table; "llmcompressor" or "autoround" for the
            form that `AWQModifier(mappings=…)` of llm-compressor and `AWQConfig(mappings=…)` of auto-round take:
            dictionaries with smooth_layer and balance_layers, patterns that match all layers which are alike.
            Mappings that these tools have no form for are left out of theirs, with a warning that says which and why.
        laws: the symmetries, if they are known already.
        **kwargs: more example inputs, by name.

    Returns:
        The mappings, in the chosen form.

    Raises:
        ValueError: `format` is another word.
    """
    if format not in FORMATS:
        raise ValueError(f"Expected format to be one of {', '.join(FORMATS)}, got {format!r}. Pass one of them.")
    symmetries = symmetries_of(model, *args, **kwargs) if laws is None else laws
    with as_a_function(model):
        sizes = activation_sizes(model, [example_call(model, args, kwargs)])
    scalable = [(s, readers(s, sizes)) for s in symmetries.symmetries if _scales_alone(s)]
    plain = _merge([_of_one(symmetry, reading) for symmetry, reading in scalable if reading])
    return ResultList(plain, "mapping", _HEADS, _row) if format == "plain" else in_format(model, plain, format)


def in_format(model: nn.Module, plain: Sequence[LayerMapping], format: str) -> list[dict[str, Any]]:  # noqa: A002
    """Return mappings in the form of a tool; those with a `missing_form` are left out."""
    without = [(mapping, why) for mapping in plain if (why := missing_form(mapping))]
    if without:
        mapping, why = without[0]
        pair = f"{' and '.join(mapping.smooth)} → {' and '.join(mapping.balance)}"
        others = f" and {len(without) - 1} more" if len(without) > 1 else ""
        warnings.warn(f"{format} has no form for {pair}{others}, left out: {why}.", stacklevel=3)
    names = [name for name, _ in model.named_modules()]
    prefix = "re:" if format == "llmcompressor" else ""
    return patterns([mapping for mapping in plain if not missing_form(mapping)], names, prefix)


def missing_form(mapping: LayerMapping) -> str:
    """Return why llm-compressor and auto-round have no form for a mapping; empty if they have one."""
    if len(mapping.smooth) != 1:
        return f"{len(mapping.smooth)} layers make these channels, and a mapping names one"
    if not mapping.one_to_one:
        return "their form scales channel i of one layer by channel i of the other, and here " + (
            mapping.reason.rpartition("; ")[2] if "; " in mapping.reason else mapping.reason
        )
    return ""


_HEADS = ("divide", "multiply", "channels", "because")


def _row(mapping: LayerMapping) -> tuple[str, ...]:
    return " ".join(mapping.smooth), " ".join(mapping.balance), str(mapping.channels), mapping.reason


def _scales_alone(symmetry: Symmetry) -> bool:
    """Return whether a symmetry multiplies rows, and adds nothing anywhere."""
    return symmetry.exact and symmetry.kind.scales_rows and not symmetry.logarithmic


def _of_one(symmetry: Symmetry, seen: Sequence[Leg]) -> LayerMapping:
    reading, making = reading_side(symmetry, seen), makers(symmetry, seen)
    smooth, balance = _modules(making), _modules(reading)
    copies = max(
        [sum(leg.view.parameter == name for leg in reading) for name in {leg.view.parameter for leg in reading}]
    )
    if not making:
        reason = "read from both sides"
    elif not any(map(is_matrix, making)):
        reason = "a gain is multiplied in, channel by channel, and only these maps read it"
    else:
        reason = symmetry.kind.separates
    if copies > 1:
        reason += f"; each channel is read {copies} times"
    return LayerMapping(
        smooth=smooth,
        balance=balance,
        channels=symmetry.n,
        symmetries=(symmetry.name,),
        reason=reason,
        one_to_one=copies == 1 and bool(making),
    )


def _modules(legs: Iterable[Leg]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(leg.view.parameter.rpartition(".")[0] for leg in legs))


def _merge(mappings: Sequence[LayerMapping]) -> list[LayerMapping]:
    """Merge the heads of one pair of layers into one mapping."""
    together: dict[tuple[tuple[str, ...], tuple[str, ...]], list[LayerMapping]] = defaultdict(list)
    for mapping in mappings:
        together[mapping.smooth, mapping.balance].append(mapping)
    return [
        LayerMapping(
            smooth=smooth,
            balance=balance,
            channels=sum(mapping.channels for mapping in members),
            symmetries=tuple(name for mapping in members for name in mapping.symmetries),
            reason=members[0].reason,
            one_to_one=all(mapping.one_to_one for mapping in members),
        )
        for (smooth, balance), members in together.items()
    ]


def patterns(plain: Sequence[LayerMapping], names: Sequence[str], prefix: str) -> list[dict[str, Any]]:
    """Return mappings of layers that are alike as one pattern, where it finds them and no other modules.

    Otherwise each mapping is returned by itself.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[LayerMapping]] = defaultdict(list)
    for member in plain:
        groups[_template(member.smooth[0]), tuple(map(_template, member.balance))].append(member)
    counts = Counter(map(_template, names))
    result: list[dict[str, Any]] = []
    for (smooth, balance), members in groups.items():
        meant = {name for member in members for name in (*member.smooth, *member.balance)}
        numbers = Counter(map(_template, meant))
        everywhere = all(counts[each] == numbers[each] for each in (smooth, *balance))
        each = [(smooth, balance)] if everywhere else [(m.smooth[0], m.balance) for m in members]
        result += [
            {
                "smooth_layer": prefix + _pattern(name),
                "balance_layers": [prefix + _pattern(other) for other in dict.fromkeys(others)],
            }
            for name, others in each
        ]
    return result


def _template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def _pattern(template: str) -> str:
    return "^" + re.escape(template).replace(r"\#", r"\d+") + "$"
