"""Ways into other people's training loops; each is loaded when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conserved.integrations.equalizing import EqualizeCallback
    from conserved.integrations.lightning import LightningConservation
    from conserved.integrations.trainer import ConservationCallback

__all__ = ["ConservationCallback", "EqualizeCallback", "LightningConservation"]


def __getattr__(name: str) -> object:
    """Import the loop's own package only for those who use it."""
    if name == "ConservationCallback":
        from conserved.integrations.trainer import ConservationCallback

        return ConservationCallback
    if name == "EqualizeCallback":
        from conserved.integrations.equalizing import EqualizeCallback

        return EqualizeCallback
    if name == "LightningConservation":
        from conserved.integrations.lightning import LightningConservation

        return LightningConservation
    raise AttributeError(f"module 'conserved.integrations' has no attribute {name!r}")
