r"""Kinds of group a symmetry can have: how each acts on a leg, and what that makes of the moment map.

A group element moves the n rows of an n × m leg A. Write ξ·A for its infinitesimal action. The moment map
of two legs is defined by pairing with every generator,

    ⟨ξᵀ, μ(A, B)⟩ = ⟨ξ·A, B⟩        for all ξ (the transpose matters for matrices only),

so a kind is fully described by `act` (the group) and `contract` (the adjoint of its generator). `contract`
is written for a leg of degree +1; a leg of degree −1 moves by g^{-T} and contributes −contract(B, A), which
for the general linear group is −(A Bᵀ)ᵀ.
"""

from conserved.kind.complex_scaling import ComplexScaling
from conserved.kind.general_linear import GeneralLinear
from conserved.kind.kind import Degree, Kind
from conserved.kind.one_scale import OneScale
from conserved.kind.scaling import Scaling
from conserved.kind.translation import Translation

__all__ = [
    "KINDS",
    "ComplexScaling",
    "Degree",
    "GeneralLinear",
    "Kind",
    "OneScale",
    "Scaling",
    "Translation",
]

KINDS: dict[str, Kind] = {
    kind.code: kind for kind in (GeneralLinear(), ComplexScaling(), Scaling(), OneScale(), Translation())
}
"""Every kind by its code."""
