"""Do the first and the last stage of a pipeline hold the table alike that they share? Its gradient is a sum of both.

No law of one stage speaks of a shared table, because each stage computes a part of its gradient only. What has to hold
is that both stages use the same gradient. Each process shows the norm and two projections of what it holds of it, which
add up over the shards of a distributed optimizer, through the store: nothing waits for another stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from conserved.layout.gradients import gradient_of, owned_ranges
from conserved.layout.megatron import SharedTableRanks, is_shared_with_stages, shared_table_ranks, stage_ranks
from conserved.layout.replicas import projections
from conserved.rank_agreement import several_processes
from conserved.symmetry.view import local
from conserved.tolerances import RESIDUAL_TOLERANCE
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.rank_exchange import RankExchange
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep

_Sums = list[float]
"""The square of a norm, and two projections."""


class SharedTables(StepIdentity):
    """Compares the gradient of a table between the stages of a pipeline that share it."""

    name = "shared tables"

    def __init__(self) -> None:
        self._exchange: RankExchange | None = None
        self._ranks: SharedTableRanks | None = None
        self._name = ""
        self._sums: _Sums | None = None
        self._limit = 0.0
        self._steps: dict[int, dict[int, _Sums]] = {}
        """By step and process, what was shown."""
        self._reported = False

    def begin(self, step: TrainingStep) -> None:
        if not several_processes():
            return
        # Exchanges are numbered, so that every stage makes one, also those between that share no table.
        exchange = RankExchange("shared tables") if stage_ranks() else None
        self._ranks = shared_table_ranks()
        self._exchange = None if self._ranks is None else exchange

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Take the projections of the gradient that is about to be used."""
        if self._exchange is None or self._sums is not None:
            return
        for name, parameter in step.model.named_parameters():
            gradient = gradient_of(parameter)
            if gradient is not None and is_shared_with_stages(parameter):
                start, end = owned_ranges(step.called, [parameter])[0]
                self._name, self._sums = name, _additive(gradient, start, end)
                self._limit = RESIDUAL_TOLERANCE[gradient.dtype]
                return

    def after_step(self, step: TrainingStep) -> None:
        if self._exchange is None:
            return
        if self._sums is not None:
            self._exchange.show(step.number, {"sums": self._sums, "name": self._name})
            self._steps.setdefault(step.number, {})[self._exchange.rank] = self._sums
        self._sums = None
        self._compare(step)

    def close(self, step: TrainingStep) -> None:
        if self._exchange is not None:
            self._compare(step)

    def restart(self) -> None:
        self._sums = None

    def _compare(self, step: TrainingStep) -> None:
        assert self._exchange is not None
        assert self._ranks is not None
        for rank, number, other, _ in self._exchange.arrivals():
            self._steps.setdefault(number, {})[rank] = other["sums"]
        for number in sorted(self._steps):
            shown = self._steps[number]
            if {*self._ranks.first, *self._ranks.last} <= {*shown}:
                del self._steps[number]
                first, last = (_total(shown, ranks) for ranks in (self._ranks.first, self._ranks.last))
                self._judge(step, number, first, last)
        for number in [number for number in self._steps if number < step.number - _KEPT]:
            del self._steps[number]

    def _judge(self, step: TrainingStep, number: int, first: _Sums, last: _Sums) -> None:
        assert self._ranks is not None
        size = math.sqrt(max(first[0], last[0], 0.0))
        norms = abs(math.sqrt(max(first[0], 0.0)) - math.sqrt(max(last[0], 0.0)))
        apart = max(norms, abs(first[1] - last[1]), abs(first[2] - last[2]))
        if self._reported or not size or apart <= self._limit * size:
            return
        self._reported = True
        ranks = (self._ranks.first[0], self._ranks.last[0])
        step.report(
            StepFinding(
                code="replicas",
                tensor=self._name,
                step=number,
                ranks=ranks,
                value=apart / size,
                limit=self._limit,
                message=f"The gradient of {self._name} differs by {apart / size:.2g} of its norm between ranks "
                f"{ranks[0]} and {ranks[1]}, the first and the last stage of the pipeline, which share this table. "
                "The sum over the embedding group is missing, or was made before the gradient was reduced over data "
                "parallelism on one of them.",
            )
        )


_KEPT = 16
"""Steps after which what a stage has shown is forgotten, if another has not audited the same step."""


def _additive(gradient: Tensor, start: int, end: int) -> _Sums:
    """Return the squared norm and two projections of the entries that this process is right about."""
    norm, first, second = projections(local(gradient).flatten()[start:end], start).tolist()
    return [norm * norm, first, second]


def _total(shown: dict[int, _Sums], ranks: Sequence[int]) -> _Sums:
    return [math.fsum(shown[rank][index] for rank in ranks) for index in range(3)]
