"""Five models × eight schemes, rounded as they are, after llm-compressor's smoothing and rotations, and after ours.

    python benchmarks/quantised_training.py MODELS
    python benchmarks/quantised_models.py MODELS --minilm FOLDER
    python benchmarks/quantised_models.py MODELS --one llama-0 gpt2-0 --device cuda   # trains what is missing
    python benchmarks/quantised_models.py MODELS --join

Four architectures trained here on text, three seeds each, and all-MiniLM-L6-v2 (the folder in its PyPI package). All
are rounded by the same code (`conserved.transform.schemes`), so that only the point of the orbit differs. Decoders:
divergence from the predictions in full precision, and loss, on held-out text. MiniLM: the same of finding the second
half of a documentation string by its first. Calibration text and held-out text are different. llm-compressor and
torchao are used if they can be imported; a method that fails, or changes the function, is listed with the reason.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from conserved.transform import SCHEMES, equalize, fit_to_scheme
from conserved.transform.schemes import round_tokens, rounded_layers
from measure import save
from quantised_training import CONFIGS, CONTEXT, batch, split_text, train

Case = tuple[nn.Module, list[dict[str, Any]], Callable[[nn.Module], Tensor], Tensor]
"""A model, calibration batches, its logits on held-out data, and the labels of these."""


def decoder(folder: Path, device: str = "cpu") -> Case:
    """A decoder that was trained here."""
    tokens, held = (text.to(device) for text in split_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
    drawn = [batch(tokens, 16, torch.Generator().manual_seed(n))[:, :-1] for n in (7, 8)]
    windows = batch(held, 64, torch.Generator().manual_seed(1))

    def logits(one: nn.Module) -> Tensor:
        with torch.no_grad():
            return one(input_ids=windows[:, :-1], use_cache=False).logits.flatten(0, 1)

    return model, [{"input_ids": x, "use_cache": False} for x in drawn], logits, windows[:, 1:].flatten()


def sentences(folder: Path) -> Case:
    """MiniLM, on documentation strings of the standard library."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts: dict[str, list[str]] = {}
    for name in sorted(sys.stdlib_module_names)[:120]:
        if name.startswith("_") or name in ("antigravity", "this", "idlelib"):
            continue
        for value in vars(importlib.import_module(name)).values():
            text = inspect.getdoc(value) if inspect.isfunction(value) or inspect.isclass(value) else None
            words = text.split() if text else []
            if 24 <= len(words) <= 60:
                texts[" ".join(words)] = words
    chosen = list(texts.values())[:240]
    halves = [[" ".join(w[: len(w) // 2]) for w in chosen], [" ".join(w[len(w) // 2 :]) for w in chosen]]
    sides = [dict(tokenizer(s, padding=True, truncation=True, max_length=48, return_tensors="pt")) for s in halves]
    held = [{key: value[40:] for key, value in side.items()} for side in sides]

    def embedded(one: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            hidden = one(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def logits(one: nn.Module) -> Tensor:
        return embedded(one, held[0]) @ embedded(one, held[1]).T / 0.05

    calibration = [{key: value[:40] for key, value in side.items()} for side in sides]
    return model, calibration, logits, torch.arange(len(chosen) - 40)


def rounded(model: nn.Module, name: str) -> nn.Module:
    """A copy as a quantiser would leave it."""
    scheme, result = SCHEMES[name], copy.deepcopy(model)
    for layer in rounded_layers(result):
        module: Any = result.get_submodule(layer.module)
        module.weight.data = layer.rounded(module.weight.data, scheme)
        if scheme.activations:
            bits = scheme.activations
            module.register_forward_pre_hook(lambda _, x, bits=bits: (round_tokens(x[0], bits), *x[1:]))
    return result


def any_tokenizer() -> Any:
    """A tokenizer that nothing uses: llm-compressor asks for one, and calibration is tokens already."""
    tokenizers: Any = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"?": 0}, unk_token="?")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="?", pad_token="?"
    )


def smoothed_by_llmcompressor(model: nn.Module, calibration: list[dict[str, Any]], tokenizer: Any) -> nn.Module:
    """SmoothQuant with the mappings that llm-compressor has for the architecture."""
    library: Any = importlib.import_module("llmcompressor")
    modifiers: Any = importlib.import_module("llmcompressor.modifiers.transform")
    result = copy.deepcopy(model)
    rows = [
        {"input_ids": x, "attention_mask": b["attention_mask"][n] if "attention_mask" in b else torch.ones_like(x)}
        for b in calibration
        for n, x in enumerate(b["input_ids"])
    ]
    width = max(len(row["input_ids"]) for row in rows)
    rows = [{key: F.pad(value, (0, width - len(value))) for key, value in row.items()} for row in rows]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=16)  # type: ignore[arg-type]
    library.oneshot(
        model=result,
        dataset=loader,
        processor=tokenizer,
        recipe=[modifiers.SmoothQuantModifier(smoothing_strength=0.5)],
        num_calibration_samples=len(rows),
        max_seq_length=CONTEXT,
        pipeline="basic",
    )
    return result


def rotated_by_llmcompressor(model: nn.Module, calibration: list[dict[str, Any]], tokenizer: Any) -> nn.Module:
    """SpinQuant's rotations R1 and R2, random Hadamard matrices."""
    library: Any = importlib.import_module("llmcompressor")
    modifiers: Any = importlib.import_module("llmcompressor.modifiers.transform")
    result = copy.deepcopy(model)
    recipe = [modifiers.SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard")]
    library.oneshot(model=result, recipe=recipe, pipeline="datafree")
    return result


def torchao_int8(model: nn.Module, calibration: list[dict[str, Any]], *, smooth: bool) -> nn.Module:
    """Rounding by torchao itself, int8 with dynamic activations, with or without its smoothing."""
    quantization: Any = importlib.import_module("torchao.quantization")
    base = quantization.Int8DynamicActivationInt8WeightConfig()
    result = copy.deepcopy(model)
    if not smooth:
        quantization.quantize_(result, base, filter_fn=lambda m, n: isinstance(m, nn.Linear) and "lm_head" not in n)
        return result
    library: Any = importlib.import_module("torchao.prototype.smoothquant")
    steps = library.common.QuantizationStep if hasattr(library, "common") else None
    prepare, convert = (steps.PREPARE, steps.CONVERT) if steps else ("prepare", "convert")
    chosen = lambda m, n: isinstance(m, nn.Linear) and "lm_head" not in n  # noqa: E731
    quantization.quantize_(
        result, library.SmoothQuantConfig(base_config=base, step=prepare, alpha=0.5), filter_fn=chosen
    )
    with torch.no_grad():
        for one in calibration:
            result(**one)
    observed = lambda m, n: "Observed" in type(m).__name__  # noqa: E731
    quantization.quantize_(
        result, library.SmoothQuantConfig(base_config=base, step=convert, alpha=0.5), filter_fn=observed
    )
    return result


THEIRS = {
    "SmoothQuant (llm-compressor)": smoothed_by_llmcompressor,
    "rotations (llm-compressor)": rotated_by_llmcompressor,
}
FIXED = ("balanced", "range", "activation", "incoherent")


def measure(case: Case, tokenizer: Any) -> dict[str, Any]:
    """All numbers of one model."""
    model, calibration, logits, labels = case
    plain = logits(model).log_softmax(-1)

    def judged(one: nn.Module) -> dict[str, float]:
        result = logits(one)
        divergence = F.kl_div(result.log_softmax(-1), plain, log_target=True, reduction="batchmean")
        return {"divergence": float(divergence), "loss": float(F.cross_entropy(result, labels.to(result.device)))}

    points: dict[str, nn.Module] = {"as trained": model}
    failed: dict[str, str] = {}
    for name, make in THEIRS.items():
        try:
            points[name] = make(model, calibration, tokenizer).eval()
            moved = float((logits(points[name]) - logits(model)).norm() / logits(model).norm())
            if moved > 1e-2:
                failed[name] = f"outputs change by {moved:.2g} before anything is rounded"
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:150] if str(problem) else ''}"
    for name in FIXED:
        points[f"always {name}"] = copy.deepcopy(model)
        options: Any = {"batches": calibration} if name == "activation" else {}
        equalize(points[f"always {name}"], **calibration[0], objective=name, **options)
    result: dict[str, Any] = {"float": judged(model), "schemes": {}, "chosen": {}, "failed": failed}
    for scheme in SCHEMES:
        row = {name: judged(rounded(point, scheme)) for name, point in points.items()}
        own = copy.deepcopy(model)
        fitted = fit_to_scheme(own, **calibration[0], scheme=scheme, batches=calibration)
        row["conserved, by scheme"] = judged(rounded(own, scheme))
        result["schemes"][scheme] = row
        result["chosen"][scheme] = fitted.chosen
    result["torchao int8"] = {}
    own = copy.deepcopy(model)
    fit_to_scheme(own, **calibration[0], scheme="w8a8", batches=calibration)
    ways: dict[str, Any] = {
        "plain": lambda: torchao_int8(model, calibration, smooth=False),
        "its smoothing": lambda: torchao_int8(model, calibration, smooth=True),
        "after conserved": lambda: torchao_int8(own, calibration, smooth=False),
    }
    for name, make_one in ways.items():
        try:
            result["torchao int8"][name] = judged(make_one())
        except Exception as problem:
            result["torchao int8"][name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:150]}"
    return result


