"""Settings of a monitor beyond its common arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conserved.layout import GivenLayout
from conserved.tracking.alarm_rules import STANDARD, AlarmRule, Growth
from conserved.tracking.optimizer_rules import Rule

ReadNumber = Callable[[], float | Tensor]
"""A function that returns further readings, such as the key coherence of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Further settings of a monitor; every field has a default that serves most runs.

    Attributes:
        rule: how the optimizer's steps are read, instead of the rule registered for its class.
        causes: whether steps are split into the parts of decay, momentum and the preconditioner.
        baselines: whether the paper's baselines, which are not conserved, are watched as well.
        dtype: the precision laws are computed in; by default that of the parameters, at least float32.
        precision: the precision of the backward pass, where it is not the parameters' own (autocast).
        gauges: functions that read other numbers after every step, by name.
        alarms: functions of a step's record that yield alarms, and `Growth` of readings.
        keep: number of records that stay in memory.
        notes: plain data that is stored with the run, such as its hyperparameters.
        layout: where the pieces of parameters are, by patterns of names, for stacks that leave no trace on parameters;
            as for `conserved.audit`.
        compare: whether gradients are also compared, row by row, with those of the pass in reference form (eager, wider
            precision) at the first audited step and then as the budget allows. It sees what no law spans. It takes
            several passes. If something differs, weights move by their spacing for a pass and are put back bit by bit.
        repair: whether gradients that the same pass does not give again are replaced by those of the replay before the
            optimizer uses them, so that a bit flip costs one pass and not the run.
        strict: whether an error inside the monitor is raised in the training loop instead of turning a part of it off.
    """

    rule: Rule | None = None
    causes: bool = True
    baselines: bool = False
    dtype: torch.dtype | None = None
    precision: torch.dtype | None = None
    gauges: Mapping[str, ReadNumber] = field(default_factory=dict)
    alarms: Iterable[AlarmRule | Growth] = STANDARD
    keep: int = 1000
    notes: Mapping[str, Any] = field(default_factory=dict)
    layout: GivenLayout | None = None
    compare: bool = False
    repair: bool = False
    strict: bool = False

    def under(self, precision: torch.dtype | None) -> MonitorConfig:
        """Return the same settings for backward passes in another precision.

        Args:
            precision: the precision of autocast, if there is one.

        Returns:
            A copy with this `precision`, unless one was set already.
        """
        return replace(self, precision=self.precision or precision)
