r"""Attention whose keys and values are centered before the kernel: the same function, a far more accurate backward.

Let s_ij = a q_i·k_j + b_ij, P = softmax(s) by rows, O_i = Σ_j P_ij v_j. Two symmetries are exact, for any c and e:

    attn(q, k, v) = attn(q, k - c, v - e) + e                                                     (1)

A constant c adds -a q_i·c to all scores of row i, which softmax ignores. Rows of P sum to one, so e comes out
unchanged. Neither side depends on c or e, so they need no gradient: those for k - c and v - e are those for k and v.

**Error before.** Fused kernels compute, with u the unit roundoff of the stored precision (2⁻⁸ bf16, 2⁻¹¹ fp16),

    δ_i = dO_i·fl(O_i),   dS_ij = P_ij (dO_i·v_j - δ_i),   dQ_i = a Σ_j fl(dS_ij) k_j,   dK_j = a Σ_i fl(dS_ij) q_i

so that δ_i is off by ε_i, |ε_i| <= u Σ_c |dO_ic||O_ic| (and as much again where the kernel rounds P before P v).
With k̄_i = Σ_j P_ij k_j,

    |ΔdQ_i| <= a (|ε_i| |k̄_i| + u Σ_j |dS_ij| |k_j|) + u |dQ_i|                                     (2)
    |ΔdK_j| <= a (Σ_i |ε_i| P_ij |q_i| + u Σ_i |dS_ij| |q_i|) + u |dK_j|

The true dS has zero row sums, Σ_j dS_ij = 0, so dQ_i contains differences of keys and of values only, while ε_i k̄_i
contains their sizes. Where keys and values share a large component, as in deep layers early in training, (2) exceeds
|dQ_i|.

**Error after.** O_i becomes O_i - e, k_j becomes k_j - c, and (2) reads

    |ΔdQ_i| <= a (u Σ_c |dO_ic| |O_ic - e_c| |k̄_i - c| + u Σ_j |dS_ij| |k_j - c|) + u |dQ_i|         (3)

plus the rounding of the subtractions: fl(k - c) = k - c + η with |η_j| <= u |k_j - c| moves s_ij by a q_i·η_j. It is
zero where c/2 <= k <= 2c. `gauge_constants` chooses c and e, and leaves out the components that would lose by it.

**Dropout.** Dropped rows sum to r_i, not to one, so that attn(q, k, v) = attn(q, k - c, v - e) + r_i e with r_i unknown
outside the kernel. Keys are still exact (P is made before anything is dropped), so keys alone are centered.

**Rows that see no key** are zero (or NaN) for any v, and must stay so. A mask that is a tensor says which they are.
Where masks are of another kind, e lies beyond all values in one column. A row that sees a key is then not zero in that
column, while a row that sees none is zero in all, and e is added to the former only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conserved._torch_compat import SCALED_DOT_PRODUCT
from conserved.attention.fused_centering import ShiftedKeysAndValues, ShiftedOutput, kernels_apply
from conserved.attention.gauge_constants import Constants, row_constants, with_marker
from conserved.attention.invariance import Attend, Invariance, probe_invariance
from conserved.attention.sampled_rows import (
    causal_bias_as_flag,
    document_of_tokens,
    packed_documents,
    readable_mask,
)

_SDPA = SCALED_DOT_PRODUCT
"""PyTorch's function itself, whatever listeners have put in its place in `torch.nn.functional`."""

_SDPA_POSITIONAL = ("attn_mask", "dropout_p", "is_causal")


