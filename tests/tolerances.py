"""Every tolerance of the tests, in one table."""

import torch

FUNCTION_UNCHANGED = 1e-11
"""Relative change of a model's output under a finite group element, in float64."""

IDENTITY = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative residual of a gradient identity, by the precision of the backward pass."""

FLOW = 1e-9
"""Relative change of a law along an integrated gradient flow."""

EXACT_STEP = 1e-13
"""Gap between a step's exact drift formula and the change of the law, over the size of the law's terms."""

AGREE = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Fast path against naive reference."""

ORDER = 0.1
"""Distance of a fitted exponent from the predicted one."""

SEEN = 1e-3
"""A mutated rule must leave at least this relative residual."""

FIELD = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The energy field against the naive computation, over its largest singular value."""

FIELD_ENERGIES = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Energies of a field over the largest of them, by the precision of the work; for a masked field that is float64."""

FIELD_WINDOW = 1e-10
"""The same for a window, a difference of two sums."""

FIELD_SPECTRUM = {torch.float64: 1e-13, torch.float32: 2e-8}
"""Singular values of a whole field over the largest of them."""

FIELD_LEVERAGES = {torch.float64: 1e-11, torch.float32: 1e-6}
"""Leverages of keys whose directions are of like size."""
