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

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from conserved.attention import display
from conserved.attention.band import Band
from conserved.attention.coherence import KeySpace
from conserved.attention.lanczos import leading_values
from conserved.attention.moments import BLOCK, TokenMoments, row_blocks

DENSE = 512
"""Up to this length the field of a masked head is formed, and its whole spectrum taken."""

_DOUBLE = torch.finfo(torch.float64).eps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EnergyField:
    """Exact statistics of the energy field of every head.

    `complete` says whether `singular_values` are all of them (zeros beyond the bound left out) or, for a long masked
    field, the leading ones. `row_sums` are zero but for rounding. `leverages` are those of the centred keys, whose rank
    is `key_rank`. What has no value is NaN: how a field of zeros is spread, and what needs the whole spectrum where
    only its leading part is known.
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
        """How many singular values stand above rounding; NaN where not all are known."""
        found = (self.singular_values > self.floor[..., None]).sum(-1).double()
        return found if self.complete else torch.full_like(found, torch.nan)

    @property
    def energy(self) -> Float[Tensor, "*heads"]:
        """‖E‖², the sum of the squares of all entries."""
        return self.row_energies.sum(-1)

    @property
    def participation(self) -> Float[Tensor, "*heads"]:
        """1/(L Σ p²) for the shares p of the columns in the energy: 1 is even, 1/L is one key."""
        return _participation(self.column_energies, self._nothing) / self.keys

    @property
    def row_participation(self) -> Float[Tensor, "*heads"]:
        """The same for queries."""
        return _participation(self.row_energies, self._nothing) / self.row_energies.shape[-1]

    @property
    def coherence(self) -> Float[Tensor, "*heads"]:
        """(L/r) max leverage of the centred keys, between 1 (even) and L/r (one key is a direction of its own)."""
        spread = self.keys / self.key_rank * self.leverages.amax(-1)
        return torch.where(self.key_rank > 0, spread, torch.nan)

    @property
    def ridge_coherence(self) -> Float[Tensor, "*heads"]:
        """(L/d_λ) max ridge leverage, with d_λ the sum of the ridge leverages."""
        if self.ridge_leverages is None or self.ridge_dimension is None:
            raise ValueError("Ridge leverages were not asked for; call energy_field(…, ridge=0.01) or so.")
        spread = self.keys / self.ridge_dimension * self.ridge_leverages.amax(-1)
        return torch.where(self.key_rank > 0, spread, torch.nan)

    @property
    def effective_rank(self) -> Float[Tensor, "*heads"]:
        """exp of the entropy of σ/Σσ (Roy and Vetterli, 2007); NaN where not all σ are known."""
        total = self.singular_values.sum(-1, keepdim=True)
        shares = self.singular_values / total
        found = torch.special.entr(shares).sum(-1).exp()
        found = torch.where(self._nothing, 0.0, found)
        return found if self.complete else torch.full_like(found, torch.nan)

    @property
    def stable_rank(self) -> Float[Tensor, "*heads"]:
        """‖E‖_F²/‖E‖², at most the rank; NaN where no singular value is known."""
        if not self.singular_values.shape[-1]:
            return torch.full_like(self.energy, torch.nan)
        found = self.energy / self.singular_values[..., 0].square()
        return torch.where(self._nothing, 0.0, found)

    def __repr__(self) -> str:
        return f"<EnergyField: {display.title(self)}>"

    def _repr_html_(self) -> str:
        """A table by head, for notebooks."""
        return display.table(self)

    @property
    def _nothing(self) -> Bool[Tensor, "*heads"]:
        """Which heads' fields are zero but for rounding."""
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
    """The energy field of queries and keys as the attention uses them, for every head at once.

    `q` is (…, heads, queries, d) and `k` (…, key heads, keys, d); several query heads may share a key head. With
    `causal` the last query stands at the last key; `window` limits how many keys a query sees. `key_bias` (…, keys) is
    added to every row of logits, −inf there hides a key, and so does False in `key_mask`; False in `query_mask` is a
    row that sees nothing. `slope` is that of a bias −slope·distance (causal only), one for all heads or one for each.
    `ridge` asks for ridge leverages with λ = ridge · mean squared singular value of the keys. Of a masked field longer
    than 512 no singular values are found unless `leading` asks for some; each takes a few dozen passes.

    >>> field = energy_field(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    >>> field.singular_values, field.rank    # E = (1, 2)ᵀ (−1, 1)
    (tensor([3.1623], dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    q, k, query_mask, key_mask, groups = _checked(q, k, query_mask, key_mask)
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if key_bias is not None:
        q, k, key_mask = _with_bias(q, k, key_bias, key_mask, scale, groups)
    if slope is not None:
        if not causal:
            raise ValueError("A bias by distance in both directions is not linear in the key: there is no exact field.")
        q, k = _with_slope(q, k, slope, scale, groups)
    band = Band.of(q.shape[-2], k.shape[-2], causal=causal, window=window)
    keys = TokenMoments.of(k, key_mask)
    # Coarser keys are summed to 1e-8 of the largest: a direction below that is not theirs.
    space = KeySpace.of(keys, ridge, tolerance=1e-12 if k.dtype == torch.float64 else 1e-7)
    if band.whole:
        found = _whole(q, k, TokenMoments.of(q, query_mask), keys, space, query_mask, key_mask, scale)
    else:
        found = _masked(q, k, keys, space, band, query_mask, key_mask, scale, leading)
    return found if groups is None else _flattened(found)


def _whole(
    q: Tensor,
    k: Tensor,
    queries: TokenMoments,
    keys: TokenMoments,
    space: KeySpace,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> EnergyField:
    """Every query sees every key."""
    a, b = abs(scale) * queries.about_zero(), keys.factor
    values = torch.linalg.svdvals(a @ b.mT)[..., : min(q.shape[-2], k.shape[-2])]
    column_energies, leverages, ridged, total = _key_pass(k, keys.mean, a, space, key_mask)
    forms = torch.cat((abs(scale) * b.mT, scale * total[..., :, None]), -1)
    rows, sums = _query_pass(q, forms, query_mask)
    tolerance = max(q.shape[-2], k.shape[-2]) * _DOUBLE if q.dtype == k.dtype == torch.float64 else 2e-6
    # Centring keys far from the origin leaves their rounding behind.
    noise = 8 * _DOUBLE * torch.linalg.matrix_norm(a) * space.offset
    return EnergyField(
        singular_values=values,
        row_sums=sums,
        row_energies=rows,
        column_energies=column_energies,
        leverages=leverages,
        ridge_leverages=ridged,
        ridge_dimension=_shaped(space.ridge_dimension, values[..., 0]),
        key_rank=space.rank.expand(values.shape[:-1]),
        keys=keys.count.expand(values.shape[:-1]),
        bound=min(q.shape[-1], max(k.shape[-2] - 1, 0)),
        complete=True,
        floor=torch.maximum(tolerance * values[..., 0], noise),
    )


def _key_pass(
    k: Tensor, mean: Tensor, a: Tensor, space: KeySpace, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Column energies, leverages, ridge leverages, and the sum of the centred keys."""
    heads = a.shape[:-2]
    forms = [a.mT, space.whitening.expand(*heads, -1, -1)]
    if space.ridge_whitening is not None:
        forms.append(space.ridge_whitening.expand(*heads, -1, -1))
    widths = [form.shape[-1] for form in forms]
    work = torch.float64 if k.dtype == torch.float64 else torch.float32
    weights = torch.cat(forms, -1).to(work)
    near = mean.to(work)[..., None, :]
    rest = (mean - mean.to(work).double()).to(work)[..., None, :]
    total = a.new_zeros(*k.shape[:-2], k.shape[-1])
    parts = []
    for rows in row_blocks(a.new_empty(0).expand(*heads, k.shape[-2], 0), sum(widths)):
        # Two subtractions keep what the mean has beyond the working precision.
        centred = (k[..., rows, :].to(work) - near) - rest
        if mask is not None:
            centred = torch.where(mask[..., rows, None], centred, 0.0)
        total = total + centred.sum(-2, dtype=torch.float64)
        squares = (centred @ weights).square()
        parts.append(torch.stack([part.sum(-1) for part in squares.split(widths, -1)]))
    found = torch.cat(parts, -1).double()
    return found[0], found[1], found[2] if len(widths) > 2 else None, total


