"""Tables and sentences of the documentation, one function each, made of nothing but what benchmarks have stored."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@cache
def stored(name: str, device: str = "cpu") -> dict[str, Any]:
    """The newest result of a benchmark on a device."""
    found = sorted(RESULTS.glob(f"{name}_{device}_*.json"))
    if not found:
        raise FileNotFoundError(f"No result of {name} on {device} is stored in {RESULTS}.")
    record: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
    return record


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown; all columns but the first are numbers if their first entry is one."""
    first = rows[0]
    marks = ["---:" if place and re.match(r"[−\d]", str(cell)) else "---" for place, cell in enumerate(first)]
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "|".join(marks) + "|", *lines[1:]])


def number(value: float, digits: int = 2) -> str:
    """A number a person reads: 1,234 or 0.56 or 7.8e-16; whole numbers as they are."""
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}".replace("-", "−")
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - _magnitude(value))
        text = f"{round(value, digits - 1 - _magnitude(value)):,.{decimals}f}"
        return text.replace("-", "−")
    return f"{value:.{digits - 1}e}".replace("-", "−").replace("e−0", "e−").replace("e+", "e")


def size(parameters: int) -> str:
    """How large a model is, in words from a million on."""
    for unit, word in ((10**9, "billion"), (10**6, "million")):
        if parameters >= unit / 2:
            return f"{parameters / unit:.3g} {word}"
    return f"{parameters:,}"


def _magnitude(value: float) -> int:
    return int(f"{abs(value):e}".partition("e")[2])


def span(values: Sequence[float], digits: int = 2) -> str:
    """Least to most; one number if they are the same."""
    least, most = number(min(values), digits), number(max(values), digits)
    return least if least == most else f"{least} to {most}"


def seconds(value: float) -> str:
    """A duration with its unit."""
    return f"{number(value * 1e3, 3)} ms" if value < 1 else f"{number(value, 3)} s"


def made_on(record: dict[str, Any]) -> str:
    """Where a table comes from."""
    threads = "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
    processor = record["device"] if "NVIDIA" in record["device"] else f"{record['device']}, {threads}"
    return f"*{processor}, PyTorch {record['torch'].partition('+')[0]}, {record['date']}, commit {record['commit']}.*"


def catalogue() -> str:
    """Which check sees which broken backward pass."""
    words = {"identity": "identity", "scale": "scale", "gauge": "gauge", "missing": "no gradient"}
    words |= {"reference": "reference form", "loss": "loss"}
    rows = []
    for item in stored("audit_catalogue")["rows"]:
        single, half = item["float32"], item["bfloat16"]
        seen = ", ".join(words[one] for one in single["seen"]) or "**nobody**"
        figures = [number(one["residual"]) if one["residual"] else "–" for one in (single, half)]
        first = f"`{single['broken'][0]}`" if single["broken"] else "–"
        label = re.sub(r"https://github.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", r"\1#\2", item["source"])
        name = f"{item['defect']} ([{label}]({item['source']}))" if label else item["defect"]
        rows.append((name, seen, *figures, first, item["why"]))
    return table(("defect", "seen by", "float32", "bfloat16", "broken first", "why not by others"), rows)


def audit_kernels() -> str:
    """Clean kernels and planted defects on real hardware."""
    record = stored("audit_kernels", "h200")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["defect"], row["dtype"]), []).append(row)
    rows = []
    for (defect, dtype), members in groups.items():
        if defect and dtype != "bfloat16":
            continue
        kernels = len({row["kernel"] for row in members})
        seen = " and ".join(
            name for name, holds in (("identity", "identities hold"), ("gauge", "gauge holds")) if not members[0][holds]
        )
        name = f"{defect}, {dtype}" if defect else f"clean, {dtype}, {kernels} kernels"
        figures = [span([row[key] for row in members]) for key in ("query_key", "value_output", "gauge")]
        rows.append((name, len(members), *figures, number(members[0]["tolerance"]), seen or "–"))
    lengths = sorted({row["length"] for row in record["rows"]})
    heads = ("pass", "passes", "query/key", "value/output", "gauge", "limit", "seen by")
    named = ", ".join(dict.fromkeys(row["kernel"] for row in record["rows"]))
    text = f"Kernels: {named}; lengths {', '.join(f'{length:,}' for length in lengths)}."
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


_PRECISIONS = {
    "float32": "float32",
    "autocast": "autocast, bfloat16",
    "fp16": "autocast, float16, scaled loss",
    "bf16": "bfloat16",
}

_LEGS = ("key head", "value head", "up", "gain", "head")
_PARTS = ("one row of up", "embedding rows", "router, one expert")


def factors_at_scale() -> str:
    """Wrong factors in gradients of large models that audits see, alone, with a replay, and beside the reference."""
    record = stored("scale_table", "h200")
    runs: dict[tuple[str, int, str], dict[str, Any]] = {}
    for run in record["cells"]:
        maker, _, precision = run["cell"].split(":")
        merged = runs.setdefault((maker, run["parameters"], precision), {})
        for target, said in run["planted"]["fresh"].items():
            merged[target] = said

    def shown(said: dict[str, Any] | None, part: bool) -> str:
        if said is None:
            return "–"
        return f"`{said['alone']}` {said['compared'][:2] if part else said['replayed'][0]}"

    rows = []
    order = list(_PRECISIONS)
    for (maker, parameters, precision), run in sorted(
        runs.items(), key=lambda i: (i[0][1], i[0][0], order.index(i[0][2]))
    ):
        cells = [shown(run.get(target), target in _PARTS) for target in (*_LEGS, *_PARTS)]
        key = run.get("key head", {}).get("stated")
        stated = "–" if key is None else f"{100 * key:.2g} %"
        rows.append((f"{_MAKERS[maker]}, {size(parameters)}", _PRECISIONS[precision], *cells, stated))
    heads = ("model", "precision", *_LEGS, *_PARTS, "stated for key heads, alone")
    factors = ", ".join(f"{factor:g}".replace("-", "−") for factor in record["factors"])
    return f"{table(heads, rows)}\n\nFactors, in this order: {factors}. {made_on(record)}"


_MAKERS = {"llama": "Llama", "mixtral": "Mixtral", "litgpt": "litgpt", "hand": "by hand"}


def clean_at_scale(name: str = "scale_clean") -> str:
    """Verdicts on right passes of large models, by regime."""
    record = stored(name, "h200")
    regimes = dict.fromkeys(key.split(": ")[0] for cell in record["cells"] for key in cell["replayed"])

    def counts(regime: str, how: str) -> list[int]:
        words = ("verified", "inconclusive", "refuted")
        return [sum(cell[how].get(f"{regime}: {word}", 0) for cell in record["cells"]) for word in words]

    rows = [(regime, *counts(regime, "replayed"), *counts(regime, "alone")) for regime in regimes]
    rows.append(("all", *(sum(row[place] for row in rows) for place in range(1, 7))))
    heads = ("regime", "verified", "left open", "refuted", "without a replay: verified", "left open", "refuted")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def clean_again() -> str:
    """The same, measured again by what is now the package."""
    return clean_at_scale("scale_clean_again")


_SIZES = {
    "below 1 %": ("below 0.0001", "below 0.001", "below 0.01"),
    "1 to 10 %": ("below 0.1",),
    "above 10 %": ("below 1", "below 1000", "below inf", "not finite"),
}


def flips_at_scale() -> str:
    """Bit flips in gradients and inside of backward passes that were seen, by size."""
    record = stored("scale_flips", "h200")
    rows = []
    for cell in record["cells"]:
        for where, bins in cell["flips"].items():
            chosen = [[bins[name] for name in names if name in bins] for names in _SIZES.values()]
            seen = [f"{sum(b['seen'] for b in some)} of {sum(b['all'] for b in some)}" for some in chosen]
            norms = [sum(b[f"5 σ of {of} norm"] for b in chosen[-1]) for of in ("a tensor's", "the global")]
            place = "inside the backward pass" if where == "inside" else where
            _, name, precision = cell["cell"].split(":")
            rows.append(
                (
                    place,
                    f"{name}, {precision}",
                    *seen,
                    *norms,
                    f"{cell['alarms in clean steps']} of {cell['clean steps']}",
                )
            )
    heads = ("where", "model", *_SIZES, "above 10 %, by a tensor's norm", "by the norm of all", "alarms in clean steps")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def audit_cost() -> str:
    """What an audit costs beside a backward pass, and beside gradcheck."""
    rows = []
    for device in ("cpu", "h200"):
        record = stored("audit_cost", device)
        for model in record["models"]:
            spent, shape = model["seconds"], model["size"]
            rows.append(
                (
                    f"{record['device']}, {model['precision']}",
                    size(model["parameters"]),
                    f"{shape['batch']} × {shape['length']:,}",
                    seconds(spent["backward alone"]),
                    seconds(spent["audit"]),
                    f"{number(100 * model['audit / backward'])} %",
                    f"{number(record['one layer']['gradcheck / audit'], 3)}",
                )
            )
    heads = (
        "machine",
        "parameters",
        "tokens",
        "backward",
        "audit by itself",
        "it adds",
        "gradcheck / (backward and audit), one layer",
    )
    return table(heads, rows)


