"""The other processes of a run: which of them share parameters with this one, and what their monitors agree on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

import torch.distributed as dist
from torch import nn

from conserved.auditing.backward_pass import layout_with
from conserved.inference.model_parts import parts_of
from conserved.laws import LawSet
from conserved.layout import GivenLayout
from conserved.rank_agreement import RankAgreement, announce_monitor, retract_monitor, several_processes
from conserved.tracking.process_laws import shared_laws


class Peers:
    """The processes whose monitors compute together with that of this process, if there are any."""

    def __init__(self) -> None:
        self._announced: int | None = None
        self.agreement: RankAgreement | None = None
        """How processes that hold pieces of one parameter agree on what they compute together."""

    def announce(self) -> None:
        """Let other processes know that this one has a monitor."""
        self._announced = announce_monitor() if several_processes() else None

    def agree_on_laws(self, model: nn.Module, laws: LawSet, layout: GivenLayout | None) -> LawSet:
        """Return the laws that all processes with these parameters have read, about to take the reference together."""
        ranks = layout_with(parts_of(model), layout).joint_ranks if several_processes() else ()
        if self.agreement is None and len(ranks) > 1 and self._announced is not None:
            self.agreement = RankAgreement(ranks, "laws", self._announced)
        if self.agreement is None:
            return laws
        self.agreement.confirm("reference of laws")
        return shared_laws(laws, self.agreement)

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all processes confirm a computation over processes before it runs."""
        return nullcontext() if self.agreement is None else self.agreement.active()

    def withdraw(self) -> None:
        """Let the other processes no longer wait for this one."""
        if self._announced is None or not dist.is_initialized():
            return
        # The store may be gone already, with the process that held it.
        with suppress(RuntimeError):
            if self.agreement is None:
                retract_monitor(self._announced)
            else:
                self.agreement.withdraw()


def is_first_process() -> bool:
    """Return whether this process writes to sinks and logs: of several, only the first does."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
