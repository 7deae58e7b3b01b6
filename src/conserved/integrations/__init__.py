"""Ways into other people's training loops; each is loaded when it is first asked for, and their packages with it."""

from typing import TYPE_CHECKING

from conserved.on_demand import load_on_demand

if TYPE_CHECKING:
    from conserved.integrations.equalizing import EqualizeCallback
    from conserved.integrations.lightning import LightningConservation
    from conserved.integrations.trainer import ConservationCallback
else:
    __getattr__ = load_on_demand(
        __name__,
        {
            "equalizing": "EqualizeCallback",
            "lightning": "LightningConservation",
            "trainer": "ConservationCallback",
        },
    )

__all__ = ["ConservationCallback", "EqualizeCallback", "LightningConservation"]
