"""Key coherence, largest logit and evenness of every head while a model trains, into the sinks of the law monitor."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from conserved.alarm import Alarm
from conserved.attention.departures import DepartureRule, DepartureWatch
from conserved.attention.energy import energy_field
from conserved.attention.probing import sequences
from conserved.attention.queries_and_keys import Capture, listening
from conserved.attention.softmax import softmax_statistics
from conserved.run_names import new_run_name
from conserved.store.sink import Run, Sink
from conserved.store.step_record import StepRecord

LOGGER = logging.getLogger("conserved")


AttentionRecord = StepRecord
"""One sampled step: readings by name and alarms, and no laws."""


class AttentionMonitor:
    """Listens to the forward passes of a model that trains, every so many steps.

    >>> monitor = AttentionMonitor(model, every=20, rule=rule, sinks=[sink])   # doctest: +SKIP
    >>> for batch in batches:                                                  # doctest: +SKIP
    ...     with monitor.listen():
    ...         loss = loss_fn(model(batch))
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
    ...     monitor.step()

    Between samples nothing is attached to the model. Series are named LAYER[HEAD].coherence, .largest_logit and
    .evenness.

    Args:
        model: the model that trains.
        every: number of steps from one sample to the next.
        sequences: number of sequences of each batch that are looked at, from its beginning.
        rule: when to raise an alarm; by default never.
        sinks: where records go.
        run: the name of the run in its sinks; by default the date and time.
        config: plain data that is stored with the run.
        keep: number of samples that stay in memory.

    Raises:
        ValueError: `every` or `sequences` is less than one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        sequences: int = 4,
        rule: DepartureRule | None = None,
        sinks: Iterable[Sink] = (),
        run: str | None = None,
        config: Mapping[str, Any] | None = None,
        keep: int = 10_000,
    ) -> None:
        if every < 1 or sequences < 1:
            raise ValueError(
                f"Expected every and sequences of at least 1, got {every} and {sequences}. Pass positive numbers."
            )
        self.model = getattr(model, "_orig_mod", model)
        self.every, self.count = every, 0
        self.skipped: dict[str, str] = {}
        self.alarms: list[Alarm] = []
        self.records: deque[AttentionRecord] = deque(maxlen=keep)
        self._most = sequences
        self._watch = DepartureWatch(rule) if rule is not None else None
        self._sinks = tuple(sinks)
        self._run = run or f"attention, {new_run_name()}"
        self._config = dict(config or {}) | {"every": every, "sequences": sequences}
        self._samples: dict[str, list[Tensor]] = {}
        self._started = False

    @property
    def sampled(self) -> bool:
        """Whether the step under way is one that is looked at."""
        return (self.count + 1) % self.every == 0

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Observe the forward pass inside the context, if this step is sampled."""
        if not self.sampled:
            yield
            return
        with listening(self.model, self._sample):
            yield

    def step(self) -> AttentionRecord | None:
        """Count a step of training and return its record, if it was sampled."""
        self.count += 1
        if not self._samples:
            return None
        readings = {name: float(torch.stack(parts).mean()) for name, parts in self._samples.items()}
        self._samples.clear()
        alarms = tuple(self._watch.look(self.count, readings)) if self._watch is not None else ()
        record = AttentionRecord(step=self.count, readings=readings, alarms=alarms)
        self._log(alarms)
        self.records.append(record)
        for sink in self._sinks:
            if not self._started:
                sink.begin(Run(name=self._run, config=self._config, step=self.count - 1))
            sink.write(record)
        self._started = True
        return record

    def series(self) -> dict[str, list[float]]:
        """Return every series so far, by name."""
        table: dict[str, list[float]] = {}
        for record in self.records:
            for name, value in record.readings.items():
                table.setdefault(name, []).append(value)
        return table

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the latest reading of every series, as functions: for a law monitor that takes gauges of its own."""
        latest = self.records[-1].readings if self.records else {}
        return {name: lambda name=name: self.records[-1].readings[name] for name in latest}  # type: ignore[misc]

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> AttentionMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self, capture: Capture) -> None:
        if capture.problem:
            self.skipped[capture.path] = capture.problem
            return
        for number, (q, k, options) in enumerate(sequences(capture, None, self.skipped)):
            if number >= self._most:
                break
            for name, values in _readings(q, k, capture, options).items():
                for head, value in enumerate(values):
                    self._samples.setdefault(f"{capture.path}[{head}].{name}", []).append(value)

    def _log(self, alarms: tuple[Alarm, ...]) -> None:
        self.alarms += alarms
        for kind in dict.fromkeys(alarm.code for alarm in alarms):
            alike = [alarm for alarm in alarms if alarm.code == kind]
            others = f" {len(alike) - 1} other heads do the same." if len(alike) > 1 else ""
            LOGGER.warning("%s%s", alike[0].message, others)


def _readings(q: Tensor, k: Tensor, capture: Capture, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the three series of every head, NaN where keys are not finite."""
    softmax = softmax_statistics(q, k, scale=capture.scale, softcap=capture.softcap, **options)
    readings = {"largest_logit": softmax.largest_logit, "evenness": softmax.evenness}
    if bool(torch.isfinite(k).all()):
        # Coherence belongs to the keys alone: one of them is query enough.
        coherence = energy_field(k[..., :1, :], k).coherence
        readings["coherence"] = coherence.repeat_interleave(q.shape[-3] // k.shape[-3], -1)
    else:
        readings["coherence"] = torch.full_like(softmax.largest_logit, torch.nan)
    return readings
