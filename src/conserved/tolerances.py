"""Tolerances that several parts of the package hold numbers against, each with its derivation or its measurement.

A tolerance that one file alone uses stands in that file, beside what it limits.
"""

from __future__ import annotations

import math

import torch

HALF = (torch.bfloat16, torch.float16)
"""Precisions in which a residual says less than the noise that a replay measures."""

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
"""The relative error of one rounding that tests of single functions count in, by precision.

It is half the spacing of numbers just above one; in bfloat16 a quarter, with which the limits of `check` were measured
(benchmarks/check_clean.py, benchmarks/check_catalogue.py).
"""

COARSE_UNIT = 2.0**-13
"""A function whose rounding is above this computes in half precision, or like it: float16 has 2⁻¹¹, tensor cores that
take single precision 2⁻¹²."""

RESIDUAL_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative residual of an identity on many entries that rounding explains, by precision of the pass
(benchmarks/clean_passes.py)."""

SIGMAS = 6.0
"""Measured noise that an identity may show. One sample of n entries has a relative spread of 1/√(2n): six leaves room
for identities of few entries. Clean passes reached 5.2 over eight regimes and four sizes (results/audit_noise_h200):
the margin is small, and was chosen before they were looked at."""

ROOT_MEAN_SQUARE = math.sqrt(1 / 6)
"""Root mean square of the relative error of rounding once, in units of u."""

NOISE, ROUNDING = 14.0, 32.0
"""How many standard deviations of a gradient's own noise, and roundings of its size, a right gradient of a function may
be off. The deviation is estimated from rows of 16 entries; such estimates are low by a third once in 10⁴. Clean
functions came as near as 0.995 of a limit (benchmarks/check_clean.py)."""

AS_INTENDED = 4.0
"""Roundings of the given precision by which the gradient of a more precise form of a function may be off."""

USEFUL_SHARE, USEFUL_SHARE_OF_SUMS = 0.5, 0.25
"""A test that allows more than this share of a gradient tests nothing: entry by entry, and for sums over entries.

The bias of a sum is known to about its own size only."""

UPDATE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.03}
"""How far an update may be from the rule's, relative to the largest of its tensor or to the norm of its block, by type
of the weights.

In bfloat16 torch rounds by 2⁻⁸ after each of about eight operations. Sampled entries of 15 optimizers stayed below a
third of it. Float16 is left out: squares of small gradients underflow there.
"""
