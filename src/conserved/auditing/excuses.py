"""Why an identity that does not hold may not mean a wrong gradient: tables, functions, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from conserved.auditing.backward_pass import BackwardPass
from conserved.auditing.lookup_tables import lost, tables
from conserved.inference.derivation import Derivation
from conserved.inference.moving_parameters import moved, runs
from conserved.laws.identities import HALF
from conserved.symmetry import Symmetry, Tensors, whole

EXPLAINED = 24
"""Failures that are looked into one by one, worst first; each costs a transfer from the device."""

EITHER = "either the backward is wrong or this function is not what its place suggests"

_SEEDS = 6
"""Random group elements, and seeds of the model's own randomness, that a law in doubt is tried with."""

_SOFT = 0.2
"""The share of what half a motion does to the outputs that a law up to ε may do to them."""

_CUT = 16
"""Entries of several gradients that have one magnitude, the largest, if gradients were clipped by value."""


def untrue(backward: BackwardPass, broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Of broken laws that were not read off the program as a proof, those that the forward pass does not keep either.

    Parameters are moved along them, with the inputs that the laws were read off and the randomness of several seeds.
    """
    found = _longer(broken)
    known = backward.laws.derivation
    broken = [symmetry for symmetry in broken if symmetry.name not in found]
    doubted = [symmetry for symmetry in broken if symmetry.source != "typed"][:EXPLAINED]
    if not doubted or not isinstance(known, Derivation) or known.call is None:
        return found
    run = runs(backward.model, *known.call)
    theta = dict(backward.model.named_parameters())
    try:
        if all(moved(run, theta, doubted, seed=seed).holds for seed in range(_SEEDS)):
            return found
        for symmetry in doubted:
            changes = [moved(run, theta, [symmetry], seed=seed) for seed in range(_SEEDS)]
            worst = max(changes, key=lambda one: one.change)
            # A law up to ε changes the outputs by as much as ε is worth.
            bound = 0.0 if symmetry.exact else _SOFT
            if any(one.holds is False and one.change > bound * one.half for one in changes):
                text = f"moving the parameters along it changes the outputs by {worst.change:.1g}: it is no law here"
                found[symmetry.name] = (f"{EITHER}: {text}",)
    except Exception:
        # A model that cannot be called again decides nothing.
        return found
    return found


def _longer(broken: Sequence[Symmetry]) -> dict[str, tuple[str, ...]]:
    """Broken laws of tables with rows that the call the laws were read off did not reach, and that are reached now."""
    reached = {name for symmetry in broken if symmetry.family == "unused" for name in symmetry.parameters}
    text = "rows have a gradient that inputs did not reach when the laws were read off: infer them from longer inputs"
    return {symmetry.name: (text,) for symmetry in broken if reached.intersection(symmetry.parameters)}


def lost_since(backward: BackwardPass, broken: Sequence[Symmetry]) -> dict[str, str]:
    """Of laws that seem broken, those that are none any more because of what training did to a table."""
    looked_up = tables(backward.model) if broken else {}
    return {symmetry.name: reason for symmetry in broken if (reason := lost(symmetry, looked_up))}


def clipped_at(broken: Sequence[Symmetry], slopes: Tensors) -> float | None:
    """The value at which gradients were cut off, if they look as if they were; no law survives that.

    Many entries have exactly the largest magnitude of all; one or two may by chance, or by symmetry.
    """
    names = dict.fromkeys(name for symmetry in broken for name in symmetry.parameters)
    tensors = [whole(slopes[name]).detach() for name in names if not slopes[name].is_sparse]
    tensors = [one for one in tensors if one.numel() and one.dtype not in HALF]
    if not tensors:
        return None
    peaks = [one.abs().max() for one in tensors]
    peak = float(torch.stack([one.double().to(peaks[0].device) for one in peaks]).max())
    if not 0 < peak < math.inf:
        return None
    cut = [one.abs() == peak for one in tensors]
    many = sum(int(one.sum()) for one in cut)
    pairs = zip(tensors, cut, strict=True)
    both = any(bool((one[where] > 0).any()) and bool((one[where] < 0).any()) for one, where in pairs)
    return peak if many >= _CUT and both and sum(bool(one.any()) for one in cut) > 1 else None
