"""How evenly a trained model's energy fields spread over keys, against Gaussian and shuffled keys.

Takes a folder with a model's config, safetensors and tokenizer. The texts are docstrings of the standard library.
"""

from __future__ import annotations

import ast
import math
import sys
import sysconfig
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from conserved.attention import HeadRow, low_rank_table, probe
from measure import save

MODULES = ("argparse", "difflib", "doctest", "imaplib", "optparse", "pickletools", "tarfile", "turtle")
TOKENS = 256


def docstrings() -> list[str]:
    """The opening of several modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    result = []
    for name in MODULES:
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        parts = [ast.get_docstring(tree) or ""]
        documented = (ast.ClassDef, ast.FunctionDef)
        parts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
        result.append(" ".join(parts))
    return result


def spread(rows: tuple[HeadRow, ...], name: str) -> dict[str, float]:
    """Median and extremes over heads."""
    values = [getattr(row, name) for row in rows if not math.isnan(getattr(row, name))]
    return {"median": median(values), "least": min(values), "most": max(values)}


def main() -> None:
    """Probe, print, save."""
    torch.set_num_threads(1)
    folder = sys.argv[1]
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(docstrings(), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    result = probe(model, **tokens)
    narrow = low_rank_table(model, **tokens)
    table = Table(title=f"{len(result.rows)} heads, {len(MODULES)} texts of up to {TOKENS} tokens")
    for heading in ("quantity", "median over heads", "least", "most"):
        table.add_column(heading, justify="left" if heading == "quantity" else "right")
    record: dict[str, Any] = {"model": Path(folder).name, "heads": len(result.rows), "verdict": str(result.verdict)}
    for name in (
        "participation",
        "gaussian_participation",
        "shuffled_participation",
        "coherence",
        "gaussian_coherence",
        "shuffled_coherence",
        "rank",
        "effective_rank",
        "stable_rank",
        "evenness",
        "largest_logit",
        "zero_sum_error",
    ):
        record[name] = spread(result.rows, name)
        table.add_row(name, *(f"{value:.3g}" for value in record[name].values()))
    needed = [row.needed for row in narrow.rows]
    record["directions_needed_for_99_percent"] = {"median": median(needed), "least": min(needed), "most": max(needed)}
    table.add_row("directions for 99 %", f"{median(needed):g}", str(min(needed)), str(max(needed)))
    record["less_spread_than_gaussian"] = sum(r.participation < r.gaussian_participation for r in result.rows)
    record["more_coherent_than_gaussian"] = sum(r.coherence > r.gaussian_coherence for r in result.rows)
    record["rows"] = result.record()["heads"]
    record["low_rank"] = narrow.record()["heads"]
    Console(width=100).print(table)
    print(f"less spread than Gaussian keys: {record['less_spread_than_gaussian']} of {len(result.rows)} heads")
    print(f"more coherent than Gaussian keys: {record['more_coherent_than_gaussian']} of {len(result.rows)} heads")
    print(f"saved {save('delocalisation_minilm', record)}")


if __name__ == "__main__":
    main()
