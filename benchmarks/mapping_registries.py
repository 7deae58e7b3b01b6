"""Mappings derived from symmetries against the registries of llm-compressor and auto-round, by architecture.

Every architecture that the registries name and transformers can build from a small config is built in float64. Their
patterns are resolved on it and compared with `conserved.transform.mappings`. Wherever the two differ, their mapping is
carried out on the weights: if the outputs change, it is no symmetry of this model.

The packages are read from folders, as `pip install --no-deps --target FOLDER llmcompressor auto-round` makes them:
    python benchmarks/mapping_registries.py FOLDER …
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import re
import sys
import types
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import float64
from conserved.transform import LayerMapping, mappings, symmetries_of
from measure import save

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_attention_groups": 4,
    "head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_num_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 60,
    "video_token_id": 61,
    "decoder_start_token_id": 1,
    "hidden_size_per_layer_input": 8,
    "depth": 2,
    "out_hidden_size": 32,
    "image_size": 28,
    "layer_types": None,
}
"""What a small model of any architecture has, where its config knows the entry."""

CHOSEN = ("num_experts_per_tok", "n_group", "topk_group")
"""Entries that a router needs, though configs leave them open."""

Theirs = list[tuple[str, list[str]]]


def registries(folders: list[Path]) -> dict[str, dict[str, Theirs]]:
    """The tables in the packages' own files, as smooth and balance patterns by architecture."""
    for name in ("auto_round", "auto_round.logger", "auto_round.utils", "auto_round.utils.model"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["auto_round.logger"].logger = None  # type: ignore[attr-defined]
    sys.modules["auto_round.utils.model"].is_moe_model = None  # type: ignore[attr-defined]
    sys.modules.setdefault("loguru", types.ModuleType("loguru")).logger = None  # type: ignore[attr-defined]
    awq = _table(folders, "llmcompressor/modifiers/transform/awq/mappings.py", "AWQ_MAPPING_REGISTRY")
    smooth = _table(folders, "llmcompressor/modifiers/transform/smoothquant/utils.py", "MAPPINGS_REGISTRY")
    intel = _table(folders, "auto_round/algorithms/transforms/awq/mappings.py", "AWQ_MAPPING_REGISTRY")
    return {
        "llm-compressor AWQ": {a: [(m.smooth_layer, m.balance_layers) for m in result] for a, result in awq.items()},
        "llm-compressor SmoothQuant": {
            a: [(m.smooth_layers, m.balance_layers) for m in result] for a, result in smooth.items()
        },
        "auto-round AWQ": {a: [(m.smooth_layer, m.balance_layers) for m in result] for a, result in intel.items()},
    }


def _table(folders: list[Path], index: str, name: str) -> Any:
    path = next(folder / index for folder in folders if (folder / index).is_file())
    spec = importlib.util.spec_from_file_location(f"registry_{abs(hash(index))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def build(architecture: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of an architecture in float64 with scattered weights, and inputs."""
    cls = getattr(transformers, architecture)
    shrunk = config_of(cls.config_class())
    torch.manual_seed(0)
    shrunk._attn_implementation = "eager"
    if hasattr(shrunk, "num_experts_per_tok") or hasattr(shrunk, "moe_k"):
        shrunk._experts_implementation = "batched_mm"
    model = cls(shrunk).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(3, 50, (2, 7))
    if architecture.startswith("Whisper"):
        return model, {"input_features": torch.randn(2, 8, 16, dtype=torch.float64), "decoder_input_ids": ids}
    return model, {"input_ids": ids}


def config_of(config: Any) -> Any:
    """A config with every size that it has made small."""
    inner = [getattr(config, f"{name}_config", None) for name in ("text", "vision", "audio", "thinker")]
    for part in filter(None, (config, *inner)):
        for name, value in SMALL.items():
            if name == "layer_types":
                if getattr(part, name, None) and hasattr(part, "num_hidden_layers"):
                    part.layer_types = part.layer_types[: part.num_hidden_layers]
            elif hasattr(part, name) and (getattr(part, name) is not None or name in ("pad_token_id", *CHOSEN)):
                setattr(part, name, value)
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and ("mrope_section" in rope or "qwen2_5" in str(getattr(part, "model_type", ""))):
            rope["mrope_section"] = [2, 1, 1]
        if getattr(part, "pixel_shuffle_ratio", None):
            part.intermediate_size = int(part.hidden_size / part.pixel_shuffle_ratio**2)
            part.projector_input_dim = part.projector_output_dim = part.vision_output_dim = part.hidden_size
        if getattr(part, "qk_rope_head_dim", None):
            part.head_dim = part.qk_rope_head_dim
        for name in ("mlp_layer_types", "no_rope_layers"):
            if getattr(part, name, None):
                setattr(part, name, getattr(part, name)[:2])
    return config


def resolved(theirs: Theirs, names: list[str]) -> list[tuple[str, frozenset[str], list[str]]]:
    """Their patterns on a model: what is smoothed, what is balanced, and the patterns of what is balanced."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in names:
        outcome = re.match(r"(.*?\.\d+)\.", name)
        if outcome:
            blocks[outcome.group(1)].append(name)
    result = []
    for pool in blocks.values():
        for smooth, balance in theirs:
            smoothed = matching(smooth, pool)
            for one in smoothed:
                near = (
                    [n for n in pool if n.rpartition(".")[0] == one.rpartition(".")[0]] if len(smoothed) > 1 else pool
                )
                each = {pattern: matching(pattern, near) for pattern in balance}
                readers = frozenset(n for outcome in each.values() for n in outcome) - {one}
                result.append((one, readers, balance))
    return result


def matching(pattern: str, pool: list[str]) -> list[str]:
    """The names that a pattern of theirs means."""
    if pattern.startswith("re:"):
        return [name for name in pool if re.match(pattern[3:], name)]
    return [name for name in pool if re.search(pattern, name)]


def outputs(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All numbers that the model returns first."""
    with torch.no_grad(), float64.kept():
        return model(**inputs, use_cache=False)[0].flatten()


def carried_out(model: nn.Module, inputs: dict[str, Any], smooth: str, balance: frozenset[str]) -> float | None:
    """The relative change of the outputs if a mapping is carried out with random scales; None if it cannot be."""
    moved = copy.deepcopy(model)
    maker: Any = moved.get_submodule(smooth)
    readers: list[Any] = [moved.get_submodule(name) for name in balance]
    if not isinstance(getattr(maker, "weight", None), Tensor) or not readers:
        return None
    plain = [reader.weight for reader in readers if getattr(reader, "weight", torch.zeros(0)).ndim == 2]
    stacks = [reader.gate_up_proj for reader in readers if getattr(reader, "gate_up_proj", None) is not None]
    stacks = [stack for stack in stacks if isinstance(stack, Tensor) and stack.ndim == 3]
    if len(plain) + len(stacks) < len(readers):
        return None
    rows = maker.weight.shape[0]
    width = plain[0].shape[1] if plain else rows
    axes = [[axis for axis in (1, 2) if stack.shape[axis] == width] for stack in stacks]
    if any(weight.shape[1] != width for weight in plain) or rows < width or any(len(result) != 1 for result in axes):
        return None
    scales = torch.exp(0.3 * torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    with torch.no_grad():
        offset = 1.0 if _offset(maker) else 0.0
        maker.weight[-width:] = (maker.weight[-width:] + offset) / (
            scales if maker.weight.ndim == 1 else scales[:, None]
        )
        maker.weight[-width:] -= offset
        if getattr(maker, "bias", None) is not None:
            maker.bias[-width:] /= scales
        for weight in plain:
            weight *= scales
        for stack, (axis,) in zip(stacks, axes, strict=True):
            stack *= scales[:, None] if axis == 1 else scales
    before, after = outputs(model, inputs), outputs(moved, inputs)
    return float((after - before).norm() / before.norm())


def _offset(module: nn.Module) -> bool:
    """Whether a norm multiplies by 1 + γ."""
    return type(module).__name__.startswith("Gemma") and isinstance(getattr(module, "weight", None), Tensor)


def compare(architecture: str, tables: dict[str, dict[str, Theirs]]) -> dict[str, Any]:
    """One row: for each registry how its mappings stand to ours."""
    model, inputs = build(architecture)
    with float64.kept():
        laws = symmetries_of(model, **inputs, use_cache=False)
        ours = [m for m in mappings(model, laws=laws, **inputs, use_cache=False) if isinstance(m, LayerMapping)]
    by_smooth: dict[str, set[str]] = defaultdict(set)
    for one in ours:
        for smooth in one.smooth:
            by_smooth[smooth] |= set(one.balance)
    seen_towers = _towers(model, by_smooth)
    names = [name for name, _ in model.named_modules()]
    row: dict[str, Any] = {"architecture": architecture, "ours": len(ours), "towers": seen_towers, "registries": {}}
    for registry, table in tables.items():
        if architecture not in table:
            continue
        counts: Counter[str] = Counter()
        differences: dict[str, str] = {}
        seen = set()
        for smooth, result, patterns in resolved(table[architecture], names):
            mine = by_smooth.get(smooth, set())
            balance = result | _stacked(patterns, mine)
            seen.add(smooth)
            what, why = judged(model, inputs, smooth, balance, mine, by_smooth)
            counts[what] += 1
            if why:
                differences.setdefault(re.sub(r"\.\d+\.", ".N.", smooth), why)
        extra = sorted({re.sub(r"\.\d+\.", ".N.", s) for s in by_smooth if s not in seen})
        row["registries"][registry] = {
            **{
                key: counts[key] for key in ("same", "theirs incomplete", "no symmetry", "not there", "not run", "less")
            },
            "more": sum(s not in seen for s in by_smooth),
            "more of": extra,
            "differences": differences,
        }
    return row


def _towers(model: nn.Module, by_smooth: dict[str, set[str]]) -> list[str]:
    """Image towers do not run on tokens: each is run by itself, on an image, and its mappings are added."""
    result = []
    for name in ("vision_tower", "vision_model", "model.vision_tower", "model.vision_model"):
        try:
            tower = model.get_submodule(name)
        except AttributeError:
            continue
        image: dict[str, Any] = {"pixel_values": torch.randn(1, 3, 28, 28, dtype=torch.float64)}
        for inputs in (image, image | {"image_sizes": torch.tensor([[28, 28]])}):
            try:
                with float64.kept():
                    ours = [m for m in mappings(tower, **inputs) if isinstance(m, LayerMapping)]
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:120]}")
                continue
            for one in ours:
                for smooth in one.smooth:
                    by_smooth[f"{name}.{smooth}"] |= {f"{name}.{reader}" for reader in one.balance}
            result.append(name)
            break
    return result


def _stacked(patterns: list[str], mine: set[str]) -> set[str]:
    """Experts that are one stacked parameter here, of which their patterns would find the single modules."""
    return {
        name
        for name in mine
        if name.endswith("experts")
        and all(any(matching(p, [f"{name}.0.{part}"]) for p in patterns) for part in ("gate_proj", "up_proj"))
    }


def judged(
    model: nn.Module,
    inputs: dict[str, Any],
    smooth: str,
    balance: frozenset[str],
    mine: set[str],
    by_smooth: dict[str, set[str]],
) -> tuple[str, str]:
    """How one of their mappings stands to ours, and the evidence where the two differ."""
    if not balance:
        return "not there", "their patterns find no reader in this version of the model"
    if balance == mine:
        return "same", ""
    change = carried_out(model, inputs, smooth, balance)
    if mine and balance < mine:
        left = ", ".join(sorted(name.rpartition(".")[2] for name in mine - balance))
        text = f"; carried out, outputs change by {change:.0e}" if change is not None else ""
        return "theirs incomplete", f"{left} reads these channels too and is not balanced{text}"
    if change is None:
        kind = type(model.get_submodule(smooth)).__name__
        if not list(model.get_submodule(smooth).parameters()):
            return "no symmetry", f"{kind} has no weights to divide: their tool inserts a scale, which is another model"
        odd = [name for name in balance if getattr(model.get_submodule(name), "weight", torch.zeros(0)).ndim != 2]
        if odd:
            return "no symmetry", f"{odd[0].rpartition('.')[2]} is no linear map in this version of the model"
        return "no symmetry", "shapes do not agree, and their tool skips it"
    if change == 0:
        return "not run", "these layers do not run on tokens alone"
    if change > 1e-9:
        return "no symmetry", f"carried out, outputs change by {change:.0e}"
    return "less", f"carried out, outputs change by {change:.0e}: a symmetry that was not found"


def main() -> None:
    """Compare all, print a table, save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    tables = registries(options.folders)
    rows, failed = [], {}
    for architecture in sorted({name for table in tables.values() for name in table}):
        if options.only not in architecture:
            continue
        try:
            rows.append(compare(architecture, tables))
        except Exception as problem:
            failed[architecture] = (
                f"{type(problem).__name__}: {str(problem).splitlines()[0][:150] if str(problem) else ''}"
            )
            print(f"{architecture}: {failed[architecture]}")
            continue
        for registry, result in rows[-1]["registries"].items():
            print(architecture, registry, {k: v for k, v in result.items() if v})
    versions = {p.name: p.parent.name for folder in options.folders for p in folder.glob("*.dist-info")}
    if not options.only:
        print(save("mapping_registries", {"rows": rows, "not built": failed, "packages": sorted(versions)}))


if __name__ == "__main__":
    main()
