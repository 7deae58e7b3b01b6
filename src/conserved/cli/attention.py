"""Describe the attention of a model on an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from conserved.cli.app import INSIDE, AsJson, Output, UsageError, command, deliver, exit_with, progress
from conserved.cli.inputs import InputsOption
from conserved.cli.models import Options, Target, call_of, load_model, runs_on, split_words
from conserved.cli.storing import Store, store_record
from conserved.output.terminal import Console


@command(INSIDE)
def attention(
    target: Target,
    options: Options = None,
    inputs: InputsOption = None,
    text: Annotated[list[str] | None, typer.Option(help="a text for the tokenizer beside a model's weights")] = None,
    baselines: Annotated[bool, typer.Option(help="hold the keys against Gaussian and shuffled ones")] = True,
    low_rank: Annotated[bool, typer.Option("--low-rank", help="Show what the leading directions hold.")] = False,
    seed: Annotated[int, typer.Option(help="seed of inputs and baselines", min=0)] = 0,
    store: Store = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Describe the attention of a model on an input: the energy field of every head, key coherence, entropy."""
    from conserved.attention import low_rank_table, probe
    from conserved.integrations import configured_models

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None
    given, words = split_words(options, inputs)
    if configured_models.has_weights(target):
        model, named = configured_models.load_pretrained(target, text or [])
    elif text:
        raise UsageError(f"--text is for a folder with config.json, weights and a tokenizer; {target} is not one.")
    else:
        model = load_model(target, given).eval()
    if named is None:
        positional, named = call_of(model, target, words, seed)
    with runs_on(target, words):
        probe_result = probe(model, *positional, baselines=baselines, seed=seed, progress=progress(), **named)
    table = low_rank_table(model, *positional, **named) if low_rank else None
    store_record(store, "attention", target, given, probe_result.record())
    record = probe_result.record() | ({} if table is None else {"low_rank": table.record()})
    if not deliver(record, as_json=as_json, output=output):
        Console().print_lines(probe_result.lines())
        if table is not None:
            Console().print_lines(table.lines())
    exit_with(probe_result.verdict.status)
