"""Symmetries: kinds of group, views of parameters, legs, the symmetry itself, and its law as a formula."""

from conserved.symmetry.kind import Degree, Kind, NoBestPointError, UnmovableError
from conserved.symmetry.kinds import KINDS, ComplexScaling, GeneralLinear, OneScale, Scaling, Translation
from conserved.symmetry.pairs import Direction, LawPairs, Pair, Point, Tensors
from conserved.symmetry.products import OuterProduct, Products, RowProducts, Term
from conserved.symmetry.symmetry import Leg, Symmetry, moment_map
from conserved.symmetry.view import Pick, Reading, View, whole

__all__ = [
    "KINDS",
    "ComplexScaling",
    "Degree",
    "Direction",
    "GeneralLinear",
    "Kind",
    "LawPairs",
    "Leg",
    "NoBestPointError",
    "OneScale",
    "OuterProduct",
    "Pair",
    "Pick",
    "Point",
    "Products",
    "Reading",
    "RowProducts",
    "Scaling",
    "Symmetry",
    "Tensors",
    "Term",
    "Translation",
    "UnmovableError",
    "View",
    "moment_map",
    "whole",
]
