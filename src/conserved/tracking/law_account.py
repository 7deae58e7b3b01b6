"""The laws of a model bound to its optimizers: where they began, what every step did to them, what it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conserved.boundary import Boundary
from conserved.laws import LawSet, Reference
from conserved.store.step_record import FIELDS, By, LawName, average
from conserved.symmetry import Symmetry, Tensors
from conserved.tracking.device_transfer import Transfer
from conserved.tracking.kept_account import RunningTotals, Scales, close_step, start_account
from conserved.tracking.ledger import Ledger, StepAccount
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.optimizer_watch import OptimizerWatch
from conserved.tracking.step_expansion import Expansion
from conserved.tracking.theory import (
    AngularMomentum,
    Decay,
    DriftBound,
    angular_momenta,
    decays,
    drift_bounds,
    momenta,
)
from conserved.tracking.watched_laws import Selection, Where


class LawAccount:
    """The account of a monitor that knows the laws; their values at its creation are the reference."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        law_set: LawSet,
        *,
        where: Where | None,
        config: MonitorConfig,
        boundary: Boundary,
        sampled: Callable[[], bool],
        converted: Callable[[Sequence[str]], None],
    ) -> None:
        """Create an account. `sampled` says whether to account for the coming step.

        `converted` receives parameters of a new type.
        """
        selection = Selection.of(model, optimizers, law_set, where, with_impostors=config.baselines)
        self.laws, self.left_out = selection.laws, selection.left_out
        self._config, self._impostors = config, selection.impostors
        self._precision, self._behind = config.precision, False
        names = dict.fromkeys(name for symmetry in self.laws for name in symmetry.parameters)
        self.theta: Tensors = {name: self.laws.parameters[name] for name in names}
        self.watch = OptimizerWatch(
            optimizers,
            self.theta,
            rule=config.rule,
            before=self._catch_up,
            converted=converted,
            sampled=sampled,
            boundary=boundary,
        )
        self._ledger = Ledger(self.laws.symmetries, self.theta, dtype=config.dtype)
        self.names = tuple(map(_law_name, self.laws))
        self.transfer = Transfer(self.names, [index for stack in self._ledger.stacks for index in stack.indices])
        self._unclipped: list[Tensor] | None = None
        self.take_reference()
        self._momenta = self._momenta_now()

    def take_reference(self) -> None:
        """Make the current laws the reference from which drift is measured."""
        now = self.laws.reference(dtype=self._config.dtype)
        self.reference = _moved_to("cpu", now)
        accounts = self._laws_now()
        self._scales = self._measured([account.law for account in accounts])
        self._running = [start_account(account) for account in accounts]
        self._linear = any(bool((scales.floor > 0).any()) for scales in self._scales)

    def _laws_now(self) -> list[StepAccount]:
        return self._ledger.account(lambda names: [Expansion.of(self.theta[name]) for name in names])

    def _measured(self, like: Sequence[Tensor]) -> list[Scales]:
        """Return the scale of changes and their rounding limits at the current parameters."""
        return [
            Scales.of(
                stack,
                self.laws.symmetries,
                self.theta,
                self.reference,
                impostors=self._impostors,
                dtype=self._config.dtype,
                precision=self._precision,
                like=reference,
            )
            for stack, reference in zip(self._ledger.stacks, like, strict=True)
        ]

    def _catch_up(self) -> None:
        """Continue from the current laws, after steps that were left out.

        Nothing is known about the steps in between. Their drift counts as accounted for: what is left over is what the
        steps that were looked at leave.
        """
        if self._behind:
            self._go_on(self._laws_now())

    def _go_on(self, accounts: Sequence[StepAccount]) -> None:
        for running, account in zip(self._running, accounts, strict=True):
            running.accounted += account.law - running.previous
            running.previous, running.sizes = account.law.clone(), account.sizes.clone()
        self._behind = False

    def use_precision(self, precision: torch.dtype) -> None:
        """Set the precision of the backward pass, unless the configuration names one."""
        if self._config.precision is None and precision != self._precision:
            self._precision = precision
            self._coarsen()

    def _coarsen(self) -> None:
        """Allow for the rounding of the precision that is used now, never for less than before."""
        measured = self._measured([running.reference for running in self._running])
        self._scales = [new.no_finer_than(old) for new, old in zip(measured, self._scales, strict=True)]

    def go_on_converted(self) -> None:
        """Continue after parameters were converted between two steps: that is not a step, and rounding differs."""
        self._coarsen()
        self._go_on(self._laws_now())

    def note_unclipped(self) -> None:
        """Record the gradients that backpropagation gave, before clipping changes them."""
        self._unclipped = [account.gradient_term for account in self._ledger.account(self.watch.unclipped)]

    def leave_out_step(self) -> None:
        """Skip the last step; the next one that is accounted for starts from its own state."""
        self._behind = True

    def forget_step(self) -> None:
        """Discard the last step, which is accounted for."""
        self._unclipped = None
        self.watch.clear()

    def settle(self) -> tuple[tuple[str, ...], Tensor]:
        """Return the causes of the last step, and a row for every law: `FIELDS`, then what each cause did."""
        if not self.watch.stepped:
            self._catch_up()
        accounts = self._ledger.account(lambda names: self.watch.expand(names, causes=self._config.causes))
        norm = self.watch.gradient_norm() if self._linear and self.watch.stepped else None
        before: Sequence[Tensor | None] = self._unclipped or [None] * len(accounts)
        stacks = zip(self._ledger.stacks, self._scales, self._running, accounts, before, strict=True)
        with torch.no_grad():
            rows = [
                close_step(
                    stack,
                    scales,
                    running,
                    account,
                    unclipped=gradient_term,
                    gradient_norm=None if norm is None else norm.to(account.law.dtype),
                )
                for stack, scales, running, account, gradient_term in stacks
            ]
            causes = tuple(dict.fromkeys(cause for _, by_cause in rows for cause in by_cause))
            host = rows[0][0]["moved"].device
            rows_of = [
                [
                    *(fields[name] for name in FIELDS),
                    *(by_cause.get(c, torch.zeros_like(fields["moved"])) for c in causes),
                ]
                for fields, by_cause in rows
            ]
            return causes, torch.cat([torch.stack(part, -1).to(host, non_blocking=True) for part in rows_of])

    def errors(self, theta: Tensors | None, by: By) -> dict[str, float]:
        """Return Equation (10) of these parameters, or of the model's own, against the reference."""
        reference = _moved_to(next(iter(self.theta.values())).device, self.reference)
        result = self.laws.errors(reference, theta, by="law", dtype=self._config.dtype)
        return average(self.names, [result[law.name] for law in self.names], by)

    def bounds(self) -> list[DriftBound]:
        """Return equation (9) for every law."""
        return drift_bounds(self._ledger, self._running, self.watch, self._impostors)

    def decay(self) -> list[Decay]:
        """Return the decay law for every law whose legs decay alike."""
        return decays(self._ledger, self._running, self.watch)

    def angular_momenta(self) -> list[AngularMomentum]:
        """Return the angular momenta now, against those at the start."""
        return angular_momenta(self.laws, self._momenta, self._momenta_now(), self.watch)

    def _momenta_now(self) -> dict[str, tuple[Tensor, Tensor]]:
        lawful = self.laws.select(lambda symmetry: symmetry.name not in self._impostors)
        return momenta(lawful, self.theta, self.watch, self._config.dtype)

    def memory(self) -> dict[str, int]:
        """Return bytes held between steps.

        The laws hold some, and so do copies of parameters that an optimizer's rule asks for.
        """
        tensors = [tensor for running in self._running for tensor in running.tensors().values()]
        tensors += [
            tensor
            for scales in self._scales
            for tensor in (scales.denominators, scales.multiplicities, scales.rounding, scales.tolerance, scales.floor)
        ]
        own = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return {"laws": sum(own.values()), "copies": self.watch.copied_bytes()}

    def state(self) -> dict[str, Any]:
        """Return references and sums, for a checkpoint."""
        # Steps that were left out are behind the weights that the checkpoint holds.
        self._catch_up()
        return {
            "laws": list(self.laws.names),
            "reference": {"values": dict(self.reference.values), "scales": dict(self.reference.scales)},
            "running": [
                {name: tensor.detach().cpu().clone() for name, tensor in running.tensors().items()}
                for running in self._running
            ],
            "momenta": {name: (value.cpu(), size.cpu()) for name, (value, size) in self._momenta.items()},
            "sums": [
                [
                    [
                        float(sums_of_group.time),
                        float(sums_of_group.squares),
                        float(sums_of_group.decayed),
                        float(sums_of_group.damped),
                    ]
                    for sums_of_group in sums
                ]
                for sums in self.watch.optimizer_sums()
            ],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state belongs to other laws."""
        if list(state["laws"]) != list(self.laws.names):
            other = sorted(set(state["laws"]) ^ set(self.laws.names))
            raise ValueError(
                f"Expected the state of {len(self.laws)} laws, got that of {len(state['laws'])}, which differ in "
                f"{other[0] if other else 'their order'}. Load it into a monitor of the same model."
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore references and sums that `state` returned."""
        self.reference = Reference(dict(state["reference"]["values"]), dict(state["reference"]["scales"]))
        self._running = [
            RunningTotals(**{name: tensor.to(running.reference) for name, tensor in saved.items()})
            for running, saved in zip(self._running, state["running"], strict=True)
        ]
        self._scales = [
            scales.measured_against(stack, self.laws.symmetries, self.reference)
            for scales, stack in zip(self._scales, self._ledger.stacks, strict=True)
        ]
        self._momenta = {name: (value, size) for name, (value, size) in state["momenta"].items()}
        for sums, saved_sums in zip(self.watch.optimizer_sums(), state["sums"], strict=True):
            for sums_of_group, values in zip(sums, saved_sums, strict=True):
                sums_of_group.time, sums_of_group.squares, sums_of_group.decayed, sums_of_group.damped = values


def _law_name(symmetry: Symmetry) -> LawName:
    units = 1 if symmetry.kind.together else symmetry.numbers
    return LawName(name=symmetry.name, block=symmetry.block, family=symmetry.family, units=units)


def _moved_to(device: str | torch.device, reference: Reference) -> Reference:
    values, scales = (
        {name: value.to(device) for name, value in part.items()} for part in (reference.values, reference.scales)
    )
    return Reference(values, scales)
