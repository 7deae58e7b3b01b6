"""A live model's energy fields: one row per layer and head, from one run of the model with its own attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from conserved.attention.band import Band
from conserved.attention.coherence import gaussian_coherence
from conserved.attention.energy import energy_field
from conserved.attention.moments import TokenMoments
from conserved.attention.queries_and_keys import Capture, NoAttentionError, listening
from conserved.attention.softmax import softmax_statistics
from conserved.output import html
from conserved.output.lines import WIDTH, TextLine, columns, counted, join_lines, paragraphs
from conserved.output.result import PrintableResult
from conserved.verdict import Evidence, Verdict

_LEGEND = (
    "spread: participation of keys, beside that of Gaussian keys; coher.: key coherence, beside that of Gaussian keys; "
    "max z: largest logit; H/log n: entropy over that of even attention"
)

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far from zero the sum of a row may be, over the largest it could be; coarser types are computed in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRow:
    """One head of one layer: means over sequences; the largest logit and the two errors are maxima.

    Rank and its relatives are those of the field over all keys, which has the rank bound; participation is that of the
    field as the mask leaves it. The baselines keep queries and mask and replace keys: by Gaussian ones of the same mean
    and covariance, or by the same numbers shuffled over positions, each entry by itself.
    """

    layer: str
    head: int
    attention: str
    sequences: int
    length: float
    width: int
    bound: float
    rank: float
    effective_rank: float
    stable_rank: float
    participation: float
    gaussian_participation: float
    shuffled_participation: float
    coherence: float
    gaussian_coherence: float
    shuffled_coherence: float
    largest_logit: float
    entropy: float
    evenness: float
    zero_sum_error: float
    rank_excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProbe(PrintableResult):
    """The energy field of every head in one run of a model, and the verdict on its rank bound and zero sums."""

    rows: tuple[HeadRow, ...]
    skipped: tuple[tuple[str, str], ...]
    verdict: Verdict

    def __repr__(self) -> str:
        layers = len({row.layer for row in self.rows})
        size = f"{counted(len(self.rows), 'head')} of {counted(layers, 'layer')}"
        return f"<AttentionProbe: {size}; {self.verdict.status.value}>"

    def _repr_html_(self) -> str:
        """Return the verdict and a row for every head, for notebooks."""
        heads = ("layer", *(head for head, _ in _COLUMNS))
        rows = [(row.layer, *(show(row) for _, show in _COLUMNS)) for row in self.rows]
        return html.panel(html.badge(self.verdict), html.table(heads, rows, numbers=range(1, len(heads))))

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON; numbers that are not finite are None."""
        return {
            "verdict": self.verdict.status.value,
            "message": self.verdict.message,
            "heads": [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows],
            "skipped": [{"layer": layer, "reason": reason} for layer, reason in self.skipped],
        }

    def lines(self) -> list[TextLine]:
        """Return a table for every layer, a legend, and the verdict."""
        lines: list[TextLine] = []
        for layer in dict.fromkeys(row.layer for row in self.rows):
            rows = [row for row in self.rows if row.layer == layer]
            cells = [[show(row) for _, show in _COLUMNS] for row in rows]
            lines.append(TextLine(f"{layer or '(model)'}, {rows[0].attention}", style="bold"))
            lines += columns([head for head, _ in _COLUMNS], cells, right=range(len(_COLUMNS)))
        lines += [TextLine(), TextLine(_LEGEND)]
        lines += [TextLine(f"{layer}: not described, {reason}") for layer, reason in self.skipped]
        return [*lines, *paragraphs(str(self.verdict))]

    def summary(self, width: int = WIDTH) -> str:
        """Return the table as text."""
        return join_lines(self.lines(), width)


_COLUMNS: tuple[tuple[str, Callable[[HeadRow], str]], ...] = (
    ("head", lambda r: str(r.head)),
    ("rank", lambda r: f"{r.rank:.3g}/{r.bound:.3g}"),
    ("eff.", lambda r: f"{r.effective_rank:.1f}"),
    ("stable", lambda r: f"{r.stable_rank:.1f}"),
    ("spread", lambda r: f"{r.participation:.2f}"),
    ("Gauss", lambda r: f"{r.gaussian_participation:.2f}"),
    ("coher.", lambda r: f"{r.coherence:.2f}"),
    ("Gauss", lambda r: f"{r.gaussian_coherence:.2f}"),
    ("max z", lambda r: f"{r.largest_logit:.1f}"),
    ("H/log n", lambda r: f"{r.evenness:.2f}"),
)
"""The columns of the table, each with the text of its cells."""


