"""Do stages of a pipeline written by hand step a tensor alike that they share? Values say which tensor that is.

The first and the last stage hold the same table, and its gradient is the sum of what both compute. No law of one stage
speaks of such a tensor. What has to hold is that it stays the same on both. Two processes share a tensor if they run
different models and a few of their tensors are equal to the bit; stages that were seeded alike share most of theirs.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from conserved.inference.cached_laws import cached_laws_of
from conserved.layout.megatron import carries_attributes, stage_ranks
from conserved.rank_agreement import several_processes
from conserved.tracking.identities.finding import StepFinding
from conserved.tracking.identities.fingerprints import fingerprints, varies
from conserved.tracking.identities.rank_exchange import MOST, RankExchange
from conserved.tracking.identities.step_identity import StepIdentity, TrainingStep, is_plain

_FEW = 0.25
"""The largest share of a model's tensors that are shared on purpose."""


class TiedStages(StepIdentity):
    """Compares tensors between processes that run different models and began with equal values of them."""

    name = "tied stages"

    def __init__(self) -> None:
        self._exchange: RankExchange | None = None
        self._tied: dict[int, dict[str, str]] = {}
        """By process, the names of shared tensors here and there."""
        self._reported = False

    def begin(self, step: TrainingStep) -> None:
        if not several_processes():
            return
        # Exchanges are numbered, so that every process makes one.
        exchange = RankExchange("tied stages")
        named = dict(step.model.named_parameters())
        plain = all(is_plain(p) and not hasattr(p, "device_mesh") for p in named.values())
        if exchange.world > MOST or stage_ranks() or carries_attributes(named) or not plain:
            return
        self._exchange = exchange
        prints = fingerprints([*named.values()]).tolist()
        tensors = {
            name: f"{number} {tuple(p.shape)}"
            for (name, p), number in zip(named.items(), prints, strict=True)
            if p.requires_grad and p.ndim > 1 and varies(p)
        }
        exchange.show(0, {"names": [*named], "tensors": tensors})

    def before_laws(self, step: TrainingStep) -> None:
        """Learn which tensors are shared: laws with these are not watched."""
        self._compare(step)

    def with_gradients(self, step: TrainingStep, optimizer: Optimizer) -> None:
        """Learn it before the first audit, if the other process came later."""
        self._compare(step)

    def after_step(self, step: TrainingStep) -> None:
        if self._exchange is None:
            return
        names = sorted({name for tied in self._tied.values() for name in tied})
        if names:
            parameters = dict(step.model.named_parameters())
            prints = fingerprints([parameters.get(name) for name in names]).tolist()
            self._exchange.show(step.number, {"after": dict(zip(names, prints, strict=True))})
        self._compare(step)

    def close(self, step: TrainingStep) -> None:
        self._compare(step)

    def _compare(self, step: TrainingStep) -> None:
        if self._exchange is None:
            return
        for rank, number, theirs, own in self._exchange.arrivals():
            if number == 0:
                self._learn(step, rank, theirs, own)
                continue
            for name, other in self._tied.get(rank, {}).items():
                if other in theirs["after"] and theirs["after"][other] != own["after"].get(name):
                    self._report(step, rank, number, name)

    def _learn(self, step: TrainingStep, rank: int, theirs: dict[str, Any], own: dict[str, Any]) -> None:
        there = {tensor: name for name, tensor in theirs["tensors"].items()}
        tied = {name: there[tensor] for name, tensor in own["tensors"].items() if tensor in there}
        few = len(tied) <= _FEW * min(len(own["names"]), len(theirs["names"]))
        if tied and few and theirs["names"] != own["names"]:
            self._tied[rank] = tied
            cached = cached_laws_of(step.model)
            cached.shared = cached.shared.union(tied)

    def _report(self, step: TrainingStep, rank: int, number: int, name: str) -> None:
        assert self._exchange is not None
        if self._reported:
            return
        self._reported = True
        ranks = tuple(sorted((self._exchange.rank, rank)))
        step.report(
            StepFinding(
                code="replicas",
                tensor=name,
                step=number,
                ranks=ranks,
                message=f"{name} was the same on ranks {ranks[0]} and {ranks[1]}, which run different models, and "
                f"differs after step {number}. If both stages share it, its gradient has to be added up over them.",
            )
        )