def _query_pass(q: Tensor, forms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row energies and row sums."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = forms.to(work)
    energies, sums = [], []
    for rows in row_blocks(q, forms.shape[-1]):
        block = q[..., rows, :].to(work)
        if mask is not None:
            block = torch.where(mask[..., rows, None], block, 0.0)
        product = block @ weights
        energies.append(product[..., :-1].square().sum(-1))
        sums.append(product[..., -1])
    return torch.cat(energies, -1).double(), torch.cat(sums, -1).double()


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
    """Queries see some of the keys."""
    heads, (queries, width) = q.shape[:-2], q.shape[-2:]
    n = k.shape[-2]
    kept_queries = q.new_ones((), dtype=torch.bool) if query_mask is None else query_mask
    kept_keys = k.new_ones((), dtype=torch.bool) if key_mask is None else key_mask
    flat_q, flat_k = _flat(q, heads, (queries, width)), _flat(k, heads, (n, width))
    flat_seen = _flat(kept_keys, heads, (n,))
    flat_asks = _flat(kept_queries, heads, (queries,))
    means = _flat(keys.mean, heads, (width,))
    complete = max(queries, n) <= DENSE
    parts = []
    many = max(1, 4 * BLOCK // (max(queries, n) * (width + 1)))
    for start in range(0, flat_q.shape[0], many):
        some = slice(start, start + many)
        x = torch.where(flat_asks[some, :, None], flat_q[some].double(), 0.0) * scale
        y = torch.where(flat_seen[some, :, None], flat_k[some].double() - means[some, None, :], 0.0)
        parts.append(_masked_slice(x, y, flat_seen[some].double(), band, leading, complete))
    rows, columns, sums, values = (torch.cat(part) for part in zip(*parts, strict=True))
    a = abs(scale) * torch.linalg.matrix_norm(q.double() if query_mask is None else q.double() * query_mask[..., None])
    _, leverages, ridged, _ = _key_pass(k, keys.mean, q.new_zeros(*heads, 0, width).double(), space, key_mask)
    values = values.reshape(*heads, values.shape[-1])
    size = rows.clamp(min=0).sum(-1).sqrt().reshape(heads)
    return EnergyField(
        singular_values=values,
        row_sums=sums.reshape(*heads, queries),
        row_energies=rows.reshape(*heads, queries).clamp(min=0),
        column_energies=columns.reshape(*heads, n).clamp(min=0),
        leverages=leverages,
        ridge_leverages=ridged,
        ridge_dimension=_shaped(space.ridge_dimension, size),
        key_rank=space.rank.expand(heads),
        keys=keys.count.expand(heads),
        bound=None,
        complete=complete,
        floor=torch.maximum(max(queries, n) * _DOUBLE * size, 8 * _DOUBLE * a * space.offset),
    )


def _masked_slice(
    x: Tensor, y: Tensor, seen: Tensor, band: Band, leading: int, complete: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and column energies, row sums and singular values of a few heads, in double precision."""
    ones = seen[..., None]
    counts = band.sums(ones, x.shape[-2])[..., 0]
    totals = (x * band.sums(y, x.shape[-2])).sum(-1)
    means = totals / counts.clamp(min=1)
    left = torch.cat((x, -means[..., None]), -1)
    right = torch.cat((y, ones), -1)
    rows = band.squares(left, right)
    columns = band.mirrored().squares(right, left)
    if complete:
        field = (left @ right.mT).masked_fill(~band.visible(x.shape[-2], y.shape[-2], x.device), 0.0)
        values = torch.linalg.svdvals(field)
    elif leading > 0:
        values = leading_values(left, right, band, leading)
    else:
        values = rows.new_zeros(len(rows), 0)
    return rows, columns, totals - means * counts, values


def _participation(energies: Tensor, nothing: Tensor) -> Tensor:
    shares = energies / energies.sum(-1, keepdim=True)
    return torch.where(nothing, torch.nan, 1 / shares.square().sum(-1))


def _shaped(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.expand(like.shape)


def _flat(x: Tensor, heads: torch.Size, rest: tuple[int, ...]) -> Tensor:
    """One axis for all heads."""
    return x.expand(*heads, *rest).reshape(heads.numel(), *rest)


def _checked(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int | None]:
    """Queries and keys with equal leading axes; those of a group of query heads get an axis of their own."""
    if q.ndim < 2 or k.ndim != q.ndim or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"Queries (…, heads, length, d) and keys (…, key heads, length, d) do not fit: {tuple(q.shape)} and "
            f"{tuple(k.shape)}."
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"There is no field without queries and keys; got {tuple(q.shape)} and {tuple(k.shape)}.")
    if not (q.is_floating_point() and k.is_floating_point()):
        raise TypeError(f"Queries and keys are floating-point tensors; got {q.dtype} and {k.dtype}.")
    query_mask = None if query_mask is None else query_mask.expand(q.shape[:-1])
    key_mask = None if key_mask is None else key_mask.expand(k.shape[:-1])
    q, k = q.detach(), k.detach()
    if q.ndim == 2 or q.shape[-3] == k.shape[-3]:
        return q, k, query_mask, key_mask, None
    heads, key_heads = q.shape[-3], k.shape[-3]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads cannot share {key_heads} key heads evenly.")
    groups = heads // key_heads
    q = q.unflatten(-3, (key_heads, groups))
    query_mask = None if query_mask is None else query_mask.unflatten(-2, (key_heads, groups))
    return q, k.unsqueeze(-3), query_mask, None if key_mask is None else key_mask.unsqueeze(-2), groups


def _with_bias(
    q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, groups: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A bias per key as one more column; −inf hides the key."""
    bias = bias.detach().to(torch.promote_types(bias.dtype, k.dtype))
    bias = bias.expand(k.shape[:-1]) if groups is None else bias.expand(k.squeeze(-3).shape[:-1]).unsqueeze(-2)
    hidden = bias == -torch.inf
    if bool(hidden.any()):
        mask = ~hidden if mask is None else mask & ~hidden
        bias = torch.where(hidden, 0.0, bias)
    q = torch.cat((q, q.new_full((*q.shape[:-1], 1), 1 / scale, dtype=bias.dtype)), -1)
    return q, torch.cat((k, bias[..., None]), -1), mask


def _with_slope(q: Tensor, k: Tensor, slope: float | Tensor, scale: float, groups: int | None) -> tuple[Tensor, Tensor]:
    """The part of −slope·(i − j) that depends on the key, as one more column, in double precision."""
    steep = torch.as_tensor(slope, dtype=torch.float64, device=q.device)
    if groups is not None and steep.ndim:
        steep = steep.unflatten(-1, q.shape[-4:-2])
    column = (steep / scale)[..., None].expand(q.shape[:-1])[..., None]
    place = torch.arange(k.shape[-2], dtype=torch.float64, device=k.device) - k.shape[-2] // 2
    k = torch.cat((k.double(), place[:, None].expand(*k.shape[:-1], 1)), -1)
    return torch.cat((q.double(), column), -1), k


def _flattened(field: EnergyField) -> EnergyField:
    """Query heads of all groups on one axis again."""

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
