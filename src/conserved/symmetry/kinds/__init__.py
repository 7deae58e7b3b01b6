"""Kinds of group a symmetry can have, one file each."""

from conserved.symmetry.kind import Kind
from conserved.symmetry.kinds.complex_scaling import ComplexScaling
from conserved.symmetry.kinds.general_linear import GeneralLinear
from conserved.symmetry.kinds.one_scale import OneScale
from conserved.symmetry.kinds.scaling import Scaling
from conserved.symmetry.kinds.translation import Translation

__all__ = ["KINDS", "ComplexScaling", "GeneralLinear", "OneScale", "Scaling", "Translation"]

KINDS: dict[str, Kind] = {
    kind.code: kind for kind in (GeneralLinear(), ComplexScaling(), Scaling(), OneScale(), Translation())
}
"""Every kind by its code; files of laws name them by it. A kind of your own that files may name is added here."""