def table(result: dict[str, list[dict[str, Any]]]) -> str:
    """Divergence × 1000, mean over seeds ± standard error, for each model and scheme."""
    ways = ["as trained", *THEIRS, *(f"always {name}" for name in FIXED), "conserved, by scheme"]
    lines = ["| model | scheme | " + " | ".join(ways) + " |", "|---|---|" + "---:|" * len(ways)]
    for model, seeds in result.items():
        for scheme in SCHEMES:
            cells = []
            for way in ways:
                values = [
                    one["schemes"][scheme][way]["divergence"] * 1000 for one in seeds if way in one["schemes"][scheme]
                ]
                error = f" ± {stdev(values) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
                cells.append(f"{mean(values):.3g}{error}" if values else "–")
            lines.append(f"| {model} | {scheme} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure all, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--one", nargs="*", default=[], help="measure these models alone, each into a file of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--join", action="store_true", help="save what --one has measured")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    outcome: dict[str, list[dict[str, Any]]] = {}
    if options.one:
        for case in options.one:
            name, seed = case.rsplit("-", 1)
            measured = options.models / f"{case}.json"
            if measured.is_file():
                continue
            if name != "MiniLM" and not (options.models / case / "training.json").is_file():
                train(name, int(seed), options.models / case, options.steps, options.device)
            one = sentences(options.minilm) if name == "MiniLM" else decoder(options.models / case, options.device)
            result = measure(one, any_tokenizer())
            measured.write_text(json.dumps(result), encoding="utf-8")
            print(case, result["chosen"], result["failed"], result["torchao int8"], flush=True)
        return
    if options.join:
        for file in sorted(options.models.glob("*-*.json")):
            outcome.setdefault(file.stem.rsplit("-", 1)[0], []).append(json.loads(file.read_text("utf-8")))
    else:
        for name in CONFIGS:
            for seed in range(options.seeds):
                outcome.setdefault(name, []).append(
                    measure(decoder(options.models / f"{name}-{seed}"), any_tokenizer())
                )
                print(name, seed, outcome[name][-1]["chosen"], outcome[name][-1]["failed"], flush=True)
        if options.minilm:
            outcome["MiniLM"] = [measure(sentences(options.minilm), any_tokenizer())]
    print(table(outcome), flush=True)
    save("quantised_models", {"models": outcome})


if __name__ == "__main__":
    main()