class CenteredAttention:
    """An attention function that subtracts one constant from all keys and one from all values of each head.

    Made by `centered`; call it as the function that it wraps.
    """

    def __init__(
        self,
        attention: Callable[..., Any],
        *,
        keys: bool = True,
        values: bool = True,
        causal: bool = False,
        axis: int = -2,
        output_axis: int = -2,
    ) -> None:
        """Wrap a function; `centered` describes the arguments."""
        self.attention = attention
        self.keys = keys
        self.values = values
        self.causal = causal
        self.axis = axis
        self.output_axis = output_axis
        self.probed: dict[Any, Invariance] = {}
        """Results of probing, by the kind of call."""
        self._is_sdpa = attention in (_SDPA, F.scaled_dot_product_attention)
        self._names = _SDPA_POSITIONAL if self._is_sdpa else _positional_names(attention)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        """Return attention(query, key, value, …), computed with centered keys and values.

        Raises:
            NotInvariantError: the function is not invariant under the shifts, as found when it is called for the first
                time with such options.
        """
        # Listeners replace PyTorch's function where it is looked up, so look it up in every call.
        attention = F.scaled_dot_product_attention if self._is_sdpa else self.attention
        attend = partial(_call, attention, args, options)
        named = dict(zip(self._names, args, strict=False)) | options
        return self.apply(attend, query, key, value, named, plain=self._is_sdpa and named.get("attn_mask") is None)

    def apply(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Mapping[str, Any],
        *,
        plain: bool = False,
    ) -> Any:
        """Center the arguments of one call.

        Args:
            attend: the function of queries, keys and values, with its further arguments bound.
            query: queries, with tokens along `axis`.
            key: keys as the scores use them: after norms and rotary positions.
            value: values.
            options: the further arguments by name, from which masks are read.
            plain: whether the function is known to be invariant and every row to see a key.

        Returns:
            What `attend` returns.
        """
        options = causal_bias_as_flag(options)
        if key.is_nested or not (query.shape[self.axis] and key.shape[self.axis]) or self._decodes(query, key):
            return attend(query, key, value)
        values = self.values and not drops(options)
        if not (plain or torch.compiler.is_compiling()):
            invariance = self.invariance(attend, query, key, value, options)
            if self.keys:
                invariance.require_keys(getattr(self.attention, "__name__", repr(self.attention)))
            values = values and invariance.returns_value_shift
        if self.causal:
            options = {"is_causal": True, **options}
        q, k, v = (heads_first(tensor, self.axis) for tensor in (query, key, value))
        constants = self._constants(q, k, v, options, values=values, plain=plain)
        shifted_key, shifted_value = (heads_first(tensor, self.axis) for tensor in _shifted(k, v, constants))
        outputs = attend(query, shifted_key, shifted_value)
        first, *others = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if constants.value is not None:
            sees = None if plain else self._sees(first, q, k, options)
            first = self._restored(first, constants.of_tokens(constants.value), sees)
        if isinstance(outputs, list):
            return [first, *others]
        return (first, *others) if isinstance(outputs, tuple) else first

    def invariance(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Invariance:
        """Probe a kind of call once: a kind is the values of its options, but for tensors that are not parameters."""
        shown = [(name, _kind(option)) for name, option in sorted(options.items())]
        kind = (*shown, query.dtype, query.device.type, query.ndim, query.shape[-1])
        if kind not in self.probed:
            q, k = (heads_first(tensor, self.axis) for tensor in (query, key))
            bounds = packed_documents(q, k, options)
            signs = None if bounds is None else 1.0 - 2.0 * (document_of_tokens(bounds, key.shape[self.axis]) % 2)
            self.probed[kind] = probe_invariance(attend, query, key, value, signs, self.axis, self.output_axis)
        return self.probed[kind]

    def _decodes(self, query: Tensor, key: Tensor) -> bool:
        return not torch.is_grad_enabled() and query.shape[self.axis] < key.shape[self.axis]

    def _constants(
        self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], *, values: bool, plain: bool
    ) -> Constants:
        """Return the constants in the dtypes of keys and values, without gradients."""
        device = key.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            chosen = row_constants(query.detach(), key.detach(), value.detach(), options)
            constant = chosen.value if values else None
            if constant is not None:
                # The same number must be subtracted and added, so it is rounded to what the output is stored in.
                stored = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
                if not (plain or readable_mask(query, key, options) is not None):
                    constant = with_marker(constant, value, stored)
                constant = constant.to(stored).to(value.dtype)
            key_constant = chosen.key.to(key.dtype) if self.keys and chosen.key is not None else None
            return Constants(key_constant, constant, chosen.documents)

    def _sees(self, output: Tensor, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Return for every output row whether it sees a key: from the mask, or else by the marker."""
        mask = readable_mask(query, key, options)
        if mask is None:
            return (output.detach() != 0).any(-1, keepdim=True)
        rows = mask if mask.dtype == torch.bool else mask > -torch.inf
        return heads_first(rows.any(-1, keepdim=True), self.output_axis)

    def _restored(self, output: Tensor, constant: Tensor, sees: Tensor | None) -> Tensor:
        """Add the constant of the values to the output rows that see a key, for each query head of a group."""
        rows = heads_first(output, self.output_axis)
        if sees is None and _same_heads(rows, constant) and kernels_apply(rows, constant):
            return heads_first(ShiftedOutput.apply(rows, constant), self.output_axis)
        if output.ndim > 2 and constant.ndim > 2:
            heads = output.shape[-3 if self.output_axis == -2 else -2]
            if heads > constant.shape[-3] > 1:
                constant = constant.repeat_interleave(heads // constant.shape[-3], -3)
        constant = heads_first(constant, self.output_axis).to(output.dtype)
        return output + (constant if sees is None else constant * sees)

    def __repr__(self) -> str:
        name = getattr(self.attention, "__name__", repr(self.attention))
        return f"centered({name}, keys={self.keys}, values={self.values})"


def centered(
    attention: Callable[..., Any] = F.scaled_dot_product_attention,
    *,
    keys: bool = True,
    values: bool = True,
    causal: bool = False,
    axis: int = -2,
    output_axis: int | None = None,
) -> CenteredAttention:
    """Return the same attention with an accurate backward pass in half precision.

        attend = conserved.attention.centered()
        y = attend(q, k, v, is_causal=True)                                      # as scaled_dot_product_attention

        attend = conserved.attention.centered(flash_attn_func, axis=-3)          # (batch, length, heads, width)

    One constant per head is subtracted from all keys and one from all values, and the latter is added to the output.
    Softmax attention does not change by that, with any mask, window, packing, grouping of heads or position encoding
    of the keys. Its gradients in half precision do: rounding of what keys and values have in common no longer enters.

    The function is probed when it is called with new options for the first time, and not under `torch.compile`.
    PyTorch's own function without a mask needs no probe. With dropout only keys are centered. Calls that decode, with
    fewer queries than keys and without gradients, and nested tensors go to the function unchanged.

    Args:
        attention: any function of queries, keys, values and further arguments that is invariant under a shift of keys.
        keys: whether to center keys.
        values: whether to center values.
        causal: whether the function hides later keys without an argument that says so. Constants are chosen by it, so
            it matters for accuracy only.
        axis: the axis of tokens in queries, keys and values: -2 for (…, heads, length, width) as in PyTorch, -3 for
            (…, length, heads, width) and packed (length, heads, width) as in flash-attn.
        output_axis: the axis of tokens in the output; by default `axis`.

    Returns:
        A function with the signature of `attention`.

    Raises:
        TypeError: `attention` cannot be called.
        ValueError: an axis is none of those.
    """
    if not callable(attention):
        raise TypeError(f"Expected an attention function, got {type(attention).__name__}. Pass a callable.")
    output_axis = axis if output_axis is None else output_axis
    for name, value in (("axis", axis), ("output_axis", output_axis)):
        if value not in (-2, -3):
            raise ValueError(f"Expected {name} to be -2 or -3, got {value}. Pass the axis of tokens, from the end.")
    return CenteredAttention(attention, keys=keys, values=values, causal=causal, axis=axis, output_axis=output_axis)


def _shifted(key: Tensor, value: Tensor, constants: Constants) -> tuple[Tensor, Tensor]:
    """Subtract the constants, in one launch if there are two and kernels apply."""
    c, e = (None if part is None else constants.of_tokens(part) for part in (constants.key, constants.value))
    if c is None or e is None:
        return key if c is None else key - c, value if e is None else value - e
    if _same_heads(key, c) and _same_heads(value, e) and kernels_apply(key, value, c, e):
        shifted: tuple[Tensor, Tensor] = ShiftedKeysAndValues.apply(key, value, c, e)
        return shifted
    return key - c, value - e


def _same_heads(tensor: Tensor, constant: Tensor) -> bool:
    """Return whether a constant has a vector for every batch entry and every (group of) heads, as kernels read it."""
    return (
        tensor.ndim == constant.ndim == 4
        and constant.is_contiguous()
        and constant.shape[0] == tensor.shape[0]
        and constant.shape[2] == 1
        and tensor.shape[1] % constant.shape[1] == 0
    )


def _call(
    attention: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> Any:
    return attention(q, k, v, *args, **options)


def heads_first(tensor: Tensor, axis: int) -> Tensor:
    """Exchange the axes of heads and tokens if tokens come first; the same exchange goes back."""
    return tensor if axis == -2 or tensor.ndim < 3 else tensor.transpose(-3, -2)


def _positional_names(attention: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of what may follow queries, keys and values without a name."""
    try:
        parameters = list(inspect.signature(attention).parameters.values())
    except (TypeError, ValueError):
        return ()  # builtins have no signature
    return tuple(item.name for item in parameters[3:] if item.kind is item.POSITIONAL_OR_KEYWORD)


def drops(options: Mapping[str, Any]) -> bool:
    """Return whether the options name a dropout probability that is not zero."""
    return any(bool(options.get(name)) for name in ("dropout_p", "dropout"))


_DEPTH = 4
"""How deep `_kind` looks into containers, objects and what functions close over."""


def _kind(option: Any, depth: int = _DEPTH) -> Any:
    """Return a value that two options share only if the function cannot tell one from the other by its symmetry.

    Numbers, names and what functions and plain objects consist of count by value: a cap on scores may be an argument of
    a function or an attribute of a configuration. Masks differ from call to call, so tensors count by type, except for
    parameters, which may be the sinks of one layer.
    """
    if isinstance(option, bool | int | float | str | bytes | None):
        return option
    name = f"{type(option).__module__}.{type(option).__qualname__}"
    if isinstance(option, Tensor):
        return (name, id(option)) if option.is_leaf and option.requires_grad else name
    if depth == 0:
        return name
    if isinstance(option, partial):
        parts: Any = (option.func, option.args, option.keywords)
    elif isinstance(option, FunctionType):
        cells = [_contents(cell) for cell in option.__closure__ or ()]
        parts = (*(option.__defaults__ or ()), *(option.__kwdefaults__ or {}).values(), *cells)
        return (name, option.__code__, *(_kind(part, depth - 1) for part in parts))
    elif isinstance(option, MethodType):
        parts = (option.__func__, option.__self__)
    elif isinstance(option, Mapping):
        parts = [part for pair in option.items() for part in pair]
    elif isinstance(option, tuple | list):
        parts = option
    else:
        parts = [part for pair in getattr(option, "__dict__", {}).items() for part in pair]
    return (name, *(_kind(part, depth - 1) for part in parts))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later
        return None
