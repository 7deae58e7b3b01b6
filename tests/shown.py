"""Text that documentation shows against text that comes out: equal, but for what differs between machines."""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+−]?\d+)?")


def same(shown: str, result: str) -> bool:
    """Whether every line and word agrees; see `close` for numbers. `…` stands for any lines, or any words of a line."""
    wanted, given = _lines(shown), _lines(result)
    if "…" not in wanted:
        return _all_alike(wanted, given)
    cut = wanted.index("…")
    rest = wanted[cut + 1 :]
    return _all_alike(wanted[:cut], given[:cut]) and _all_alike(rest, given[len(given) - len(rest) :])


def _all_alike(shown: list[str], result: list[str]) -> bool:
    return len(shown) == len(result) and all(_alike(a, b) for a, b in zip(shown, result, strict=True))


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _alike(shown: str, result: str) -> bool:
    if "…" in shown:
        return re.fullmatch(".*".join(re.escape(part.strip()) for part in shown.split("…")), result) is not None
    words = [_NUMBER.sub("#", line) for line in (shown, result)]
    numbers = [_NUMBER.findall(line) for line in (shown, result)]
    return words[0] == words[1] and all(close(a, b) for a, b in zip(*numbers, strict=True))


def close(shown: str, result: str) -> bool:
    """Whole numbers are equal; decimals agree to five per cent; what is written with an exponent is rounding, or a
    measure of it, and agrees to three orders of magnitude."""
    if shown == result:
        return True
    if "e" in shown or "e" in result:
        sizes = [abs(_value(text)) for text in (shown, result)]
        return min(sizes) > 0 and abs(math.log10(sizes[0] / sizes[1])) <= 3
    if "." not in shown or "." not in result:
        return False
    return math.isclose(_value(shown), _value(result), rel_tol=0.05, abs_tol=1e-3)


def _value(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))
