"""An exact account of what every optimizer step does to the laws of a model."""

from conserved.alarm import Alarm
from conserved.boundary import Condition
from conserved.store import (
    BrokenStoreError,
    JsonLines,
    LiveTable,
    RunStore,
    RunTakenError,
    Sink,
    SQLite,
    TensorBoard,
    Trackio,
    WeightsAndBiases,
    store_document,
)
from conserved.store.step_record import Entry, StepRecord
from conserved.tracking.alarm_rules import STANDARD, Growth, faster_than_account, residual_above_rounding
from conserved.tracking.combination import Combination
from conserved.tracking.monitor import Monitor
from conserved.tracking.monitor_config import MonitorConfig
from conserved.tracking.optimizer_rules import GENERIC, ParameterStep, Rule, Update, register_rule, rule_of
from conserved.tracking.optimizer_watch import PrecisionChangedError
from conserved.tracking.theory import AngularMomentum, Decay, DriftBound

__all__ = [
    "GENERIC",
    "STANDARD",
    "Alarm",
    "AngularMomentum",
    "BrokenStoreError",
    "Combination",
    "Condition",
    "Decay",
    "DriftBound",
    "Entry",
    "Growth",
    "JsonLines",
    "LiveTable",
    "Monitor",
    "MonitorConfig",
    "ParameterStep",
    "PrecisionChangedError",
    "Rule",
    "RunStore",
    "RunTakenError",
    "SQLite",
    "Sink",
    "StepRecord",
    "TensorBoard",
    "Trackio",
    "Update",
    "WeightsAndBiases",
    "faster_than_account",
    "register_rule",
    "residual_above_rounding",
    "rule_of",
    "store_document",
]
