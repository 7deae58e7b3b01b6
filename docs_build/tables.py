"""Keep the tables of the documentation equal to the stored results.

python docs_build/tables.py            # rewrites every marked region of the README and of docs/
python docs_build/tables.py --check    # says which are out of date, and changes nothing

A region is what stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME is a function of `results.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import results

ROOT = Path(__file__).parent.parent

REGION = re.compile(r"(<!-- results: ([a-z_]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

PAGE = {
    "Laws and look-alikes under gradient descent": (
        "order_test.py",
        "A decoder learns text for the same flow time with smaller and smaller steps: a law drifts in proportion to "
        "the step or not at all, what only looks like one drifts as much however small the step. Figures are relative "
        "to the size of the terms.",
        "orders",
    ),
    "All laws of a model at once": (
        "law_evaluation.py",
        "Against one plain `sum` over every weight, in the same run.",
        "evaluation",
    ),
    "Counting laws": ("law_count.py", "Attention of several sizes, at two random points each.", "large_counts"),
    "Proving laws": ("certificates.py", "", "certificate_times"),
    "What an audit costs": (
        "audit_cost.py",
        "The audit reads weights and gradients a few times; on a fast device most of its time is the host's.",
        "audit_cost",
    ),
    "Real kernels": (
        "audit_kernels.py",
        "One layer of attention with clean and with broken backward passes.",
        "audit_kernels",
    ),
    "What watching costs": ("step_overhead.py", "", "overhead"),
    "Then and now": (
        "two_trees.py",
        "The first version and today's: on two cores a decoder of 97 million parameters and a head of 4,096 keys, on "
        "the GPU 0.6 billion and 1,048,576; attention with 64 parameters in a fresh process.",
        "two_trees",
    ),
    "Where the time goes": (
        "host_cost.py",
        "0.6 billion parameters, a head of 1,048,576 keys. Weights and gradients in bfloat16 are read in 0.5 ms, "
        "parameters, gradients and AdamW's state in 2.2 ms; the rest is many small things, most of them on the host.",
        "profile",
    ),
    "How costs grow": (
        "growth.py",
        "Audits in bfloat16 on the GPU, steps of AdamW in float32.",
        "growth",
    ),
    "The paper's set-ups at full size": (
        "paper_runs.py",
        "Appendix D on Fashion-MNIST, resized, and the King James text, for as many steps as the time allows. With "
        "mini-batches of images the loss falls fast in these first steps and gradients with it, so the "
        "drift grows more slowly than with k τ²; full batches and texts show the exponents 1 and 2.",
        "paper_runs",
    ),
    "The paper's runs to the end": (
        "long_runs.py",
        "How far, how fast; [what came of them](long-runs.md).",
        "long_runs",
    ),
    "Gradients in several arithmetics": (
        "long_runs.py",
        "A law's drift is of second order in the step; rounding leaks at first order.",
        "long_arithmetic",
    ),
    "Seeds together": (
        "vmapped_seeds.py",
        "The CIFAR-sized vision transformer in float32: stacked seeds pay while a step is short.",
        "seeds_together",
    ),
    "The energy field": ("energy_field.py", "One head of width 64 in float32.", "energy_speed"),
    "How evenly an encoder attends": ("delocalisation.py", "Eight texts of 256 tokens.", "delocalisation"),
    "Alarms": ("attention_alarm.py", "A decoder of six heads, broken in the middle of its run.", "alarm"),
    "Natural attention": ("natural_attention.py", "Mean and 95 % interval over ten seeds.", "natural"),
}
"""The page of all benchmarks: heading, script, a sentence, table."""


def made(name: str) -> str:
    """The text of a region."""
    function = getattr(results, name, None)
    if function is None:
        raise KeyError(f"There is no table {name!r} in results.py.")
    text: str = function()
    return text


def filled(markdown: str) -> str:
    """A page with every region made anew."""
    return REGION.sub(lambda found: f"{found[1]}{made(found[2])}\n{found[4]}", markdown)


def pages() -> Iterator[Path]:
    """The files that may have regions."""
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def page() -> str:
    """All benchmarks on one page."""
    lines = [
        "# Benchmarks",
        "",
        "Made from the files in `benchmarks/results`, each of which says on what machine and at which commit it was "
        "measured. `make bench` measures again on yours.",
    ]
    for heading, (script, text, name) in PAGE.items():
        lines += ["", f"## {heading}", "", f"`benchmarks/{script}`. {text}".rstrip(), "", made(name)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite what is out of date, or list it."""
    late = [path for path in pages() if filled(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    for path in late:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    if "--check" in sys.argv and late:
        sys.exit("Out of date; run python docs_build/tables.py")


if __name__ == "__main__":
    main()
