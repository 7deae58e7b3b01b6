"""An exact account of what every optimizer step does to the laws of a model."""

from conserved.alarm import Alarm
from conserved.track.alarms import STANDARD, Growth, faster_than_account, residual_above_rounding
from conserved.track.combination import Combination
from conserved.track.config import MonitorConfig
from conserved.track.monitor import Monitor
from conserved.track.record import Entry, StepRecord
from conserved.track.rules import GENERIC, ParameterStep, Rule, Update, register_rule, rule_of
from conserved.track.sinks import (
    BrokenStore,
    JsonLines,
    LiveTable,
    RunStore,
    RunTaken,
    Sink,
    SQLite,
    TensorBoard,
    Trackio,
    WeightsAndBiases,
    store_document,
)
from conserved.track.theory import AngularMomentum, Decay, DriftBound
from conserved.track.watch import PrecisionChanged, StepMissed

__all__ = [
    "GENERIC",
    "STANDARD",
    "Alarm",
    "AngularMomentum",
    "BrokenStore",
    "Combination",
    "Decay",
    "DriftBound",
    "Entry",
    "Growth",
    "JsonLines",
    "LiveTable",
    "Monitor",
    "MonitorConfig",
    "ParameterStep",
    "PrecisionChanged",
    "Rule",
    "RunStore",
    "RunTaken",
    "SQLite",
    "Sink",
    "StepMissed",
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