def probe(
    model: nn.Module,
    *args: Any,
    baselines: bool = True,
    entropy: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    **model_inputs: Any,
) -> AttentionProbe:
    """Run `model(*args, **model_inputs)` once and describe the energy field of every head.

    The model's own attention runs, whichever backend it uses; nothing is switched, and the model is left as it was.

    Args:
        model: a model that calls transformers' attention interface, torch.nn.MultiheadAttention,
            torch.nn.functional.scaled_dot_product_attention or conserved.blocks.Attention.
        *args: inputs, as the model is called.
        baselines: whether Gaussian and shuffled keys are measured as well.
        entropy: whether the entropy of attention is computed; it goes over all logits by blocks, in quadratic time.
        seed: the seed of the baselines.
        progress: called with one line for every attention call.
        **model_inputs: more inputs, by name. A two-axis `attention_mask` tells padding apart.

    Returns:
        One row per head, layers that could not be described, and a verdict.

    Raises:
        NoAttentionError: no call of attention was observed.
    """
    by_head: dict[tuple[str, int], list[dict[str, Any]]] = {}
    generator = torch.Generator().manual_seed(seed)

    def describe(capture: Capture, calls: Iterable[AttentionInputs]) -> None:
        if progress is not None:
            progress(f"{capture.path or '(model)'}: queries {tuple(capture.q.shape)}")
        for q, k, options in calls:
            measured = measure(q, k, capture, options, baselines, entropy, generator)
            for head, values in enumerate(measured):
                by_head.setdefault((capture.path, head), []).append(values)

    skipped = described(model, args, model_inputs, describe)
    rows = tuple(_row(layer, head, parts) for (layer, head), parts in by_head.items())
    limits = [part["limit"] for parts in by_head.values() for part in parts]
    return AttentionProbe(rows=rows, skipped=tuple(skipped.items()), verdict=_judge(rows, max(limits, default=0.0)))


AttentionInputs = tuple[Tensor, Tensor, dict[str, Any]]
"""Queries and keys of one sequence, and the shape of their mask."""


def described(
    model: nn.Module,
    args: tuple[Any, ...],
    inputs: Mapping[str, Any],
    describe: Callable[[Capture, Iterable[AttentionInputs]], None],
) -> dict[str, str]:
    """Run a model once and pass on every call of attention, sequence by sequence; where that cannot be, and why."""
    padding = inputs.get("attention_mask")
    padding = padding if isinstance(padding, Tensor) and padding.ndim == 2 else None
    skipped: dict[str, str] = {}
    calls = 0

    def on_capture(capture: Capture) -> None:
        nonlocal calls
        calls += 1
        if capture.problem:
            skipped[capture.path] = capture.problem
        else:
            describe(capture, sequences(capture, padding, skipped))

    core = getattr(model, "_orig_mod", model)
    with torch.no_grad(), listening(core, on_capture):
        core(*args, **inputs)
    if not calls:
        raise NoAttentionError(
            f"{type(core).__name__} ran without a call of attention that could be observed. It must call transformers' "
            "attention interface, torch.nn.MultiheadAttention, conserved.blocks.Attention or "
            "torch.nn.functional.scaled_dot_product_attention (in timm: fused_attn)."
        )
    return skipped


def sequences(capture: Capture, padding: Tensor | None, skipped: dict[str, str]) -> Iterator[AttentionInputs]:
    """Yield queries and keys of one sequence at a time, without what padding hides, and the shape of their mask."""
    queries, keys = capture.q.shape[-2], capture.k.shape[-2]
    for number, (q, k) in enumerate(zip(capture.q, capture.k, strict=True)):
        asks = torch.ones(queries, dtype=torch.bool, device=q.device)
        if padding is not None and padding.shape == (len(capture.q), queries):
            asks = padding[number].to(q.device).bool()
        if capture.mask is None:
            if bool(asks.all()):
                yield q, k, {"causal": capture.causal, "window": capture.window}
                continue
            band = Band.of(queries, keys, causal=capture.causal, window=capture.window)
            allowed = band.visible(queries, keys, q.device)
        else:
            mask = capture.mask[number if len(capture.mask) > 1 else 0]
            if len(mask) > 1 and not bool((mask == mask[:1]).all()):
                skipped[capture.path] = "its heads have masks of their own"
                return
            allowed = mask[0].expand(queries, keys)
        rows, columns = allowed.any(1) & asks, (allowed & asks[:, None]).any(0)
        options = shape_of(allowed[rows][:, columns])
        if options is None:
            skipped[capture.path] = "its mask is neither full nor causal nor a window"
        elif int(columns.sum()) > 1 and bool(rows.any()):
            yield q[:, rows], k[:, columns], options


