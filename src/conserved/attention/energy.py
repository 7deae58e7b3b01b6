r"""The energy field of softmax attention: the logits, each row centred over the keys it sees, without forming them.

Softmax does not change when a row of logits is shifted, so all it can see is E_ij = z_ij − mean_j z_ij. For queries Q,
keys K (both as the attention uses them: after norms and rotary positions) and all keys visible, with K_c = K − 1 k̄ᵀ,

    E = s Q K_cᵀ,   s = 1/√d unless given.

*Rows sum to zero:* E 1 = s Q K_cᵀ 1 = 0, since the columns of K_c do. The same holds row by row under any mask.
*Rank:* E factors through R^d, and K_cᵀ 1 = 0, so rank E ≤ min(d, L_k − 1). The fields of all query heads that share
keys factor through the same K_c, so stacked they obey the same bound. A bias per key adds one column to K and a column
of ones to Q: the bound grows by one. So does a bias that is linear in the distance of query and key, whose part that
depends on the query alone is centred away. A cap on the logits (softcap) is not linear: no bound survives it.
*Spectrum:* with factors A of QᵀQ = AᵀA and B of K_cᵀK_c = BᵀB, Q = U A and K_c = V B for U, V with orthonormal
columns, so the singular values of E are those of the d × d matrix s A Bᵀ: exact in O(L d²), and A, B come from sums
over keys and queries that combine exactly over blocks and machines (`TokenMoments`).
*Energies:* ‖E_i:‖² = s² ‖B q_i‖² and ‖E_:j‖² = s² ‖A k_cj‖².

Under a causal mask or a window every row has its own mean, a_i = mean over visible j of s q_i·k_j, and
E_ij = (s q_i, −a_i)·(k_j, 1) where j is visible. A block of E that is visible throughout has rank ≤ d + 1 (d for its
first term, 1 for the means), but E as a whole has no such bound: its diagonal is free. Its row and column energies are
sums of squares over visible pairs, which `Band` takes in O(L d²).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from conserved.attention import display
from conserved.attention.band import Band
from conserved.attention.coherence import KeySpace
from conserved.attention.lanczos import leading_values
from conserved.attention.moments import TokenMoments, block_rows, token_moments
from conserved.attention.prefix_sums import Rows
from conserved.attention.small_matrices import placed
from conserved.attention.token_passes import key_forms, key_pass, row_energies, row_sums

DENSE = 512
"""Up to this length the field of a masked head is formed, and its whole spectrum taken."""

_DOUBLE = torch.finfo(torch.float64).eps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EnergyField:
    """Exact statistics of the energy field of every head.

    `complete` says whether `singular_values` are all of them (zeros beyond the bound left out) or, for a long masked
    field, the leading ones. `row_sums` are zero but for rounding. `leverages` are those of the centred keys, whose rank
    is `key_rank`. NaN stands for quantities without a value: the spread of a field of zeros, and quantities of the
    whole spectrum where only its leading part is known.
    """

    singular_values: Float[Tensor, "*heads values"]
    row_sums: Float[Tensor, "*heads queries"]
    row_energies: Float[Tensor, "*heads queries"]
    column_energies: Float[Tensor, "*heads keys"]
    leverages: Float[Tensor, "*heads keys"]
    ridge_leverages: Float[Tensor, "*heads keys"] | None
    ridge_dimension: Float[Tensor, "*heads"] | None
    key_rank: Int[Tensor, "*heads"]
    keys: Float[Tensor, "*heads"]
    bound: int | None
    complete: bool
    floor: Float[Tensor, "*heads"]

    @property
    def rank(self) -> Float[Tensor, "*heads"]:
        """The number of singular values above rounding; NaN where not all are known."""
        rank = (self.singular_values > self.floor[..., None]).sum(-1).double()
        return rank if self.complete else torch.full_like(rank, torch.nan)

    @property
    def energy(self) -> Float[Tensor, "*heads"]:
        """‖E‖², the sum of the squares of all entries."""
        return self.row_energies.sum(-1)

    @property
    def participation(self) -> Float[Tensor, "*heads"]:
        """1/(L Σ p²) for the shares p of the columns in the energy: 1 is even, 1/L is one key."""
        return _participation(self.column_energies, self._nothing) / self.keys

    @property
    def coherence(self) -> Float[Tensor, "*heads"]:
        """(L/r) max leverage of the centred keys, between 1 (even) and L/r (one key is a direction of its own)."""
        spread = self.keys / self.key_rank * self.leverages.amax(-1)
        return torch.where(self.key_rank > 0, spread, torch.nan)

    @property
    def ridge_coherence(self) -> Float[Tensor, "*heads"]:
        """(L/d_λ) max ridge leverage, with d_λ the sum of the ridge leverages."""
        if self.ridge_leverages is None or self.ridge_dimension is None:
            raise ValueError(
                "Expected a field with ridge leverages, got one without. Call energy_field(…, ridge=0.01)."
            )
        spread = self.keys / self.ridge_dimension * self.ridge_leverages.amax(-1)
        return torch.where(self.key_rank > 0, spread, torch.nan)

    @property
    def effective_rank(self) -> Float[Tensor, "*heads"]:
        """exp of the entropy of σ/Σσ (Roy and Vetterli, 2007); NaN where not all σ are known."""
        total = self.singular_values.sum(-1, keepdim=True)
        shares = self.singular_values / total
        rank = torch.special.entr(shares).sum(-1).exp()
        rank = torch.where(self._nothing, 0.0, rank)
        return rank if self.complete else torch.full_like(rank, torch.nan)

    @property
    def stable_rank(self) -> Float[Tensor, "*heads"]:
        """‖E‖_F²/‖E‖², at most the rank; NaN where no singular value is known."""
        if not self.singular_values.shape[-1]:
            return torch.full_like(self.energy, torch.nan)
        rank = self.energy / self.singular_values[..., 0].square()
        return torch.where(self._nothing, 0.0, rank)

    def __repr__(self) -> str:
        return f"<EnergyField: {display.title(self)}>"

    def __str__(self) -> str:
        """Return a table by head, for `print`."""
        return display.text(self)

    def _repr_html_(self) -> str:
        """Return a table by head, for notebooks."""
        return display.table(self)

    @property
    def _nothing(self) -> Bool[Tensor, "*heads"]:
        """Return whether the field of each head is zero up to rounding."""
        largest = self.singular_values[..., 0] if self.singular_values.shape[-1] else self.energy.sqrt()
        return largest <= self.floor


def energy_field(
    q: Float[Tensor, "*heads queries d"],
    k: Float[Tensor, "*kv_heads keys d"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    key_bias: Float[Tensor, "..."] | None = None,
    slope: float | Float[Tensor, "..."] | None = None,
    query_mask: Bool[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "..."] | None = None,
    ridge: float | None = None,
    leading: int = 0,
) -> EnergyField:
    """Return the energy field of queries and keys as the attention uses them, for every head at once.

    >>> field = energy_field(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    >>> field.singular_values, field.rank    # E = (1, 2)ᵀ (−1, 1)
    (tensor([3.1623], dtype=torch.float64), tensor(1., dtype=torch.float64))

    Args:
        q: queries, (…, heads, queries, d).
        k: keys, (…, key heads, keys, d); several query heads may share a key head.
        causal: whether a query sees no later key; the last query stands at the last key.
        window: the largest number of keys a query sees; by default no limit.
        scale: factor of the logits; by default 1/√d.
        key_bias: (…, keys), added to every row of logits; −inf hides a key.
        slope: the slope of a bias −slope · distance (ALiBi, causal only), one for all heads or one for each.
        query_mask: False marks a row that sees nothing, such as padding.
        key_mask: False hides a key.
        ridge: asks for ridge leverages, with λ = ridge · mean squared singular value of the keys.
        leading: number of singular values to find of a masked field longer than 512, where none are found by default;
            each takes a few dozen passes.

    Returns:
        Singular values, energies of rows and columns, and leverages of the keys, by head; the rest follows from them.

    Raises:
        ValueError: shapes do not fit each other, values are not finite, or a `slope` is given without `causal`.
        TypeError: queries or keys are not floating-point tensors.
    """
    q, k, query_mask, key_mask, groups = _checked(q, k, query_mask, key_mask)
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if key_bias is not None:
        q, k, key_mask = _with_bias(q, k, key_bias, key_mask, scale, groups)
    if slope is not None:
        if not causal:
            raise ValueError(
                "Expected a mask that is causal or no slope, got a slope in both directions. That bias is not "
                "linear in the key, so it has no exact field: pass causal=True."
            )
        q, k = _with_slope(q, k, slope, scale, groups)
    band = Band.of(q.shape[-2], k.shape[-2], causal=causal, window=window)
    # Sums over keys and queries are queued at once: the keys are factored while those of the queries are under way.
    keys_of = token_moments(k, key_mask)
    queries_of = token_moments(q, query_mask, triangular=True) if band.whole else None
    keys = keys_of()
    # Coarser keys are summed to 1e-8 of the largest: a direction below that is not theirs.
    space = KeySpace.of(keys, ridge, tolerance=1e-12 if k.dtype == torch.float64 else 1e-7)
    if queries_of is not None:
        field = _whole(q, k, queries_of, keys, space, query_mask, key_mask, scale)
    else:
        field = _masked(q, k, keys, space, band, query_mask, key_mask, scale, leading)
    return field if groups is None else _flattened(field)


def _whole(
    q: Tensor,
    k: Tensor,
    queries_of: Callable[[], TokenMoments],
    keys: TokenMoments,
    space: KeySpace,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> EnergyField:
    """Compute the field where every query sees every key. The device has work queued while the host factors."""
    heads, b = q.shape[:-2], keys.factor
    mean, query_form = placed(k.device, keys.mean, abs(scale) * b.mT)
    rows = row_energies(q, query_form, query_mask)
    a = abs(scale) * queries_of().about_zero()
    (forms,) = placed(k.device, key_forms(space, a))
    energies, total = key_pass(k, mean, forms, key_mask)
    sums = row_sums(q, scale * total, query_mask)
    values = torch.linalg.svdvals(a @ b.mT)[..., : min(q.shape[-2], k.shape[-2])]
    tolerance = max(q.shape[-2], k.shape[-2]) * _DOUBLE if q.dtype == k.dtype == torch.float64 else 2e-6
    # Centring keys far from the origin leaves their rounding behind.
    noise = 8 * _DOUBLE * torch.linalg.matrix_norm(a) * space.offset
    floor = torch.maximum(tolerance * values[..., 0], noise)
    values, floor, *sizes = placed(k.device, values, floor, *_sizes(keys, space, heads))
    return EnergyField(
        singular_values=values,
        row_sums=sums,
        row_energies=rows,
        column_energies=energies[-1],
        leverages=energies[0],
        ridge_leverages=energies[1] if len(energies) > 2 else None,
        ridge_dimension=sizes[2] if len(sizes) > 2 else None,
        key_rank=sizes[1].long(),
        keys=sizes[0],
        bound=min(q.shape[-1], max(k.shape[-2] - 1, 0)),
        complete=True,
        floor=floor,
    )


def _sizes(keys: TokenMoments, space: KeySpace, heads: torch.Size) -> list[Tensor]:
    """Return keys, rank and ridge dimension of every query head."""
    statistics = [keys.count, space.rank.double()]
    if space.ridge_dimension is not None:
        statistics.append(space.ridge_dimension)
    return [x.expand(heads) for x in statistics]


def _masked(
    q: Tensor,
    k: Tensor,
    keys: TokenMoments,
    space: KeySpace,
    band: Band,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    leading: int,
) -> EnergyField:
    """Compute the field where queries see only some of the keys."""
    heads, (queries, width), n = q.shape[:-2], q.shape[-2:], k.shape[-2]
    mean, forms, offset, *sizes = placed(
        k.device, keys.mean, key_forms(space, None), space.offset.expand(heads), *_sizes(keys, space, heads)
    )
    energies, _ = key_pass(k, mean, forms, key_mask)
    complete = max(queries, n) <= DENSE
    many = block_rows(max(queries, n), width + 1, q.device, least=1)
    parts = []
    for start in range(0, heads.numel(), many):
        some = slice(start, start + many)
        asks = None if query_mask is None else _heads(query_mask, heads, some, 1)
        seen = None if key_mask is None else _heads(key_mask, heads, some, 1)
        x = Rows(values=_heads(q, heads, some, 2), kept=asks)
        y = Rows(values=_heads(k, heads, some, 2), shift=_heads(mean, heads, some, 1), kept=seen)
        parts.append(_masked_slice(x, y, band, abs(scale), leading, complete))
    rows, columns, sums, values, norm = (torch.cat(part) for part in zip(*parts, strict=True))
    size = rows.sum(-1).sqrt().reshape(heads)
    return EnergyField(
        singular_values=values.reshape(*heads, values.shape[-1]),
        row_sums=sums.reshape(*heads, queries),
        row_energies=rows.reshape(*heads, queries),
        column_energies=columns.reshape(*heads, n),
        leverages=energies[0].expand(*heads, n),
        ridge_leverages=energies[1].expand(*heads, n) if len(energies) > 1 else None,
        ridge_dimension=sizes[2] if len(sizes) > 2 else None,
        key_rank=sizes[1].long(),
        keys=sizes[0],
        bound=None,
        complete=complete,
        floor=torch.maximum(max(queries, n) * _DOUBLE * size, 8 * _DOUBLE * norm.reshape(heads) * offset),
    )


def _masked_slice(
    x: Rows, y: Rows, band: Band, scale: float, leading: int, complete: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return row and column energies, row sums, singular values and the size of the queries of a few heads."""
    (heads, queries, _), n = x.values.shape, y.values.shape[-2]
    device = x.values.device
    counts = band.counts(queries, n, y.kept, device).expand(heads, queries)
    totals = band.dots(x, y)
    means = totals / counts.clamp(min=1)
    seen = torch.ones(1, 1, dtype=torch.float64, device=device) if y.kept is None else y.kept.double()
    x, y = replace(x, last=-means), replace(y, last=seen.expand(heads, n))
    rows = band.squares(x, y).clamp_(min=0).mul_(scale**2)
    columns = band.mirrored().squares(y, x).clamp_(min=0).mul_(scale**2)
    norm = scale * x.norm()
    values = rows.new_zeros(heads, 0)
    if complete or leading > 0:
        left, right = scale * x.joined(), y.joined()
        if complete:
            hidden = ~band.visible(queries, n, device)
            values = torch.linalg.svdvals((left @ right.mT).masked_fill(hidden, 0.0))
        else:
            values = leading_values(left, right, band, leading)
    return rows, columns, scale * (totals - means * counts), values, norm


def _participation(energies: Tensor, nothing: Tensor) -> Tensor:
    shares = energies / energies.sum(-1, keepdim=True)
    return torch.where(nothing, torch.nan, 1 / shares.square().sum(-1))


def _heads(x: Tensor, heads: torch.Size, some: slice, rest: int) -> Tensor:
    """Return some of the query heads on one axis; those of a group share what their key head has."""
    flat = x.reshape(-1, *x.shape[x.ndim - rest :])
    shared = heads.numel() // len(flat)
    if shared == 1:
        return flat[some]
    wanted = torch.arange(some.start, min(some.stop, heads.numel()), device=x.device)
    return flat[wanted // shared]


def _checked(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None]:
    """Return queries and keys with equal leading axes; those of a group of query heads get an axis of their own."""
    if q.ndim < 2 or k.ndim != q.ndim or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            "Expected queries (…, heads, length, d) and keys (…, key heads, length, d), got shapes "
            f"{tuple(q.shape)} and {tuple(k.shape)}. Transpose tokens to the axis before the last."
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(
            f"Expected at least one query and one key, got shapes {tuple(q.shape)} and {tuple(k.shape)}. Pass "
            "tensors that are not empty."
        )
    if not (q.is_floating_point() and k.is_floating_point()):
        raise TypeError(f"Expected floating-point queries and keys, got {q.dtype} and {k.dtype}. Convert them first.")
    query_mask = None if query_mask is None else query_mask.expand(q.shape[:-1])
    key_mask = None if key_mask is None else key_mask.expand(k.shape[:-1])
    q, k = q.detach(), k.detach()
    if q.ndim == 2 or q.shape[-3] == k.shape[-3]:
        return q, k, query_mask, key_mask, None
    heads, key_heads = q.shape[-3], k.shape[-3]
    if heads % key_heads:
        raise ValueError(
            f"Expected query heads to be a multiple of key heads, got {heads} and {key_heads}. Check the axis of heads."
        )
    groups = heads // key_heads
    q = q.unflatten(-3, (key_heads, groups))
    query_mask = None if query_mask is None else query_mask.unflatten(-2, (key_heads, groups))
    return q, k.unsqueeze(-3), query_mask, None if key_mask is None else key_mask.unsqueeze(-2), groups


def _with_bias(
    q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, groups: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a bias per key as one more column; −inf hides the key."""
    bias = bias.detach().to(torch.promote_types(bias.dtype, k.dtype))
    bias = bias.expand(k.shape[:-1]) if groups is None else bias.expand(k.squeeze(-3).shape[:-1]).unsqueeze(-2)
    # Whether a key is hidden at all is not asked: a device would have to be waited for.
    hidden = bias == -torch.inf
    mask = ~hidden if mask is None else mask & ~hidden
    bias = torch.where(hidden, 0.0, bias)
    q = torch.cat((q, q.new_full((*q.shape[:-1], 1), 1 / scale, dtype=bias.dtype)), -1)
    return q, torch.cat((k, bias[..., None]), -1), mask


def _with_slope(q: Tensor, k: Tensor, slope: float | Tensor, scale: float, groups: int | None) -> tuple[Tensor, Tensor]:
    """Return the part of −slope·(i − j) that depends on the key, as one more column, in double precision."""
    steep = torch.as_tensor(slope, dtype=torch.float64, device=q.device)
    if groups is not None and steep.ndim:
        steep = steep.unflatten(-1, q.shape[-4:-2])
    column = (steep / scale)[..., None].expand(q.shape[:-1])[..., None]
    index = torch.arange(k.shape[-2], dtype=torch.float64, device=k.device) - k.shape[-2] // 2
    k = torch.cat((k.double(), index[:, None].expand(*k.shape[:-1], 1)), -1)
    return torch.cat((q.double(), column), -1), k


def _flattened(field: EnergyField) -> EnergyField:
    """Return query heads of all groups on one axis again."""

    def flat(x: Tensor, rest: int) -> Tensor:
        return x.flatten(-2 - rest, -1 - rest)

    return EnergyField(
        singular_values=flat(field.singular_values, 1),
        row_sums=flat(field.row_sums, 1),
        row_energies=flat(field.row_energies, 1),
        column_energies=flat(field.column_energies, 1),
        leverages=flat(field.leverages, 1),
        ridge_leverages=None if field.ridge_leverages is None else flat(field.ridge_leverages, 1),
        ridge_dimension=None if field.ridge_dimension is None else flat(field.ridge_dimension, 0),
        key_rank=flat(field.key_rank, 0),
        keys=flat(field.keys, 0),
        bound=field.bound,
        complete=field.complete,
        floor=flat(field.floor, 0),
    )
