"""Why the laws of some models of the catalogue are fewer, or more, than a count at one point says."""

from __future__ import annotations

KINKS = (
    "the count is of one point, where some neurons are always or never active; over random parameters there are no "
    "more laws of degree one and two than are listed"
)

UNCLEAR = (
    "the count has no clear gap between directions and rounding; the listed laws hold, and over random parameters "
    "there are as many of degree one and two"
)

REASONS: dict[str, str] = {}
"""By the name of the model: what the missing laws are, and which rule does not see them."""