def shape_of(allowed: Tensor) -> dict[str, Any] | None:
    """Return full, causal, or a window on one side or both, whichever a mask is; None if it is something else."""
    queries, keys = allowed.shape
    widest = int(allowed.sum(1).max()) if allowed.numel() else 0
    candidates: list[dict[str, Any]] = [{"causal": False, "window": None}, {"causal": True, "window": None}]
    candidates += [{"causal": True, "window": widest}, {"causal": False, "window": (widest + 1) // 2}]
    for options in candidates:
        if options["window"] == 0:
            continue
        if bool((Band.of(queries, keys, **options).visible(queries, keys, allowed.device) == allowed).all()):
            return options
    return None


def measure(
    q: Tensor,
    k: Tensor,
    capture: Capture,
    options: dict[str, Any],
    baselines: bool,
    entropy: bool,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """Return the numbers of every head for one sequence."""
    field = energy_field(q, k, scale=capture.scale, **options)
    unmasked = field if field.bound is not None else energy_field(q, k, scale=capture.scale)
    # The largest a row of this energy could sum to.
    most = (field.row_energies * field.keys[..., None]).sqrt().amax(-1).clamp(min=1e-30)
    assert unmasked.bound is not None
    statistics: dict[str, Tensor] = {
        "rank": unmasked.rank,
        "rank_excess": unmasked.rank - unmasked.bound,
        "effective_rank": unmasked.effective_rank,
        "stable_rank": unmasked.stable_rank,
        "participation": field.participation,
        "coherence": field.coherence,
        "zero_sum_error": torch.maximum(field.row_sums.abs().amax(-1), unmasked.row_sums.abs().amax(-1)) / most,
    }
    if entropy:
        softmax = softmax_statistics(q, k, scale=capture.scale, softcap=capture.softcap, **options)
        statistics |= {
            "entropy": softmax.mean_entropy,
            "evenness": softmax.evenness,
            "largest_logit": softmax.largest_logit,
        }
    if baselines:
        for name, keys in (("gaussian", gaussian_keys(k, generator)), ("shuffled", shuffled_keys(k, generator))):
            other = energy_field(q, keys, scale=capture.scale, **options)
            statistics[f"{name}_participation"] = other.participation
            if name == "shuffled":
                statistics["shuffled_coherence"] = other.coherence
    shared: dict[str, Any] = {
        "attention": _words(options),
        "length": k.shape[-2],
        "width": q.shape[-1],
        "bound": float(unmasked.bound),
        "gaussian_coherence": gaussian_coherence(k.shape[-2], k.shape[-1])[0] if baselines else math.nan,
        "limit": ROUNDING[torch.float64 if q.dtype == torch.float64 else torch.float32],
    }
    heads = q.shape[0]
    return [shared | {name: float(value[head]) for name, value in statistics.items()} for head in range(heads)]


def gaussian_keys(k: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gaussian keys with the mean and covariance of those given."""
    moments = TokenMoments.of(k)
    rows = moments.factor.shape[-2]
    noise = torch.randn(*k.shape[:-1], rows, generator=generator, dtype=torch.float64).to(k.device)
    keys = moments.mean[..., None, :] + noise @ moments.factor / math.sqrt(k.shape[-2])
    return keys.to(torch.promote_types(k.dtype, torch.float32))


def shuffled_keys(k: Tensor, generator: torch.Generator) -> Tensor:
    """Permute the values of every entry over positions, independently of the other entries."""
    order = torch.rand(k.shape, generator=generator, dtype=torch.float64).argsort(-2).to(k.device)
    return k.gather(-2, order)


def _words(options: dict[str, Any]) -> str:
    if options["window"] is not None:
        return f"{'causal ' if options['causal'] else ''}window {options['window']}"
    return "causal" if options["causal"] else "full"


_EXTREMES = {"largest_logit", "zero_sum_error", "rank_excess", "width"}


def _row(layer: str, head: int, parts: list[dict[str, Any]]) -> HeadRow:
    """Return many sequences as one row."""
    values: dict[str, Any] = {"layer": layer, "head": head, "sequences": len(parts)}
    for name in (field.name for field in fields(HeadRow)):
        if name in values:
            continue
        numbers = [part.get(name, math.nan) for part in parts]
        if name == "attention":
            values[name] = numbers[0]
        elif name in _EXTREMES:
            values[name] = max(numbers)
        else:
            known = [number for number in numbers if not math.isnan(number)]
            values[name] = sum(known) / len(known) if known else math.nan
    return HeadRow(**values)


def _judge(rows: tuple[HeadRow, ...], limit: float) -> Verdict:
    """Return the two statements that hold for every softmax attention, on the observed calls."""
    if not rows:
        return Verdict(status=Verdict.INCONCLUSIVE, message="No attention of this model could be described.")
    error = max(row.zero_sum_error for row in rows)
    over = max(row.rank_excess for row in rows)
    evidence = (
        Evidence(what="largest row sum over the largest possible", value=error, limit=limit, samples=len(rows)),
        Evidence(what="rank beyond its bound", value=float(over), limit=0.0, samples=len(rows)),
    )
    if error <= limit and over <= 0:
        message = f"Rows sum to zero and ranks obey their bound in all {len(rows)} heads."
        return Verdict(status=Verdict.VERIFIED, message=message, evidence=evidence)
    message = "A row sum or a rank is not what softmax attention allows: queries and keys were not observed correctly."
    return Verdict(status=Verdict.REFUTED, message=message, evidence=evidence)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