def cost_at_scale() -> str:
    """What an audit of a large model adds to passes of some numbers of tokens, on a machine that does nothing else."""
    record = stored("scale_cost", "h200")
    audit = sorted(record["audit"])[len(record["audit"]) // 2]
    rows = []
    for tokens, taken in record["passes"].items():
        # The first pass of its size chooses kernels.
        one = sorted(taken[1:])[0]
        rows.append((f"{int(tokens):,}", seconds(one), seconds(audit), f"{100 * audit / (audit + one):.2g} %"))
    heads = ("tokens", "forward and backward", "audit", "share of the step")
    reading = sorted(record["reading once"])[len(record["reading once"]) // 2]
    first = f"recognize {seconds(record['recognize'])} and the first audit {seconds(record['first audit'])}"
    text = (
        f"{size(record['parameters'])} parameters, bfloat16. Norms of all weights and gradients, which read them once: "
        f"{seconds(reading)}. First call, with no compiled kernel in any cache: {first}."
    )
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


def two_trees() -> str:
    """The first version of the package and today's, in turns, on a processor and on a GPU."""
    rows, notes = [], []
    for device, machine in (("cpu", "two cores"), ("h200", "H200")):
        record = stored("two_trees", device)
        notes.append(f"{machine}: {made_on(record)}")
        rows += [
            (
                row["work"],
                machine,
                seconds(row["before"]),
                seconds(row["after"]),
                f"{row['ratio']:.2f}"
                + (f" [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]" if row["rounds"] > 1 else ""),
            )
            for row in record["rows"]
        ]
    heads = ("work", "on", f"commit {record['before_commit']}", "today", "today / then")
    return f"{table(heads, rows)}\n\nMedians of rounds in turns, quartiles of the ratio. {' '.join(notes)}"


def profile() -> str:
    """What an audit, a watched step and an energy field are made of on a GPU."""
    record = stored("host_cost", "h200")
    rows = []
    for work, found in record.items():
        if not isinstance(found, dict):
            continue
        ours = {
            name: taken for name, (taken, _) in found["kernels"].items() if name.isidentifier() and "gemm" not in name
        }
        theirs = f"PyTorch's own {seconds(found['device_seconds'] - sum(ours.values()))}"
        kernels = [*(f"`{name}` {seconds(taken)}" for name, taken in ours.items()), theirs]
        host = [f"`{re.sub('[<>]', '', name)}` {seconds(taken)}" for name, (taken, _) in found["host"].items()]
        device = f"{seconds(found['device_seconds'])} in {found['launches']:,} launches"
        rows.append((work, seconds(found["done_seconds"]), device, ", ".join(kernels), ", ".join(host[:4])))
    heads = ("work", "alone", "of it the device works", "in kernels", "longest functions of the host, profiled")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def growth() -> str:
    """What an audit and a watched step cost as models grow, beside what others do."""
    tables = []
    for device in ("cpu", "h200"):
        record = stored("growth", device)
        for part in ("audit", "monitor"):
            rows, powers = record[part]["rows"], record[part]["exponents"]
            names = [name for name in rows[0] if name != "parameters"]
            lines = [(size(row["parameters"]), *(seconds(row[name]["done"]) for name in names)) for row in rows]
            lines.append(
                (
                    "grows as parameters to the",
                    *(f"{powers[name]:.2f} ({powers[f'{name}, last two']:.2f})" for name in names),
                )
            )
            tables.append(table((f"{record['device']}: parameters", *names), lines))
        peers = ", ".join(f"{name} {seconds(one['done'])}" for name, one in record["peers"].items())
        tables.append((f"In the same run: {peers}. " if peers else "") + made_on(record))
    text = "With the device waited for before and after. Powers over all sizes, and between the last two."
    return "\n\n".join([*tables, text])


def watch_cost() -> str:
    """What the README's loop costs, audits read at every step or a step later."""
    record = stored("watch_cost", "h200")

    def percent(share: dict[str, float]) -> str:
        middle, low, high = (number(100 * share[key]) for key in ("median", "low", "high"))
        return f"{middle} % [{low}, {high}]"

    rows = [
        (
            precision,
            seconds(found["pass_seconds"]["median"]),
            seconds(found["backward_seconds"]["median"]),
            *(percent(found["added_share_of_backward"][way]) for way in ("at once", "later")),
            seconds(found["host_seconds_until_queued"]["median"]),
            seconds(found["alone_seconds"]["median"]),
        )
        for precision, found in record["loops"].items()
    ]
    heads = (
        "0.577 billion parameters",
        "forward and backward",
        "backward",
        "an audit read at once adds to it",
        "read later",
        "queued in",
        "with the device waited for",
    )
    return f"{table(heads, rows)}\n\nMedian and quartiles of loops in turns. {made_on(record)}"


def check_shares() -> str:
    """Planted defects of functions that a check sees, by line of defence."""
    record = stored("check_catalogue")
    heads = (f"{record['defects']} defects", "gradient missing", "identities", "relations", "derivatives", "all")
    rows = [
        (form.removeprefix("planted, "), *(f"{shares[line]:.0%}" for line in ("1", "2", "3", "4", "all")))
        for form, shares in record["shares"].items()
        if form.startswith("planted, ")
    ]
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def check_hidden() -> str:
    """Planted defects in tails, last blocks, single rows and rare inputs that a check sees."""
    record = stored("check_catalogue")
    kinds = {"tail": "in tails", "block": "last blocks", "row": "single rows", "size": "sizes", "rare": "rare inputs"}
    heads = (f"{record['hidden defects']} hidden defects", *kinds.values(), "all")
    rows = [
        (form.removeprefix("hidden, "), *(f"{shares[kind]:.0%}" for kind in (*kinds, "all")))
        for form, shares in record["shares"].items()
        if form.startswith("hidden, ")
    ]
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def parallel_stacks() -> str:
    """Parallel runs with a default monitor: right ones, and the same with a defect."""
    return _parallel_runs(stored("stack_variants"))


def parallel_combinations() -> str:
    """Other models and combinations in parallel with a default monitor."""
    return _parallel_runs(stored("stack_fresh"))


def parallel_first_sight() -> str:
    """Parallel programs as a default monitor saw them before anything was mended."""
    return _parallel_runs(stored("stack_first_sight"))


def _parallel_runs(record: dict[str, Any]) -> str:
    runs = record["configurations"]
    right, wrong, failed = [], [], []
    for name, row in runs.items():
        if row["hangs"] or row["errors"]:
            failed.append(name)
            continue
        verdict = ", ".join(dict.fromkeys(row["verdicts"])) or "not audited"
        first = min(row["alarms"], key=lambda alarm: alarm["step"], default=None)
        if name.startswith("defect: "):
            seen = (
                (first["step"], first["tensor"] or first["law"], "all" if first["rank"] is None else first["rank"])
                if first
                else ("not seen", "", "")
            )
            wrong.append((name.removeprefix("defect: "), *seen))
        else:
            coverage = f"{row['coverage']:.0%}" if row.get("coverage") is not None else ""
            right.append((name, row["processes"], row.get("tested", 0), coverage, verdict, len(row["alarms"])))
    heads = ("right run", "processes", "identities", "parameters", "audits", "alarms")
    defects = table(("defect", "step", "tensor", "rank"), wrong)
    rest = f"Did not run: {'; '.join(failed)}.\n\n" if failed else ""
    return f"{table(heads, right)}\n\n{defects}\n\n{rest}{made_on(record)}"


def parallel_scale() -> str:
    """Laws and audits of a decoder of the sizes of Llama 3.1 405B on 1,024 processes, by simulation."""
    record = stored("stack_scale")
    rows = [
        (
            row["layers"],
            size(row["parameters"]),
            row["laws"],
            f"{row['reading_seconds']:.0f} s",
            f"{row['peak_resident_bytes'] / 1e9:.1f} GB",
            f"{row['bytes_sent'] / 1e6:.0f} MB",
            row["messages"],
        )
        for row in record["rows"]
    ]
    heads = ("layers", "parameters", "laws", "reading", "memory", "sent in an audit by a process", "messages")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def coverage_table() -> str:
    """Coverage of known models: entries a law touches, entries tested, directions of gradients seen."""
    record = stored("coverage_table")
    rows = []
    for name, row in record["rows"].items():
        values = [row[key] for key in ("touched", "tested", "directions")]
        shares = [f"{value:.1%}" if value >= 0.001 or not value else f"{100 * value:.1g}%" for value in values]
        rows.append((name, *shares, "yes" if row["ok"] else "no"))
    heads = ("model", "touched (before)", "tested", "directions seen", "ok")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def check_kernels() -> str:
    """Kernels of other packages that were checked, and past releases with a wrong gradient."""
    record = stored("check_kernels", "h200")
    checked = [row for row in record["rows"] if "status" in row]
    rows = []
    for package in dict.fromkeys(row["package"] for row in checked if not row["defect"]):
        mine = [row for row in checked if row["package"] == package and not row["defect"]]
        said = [sum(row["status"] == status for row in mine) for status in ("verified", "inconclusive", "refuted")]
        taken = f"{seconds(median(row['seconds'] for row in mine))}"
        rows.append((package, len({row["kernel"] for row in mine}), len(mine), *said, taken))
    heads = ("package", "kernels", "checks", "verified", "inconclusive", "refuted", "median time")
    known = sorted({(row["package"], row["defect"]) for row in checked if row["defect"] and row["status"] == "refuted"})
    notes = sorted({f"{row['package']} {row['kernel']}: {row['explained']}" for row in checked if "explained" in row})
    seen = "\n".join(f"- {package}: {defect}" for package, defect in known)
    told = "\n".join(f"- {note}" for note in notes)
    clean = stored("check_clean", "h200")
    drawn = f"{number(clean['checks'])} checks of right backwards of random shapes and types raised "
    drawn += f"{len(clean['alarms'])} alarms (`benchmarks/check_clean.py`)."
    text = f"{table(heads, rows)}\n\n{made_on(record)}\n\n{drawn}\n\nRefutations, explained:\n\n{told}"
    return f"{text}\n\nDefects seen in releases:\n\n{seen}"


def campaign_counts() -> str:
    """Targets of the search for wrong gradients in released software, by result file."""
    sums = {"holds": ("verified", "holds"), "refuted": ("refuted", "differs"), "inconclusive": ("inconclusive",)}
    rows = []
    for path in sorted(RESULTS.glob("campaign_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        counts = {
            name: sum(count for key, count in record["counts"].items() if key.split()[-1] in keys)
            for name, keys in sums.items()
        }
        others = sum(record["counts"].values()) - sum(counts.values())
        minutes = number(float(record["minutes"])) if record.get("minutes") else "unknown"
        commit = record.get("commits") or [record.get("commit", "unknown")]
        name = path.stem.removeprefix("campaign_").replace("_", " ")
        rows.append((name, sum(counts.values()), *counts.values(), others, record["torch"], minutes, ", ".join(commit)))
    heads = ("file `campaign_…`", "checks", *sums, "could not be checked", "PyTorch", "minutes", "commit")
    return table(heads, rows)


def campaign_settled() -> str:
    """Refutations of the search by cause, each settled by a script, and their totals."""
    record = stored("settled_refutations")
    words = {
        "new": "Defects, unreported as far as we know",
        "known": "Defects, reported before",
        "convention": "No defects: meant, documented, or a choice where there is no derivative",
        "withdrawn": "False alarms of this library",
    }
    totals = [
        (text, len([row for row in record["rows"] if row["verdict"] == name]), record["totals"][name])
        for name, text in words.items()
    ]
    parts = [table(("", "causes", "refutations"), totals), made_on(record)]
    for name, text in words.items():
        chosen = [row for row in record["rows"] if row["verdict"] == name]
        lines = [f"**{text}:**", ""]
        for row in chosen:
            notes = [
                row["report"],
                {True: "", False: f"not with PyTorch {record['torch'].partition('+')[0]}", None: "not run"}[
                    row["shown"]
                ],
                "stands" if "stands" in row["test"] else "",
            ]
            detail = ", ".join(note for note in notes if note)
            lines.append(f"- {row['cause']} ({row['refutations']}{', ' + detail if detail else ''})")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def alarm() -> str:
    """What the attention alarm sees, and when."""
    record = stored("attention_alarm")
    healthy = record["healthy"]
    name = f"healthy, not used for calibration ({healthy['false_alarms']} alarm in {healthy['samples']} samples)"
    rows: list[tuple[object, ...]] = [(name, healthy["runs"], healthy["runs_with_a_false_alarm"], "")]
    for defect, found in record["broken"].items():
        rows.append((defect, found["runs"], found["detected"], span(found["delays"])))
    return table(("run", "runs", "alarmed", "delay in steps"), rows)


def delocalisation() -> str:
    """How evenly the heads of an encoder spread their energy."""
    record = stored("delocalisation_minilm")
    names = {
        "participation": "participation",
        "gaussian_participation": "… of Gaussian keys with the same covariance",
        "shuffled_participation": "… of keys shuffled entry by entry",
        "coherence": "coherence",
        "gaussian_coherence": "… of Gaussian keys",
        "effective_rank": "effective rank",
        "directions_needed_for_99_percent": "directions that hold 99 % of the energy",
    }
    rows = [
        (label, *(number(record[key][part]) for part in ("median", "least", "most"))) for key, label in names.items()
    ]
    text = (
        f"Of {record['heads']} heads, {record['less_spread_than_gaussian']} spread less than Gaussian keys would, and "
        f"{record['more_coherent_than_gaussian']} have keys that are more coherent."
    )
    return f"{table(('all-MiniLM-L6-v2', 'median', 'least', 'most'), rows)}\n\n{text}"


def natural_rate() -> str:
    """The rate the note states, against what was measured."""
    rows = [
        (
            row["attention"],
            number(row["damping"]),
            *(number(row[key], 3) for key in ("in_metric", "in_length", "stated")),
        )
        for row in stored("natural_attention")["rate_of_the_note"]
    ]
    return table(("attention", "damping", "worst factor in the metric", "in parameter length", "stated"), rows)


def natural() -> str:
    """Natural descent against other optimizers."""
    tasks = stored("natural_attention")["tasks"]
    methods = list(next(iter(tasks.values())))
    rows = []
    for method in methods:
        cells = [tasks[task][method] for task in tasks]
        rows.append((method, *(f"{number(c['log10_loss'], 3)} ± {number(c['half_interval'])}" for c in cells)))
    return table(("log10 of final over first loss", *tasks), rows)


def energy_speed() -> str:
    """The field against forming the matrix, and at length."""
    rows = []
    for device in ("cpu", "h200"):
        record = stored("energy_field", device)
        forming = record["against_forming"]
        last, masked = record["whole"]["rows"][-1], record["causal"]["rows"][-1]
        rows.append(
            (
                record["device"],
                f"{seconds(forming['seconds']['field'])} against {seconds(forming['seconds']['formed'])}",
                number(forming["ratio"], 3),
                f"{last['length']:,}",
                seconds(last["seconds"]["field"]),
                seconds(masked["seconds"]["field"]),
                number(last["extra_bytes"] / last["input_bytes"]),
                number(masked["extra_bytes"] / masked["input_bytes"]),
            )
        )
    heads = (
        "machine",
        "4,096 keys: field, formed",
        "ratio",
        "longest",
        "field there",
        "causal",
        "temporaries over inputs",
        "causal",
    )
    return table(heads, rows)


def overhead() -> str:
    """What watching every law at every step costs."""
    return "\n\n".join(_overhead(device) for device in ("h200", "cpu"))


def _overhead(device: str) -> str:
    record = stored("step_overhead", device)
    labels = {
        "monitor": "every law, every step, every gradient audited",
        "monitor without audits": "… without audits",
        "generic rule": "… with the generic rule",
        "float64 copy": "laws of a float64 copy, no account",
        "wandb.watch": 'wandb.watch(log="all")',
    }
    rows = []
    for optimizer, found in record["optimizers"].items():
        # On a processor other programs stretch the time of a step, but not what it computes.
        added, ranges = (
            (found["overhead"], found.get("overhead_range"))
            if device == "h200"
            else (found["processor_overhead"], found.get("processor_range"))
        )
        for key, label in labels.items():
            if key in added:
                share = found["held_share"].get(key)
                held = "–" if share is None else f"{number(100 * share)} %"
                alone = f"{seconds(found['alone_seconds'][key])} ({number(100 * found['alone_share'][key])} %)"
                within = f" [{', '.join(number(100 * end) for end in ranges[key])}]" if ranges else ""
                rows.append((optimizer, label, f"{number(100 * added[key])} %{within}", alone, held))
    found = record["optimizers"]["SGD"]
    text = (
        f"{size(found['parameters'])} parameters, {found['laws']} laws, {found['tokens']:,} tokens a step "
        f"({seconds(found['seconds']['none'])} without). {made_on(record)}"
    )
    return f"{table(('optimizer', 'what', 'added to a step', 'alone', 'memory, of the parameters'), rows)}\n\n{text}"


def paper_runs() -> str:
    """The paper's four set-ups at full size."""
    record = stored("paper_runs", "h200")
    names = {
        "query_key": "queries and keys",
        "gated_neurons": "SwiGLU neurons",
        "shift": "softmax gate",
        "not_query_key": "queries and keys, one sign spoiled",
    }
    titles = {one["configuration"]: one for one in record["configurations"]}
    rows = []
    for row in record["table"]:
        if row["family"] in names:
            one = titles[row["configuration"]]
            rate, error = list(row["final_error"].items())[-1]
            rows.append(
                (
                    one["title"],
                    names[row["family"]],
                    f"{one['steps'][rate]} of {one['planned_steps']:,}",
                    f"τ = {float(rate):g}",
                    number(error),
                    number(row["exponent_in_k"][0]),
                    number(row["exponent_in_step"][0]),
                )
            )
    heads = ("set-up", "quantity", "steps", "step size", "error (10)", "exponent in k", "in τ")
    seeds, spent = record["configurations"][0]["seeds"], record["seconds_per_configuration"]
    text = f"{seeds} seeds together, {spent:g} s for each set-up."
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


LONG = {
    "query_key": "queries and keys",
    "value_output": "values and output",
    "gated_neurons": "SwiGLU neurons",
    "gain": "norm gains",
}
"""Quadratic laws of long runs."""


def _fit(found: list[float | None] | None) -> str:
    """An exponent with its interval."""
    if found is None or found[0] is None:
        return "–"
    value, low, high = found
    text = f"{value:.2f}"
    if low is not None and high is not None and high - low >= 0.01:
        text += f" [{low:.2f}, {high:.2f}]"
    return text.replace("-", "−")


def long_runs() -> str:
    """How far the paper's runs went, and how fast."""
    record = stored("long_runs", "h200")
    rows = []
    for run in record["runs"]:
        rate = run["operations_per_second"]
        share = f"{rate / 1e12:.0f} T, {100 * rate / record['peak']:.0f} %"
        loss = " → ".join(f"{value:.3f}" for value in run["loss"])
        steps = f"{run['steps']:,} of {run['planned']:,}"
        exact = run["gradients"]
        rows.append((run["title"], exact, f"{run['step']:g}", 1, steps, f"{run['seconds']:.0f} s", share, loss))
    same = all(one["same"] for one in record["resumed"])
    text = (
        f"Data: {', '.join(dict.fromkeys(run['data'] for run in record['runs']))}. Operations are those of the model, "
        "six per weight and token; in half precision, where every weight is met in two pieces, the card makes nearly "
        "twice as many, in float32 by pieces three times as many. Runs "
        f"interrupted twice {'have the same weights, bit for bit, as' if same else 'DIFFER FROM'} runs that were not "
        f"({len(record['resumed'])} of {len(record['resumed'])}, small models on the same card)."
    )
    heads = (
        "set-up",
        "gradients in",
        "step size",
        "seeds",
        "steps",
        "time",
        "operations per second, of the peak",
        "loss",
    )
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


def long_arithmetic() -> str:
    """Speed of a gradient in each arithmetic, and its leak against the drift."""
    record = stored("long_runs", "h200")
    rows = []
    for one in record["one_step"]:
        leaks = [
            number(one["families"][family]["leak"] / one["families"][family]["predicted"], 2)
            for family in LONG
            if family in one["families"]
        ]
        rate = f"{one['operations_per_second'] / 1e12:.0f} T"
        rows.append((one["recipe"], one["gradients"], rate, *leaks))
    heads = ("set-up", "gradients in", "operations per second", *(f"leak / drift: {name}" for name in LONG.values()))
    return (
        f"{table(heads, rows)}\n\nAfter three steps on one accumulated batch, the middle step size. {made_on(record)}"
    )


def long_ledger() -> str:
    """Measured against predicted drift at the end of long runs."""
    record = stored("long_runs", "h200")
    rows = []
    for row in record["laws"]:
        if row["family"] in LONG and row["role"] == "law":
            found = row["comparison"]
            rows.append(
                (
                    row["recipe"],
                    row["gradients"],
                    LONG[row["family"]],
                    number(row["drift"]),
                    number(row["predicted"]),
                    number(found["leak"]),
                    number(found["worst"]),
                    number(found["residual"]),
                    f"{found['shrunk']:.2f}",
                )
            )
    heads = (
        "set-up",
        "gradients in",
        "law",
        "drift",
        "Σ τ² μ(G, G)",
        "leak / that",
        "largest relative difference",
        "not explained",
        "drift per Σ τ², end / start",
    )
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def _told(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of laws by run and family, of the runs that count where there are several of a recipe."""
    return {(row["told"], row["family"]): row for row in record["laws"] if row["told"]}


def long_windows() -> str:
    """Exponents by window of the runs at full size."""
    record = stored("long_runs", "h200")
    rows = []
    for (name, family), row in _told(record).items():
        if family in LONG and row["role"] == "law":
            rows += [
                (
                    name,
                    LONG[row["family"]],
                    f"{window['window']}, {window['from']} to {window['to']}",
                    _fit(window["in_k"]),
                    _fit(window["in_squares"]),
                    _fit(window["predicted_in_squares"]),
                )
                for window in row["windows"]
            ]
    heads = ("set-up", "law", "steps", "exponent in k", "in Σ τ²", "of Σ τ² μ(G, G) in Σ τ²")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def long_steps() -> str:
    """Exponents in the step size early, in the middle and late, of small set-ups in float64."""
    record = stored("long_runs")
    runs = {row["recipe"]: row for row in record["runs"]}
    rows = []
    for row in record["step_sizes"]:
        if row["family"] in (*LONG, "claimed_shift") and row["role"] in ("law", "claim"):
            steps = f"{runs[row['recipe']]['steps']:,}"
            name = LONG.get(row["family"], "Σ Wᵢ of the sigmoid gate")
            rows.append(
                (
                    row["recipe"],
                    name,
                    steps,
                    *(_fit([row["in_step"][w][0], None, None]) for w in ("early", "middle", "late")),
                )
            )
    worst = max(row["comparison"]["worst"] for row in record["laws"] if row["family"] in LONG and "comparison" in row)
    linear = max(row["drift"] for row in record["laws"] if row["linear"] and row["role"] == "law")
    heads = ("set-up", "law", "steps", "exponent in τ at a tenth", "at half", "at the end")
    text = (
        f"Step sizes 0.005, 0.01 and 0.02, falling linearly, one seed. Σ τ² μ(G, G) and the drift differ by at most "
        f"{number(worst)} of it at any recorded step; linear laws move by at most {number(linear)}."
    )
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


def _on_text(laws: dict[tuple[str, str], dict[str, Any]], recipe: str) -> str:
    """What a run on text measured of the rotary law, where gradients in half precision leak more than it drifts."""
    row = laws[recipe, "query_key"]
    text = f"{row['gradients']} leaks {number(row['comparison']['leak'])} times the drift"
    if row["comparison"]["leak"] < 1:
        apart = f"the drift is Σ τ² μ(G, G) but for {number(row['comparison']['apart'])} of it"
        return f"{number(row['error'] / row['bound'])} of the bound (9) at the end; {text}, {apart}"
    exact = laws.get((f"{recipe}, float64", "query_key"))
    if exact is None:
        return text
    worst = number(exact["comparison"]["worst"])
    return (
        f"measured in float64 for {exact['windows'][-1]['to']:,} steps, drift and Σ τ² μ(G, G) differ by at most "
        f"{worst} of it at any recorded step; {text}"
    )


def _same_on_text(row: dict[str, Any]) -> str:
    """Whether a run on text shows the law itself, or whether rounding hides it."""
    if row["comparison"]["leak"] > 1:
        return "the law as the ledger has it: rounding is larger than the drift"
    return "as a bound, yes" if row["error"] <= row["bound"] else "as a bound, no"


def long_same() -> str:
    """What the paper shows beside what the long runs show."""
    record, small = stored("long_runs", "h200"), stored("long_runs")
    laws = _told(record)
    images = [laws["cifar", family] for family in ("query_key", "gated_neurons", "value_output")]
    rotary = laws["penn", "query_key"]
    batches = [laws["imagenet", family] for family in ("query_key", "gated_neurons", "value_output")]
    words = laws["wikitext", "query_key"]
    spoiled = [laws["cifar", f"not_{row['family']}"]["drift"] for row in images]
    share = span([row["error"] / row["bound"] for row in images])
    early, late = (span([row["windows"][place]["in_squares"][0] for row in images]) for place in (0, -1))
    straight = span([window["predicted_in_squares"][0] for window in rotary["windows"]], 3)
    sigmoid = sorted(row["drift"] for row in small["laws"] if row["family"] == "claimed_shift")
    exact = max(row["drift"] for row in small["laws"] if row["family"] == "shift")
    drawn = [laws["imagenet", f"not_{row['family']}"]["drift"] for row in batches]

    def gate(recipe: str) -> str:
        row = laws[recipe, "shift"]
        return f"{number(row['drift'])} at {recipe}'s size with gradients in {row['gradients']}"

    rows = [
        (
            "Figure 2(a, b): attention and SwiGLU laws within O(τ²k), ImageNet-1K, five epochs of mini-batches",
            f"{span([row['error'] / row['bound'] for row in batches])} of the bound (9) at the end; exponent in Σ τ² "
            f"{span([row['windows'][0]['in_squares'][0] for row in batches])} early, "
            f"{span([row['windows'][-1]['in_squares'][0] for row in batches])} late",
            "as a bound, yes; as a rate, no: gradients grow first and shrink later",
        ),
        (
            "Figure 2(c): the rotary law, WikiText-103, 15,000 mini-batches",
            f"{_on_text(laws, 'wikitext')}; Σ τ² μ(G, G) with exponent "
            f"{', '.join(_fit(w['predicted_in_squares']) for w in words['windows'])} in Σ τ² early, in the middle and "
            "late",
            f"{_same_on_text(words)}; the rate early, faster than Σ τ² later",
        ),
        (
            "Figure 3(a, b): attention and SwiGLU laws within O(τ²k), CIFAR-10, 300 full-batch steps",
            f"{share} of the bound (9) at the end; exponent in Σ τ² {early} early, {late} late",
            "as a bound, yes; as a rate, early only",
        ),
        (
            "Figure 3(c): the rotary law, Penn Treebank, 300 full-batch steps",
            f"{_on_text(laws, 'penn')}; Σ τ² μ(G, G) with exponent {straight} in Σ τ²",
            f"{_same_on_text(rotary)}; the rate, yes",
        ),
        (
            "Figures 2(d), 3(d): the softmax gate's Σ Wᵢ drifts as O(τ²k)",
            f"no second-order part, only rounding; {', '.join(map(gate, ('penn', 'wikitext')))}; at most "
            f"{number(exact)} in small set-ups in float64",
            "no",
        ),
        (
            "Figure 4: Σ Wᵢ of the sigmoid gate is conserved up to O(τ²k)",
            f"drifts at first order: {', '.join(map(number, sigmoid))} at three step sizes (small set-up, 300 steps); "
            "`figure4` has the order test",
            "no",
        ),
        (
            "Figure 5: laws against other quantities",
            f"laws {span([row['drift'] for row in images])}, with one sign spoiled {span(spoiled)}, CIFAR-size; "
            f"{span([row['drift'] for row in batches])} and {span(drawn)}, ImageNet-size",
            "yes",
        ),
    ]
    return table(("what the paper shows", "what we get", "same?"), rows)


def _shares(record: dict[str, Any], recipe: str) -> list[int]:
    """The first, every second and the last of the steps at which fields were described."""
    steps = sorted({row["step"] for row in record["fields"] if row["recipe"] == recipe})
    return [*steps[:-1:2], steps[-1]]


def long_fields() -> str:
    """Energy fields along the long runs: Lee's quantities beside those of Gaussian queries and keys."""
    record = stored("long_runs", "h200")
    longest = {row["recipe"]: row["length"] for row in record["fields"]}
    rows = [
        (
            f"{row['recipe']}, {row['length']:g} keys",
            f"{row['step']:,}",
            *(f"{row[key]:.2f} / {row['gaussian_' + key]:.2f}" for key in ("participation", "coherence")),
            f"{row['effective_rank']:.1f} of {row['bound']:g}",
            f"{row['largest_logit']:.2f}",
        )
        for row in record["fields"]
        if row["length"] == longest[row["recipe"]] and row["step"] in _shares(record, row["recipe"])
    ]
    others = [row["participation"] for row in record["fields"] if row["length"] != longest[row["recipe"]]]
    good = all(row["verdict"] == "verified" for row in record["fields"])
    text = (
        f"Medians over heads, four inputs. At the shorter contexts, 64 and 128 keys, participation is {span(others)}. "
        f"Rows sum to zero and ranks keep to their bound {'at every step' if good else 'NOT AT EVERY STEP'}."
    )
    heads = ("set-up", "step", "participation / Gaussian", "coherence / Gaussian", "effective rank", "largest logit")
    return f"{table(heads, rows)}\n\n{text} {made_on(record)}"


def seeds_together() -> str:
    """Stacked seeds against one after another."""
    record = stored("vmapped_seeds", "h200")
    rows = [
        (
            row["images_per_seed"],
            seconds(row["seconds_together"]),
            seconds(row["seconds_one_after_another"]),
            number(row["ratio"]),
        )
        for row in record["rows"]
    ]
    heads = ("images per seed", "ten seeds together", "one after another", "ratio")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def evaluation() -> str:
    """All laws at once against one plain read of the weights."""
    record = stored("law_evaluation")
    rows = [
        (
            name,
            size(m["parameters"]),
            m["laws"],
            f"{m['numbers']:,}",
            number(m["ratios"]["laws"]),
            number(m["ratios"]["loop"]),
        )
        for name, m in record["models"].items()
    ]
    heads = (
        "decoder of 12 layers, width 768",
        "parameters",
        "laws",
        "numbers",
        "all laws / one sum",
        "one by one / one sum",
    )
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def large_counts() -> str:
    """Counting the laws of attention by size."""
    rows = []
    for device in ("cpu", "h200"):
        record = stored("law_count", device)
        for row in record["rows"]:
            found = f"{row['explained']:,}" if row["forms"] else "not looked for"
            rows.append(
                (
                    record["device"],
                    number(row["parameters"]),
                    number(row["count"]),
                    found,
                    number(row["gap"]),
                    seconds(row["seconds"]),
                )
            )
    return table(("machine", "parameters", "laws", "found", "gap", "time"), rows)


def certificate_times() -> str:
    """Making and checking proofs."""
    record = stored("certificates")
    rows = [
        (
            r["model"],
            r["parameters"],
            r["laws"],
            r["verdict"].upper(),
            f"{r['bytes'] / 1e6:.2f} MB" if "bytes" in r else "–",
            seconds(r["processor_seconds"]),
            seconds(r["check_processor_seconds"]) if "check_processor_seconds" in r else "not measured",
        )
        for r in record["rows"]
    ]
    heads = ("function", "parameters", "laws", "verdict", "file", "made in", "checked in")
    return f"{table(heads, rows)}\n\nProcessor time. {made_on(record)}"


def stacked_times() -> str:
    """Counting and writing down the laws of stacked attention."""
    record = stored("stacked_forms")
    rows = [
        (r["storage"], r["parameters"], r["count"], r["explained"], *(seconds(r[key]) for key in _STACKED))
        for r in record["rows"]
    ]
    heads = ("storage", "parameters", "laws", "found", "processor time", "of it for the forms")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


_STACKED = ("processor_seconds", "forms_processor_seconds")


def differential() -> str:
    """How often four evaluations of random programs were compared."""
    record = stored("differential")
    rows = [
        (r["what"], f"{r['compared']:,}", r["refused"], r["undefined"], r["open"], len(r["disagreements"]))
        for r in record["rows"]
    ]
    heads = ("random …", "compared", "refused by all", "undefined for all", "left open by balls", "disagreements")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def blind_search() -> str:
    """How many laws the search in gradients adds where inference finds fewer than there are."""
    record = stored("blind_search")
    found, blocks = record["summary"], record["summary"]["blocks"]
    searched = found["programs"] - found["not searched"]
    named = "; ".join(
        f"{name}: {row['inferred']} → {row['searched']} of {row['count']}" for name, row in blocks.items()
    )
    return (
        f"Of {searched} random programs with fewer inferred laws than the Lie closure counts, the search adds laws to "
        f"{found['with more laws']}, {found['laws added']} in all, and completes {found['with all laws']}. "
        f"Blocks of the tests: {named}. {made_on(record)}"
    )


def captures() -> str:
    """How many programs each way of capturing reads."""
    record = stored("captures")
    ways = {
        "recorder": "the recorder: typing, probing, validation",
        "certificate": "`make_fx` with decompositions: certificates",
        "export": "`torch.export` with the same decompositions: used for nothing",
    }
    rows = [
        (f"{counts['read']} of {counts['of']}", ways[name], counts["kinds"], f"{counts['seconds']:.1f} s")
        for name, counts in record["summary"].items()
    ]
    heads = ("programs read", "way", "kinds of operations", "time in all")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def counts() -> str:
    """Every block: counted, found, recognised and proved."""
    rows = []
    for row in stored("law_tables")["blocks"]:
        ranks = ", ".join(map(str, row["ranks"]))
        proved = f"{row['proved']} of at most {row['at_most']}"
        rows.append((row["name"], row["parameters"], ranks, row["count"], row["found"], row["recognised"], proved))
    heads = ("function", "parameters", "rank by depth", "laws", "found", "recognised", "proved")
    return table(heads, rows)


def families() -> str:
    """Models of transformers: recognised against counted."""
    rows = [
        (row["name"], row["parameters"], row["recognised"], row["count"])
        for row in stored("law_tables")["families"]
        if "count" in row
    ]
    return table(("model", "parameters", "recognised", "counted"), rows)


def family_proofs() -> str:
    """Models of transformers: recognised against proved."""
    rows = [
        (row["name"], row["parameters"], row["proved"], row["at_most"], row["certificate"].upper())
        for row in stored("law_tables")["families"]
        if "at_most" in row
    ]
    return table(("model", "parameters", "laws proved", "at most", "verdict"), rows)


def full_size() -> str:
    """Laws of whole models from a config alone."""
    rows = [
        (r["name"], size(r["parameters"]), f"{r['laws']:,}", f"{r['numbers']:,}", seconds(r["seconds"]))
        for r in stored("law_tables")["full_size"]
    ]
    return table(("default config", "parameters", "laws", "conserved numbers", "listed in"), rows)


def orders() -> str:
    """The order test: drift at each step size."""
    record = stored("order_test")
    runs = record["runs"]
    names = sorted(runs[0]["drift"], key=lambda name: (name.startswith("not_"), -runs[0]["drift"][name]))
    rows = []
    for name in names:
        drifts = [run["drift"][name] for run in runs]
        still = max(drifts) < 1e-12
        halved = median(a / b for a, b in pairwise(drifts))
        meaning = "an exact law" if still else "no law" if name.startswith("not_") else "a law"
        label = f"{name.removeprefix('not_')}, one sign spoiled" if name.startswith("not_") else name
        rows.append((label, *map(number, drifts), "–" if still else number(halved), meaning))
    heads = ("quantity", *(f"step {run['step']:g}" for run in runs), "factor per halving", "so it is")
    return table(heads, rows)


def tolerances() -> str:
    """What rounding explains, by precision, for identities of few and of many entries: from the library's own table."""
    import torch

    from conserved.laws.identities import rounding
    from conserved.tolerances import RESIDUAL_TOLERANCE

    rows = [
        (
            str(precision).removeprefix("torch."),
            *(number(rounding(precision, entries)) for entries in (16, 4096, 10**6)),
        )
        for precision in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        if precision in RESIDUAL_TOLERANCE
    ]
    return table(("precision of the pass", "16 entries", "4,096", "a million"), rows)


def slowest() -> str:
    """The tests that take longest, and all of them together."""
    try:
        record = stored("test_durations")
    except FileNotFoundError:
        return "*No run of the whole suite is stored for this version.*"
    rows = [(f"`{row['test']}`", seconds(row["seconds"])) for row in record["slowest"]]
    text = (
        f"{record['tests']:,} tests take {number(record['seconds'] / 60)} minutes of processor time in all, "
        f"{number(record['elapsed'] / 60)} minutes on {record['workers']} workers."
    )
    return f"{table(('test', 'time'), rows)}\n\n{text} {made_on(record)}"


def claims() -> str:
    """How the statements of the sources, and ours, came out when they were last run."""
    from conserved_papers.claims.tally import tally_table

    own, ours = (table(*tally_table(whose)) for whose in ("source", "ours"))
    return f"What the sources state (errors that are one are counted once):\n\n{own}\n\nWhat we state:\n\n{ours}"


def momentum() -> str:
    """What momentum leaves of the laws of the paper's blocks."""
    record = stored("beyond_gradient_flow")
    rows = [(row["block"], str(row["gradient"]), str(row["momentum"]), str(row["momenta"])) for row in record["rows"]]
    head = ("block", "laws of gradient flow", "laws of momentum", "of these, momenta of recognised symmetries")
    return f"{table(head, rows)}\n\n{made_on(record)}"


def adam() -> str:
    """What Adam leaves of the laws of the paper's blocks."""
    record = stored("beyond_gradient_flow")
    rows = [(row["block"], str(row["gradient"]), str(row["adam"])) for row in record["rows"]]
    return f"{table(('block', 'laws of gradient flow', 'laws of Adam'), rows)}\n\n{made_on(record)}"


def metrics() -> str:
    """Laws of the paper's blocks in other metrics, counted and certified."""
    record = stored("beyond_gradient_flow")
    kinds = ("tensor", "entry", "entropy")
    rows = [
        (row["block"], str(row["gradient"]), *(f"{row[kind]} (at most {row[f'{kind}_certified']})" for kind in kinds))
        for row in record["rows"]
    ]
    head = ("block", "Euclidean", "one number per tensor", "one number per entry", "entropy")
    return f"{table(head, rows)}\n\n{made_on(record)}"


WAYS = (
    "as trained",
    "by hand, norms (SmoothQuant)",
    "activation, gains",
    "by hand, weights too (AWQ's list)",
    "activation, for both",
    "activation",
    "range",
    "balanced",
    "balanced, then range",
    "incoherent",
    "incoherent, stream too",
)
"""Rows of the tables of quantised models."""


def quantised() -> str:
    """Trained models rounded to few bits, before and after every way of equalising."""
    record = stored("quantisation")
    titles = {
        "decoder": ("A decoder on text", "divergence", 1e4),
        "vision": ("A vision transformer on Fashion-MNIST", "divergence", 1e4),
        "minilm": ("all-MiniLM-L6-v2", "1 − cosine", 1e4),
    }
    parts = []
    for name, (title, metric, factor) in titles.items():
        found = record["models"][name]
        configs = [config for config in found["rows"]["as trained"] if config != "float32"]
        rows = [
            (way, *(f"{factor * found['rows'][way][config][metric]:.1f}" for config in configs))
            for way in WAYS
            if way in found["rows"]
        ]
        seeds = f", mean of {found['seeds']} seeds" if found["seeds"] > 1 else ""
        loss = found["rows"]["as trained"]
        inside = "cross-entropy" if "cross-entropy" in loss["float32"] else "found"
        told = ", ".join(f"{loss[config][inside]:.4f} {config}" for config in ("float32", *configs))
        parts.append(
            f"**{title}**, {metric} × 10⁴{seeds} ({inside} as trained: {told}):\n\n{table(('', *configs), rows)}"
        )
        smooth = [
            (label, f"{factor * values[metric]:.2f}")
            for label, values in (
                ("no smoothing", _inside(found["torchao"]["torchao int8"], "no smoothing")),
                ("torchao's smoothing", _inside(found["torchao"]["torchao int8"], "torchao's smoothing")),
                ("ours, activation", found["torchao"]["ours: activation"]),
                ("ours, incoherent, stream too", found["torchao"]["ours: incoherent, stream too"]),
            )
            if isinstance(values, dict)
        ]
        if smooth:
            parts.append("torchao's dynamic int8: " + ", ".join(f"{label} {value}" for label, value in smooth) + ".")
    earlier = "".join(f" {what.capitalize()} at commit {at}." for what, at in record.get("earlier", {}).items())
    return "\n\n".join(parts) + f"\n\n{made_on(record)}{earlier}"


def _inside(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


EXPLAINED = ("theirs incomplete", "no symmetry", "not there", "not run")
"""Differences that are theirs: readers left out, no symmetry, modules that are not there, layers that did not run."""


def mapping_table() -> str:
    """Mappings of the registries against ours, by architecture."""
    record = stored("mapping_registries")
    registries = ("llm-compressor AWQ", "llm-compressor SmoothQuant", "auto-round AWQ")
    rows = []
    total = [[0, 0, 0, 0] for _ in registries]
    for row in record["rows"]:
        cells = []
        for place, registry in enumerate(registries):
            found = row["registries"].get(registry)
            if found is None:
                cells.append("–")
                continue
            numbers = [found["same"], found["more"], found["less"], sum(found[key] for key in EXPLAINED)]
            total[place] = [a + b for a, b in zip(total[place], numbers, strict=True)]
            cells.append(" · ".join(map(str, numbers)))
        rows.append((f"`{row['architecture']}`", *cells))
    rows.append(("together", *(" · ".join(map(str, numbers)) for numbers in total)))
    packages = ", ".join(name.removesuffix(".dist-info").replace("-", " ") for name in record["packages"])
    return f"{table(('same · more · less · explained', *registries), rows)}\n\n{packages}. {made_on(record)}"


def mapping_differences() -> str:
    """Why mappings of the registries differ from ours."""
    found: dict[str, set[str]] = {}
    for row in stored("mapping_registries")["rows"]:
        for registry, numbers in row["registries"].items():
            for smooth, why in numbers["differences"].items():
                what = f"{registry}: `{smooth.rpartition('.')[2]}`: {re.sub(r' by [0-9].*', '', why)}"
                found.setdefault(what, set()).add(row["architecture"])
    return "\n".join(
        f"- {what} ({', '.join(f'`{name}`' for name in sorted(names))})" for what, names in sorted(found.items())
    )


def moved_families() -> str:
    """How far moves changed the outputs of the models of the catalogue."""
    record = stored("moved_families")
    rows = [row for row in record["rows"] if "float64" in row]
    sources = {row["source"] for row in rows}
    lines = []
    for key, what in (
        ("float64", "random elements of all symmetries, float64"),
        ("float32", "the same in float32"),
        ("bfloat16", "the same in bfloat16"),
        ("undone", "weights after the inverse, float64"),
        *((name, f"equalised: {name}, float64") for name in ("balanced", "range", "activation", "incoherent")),
        ("incoherent, stream too", "rotated with the residual stream, as probed, float64"),
        ("exchanged", "units that are alike change places, as probed, float64"),
        ("identity after", "largest gradient identity after the move"),
    ):
        values = sorted(row[key] for row in rows if isinstance(row.get(key), float))
        lines.append((what, len(values), f"{median(values):.0e}", f"{values[-1]:.0e}"))
    text = f"{len(rows)} models with symmetries, from {len(sources)} sources."
    return f"{text}\n\n{table(('', 'models', 'median', 'largest'), lines)}\n\n{made_on(record)}"


def billion() -> str:
    """Equalising a billion parameters, against reading them."""
    try:
        record = stored("equalize_billion")
    except FileNotFoundError:
        return "*Not measured for this version.*"
    read = record["rows"]["read"]["processor seconds"]
    rows = []
    for task, row in record["rows"].items():
        if "seconds" not in row or task == "imports":
            continue
        way, _, objective = task.partition(" ")
        label = {"read": "one read of the weights", "files": f"{objective}, from files to files"}.get(way)
        rows.append(
            (
                label or f"{objective}, the model in memory",
                seconds(row["seconds"]),
                seconds(row["processor seconds"]),
                seconds(row.get("equalising", row.get("reading", 0.0))),
                number(row["processor seconds"] / read),
                f"{row['peak GB']:.1f} GB",
            )
        )
    text = f"{size(record['parameters'])} parameters in {record['stored']}"
    heads = (text, "time", "processor time", "time moving", "processor time of reads", "peak memory")
    load = f" {record['load'].capitalize()}." if "load" in record else ""
    return f"{table(heads, rows)}\n\n{made_on(record)}{load}"


def barriers() -> str:
    """The loss barrier between two networks, before and after aligning."""
    record = stored("aligned_barriers")
    first = ("as trained", "weight matching", "align, units only", "align")
    ways = (*first, "balanced, then units", "balanced, then align")
    rows = [
        (
            row["activation"],
            row["pair"],
            *(f"{row[way]:.4f}" if way in row else "–" for way in ways),
            f"{row['distance before']:.1f} → {row['distance after']:.1f}",
        )
        for row in record["rows"]
    ]
    return f"{table(('networks', 'pair', *ways, 'distance'), rows)}\n\n{made_on(record)}"


def lora() -> str:
    """Adapters with balanced factors, against adapters that are left alone."""
    record = stored("balanced_adapters")
    rows = [
        (
            f"{optimizer}, {way}",
            f"{found['loss']:.4f}",
            f"{found['accuracy']:.3f}",
            f"{found['imbalance']:.2f}",
            f"{found['gain']:+.4f} ± {found[name]:.4f}" if way != "left alone" else "",
            f"{found['better in']} of {record['seeds']}" if way != "left alone" else "",
        )
        for name in ("gain's standard error",)
        for optimizer, ways in record["rows"].items()
        for way, found in ways.items()
    ]
    heads = ("", "held-out loss", "accuracy", "imbalance at the end", "gain in loss", "better in")
    return f"{table(heads, rows)}\n\n{made_on(record)}"


KERNEL_NAMES = {
    "flash": "flash",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "math": "math",
    "flex": "FlexAttention, eager",
    "flex compiled": "FlexAttention, compiled",
    "varlen": "packed (`varlen_attn`)",
    "fla": "fla's `parallel_attn`",
    "rounded accumulators": "sums in half precision",
    "written out": "written out, eager",
    "written out, compiled": "written out, compiled",
}
"""Kernels as the page of attention's precision calls them."""


def attention_kernels() -> str:
    """Errors of dQ and dK before and after centering, by kernel and variant, where keys and values share a lot."""
    rows = []
    for device, place in (("h200", "H200"), ("cpu", "CPU")):
        every = [row for row in stored("attention_kernels", device)["kernels"] if row.get("inputs") == "common"]
        for row in every:
            if row["dtype"] == "bfloat16":
                half = next(r for r in every if _same_call(r, row) and r["dtype"] == "float16")
                cells = [
                    f"{number(r['before'][leg][0])} → {number(r['after'][leg][0])}"
                    for r in (row, half)
                    for leg in ("dQ", "dK")
                ]
                rows.append((f"{KERNEL_NAMES[row['kernel']]} ({place})", row["variant"], *cells))
    return table(("kernel", "call", "dQ, bf16", "dK, bf16", "dQ, fp16", "dK, fp16"), rows)


def _same_call(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["kernel"], a["variant"]) == (b["kernel"], b["variant"])


def attention_harm() -> str:
    """In how many of the calls something got less accurate by centering."""
    total, worse, refused = 0, [], []
    for device in ("h200", "cpu"):
        for row in stored("attention_kernels", device)["kernels"]:
            if "problem" in row:
                refused.append(f"{row['kernel']} ({row['variant']})")
                continue
            roundoff = 2.0**-8 if row["dtype"] == "bfloat16" else 2.0**-11
            for leg, (before, _) in row["before"].items():
                total += 1
                after = row["after"][leg][0]
                if after > 1.3 * max(before, roundoff):
                    call = f"{row['kernel']}, {row['variant']}, {row['dtype']}, {row['inputs']}"
                    worse.append(f"{leg} of {call}: {number(before)} to {number(after)}")
    text = (
        f"Over {total:,} medians (all kernels, calls and precisions above; heads with much in common, random heads, "
        f"large scores, an attention sink; O, dQ, dK, dV) {len(worse) or 'none'} got worse by more than 30 % and by "
        "more than the unit roundoff"
    )
    text += f": {'; '.join(worse)}." if worse else "."
    return f"{text} Not supported by PyTorch: {', '.join(dict.fromkeys(refused))}." if refused else text


def attention_predictions() -> str:
    """Predicted against true errors by head."""
    rows = []
    for device, place in (("h200", "H200"), ("cpu", "CPU")):
        for key, row in stored("attention_moments", device)["predictions"].items():
            kernel, leg = key.rsplit(maxsplit=1)
            if kernel == "math":
                continue
            large = [number(row["ratio above 0.05"][i]) for i in (0, 2)] if row["heads above 0.05"] > 1 else ["–"]
            rows.append(
                (
                    f"{KERNEL_NAMES[kernel]} ({place})",
                    leg,
                    f"{row['heads']:,}",
                    number(row["rank correlation"], 3),
                    number(row["ratio"][1], 3),
                    " to ".join(number(row["ratio"][i]) for i in (0, 2)),
                    f"{row['heads above 0.05']:,}",
                    " to ".join(large),
                )
            )
    ratios = ("rank correlation", "median ratio", "5 % to 95 %", "error above 0.05", "ratio there")
    return table(("kernel", "of", "heads", *ratios), rows)


ATTENTION_KINDS = {
    "learned": "learned positions",
    "rotary": "rotary",
    "normed": "query/key norm",
    "grouped": "grouped heads",
    "transformers": "Llama of transformers, grouped",
}
"""Kinds of models as the page of attention's precision calls them."""


def _flash_runs(*, warm_up: bool) -> list[dict[str, Any]]:
    runs = stored("attention_moments", "h200")["moments"]
    runs = [run for run in runs if run["attention"] == "flash" and run["warm up"] == warm_up]
    longest = {run["kind"]: run for run in sorted(runs, key=_steps_of)}
    return sorted(longest.values(), key=lambda run: list(ATTENTION_KINDS).index(run["kind"]))


def _steps_of(run: dict[str, Any]) -> int:
    return int(run.get("stopped", run.get("steps", run["shape"]["steps"])))


def attention_training() -> str:
    """What was seen of ordinary training: errors of dQ and dK, and Adam's updates."""
    rows = []
    for run in _flash_runs(warm_up=True):
        looks = run["moments"]
        worst = max(looks, key=lambda look: max(look["errors"]["flash"]["dQ"]["max"]))
        rows.append(
            (
                f"{ATTENTION_KINDS[run['kind']]}, {size(run['parameters'])}",
                f"{_steps_of(run):,}",
                f"{number(max(worst['errors']['flash']['dQ']['max']))} (step {worst['step']})",
                number(max(looks[-1]["errors"]["flash"]["dQ"]["max"])),
                number(max(max(look["errors"]["centered"]["dQ"]["max"]) for look in looks)),
                number(max(max(look["errors"]["flash"]["dK"]["max"]) for look in looks)),
                number(max(look["errors"]["flash"]["dQ"]["mostly rounding"] for look in looks), 2),
                number(min(min(look["updates"]["flash, Adam"]) for look in looks), 3),
            )
        )
    heads = ("worst dQ, flash", "at the end", "worst dQ, centered", "worst dK, flash", "share above 0.5")
    return table(("model", "steps", *heads, "least cosine of Adam's updates"), rows)


def attention_harsh() -> str:
    """The runs without warm-up: errors by step."""
    rows = []
    for run in _flash_runs(warm_up=False):
        for look in run["moments"][1:]:
            flash, mended, updates = look["errors"]["flash"]["dQ"], look["errors"]["centered"]["dQ"], look["updates"]
            rows.append(
                (
                    ATTENTION_KINDS[run["kind"]],
                    look["step"],
                    number(median(flash["median"])),
                    number(flash["mostly rounding"]),
                    number(median(mended["median"])),
                    number(mended["mostly rounding"]),
                    number(min(updates["flash, gradient"])),
                    number(min(updates["centered, gradient"])),
                    number(min(updates["flash, Adam"])),
                    number(min(updates["centered, Adam"])),
                )
            )
    errors = ("dQ, flash", "share above 0.5", "dQ, centered", "share above 0.5 ")
    cosines = ("gradient, flash", "gradient, centered", "Adam, flash", "Adam, centered")
    return table(("run", "step", *errors, *cosines), rows)


def attention_seen() -> str:
    """Errors of dQ, and of dQ as attention sees it, in the runs whose losses are compared."""
    rows = []
    for run in stored("attention_losses", "h200")["losses"]:
        for look in run["looks"]:
            if look["step"] in (10, 25, 50, 100, 300) and "dQ seen" in look["errors"]["flash"]:
                errors = (look["errors"][name] for name in ("flash", "centered"))
                cells = [number(median(of[leg]["median"])) for of in errors for leg in ("dQ", "dQ seen")]
                rows.append((run["setting"], look["step"], *cells))
    return table(("run", "step", "dQ, flash", "as seen", "dQ, centered", "as seen "), rows)


def attention_losses() -> str:
    """Losses and spectral norms of the same runs with three attentions."""
    runs = [run for run in stored("attention_losses", "h200")["losses"] if run.get("steps", 1)]
    rows = []
    for setting, steps in dict.fromkeys((run["setting"], run["shape"]["steps"]) for run in runs):
        alike = [run for run in runs if (run["setting"], run["shape"]["steps"]) == (setting, steps)]
        for attention in dict.fromkeys(run["attention"] for run in alike):
            same = [run for run in alike if run["attention"] == attention]
            last = [run["last"] for run in same]
            rows.append(
                (
                    setting,
                    attention.replace("rounded accumulators", KERNEL_NAMES["rounded accumulators"]),
                    ", ".join(dict.fromkeys(f"{_steps_of(run):,}" for run in same)),
                    ", ".join(f"{loss:.3f}" for loss in last),
                    f"{sum(last) / len(last):.3f}",
                    ", ".join(_last_norm(run) for run in same),
                )
            )
    heads = ("setting", "attention", "steps", "loss by seed", "mean", "largest spectral norm of W_Q by seed")
    return table(heads, rows)


def _last_norm(run: dict[str, Any]) -> str:
    """Return the largest spectral norm of W_Q when it was last looked at, with the step if that was not the last."""
    last = run["norms"][-1]
    step = last.get("step", _steps_of(run))
    return number(max(last["q"])) + ("" if step == _steps_of(run) else f" (step {step})")


def attention_norms() -> str:
    """Largest spectral norms of W_Q by step, means over the seeds that got there."""
    runs = [run for run in stored("attention_losses", "h200")["losses"] if run.get("steps", 1)]
    names = ["flash", "centered", "math"]
    rows = []
    for setting, steps in dict.fromkeys((run["setting"], run["shape"]["steps"]) for run in runs):
        norms: dict[int, dict[str, list[float]]] = {}
        for run in runs:
            if (run["setting"], run["shape"]["steps"]) == (setting, steps):
                for look in run["norms"]:
                    by_name = norms.setdefault(look.get("step", _steps_of(run)), {})
                    name = run["attention"].removeprefix("rounded accumulators, ")
                    by_name.setdefault(name.replace("rounded accumulators", "flash"), []).append(max(look["q"]))
        for step, by_name in sorted(norms.items()):
            if len(by_name) > 2:
                cells = (number(sum(by_name[name]) / len(by_name[name])) if name in by_name else "" for name in names)
                rows.append((setting, f"{step:,}", *cells))
    return table(("setting", "step", "the kernel", "centered", "math"), rows)


def attention_folded() -> str:
    """Errors of dQ of the run without warm-up with constants of an earlier step."""
    run = next(run for run in _flash_runs(warm_up=False) if run["kind"] == "learned")
    rows = []
    for look in run["moments"][1:]:
        cells = []
        for name in ("flash", "centered", "folded, 1", "folded, 16"):
            errors = look["errors"].get(name, {}).get("dQ")
            cells += (
                ["", ""] if errors is None else [number(median(errors["median"])), number(errors["mostly rounding"])]
            )
        rows.append((f"{look['step']:,}", *(cell or "–" for cell in cells)))
    heads = ("flash", "centered", "constants 1 step old", "constants 16 steps old")
    return table(("step", *(f"{part}{head}" for head in heads for part in ("", "above 0.5, "))), rows)


def check_precision() -> str:
    """Errors and verdicts that `check` states of attention kernels on tensors of training runs."""
    rows = []
    for device, place in (("h200", "H200"), ("cpu", "CPU")):
        every = stored("check_precision", device)["rows"]
        for kind, warm_up, step, kernel in dict.fromkeys(
            (row["kind"], row["warm-up"], row["step"], row["kernel"]) for row in every
        ):
            key = (kind, warm_up, step, kernel)
            alike = [row for row in every if (row["kind"], row["warm-up"], row["step"], row["kernel"]) == key]
            stated = [row["errors"][leg]["error"] for row in alike for leg in ("q",) if row["errors"]]
            keys = [row["errors"]["k"]["error"] for row in alike if row["errors"]]
            rows.append(
                (
                    f"{ATTENTION_KINDS[kind]}{'' if warm_up else ', no warm-up'}, step {step}",
                    f"{kernel} ({place})",
                    number(max(row["float64 dq"] for row in alike)),
                    number(max(stated)) if stated else "–",
                    number(max(keys)) if keys else "–",
                    sum(bool(row["findings"]) for row in alike),
                    sum(row["verdict"] == "REFUTED" for row in alike),
                    len(alike),
                )
            )
    errors = ("dQ off by (float64)", "dQ as stated", "dK as stated")
    return table(("run", "kernel", *errors, "notes", "refuted", "layers"), rows)


def attention_worse_heads() -> str:
    """How many single heads of real runs got less accurate by centering."""
    parts = []
    for device in ("h200", "cpu"):
        every = [look["worse"] for run in stored("attention_moments", device)["moments"] for look in run["moments"]]
        counts = [worse[leg] for worse in every for leg in ("dQ", "dK")]
        parts.append(f"{sum(count for count, _ in counts):,} of {sum(total for _, total in counts):,}")
    return (
        f"Of dQ and dK of single heads in the runs on the H200 {parts[0]} got worse by more than 30 % and by more than "
        f"the unit roundoff, in small models on a processor {parts[1]}. With warm-up these are errors below one "
        "hundredth: subtracting rounds once. Without warm-up some exceed the gradient."
    )


def attention_cost() -> str:
    """Time that centering adds to a call, as a share of forward and backward of the plain kernel."""
    names = ("rows", "values only", "rows, operations of PyTorch")
    rows = []
    for row in stored("attention_cost", "h200")["cost"]:
        if "problem" in row:
            continue
        added = row["kernels"]["rows"].get("add_constants", 0.0)
        for clock, words in (("sum of kernels", "kernels alone"), ("graph", "CUDA graph")):
            plain = row[clock]["plain"]
            more = ((row[clock][name] / plain - 1) if name in row[clock] else None for name in names)
            rows.append(
                (
                    f"{row['kernel']}, {' × '.join(map(str, row['shape']))}",
                    words,
                    f"{1e3 * plain:.3f} ms",
                    *("" if share is None else f"{100 * share:+.1f} %" for share in more),
                    f"{1e-4 * added / plain:+.1f} %",
                )
            )
    return table(("kernel, shape, bf16", "clock", "plain", *names, "pass over the output alone"), rows)


def silent_errors() -> str:
    """Silent errors and what a default monitor said of them, in groups."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in stored("silent_errors")["rows"]:
        theirs = row["source"].startswith("TrainCheck:")
        two = row["processes"] == 2
        group = "TrainCheck's 20 issues" if theirs else "others, two processes" if two else "others, one process"
        groups.setdefault(group, []).append(row)
    names = ("TrainCheck's 20 issues", "others, one process", "others, two processes")
    rows = [(name, len(groups[name]), *_outcomes(groups[name])) for name in names]
    every = [row for name in names for row in groups[name]]
    rows.append(("all", len(every), *_outcomes(every)))
    heads = (
        "errors",
        "number",
        "named within a step",
        "late or misnamed",
        "by a call or a line",
        "not seen",
        "twins accused",
    )
    return f"{table(heads, rows)}\n\n{made_on(stored('silent_errors'))}"


def _outcomes(rows: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Count what became of errors; those of which a line or a call is the answer stand apart."""
    named = [row for row in rows if row["named"] and row["late"] <= 1]
    late = [row for row in rows if row["seen"] and row not in named]
    told = [row for row in rows if not row["seen"] and (row["line"] or row.get("call") or row["how"] == "call")]
    unseen = len(rows) - len(named) - len(late) - len(told)
    return len(named), len(late), len(told), unseen, sum(bool(row["twin"]) for row in rows)


def unseen_errors() -> str:
    """Silent errors that a default monitor does not see, by the reason for it."""
    reasons: dict[str, list[str]] = {}
    for row in stored("silent_errors")["rows"]:
        if row["seen"] or row["line"] or row.get("call") or row["how"] == "call":
            continue
        reasons.setdefault(row["why"] or "No reason is known.", []).append(row["error"])
    rows = [(reason, len(names), "; ".join(names)) for reason, names in reasons.items()]
    rows.sort(key=lambda row: -row[1])
    return table(("reason", "number", "errors"), rows)


def first_sight() -> str:
    """Batches of silent errors that were run once before anything was mended for them."""
    rows = [
        (
            f"batch {index}",
            batch["errors"],
            f"{batch['named within a step']} ({batch['named within a step'] / batch['errors']:.0%})",
            batch.get("shown by a line", "not recorded"),
            batch["twins that alarmed"],
        )
        for index, batch in enumerate(stored("silent_errors_first_sight")["batches"], 1)
    ]
    return table(("written without looking", "errors", "named within a step", "shown by a line", "twins accused"), rows)


def flipped_updates() -> str:
    """Bit flips in weights between steps and in updates that were seen, by size."""
    record = stored("flipped_updates", "h200")
    bins = ("< 0.0001", "< 0.01", "< 0.1", "< 1", "< 1000", "larger")
    rows = [
        (row["where"], row["precision"], *(row["flips"].get(name, "–") for name in bins),
         len(row["false alarms"]))
        for row in record["table"]
    ]  # fmt: skip
    heads = (
        "flips in",
        "weights",
        "below 10⁻⁴",
        "to 1 %",
        "to 10 %",
        "to 100 %",
        "to 1,000 ×",
        "larger",
        "false alarms",
    )
    return f"{table(heads, rows)}\n\n{made_on(record)}"


def identity_cost() -> str:
    """What each identity of a step adds to a step when it is asked alone and always.

    No check has a negative cost: the most negative figure of a size is taken for the noise of its measurement.
    """
    records = [stored("identity_cost", device) for device in ("cpu", "h200")]
    columns: dict[str, dict[str, dict[str, float]]] = {}
    for record in records:
        for key, row in record["rows"].items():
            columns.setdefault(key.partition(" ")[0], {})[key.partition(" ")[2]] = row
    noises = {size: -min(row["added ms"] for row in rows.values()) for size, rows in columns.items()}
    rows = [
        (name, *(_above(rows[name]["added ms"], noises[size]) for size, rows in columns.items()))
        for name in next(iter(columns.values()))
    ]
    heads = ("identity", *(f"{size}, step of {rows['none']['step ms']:.0f} ms" for size, rows in columns.items()))
    return f"{table(heads, rows)}\n\n" + " ".join(made_on(record) for record in records)


def _above(milliseconds: float, noise: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds > noise else f"below {max(noise, 0.05):.2g} ms"


def traincheck() -> str:
    """Silent errors under TrainCheck and under a default monitor."""
    record = stored("traincheck_comparison")
    rows = []
    for results in record["sets"].values():
        for error, row in results.items():
            if error in ("costs", "twin"):
                continue
            theirs, own = row["traincheck"], row["conserved"]
            said = f"{own[0][0]}, step {own[0][1]}" if isinstance(own, list) and own else "–"
            rows.append((error, theirs["violated"], theirs["count beyond noise"], said))
    said = table(("error", "violated invariants", "not violated by the right twin", "default monitor"), rows)
    sentences = []
    for name, results in record["sets"].items():
        costs, twin = results["costs"], results["twin"]
        violated, alarms = len(twin["traincheck"]), len(twin["conserved"])
        sentences.append(
            f"In {name}, the right twin with another seed violates {violated} of {costs['invariants']:,} invariants "
            f"and raises {alarms or 'no'} alarm. The plain run took {costs['plain']:.1f} s of processor time, a traced "
            f"one {costs['traced']:.0f} s, and learning {costs['inferring']:.0f} s."
        )
    return said + "\n\n" + " ".join(sentences)
