"""Thousands of random programs: no law inferred for one is wrong, and how often inference finds all there are.

`--count` counts the laws of the first programs by the Lie closure, which knows nothing of inference, and keeps the
counts for the tests. Without it, laws are inferred and held against one backward pass, a finite move along each
symmetry, one step of gradient descent, and the counts. Both continue where their file ends.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from conserved import recognize
from conserved.discovery.inputs import UnsuitableError
from conserved.discovery.rank import LEAST_GAP
from law_checks import check, count, drifts, subject, undefined
from measure import RESULTS, commit, machine
from program_grammar import PRODUCTIONS, build, compose

COUNTS = Path(__file__).parent.parent / "tests" / "data" / "program_counts.json"
FIRST_ORDER = 1e-3
VANISHES = 1e-9
"""Outputs smaller than this are rounding: inputs and parameters are of about one."""


def counted(seed: int, *, arguments: bool = False) -> dict[str, Any]:
    """The count of one program, from the better of two seeds of the Lie closure."""
    program, _, loss, words = compose(seed, arguments=arguments)
    prepared = subject(build(seed, arguments=arguments), loss=loss)
    best: dict[str, Any] = {}
    for attempt in range(3):
        try:
            result = count(prepared, seed=attempt)
        except (UnsuitableError, RuntimeError, NotImplementedError) as problem:
            return {"why": str(problem).splitlines()[0][:120], "words": words}
        clear = result.gap >= LEAST_GAP
        if clear and result.rank > best.get("rank", -1):
            best = {"count": result.count, "rank": result.rank, "settled": result.verdict.holds, "seed": attempt}
        if result.verdict.holds and attempt > 0:
            break
    size = sum(p.numel() for p in program.parameters())
    return {"parameters": size, "words": words, **(best or {"why": "no clear gap"})}


def inferred(seed: int, *, arguments: bool = False) -> dict[str, Any]:
    """What inference says of one program, and whether it is true."""
    program, x, loss, words = compose(seed, arguments=arguments)
    record: dict[str, Any] = {"words": words, "parameters": sum(p.numel() for p in program.parameters())}
    start = time.perf_counter()
    args: tuple[Any, ...] = (x,)
    laws = recognize(program, *args, loss=loss)
    record["seconds"] = time.perf_counter() - start
    assert laws.checked is not None
    if laws.checked.refuted:
        record["refuted"] = dict(laws.checked.refuted)
        record["program"] = str(program)
    prepared = subject(build(seed, arguments=arguments), loss=loss)
    theta = {name: p.detach() for name, p in prepared.model.named_parameters()}
    record["independent"] = laws.independent(theta) if len(laws) else 0
    record["unknown"] = sorted(map(str, dict(getattr(laws, "unknown", {}) or {})))
    with torch.no_grad():
        vanishes = float(prepared.seen().norm()) < VANISHES
    if vanishes or undefined(prepared):
        # An output that is rounding, as log Σ exp log softmax, has no relative change under a move.
        # A program whose loss is NaN has no gradients that an identity could be about.
        return record | {"undefined": True, "worst": 0.0}
    result = check(laws, prepared)
    record["worst"] = result.worst
    # A move may leave the domain of a program, as a quotient by a median that is zero there.
    wrong = {name: why for name, why in result.wrong.items() if "nan" not in str(why)}
    wrong |= {n: f"drifts at first order, {d:.1e}" for n, d in drifts(laws, prepared).items() if d > FIRST_ORDER}
    if wrong:
        record["wrong"] = wrong
        record["program"] = str(program)
    return record


def summary(rows: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    """The figures of the campaign."""
    good = {seed: r for seed, r in rows.items() if "error" not in r}
    both = {s: (r["independent"], counts[s]["count"]) for s, r in good.items() if counts.get(s, {}).get("settled")}
    short = {s: b - a for s, (a, b) in both.items() if a < b}
    blamed: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in both:
        words = set(rows[seed]["words"].split(", "))
        seen.update(words)
        blamed.update(words if seed in short else ())
    return {
        "programs": len(rows),
        "productions": len(PRODUCTIONS),
        "errors": {seed: r["error"] for seed, r in rows.items() if "error" in r},
        "undefined": [seed for seed, r in good.items() if "undefined" in r],
        "wrong": {seed: r["wrong"] for seed, r in good.items() if "wrong" in r},
        "refuted": {seed: r["refuted"] for seed, r in good.items() if "refuted" in r},
        "laws": sum(r["independent"] for r in good.values()),
        "worst_residual": max((r["worst"] for r in good.values() if "wrong" not in r), default=0.0),
        "compared": len(both),
        "equal": sum(a == b for a, b in both.values()),
        "over": {s: a - b for s, (a, b) in both.items() if a > b},
        "short": short,
        "short_by_production": {w: f"{n} of {seen[w]}" for w, n in blamed.most_common(25)},
        "short_by_reason": by_reason(rows, both, short),
    }


def by_reason(rows: dict[str, Any], both: dict[str, Any], short: dict[str, int]) -> dict[str, list[str]]:
    """Programs with laws that were not found, under what most often goes with it: operations without a rule first,
    then the production whose programs are short most often among those that are left."""
    result: dict[str, list[str]] = {}
    left = dict(short)
    for seed in list(left):
        if rows[seed].get("unknown"):
            result.setdefault(f"no rule: {', '.join(rows[seed]['unknown'])}", []).append(seed)
            del left[seed]
    words = {seed: set(rows[seed]["words"].split(", ")) for seed in both}
    while left:
        counts = Counter(word for seed in left for word in words[seed])
        whole = Counter(word for seed in both if seed in left or seed not in short for word in words[seed])
        best = max(counts, key=lambda word: (counts[word] / (whole[word] + 2), counts[word]))
        mine = [seed for seed in left if best in words[seed]]
        result[f"{best} ({len(mine)} of {whole[best]})"] = mine
        left = {seed: n for seed, n in left.items() if seed not in mine}
    return result


def main() -> None:
    """Count, or infer and check, what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="count laws instead of inferring them")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--file", type=Path, default=RESULTS / "inferred_programs_cpu_2026-11-16.json")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--arguments", action="store_true", help="draw the arguments of operators as well")
    parser.add_argument("--counted", type=int, default=0, help="with --arguments: count laws of the first programs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.arguments:
        _with_arguments(options)
        return
    counts: dict[str, Any] = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if options.count:
        for seed in range(options.first, options.first + options.programs):
            if str(seed) not in counts:
                counts[str(seed)] = counted(seed)
                if seed % 10 == 9:
                    COUNTS.write_text(json.dumps(counts, ensure_ascii=False).replace("}, ", "},\n") + "\n")
                    print(seed, counts[str(seed)], flush=True)
        COUNTS.write_text(json.dumps(counts, ensure_ascii=False).replace("}, ", "},\n") + "\n")
        return
    saved = json.loads(options.file.read_text()) if options.file.exists() else {}
    rows: dict[str, Any] = {} if options.again else saved.get("rows", {})
    for seed in range(options.first, options.first + options.programs):
        if str(seed) in rows and "error" not in rows[str(seed)]:
            continue
        torch.manual_seed(seed)
        try:
            rows[str(seed)] = inferred(seed)
        except Exception as problem:
            index = traceback.extract_tb(problem.__traceback__)[-1]
            rows[str(seed)] = {
                "error": f"{type(problem).__name__}: {problem}"[:200],
                "at": f"{Path(index.filename).name}:{index.lineno}",
                "words": compose(seed)[3],
            }
        r = rows[str(seed)]
        if "wrong" in r or "error" in r:
            print(seed, r.get("wrong") or r["error"], r.get("at", ""), flush=True)
        if seed % 50 == 49:
            _save(options.file, rows, counts)
    _save(options.file, rows, counts)
    print(json.dumps(summary(rows, counts), indent=1, ensure_ascii=False))


def _with_arguments(options: argparse.Namespace) -> None:
    """Infer and check programs whose operators have drawn arguments; count the laws of the first ones here as well."""
    rows: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for seed in range(options.first, options.first + options.programs):
        torch.manual_seed(seed)
        try:
            rows[str(seed)] = inferred(seed, arguments=True)
        except Exception as problem:
            # A campaign goes on; what was raised stands in its record.
            rows[str(seed)] = {"error": f"{type(problem).__name__}: {problem}"[:200], "words": ""}
        if seed - options.first < options.counted:
            counts[str(seed)] = counted(seed, arguments=True)
        r = rows[str(seed)]
        if "wrong" in r or "error" in r or "refuted" in r:
            print(seed, r.get("wrong") or r.get("refuted") or r["error"], flush=True)
    record = {"commit": commit(), **machine(), "summary": summary(rows, counts), "counts": counts}
    options.file.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    print(json.dumps(record["summary"], indent=1, ensure_ascii=False))


def _save(file: Path, rows: dict[str, Any], counts: dict[str, Any]) -> None:
    record = {"commit": commit(), **machine(), "summary": summary(rows, counts), "rows": rows}
    file.write_text(json.dumps(record, ensure_ascii=False).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
