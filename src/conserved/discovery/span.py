r"""The span of many vectors, and its dimension by a numerical rule that is stated and reported.

Vectors are added in blocks. What is left of a block outside the span so far has singular values that are of the size of
clear new directions, of faint ones, or of rounding:

    clear     above 1e-2 of the unit vectors that were added: the direction joins the span,
    faint     above 1e-13: kept at its own length, beside it,
    counted   clear, or faint and above 1e-10,
    gap       smallest counted over largest not counted.

A faint direction must not join. A remainder of length 1e-9 is known to rounding, 1e-16, so the unit vector made of it
points wrong by 1e-7, and later vectors that have a large part along it would all leave a remainder of that size, which
looks like a new direction. At its own length it stays as accurate as it is, and when a later vector shows the same
direction clearly, that vector takes its place.

Large blocks of clear directions are kept as an orthogonal change of coordinates: Householder reflections, I − V T Vᵀ
for a block, after which they are the first axes. What is left of a vector are its other coordinates, exactly orthogonal
to the span up to rounding after one pass (projecting a basis out needs two, over all coordinates), and few once most
directions are known. The first block that is not all clear, and whatever comes after it, is sorted in those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

CUT = 1e-10
"""Singular values below this, relative to unit vectors, are rounding."""

CLEAR = 1e-2
"""Remainders above this join the span. Rounding of a block of n unit vectors is in proportion to √n: in the largest
blocks, of thousands, their directions are known to 1e-12."""

KNOWN = 1e-4
"""Faint directions longer than this are known to 1e-10: what is held against the span is held against them too."""

ROUNDING = 1e-13
"""Remainders below this are forgotten."""

NOTHING = 1e-11
"""Large blocks whose remainders are all below this, a tenth of the cut, are forgotten without being taken apart."""

_LARGEST_SVD = 512
"""Larger blocks are halved before their singular values are computed."""

_FEW = 3
"""Coordinates that are left are few if so many times their number is no more than all."""

_FEWEST, _MOST = 256, 2048
"""Vectors that are worth a reflection of their own, and that share one."""


@dataclass(slots=True)
class Basis:
    """Clear directions as orthonormal rows, faint ones beside them."""

    size: int
    device: torch.device
    smallest_clear: float = float("inf")
    largest_forgotten: float = 0.0
    faint: Tensor = field(init=False)
    """Orthogonal to the basis and to each other, each as long as its singular value."""
    _rows: Tensor = field(init=False)
    _clear: int = 0

    def __post_init__(self) -> None:
        self._rows = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        self.faint = torch.empty(0, self.size, dtype=torch.float64, device=self.device)

    @property
    def rows(self) -> Float[Tensor, "clear D"]:
        """Orthonormal rows along the clear directions."""
        return self._rows[: self._clear]

    def faint_values(self) -> list[float]:
        """Return the lengths of the faint directions."""
        values: list[float] = torch.linalg.vector_norm(self.faint, dim=1).tolist()
        return values

    def project_out(self, block: Float[Tensor, "count D"]) -> Float[Tensor, "count D"]:
        """Return rows without their parts along the basis."""
        return block - (block @ self.rows.mT) @ self.rows

    def add(self, block: Float[Tensor, "count D"]) -> None:
        """Add the span of a block."""
        rest = self.project_out(self.project_out(block)) if self._clear else block
        size = float(torch.linalg.matrix_norm(rest))
        if size < ROUNDING:
            self.largest_forgotten = max(self.largest_forgotten, size)
            return
        if len(block) >= _FEWEST and (largest := largest_value(rest)) < NOTHING:
            self.largest_forgotten = max(self.largest_forgotten, largest)
            return
        q, r = torch.linalg.qr(rest.mT)
        least = least_value(r)
        if least > CLEAR:
            self.smallest_clear = min(self.smallest_clear, least)
            self._append(q.mT)
            self._sort(self.project_out(self.faint))
        elif len(block) > _LARGEST_SVD:
            half = len(block) // 2
            self.add(block[:half])
            self.add(block[half:])
        else:
            self._sort(torch.cat((r.mT @ q.mT, self.faint)))

    def _sort(self, rows: Tensor) -> None:
        """Sort rows orthogonal to the basis into clear and faint directions; these replace the faint ones so far."""
        if not len(rows):
            return
        values, right = _values_and_directions(rows)
        clear, faint = int((values > CLEAR).sum()), int((values > ROUNDING).sum())
        self.faint = values[clear:faint, None] * right[clear:faint]
        if clear:
            self.smallest_clear = min(self.smallest_clear, float(values[clear - 1]))
            self._append(self._orthonormal(right[:clear]))
        if faint < len(values):
            self.largest_forgotten = max(self.largest_forgotten, float(values[faint]))

    def _orthonormal(self, fresh: Tensor) -> Tensor:
        """Remove the part along the basis that vectors made from small remainders kept; return unit vectors."""
        fresh = self.project_out(fresh)
        return fresh / torch.linalg.vector_norm(fresh, dim=1, keepdim=True)

    def _append(self, rows: Tensor) -> None:
        needed = self._clear + len(rows)
        if needed > len(self._rows):
            room = min(self.size, max(needed, 2 * len(self._rows)))
            grown = torch.empty(room, self.size, dtype=torch.float64, device=self.device)
            grown[: self._clear] = self.rows
            self._rows = grown
        self._rows[self._clear : needed] = rows
        self._clear = needed


def least_value(r: Float[Tensor, "k n"]) -> float:
    """Return a lower bound of the smallest singular value of a triangular factor.

    The bound is 1 / ‖R⁻¹‖_F, or 0 if the matrix is not square.
    """
    if r.shape[0] != r.shape[1]:
        return 0.0
    identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
    size = float(torch.linalg.matrix_norm(torch.linalg.solve_triangular(r, identity, upper=True)))
    return 1 / size if size > 0 else 0.0


def largest_value(rows: Float[Tensor, "n m"]) -> float:
    """Return an upper bound of the largest singular value, at most n^(1/16) times it.

    The bound is (Σ σ¹⁶)^(1/16), computed from the Gram matrix.
    """
    size = float(torch.linalg.matrix_norm(rows))
    if size == 0:
        return 0.0
    power = rows / size
    power = power @ power.mT
    for _ in range(2):
        power = power @ power
    # ‖G⁴‖² = Σ λ⁸ with λ = σ²: rounding of the product, of relative size 1e-13, is covered by the last factor.
    return size * float(torch.linalg.matrix_norm(power)) ** (1 / 8) * (1 + 1e-6)


def _values_and_directions(rows: Float[Tensor, "n m"]) -> tuple[Tensor, Tensor]:
    """Return singular values and right singular vectors.

    Of long rows through a triangular factor, which is much smaller.
    """
    if rows.shape[1] <= 2 * rows.shape[0]:
        _, values, right = torch.linalg.svd(rows, full_matrices=False)
        return values, right
    q, r = torch.linalg.qr(rows.mT)
    _, values, right = torch.linalg.svd(r.mT, full_matrices=False)
    return values, right @ q.mT


@dataclass(frozen=True, slots=True, eq=False)
class Reflection:
    """I − V T Vᵀ, which takes the span of some vectors to the first axes."""

    v: Float[Tensor, "m b"]
    t: Float[Tensor, "b b"]

    @property
    def count(self) -> int:
        return self.v.shape[1]

    @staticmethod
    def of(block: Float[Tensor, "b m"]) -> tuple[Reflection, float]:
        """Return that of a block of at most m rows, and a lower bound of the smallest singular value of the block."""
        packed, factors = torch.geqrf(block.mT)
        count = len(block)
        least = least_value(packed[:count].triu())
        v = packed.tril(-1)
        v.diagonal().fill_(1)
        # Where nothing is left to reflect, the factor is zero; so is the reflection's column then.
        idle = factors == 0
        v *= ~idle
        # H_1 ⋯ H_b = I − V T Vᵀ with T⁻¹ = the part of VᵀV above the diagonal, and 1/τ on it.
        inverse = (v.mT @ v).triu(1)
        inverse.diagonal().copy_(1 / torch.where(idle, 1, factors))
        identity = torch.eye(count, dtype=v.dtype, device=v.device)
        return Reflection(v, torch.linalg.solve_triangular(inverse, identity, upper=True)), least

    def turn(self, rows: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Bring rows to the new coordinates, where they are stored."""
        return rows.addmm_((rows @ self.v) @ self.t, self.v.mT, alpha=-1)

    def turn_back(self, rows: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Bring rows to the old coordinates, where they are stored."""
        return rows.addmm_((rows @ self.v) @ self.t.mT, self.v.mT, alpha=-1)


@dataclass(slots=True)
class Span:
    """The span of all vectors added."""

    size: int
    device: torch.device
    _reflections: list[Reflection] = field(default_factory=list)
    _smallest_reflected: float = float("inf")
    _rest: Basis = field(init=False)
    """Directions in the coordinates that no reflection has taken."""
    _axes: Tensor | None = None
    """The axes of those coordinates as rows, once there are no more reflections and if they are few."""

    def __post_init__(self) -> None:
        self._rest = Basis(self.size, self.device)

    @property
    def reflected(self) -> int:
        """Directions that are axes in the new coordinates."""
        return self.size - self._rest.size

    @property
    def basis(self) -> Float[Tensor, "clear D"]:
        """Orthonormal rows along the clear directions, in the given coordinates."""
        first = torch.eye(self.reflected, dtype=torch.float64, device=self.device)
        rows = torch.block_diag(first, self._rest.rows)
        return self._turned_back(rows.reshape(self.reflected + len(self._rest.rows), self.size).contiguous())

    @property
    def rank(self) -> int:
        """Directions counted: all clear ones, and the faint ones above the cut."""
        return self.reflected + len(self._rest.rows) + sum(value > CUT for value in self._rest.faint_values())

    @property
    def smallest_kept(self) -> float:
        """The smallest singular value that counts as a direction."""
        clear = min(self._smallest_reflected, self._rest.smallest_clear)
        return min([value for value in self._rest.faint_values() if value > CUT], default=clear)

    @property
    def gap(self) -> float:
        """Smallest counted over largest uncounted singular value."""
        uncounted = [value for value in self._rest.faint_values() if value <= CUT]
        dropped = max([*uncounted, self._rest.largest_forgotten])
        return self.smallest_kept / dropped if dropped > 0 else float("inf")

    def add(self, block: Float[Tensor, "count D"]) -> int:
        """Add the span of a block of vectors of at most unit length; returns how many new directions there were."""
        before = self.rank
        self._absorb(self._turned(block.clone() if self._reflections and self._axes is None else block, 0))
        return max(self.rank - before, 0)

    def split(self, rows: Float[Tensor, "n D"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n m"]]:
        """Return how long the parts of rows along known directions are, and what is left of the rows, in new
        coordinates.
        """
        square = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
        rows = rows.clone()
        for reflection in self._reflections:
            rows = reflection.turn(rows)
            square += rows[:, : reflection.count].square().sum(1)
            rows = rows[:, reflection.count :]
        lengths = torch.linalg.vector_norm(self._rest.faint, dim=1, keepdim=True)
        known = (self._rest.faint / lengths)[lengths[:, 0] > KNOWN]
        inside = rows @ torch.cat((self._rest.rows, known)).mT
        square += inside.square().sum(1)
        return square.sqrt(), rows - inside @ torch.cat((self._rest.rows, known))

    def _turned_back(self, rows: Tensor) -> Tensor:
        """Return rows in the given coordinates, from those after all reflections."""
        start = self.reflected
        for reflection in reversed(self._reflections):
            start -= reflection.count
            reflection.turn_back(rows[:, start:])
        return rows

    def _turned(self, rows: Tensor, since: int) -> Tensor:
        """Return what is left of rows outside the span so far, given their coordinates after so many reflections."""
        if not since and self._axes is not None:
            return rows @ self._axes.mT
        for reflection in self._reflections[since:]:
            rows = reflection.turn(rows)[:, reflection.count :]
        return rows

    def _absorb(self, block: Tensor) -> None:
        started = len(self._rest.rows) > 0 or len(self._rest.faint) > 0
        if started or not _FEWEST <= len(block) <= block.shape[1]:
            self._sort(block)
        elif len(block) > _MOST:
            self._absorb_parts(block, _MOST)
        else:
            reflection, least = Reflection.of(block)
            if least > CLEAR:
                self._smallest_reflected = min(self._smallest_reflected, least)
                self._reflections.append(reflection)
                forgotten = self._rest.largest_forgotten
                self._rest = Basis(block.shape[1] - len(block), self.device, largest_forgotten=forgotten)
            elif len(block) > _LARGEST_SVD:
                self._absorb_parts(block, len(block) // 2)
            else:
                self._sort(block)

    def _sort(self, block: Tensor) -> None:
        """Add what is left of a block to the directions that are no axes, after which there are no more reflections."""
        self._rest.add(block)
        started = len(self._rest.rows) > 0 or len(self._rest.faint) > 0
        if started and self._reflections and self._axes is None and _FEW * self._rest.size <= self.size:
            axes = torch.zeros(self._rest.size, self.size, dtype=torch.float64, device=self.device)
            axes[:, self.reflected :].fill_diagonal_(1)
            self._axes = self._turned_back(axes)

    def _absorb_parts(self, block: Tensor, size: int) -> None:
        since = len(self._reflections)
        # Parts are turned where they are stored, which must not be where the caller keeps them.
        for part in (block if since else block.clone()).split(size):
            self._absorb(self._turned(part, since))
