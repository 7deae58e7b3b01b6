"""Does a model in eval mode evaluate? Deterministic, example by example, and causal if it claims to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import tree_leaves, tree_map_only
from conserved.output.result import PrintableResult
from conserved.plain_data import record_of
from conserved.verdict import Evidence, Status, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """One property of an evaluation: how far two outputs that should be equal are apart, relative to their size."""

    name: str
    difference: float
    limit: float
    advice: str

    @property
    def ok(self) -> bool:
        """Whether the outputs are equal up to rounding."""
        return self.difference <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalResult(PrintableResult):
    """The properties that were tested of a model in eval mode."""

    rows: tuple[EvalRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        return self.verdict.holds

    @property
    def verdict(self) -> Verdict:
        """One verdict on all properties."""
        wrong = [row for row in self.rows if not row.ok]
        evidence = tuple(
            Evidence(what=row.name, value=row.difference, limit=row.limit) for row in (wrong or self.rows[:1])
        )
        if wrong:
            message = f"In eval mode the model is not {wrong[0].name}. {wrong[0].advice}"
            return Verdict(status=Status.REFUTED, message=message, evidence=evidence)
        if not self.rows:
            return Verdict(status=Status.INCONCLUSIVE, message="Nothing could be compared.")
        message = f"In eval mode the model is {', '.join(row.name for row in self.rows)}."
        return Verdict(status=Status.VERIFIED, message=message, evidence=evidence)

    def summary(self) -> str:
        """Return the verdict with its evidence."""
        return str(self.verdict)

    def __repr__(self) -> str:
        return f"<EvalResult: {self.verdict.status.value}, {len(self.rows)} properties>"

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return self.verdict.record() | {"rows": [record_of(row, "name difference limit ok") for row in self.rows]}


def check_eval(model: nn.Module, *args: Any, causal: bool = False, **kwargs: Any) -> EvalResult:
    """Check that a model in eval mode is deterministic, independent of the rest of its batch, and causal if it should.

        assert conserved.check_eval(model, tokens, causal=True).ok

    The model is called in eval mode without gradients, under two seeds, with its batch reversed, and on its first
    example alone. With `causal`, the last position of every input is changed, and outputs before it must not move. The
    mode and random numbers are put back.

    Args:
        model: the model.
        *args: inputs; the first dimension of every tensor is the batch.
        causal: whether outputs at a position may depend only on inputs up to it, in the second dimension.
        **kwargs: further inputs.

    Returns:
        One row for each property, with one verdict.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()

    def call(change: Callable[[Tensor], Tensor], seed: int = 0) -> list[Tensor]:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            moved_args, moved_kwargs = tree_map_only(Tensor, change, (args, kwargs))
            output = model(*moved_args, **moved_kwargs)
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return [leaf for leaf in leaves if leaf.is_floating_point()]

    try:
        return EvalResult(rows=tuple(_rows(call, args, kwargs, causal=causal)))
    finally:
        for module, training in modes.items():
            module.training = training


def _rows(
    call: Callable[..., list[Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any], *, causal: bool
) -> Iterator[EvalRow]:
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    count = inputs[0].shape[0] if inputs else 0
    plain = call(lambda t: t)
    if not plain:
        return
    # Other shapes of a product round in another order: its square root of the spacing is generous.
    eps = max(torch.finfo(leaf.dtype).eps for leaf in plain)
    again = call(lambda t: t, seed=1)
    advice = "Something draws random numbers: a dropout whose rate does not follow self.training, or noise."
    yield EvalRow(name="deterministic", difference=_apart(plain, again), limit=0.0, advice=advice)
    if count > 1 and all(t.shape[0] == count for t in inputs) and all(o.ndim and o.shape[0] == count for o in plain):
        flipped = [leaf.flip(0) for leaf in call(lambda t: t.flip(0) if t.ndim else t)]
        advice = "The result of an example depends on its place in the batch."
        yield EvalRow(
            name="independent of the order of a batch", difference=_apart(plain, flipped), limit=eps**0.5, advice=advice
        )
        alone = call(lambda t: t[:1] if t.ndim else t)
        advice = "Statistics of the batch enter: a norm in train mode, a mask of another example, or padding."
        parts = [leaf[:1] for leaf in plain]
        yield EvalRow(
            name="independent of the rest of a batch", difference=_apart(parts, alone), limit=eps**0.5, advice=advice
        )
    if causal and inputs and inputs[0].ndim > 1 and inputs[0].shape[1] > 1:
        length = inputs[0].shape[1]
        later = call(lambda t: _changed(t, length))
        early = [
            (a[:, : length - 1], b[:, : length - 1])
            for a, b in zip(plain, later, strict=True)
            if _has_length(a, length)
        ]
        advice = "Outputs see later inputs: a mask is missing or shifted."
        difference = _apart([a for a, _ in early], [b for _, b in early])
        yield EvalRow(name="causal", difference=difference, limit=eps**0.5, advice=advice)


def _has_length(output: Tensor, length: int) -> bool:
    return output.ndim > 1 and output.shape[1] == length


def _changed(tensor: Tensor, length: int) -> Tensor:
    """Return inputs with another last position; masks stay."""
    if tensor.ndim < 2 or tensor.shape[1] != length or tensor.dtype == torch.bool:
        return tensor
    other = tensor.clone()
    last = other[:, -1]
    other[:, -1] = last + 1 if tensor.is_floating_point() else torch.where(last > 0, last - 1, last + 1)
    return other


def _apart(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest of them."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            difference = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
