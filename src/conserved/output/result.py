"""The base of results: `print` shows the summary, and a notebook shows it compactly."""

from __future__ import annotations

from conserved.output import html


class PrintableResult:
    """The base of results that have a `summary()`. Each defines its own short `__repr__`."""

    __slots__ = ()

    def summary(self) -> str:
        """Return the result as text, for people."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return html.panel(html.preformat(self.summary()))
