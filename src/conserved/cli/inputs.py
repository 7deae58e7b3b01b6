"""The grammar of --inputs, which is the same in every command.

    [NAME:][PRECISION:]SHAPE      random numbers of that shape, such as 5,4 or q:bf16:2,8,512,64
    [NAME:]int:BOUND:SHAPE        random integers below a bound, such as labels:int:1000:64 (tokens: is the same)
    FUNCTION                      a function beside the model that draws them from a torch.Generator

One for each argument: the option is repeated, or further inputs follow it as words of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserved.cli.app import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("fp64", "float64", "double"), "float64"),
}
"""Names of precisions, and the dtype of torch that each means."""

INTEGERS = ("int", "tokens")

InputsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        metavar="INPUT",
        help="One for each argument: a shape (5,4), with a name and precision if need be (q:bf16:2,8,512,64), "
        "integers below a bound (tokens:50:2,8), or a function beside the model that draws them.",
    ),
]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input as the command line names it.

    Attributes:
        name: the name of the argument, or "".
        precision: the dtype of torch by name, or "" for that of the model.
        bound: integers are drawn below it; None for numbers.
        shape: the shape.
        sampler: the name of a function that draws the input; everything else is empty then.
    """

    name: str = ""
    precision: str = ""
    bound: int | None = None
    shape: tuple[int, ...] = ()
    sampler: str = ""

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw the input from a generator, on the processor."""
        import torch

        if self.bound is not None:
            return torch.randint(self.bound, self.shape, generator=generator)
        numbers = torch.randn(self.shape, generator=generator)
        return numbers.to(getattr(torch, self.precision)) if self.precision else numbers


def is_input(word: str) -> bool:
    """Return whether a word between the options is an input and not name=value."""
    return "=" not in word and (":" in word or all(part.isdigit() for part in word.split(",")))


def parse_input(text: str) -> InputSpec:
    """Return the input that a word names, or refuse it with what to write instead."""
    if text.isidentifier():
        return InputSpec(sampler=text)
    *before, shape = text.split(":")
    bound: int | None = None
    if len(before) >= 2 and before[-2] in INTEGERS and before[-1].isdigit() and int(before[-1]) > 0:
        bound, before = int(before[-1]), before[:-2]
    elif any(word in INTEGERS for word in before):
        raise UsageError(
            f"Expected integers as int:BOUND:SHAPE or tokens:BOUND:SHAPE, such as tokens:50:2,8; got {text!r}."
        )
    precision = PRECISIONS[before.pop()] if before and bound is None and before[-1] in PRECISIONS else ""
    name = before.pop() if before and before[-1].isidentifier() else ""
    if before:
        raise UsageError(
            f"Expected an input as [NAME:][PRECISION:]SHAPE, such as 5,4 or q:bf16:2,8,512,64 "
            f"(precisions: bf16, fp16, fp32, fp64); got {text!r}."
        )
    # A number alone is a tensor without axes: NAME:fp32: has an empty shape.
    return InputSpec(name, precision, bound, shape_of(shape) if shape or not (name or precision) else ())


def shape_of(text: str) -> tuple[int, ...]:
    """Return sizes with commas between them as a shape."""
    if not text or not all(size.isdigit() and int(size) > 0 for size in text.split(",")):
        raise UsageError(f"Expected a shape as sizes with commas, such as 5,4; got {text!r}.")
    return tuple(map(int, text.split(",")))


def parse_inputs(words: Sequence[str] | None, option: str) -> list[InputSpec]:
    """Return all inputs of a command; `what` takes them."""
    if not words:
        raise UsageError(
            f"Say what {option} takes: --inputs 5,4 for numbers of that shape, or --inputs tokens:VOCAB:SHAPE."
        )
    specs = [parse_input(word) for word in words]
    if len(specs) > 1 and any(spec.sampler for spec in specs):
        raise UsageError("A function draws all inputs at once; name it alone.")
    named = [spec.name for spec in specs if spec.name]
    if named and len(named) < len(specs):
        raise UsageError(f"Name all inputs or none; got {', '.join(words)}.")
    if len(set(named)) < len(named):
        raise UsageError(f"Two inputs have the same name; got {', '.join(words)}.")
    return specs


def sampler_of(specs: Sequence[InputSpec]) -> Callable[[torch.Generator], Any]:
    """Return a function from a generator to a tensor, to a tuple for several, or to a dictionary for named inputs."""

    def draw(generator: torch.Generator) -> Any:
        drawn = [spec.draw(generator) for spec in specs]
        if specs[0].name:
            return {spec.name: tensor for spec, tensor in zip(specs, drawn, strict=True)}
        return drawn[0] if len(drawn) == 1 else tuple(drawn)

    return draw
