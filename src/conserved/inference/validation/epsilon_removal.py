"""Runs a program with the ε of its normalisations at zero, where laws up to ε are exact."""

from __future__ import annotations

from typing import Any

from conserved._torch_compat import TorchDispatchMode, schema_of

NEARLY_ZERO = 1e-200
"""Stands for zero: batch norms refuse an ε of zero, and no sum in float64 sees this one."""

_NORM_ARGUMENTS = {
    "aten::native_layer_norm": 4,
    "aten::native_group_norm": 7,
    "aten::_fused_rms_norm": 3,
    "aten::native_batch_norm": 7,
    "aten::_native_batch_norm_legit": 7,
    "aten::_native_batch_norm_legit_functional": 7,
    "aten::_batch_norm_with_update": 6,
}
"""By normalisation, the position of its ε."""

_ADDED = ("aten::add", "aten::add_", "aten::clamp_min", "aten::clamp_min_", "aten::clamp", "aten::clamp_")
"""Operations by which programs write an ε out, as second argument."""


class WithoutEpsilon(TorchDispatchMode):
    """Replaces ε in norms, and the same numbers where they are added or clamped to, by almost nothing."""

    def __init__(self, epsilons: frozenset[float]) -> None:
        super().__init__()
        self.epsilons = epsilons

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler for this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        argument = _NORM_ARGUMENTS.get(schema_of(func).name)
        if argument is None and schema_of(func).name in _ADDED and len(args) > 1 and self._is_epsilon(args[1]):
            argument = 1
        if argument is not None and argument < len(args):
            args = (*args[:argument], NEARLY_ZERO, *args[argument + 1 :])
        return func(*args, **(kwargs or {}))

    def _is_epsilon(self, value: Any) -> bool:
        # Programs hold ε in single precision at times, as a tensor's item: 1e-6 is then 9.9999999747e-07.
        return isinstance(value, float) and any(abs(value - epsilon) <= 1e-6 * epsilon for epsilon in self.epsilons)
