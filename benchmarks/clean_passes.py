"""Right backward passes of many families in every habit of training that occurs: none may be refuted.

    python benchmarks/clean_passes.py --passes 5200 --workers 14 --out benchmarks/results

Models have the initialisation, dropout and ε of their configs. Every pass draws a habit: train or evaluation mode, a
precision, accumulation, clipping, a gradient scaler, checkpointing, one token or one sample, padding, frozen halves,
dead units, steps taken before. One model in six is compiled, where hooks see nothing; a few passes of it are made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conserved
from conserved.inference import known_laws

VOCABULARY = 96

COMPILED = 5
"""Passes of a compiled model: each change of shape or precision compiles it again."""

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 5,
}
MIXTURE = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Llama, biased": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8}),
    "Phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "CodeGen": ("CodeGenForCausalLM", "CodeGenConfig", GPT | {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        DECODER | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "Falcon": ("FalconForCausalLM", "FalconConfig", DECODER),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "Cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "StarCoder 2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "SmolLM 3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", GROUPED),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", MIXTURE),
    "Qwen3 MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", DECODER),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", DECODER | {"max_position_embeddings": 80, "pad_token_id": 1}),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", DECODER | {"embedding_size": 32}),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", DECODER | {"embedding_size": 16}),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", IMAGE),
}


class Convolutional(nn.Module):
    """A small residual network with batch norm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        x = F.relu(x + self.norms[2](self.two(F.relu(self.norms[1](self.one(x))))))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.core = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.embed(x))[0])


class Encoder(nn.Module):
    """torch's own encoder layers, before or after norms."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=first)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.embed(x)))


class Perceptron(nn.Module):
    """Linear maps and ReLU with layer drop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)) for _ in range(3)
        )
        self.inward, self.head = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            keep = 1.0 if not self.training else float(torch.rand(()) > 0.3)
            x = x + keep * layer(x)
        return self.head(x)


OWN: dict[str, Callable[[], nn.Module]] = {
    "batch norm and convolutions": Convolutional,
    "LSTM": Recurrent,
    "torch encoder, norm first": lambda: Encoder(True),
    "torch encoder, norm last": lambda: Encoder(False),
    "perceptron with stochastic depth": Perceptron,
    "DecoderLM": lambda: conserved.blocks.DecoderLM(VOCABULARY, 32, 2, 4, 48, kv_heads=2, max_length=64),
    "DecoderLM, layer norm": lambda: conserved.blocks.DecoderLM(
        VOCABULARY, 32, 2, 4, 48, norm="layer", positions="learned", max_length=64
    ),
}


@dataclass(frozen=True, slots=True)
class Habit:
    """How one pass is made."""

    training: bool
    autocast: bool
    passes: int
    clip: float | None
    scaler: bool
    checkpointing: str
    shape: str
    padded: bool
    frozen: str
    dead: bool
    steps: int
    loss: str
    watched: bool
    compiled: bool = False

    @staticmethod
    def drawn(rng: random.Random, number: int) -> Habit:
        """One in ten is audited from weights and gradients alone; the others with norms and attention watched."""
        return Habit(
            training=rng.random() < 0.8,
            autocast=rng.random() < 0.2,
            passes=rng.choice((1, 1, 1, 2, 3)),
            clip=rng.choice((None, None, 1.0, 0.01)),
            scaler=rng.random() < 0.15,
            checkpointing=rng.choice(("", "", "", "", "plain", "reentrant")),
            shape=rng.choice(("usual", "usual", "usual", "one token", "one sample", "long")),
            padded=rng.random() < 0.2,
            frozen=rng.choice(("", "", "", "half", "embeddings", "norms")),
            dead=rng.random() < 0.1,
            steps=rng.choice((0, 0, 1, 5)),
            loss=rng.choice(("cross entropy", "regression")),
            watched=number % 10 != 9,
        )


def built(name: str, seed: int) -> nn.Module:
    """A model of a family, as its config makes it."""
    torch.manual_seed(seed)
    if name in OWN:
        return OWN[name]()
    import transformers

    model, config, options = FAMILIES[name]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def inputs_of(model: nn.Module, habit: Habit, generator: torch.Generator) -> dict[str, Any] | Tensor:
    """What a model is called with."""
    model = getattr(model, "_orig_mod", model)
    rows = 1 if habit.shape == "one sample" else 3
    if isinstance(model, Convolutional):
        return torch.randn(max(rows, 2), 3, 8, 8, generator=generator)
    if isinstance(model, Perceptron):
        return torch.randn(rows, 12, generator=generator)
    if "Image" in type(model).__name__:
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}
    length = {"one token": 1, "long": 40}.get(habit.shape, 12)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    if not hasattr(model, "config"):
        return tokens
    mask = torch.ones_like(tokens)
    if habit.padded and length > 3:
        pad = getattr(model.config, "pad_token_id", None)
        tokens[0, -3:] = 0 if pad is None else pad
        mask[0, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def loss_of(model: nn.Module, habit: Habit, generator: torch.Generator) -> Tensor:
    """One loss of one batch."""
    x = inputs_of(model, habit, generator)
    out = model(**x) if isinstance(x, dict) else model(x)
    logits: Tensor = (out.logits if hasattr(out, "logits") else out).float()
    if habit.loss == "regression":
        return (logits - torch.randn(logits.shape, generator=generator)).square().mean()
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.randint(flat.shape[-1], (len(flat),), generator=generator))


def prepared(model: nn.Module, habit: Habit, rng: random.Random) -> None:
    """Mode, frozen parameters, dead units."""
    model.train(habit.training)
    names = [name for name, _ in model.named_parameters()]
    half = set(rng.sample(names, len(names) // 2)) if habit.frozen == "half" else set()
    for name, parameter in model.named_parameters():
        frozen = (
            name in half
            or (habit.frozen == "embeddings" and "emb" in name)
            or (habit.frozen == "norms" and "norm" in name)
        )
        parameter.requires_grad_(not frozen)
        inner = any(part in name for part in ("fc1", "fc_in", "c_fc", "linear1", "intermediate", "4h.bias", ".1.bias"))
        if habit.dead and inner and name.endswith("bias") and parameter.ndim == 1:
            with torch.no_grad():
                parameter[: len(parameter) // 3].sub_(30.0)


def checkpointed(model: nn.Module, habit: Habit) -> None:
    """Checkpointing of a model of transformers, on or off."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
        if habit.checkpointing and getattr(model, "supports_gradient_checkpointing", False):
            reentrant = {"use_reentrant": habit.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)  # type: ignore[operator]
            if habit.checkpointing == "reentrant" and hasattr(model, "enable_input_require_grads"):
                model.enable_input_require_grads()  # type: ignore[operator]


def some_passes(name: str, instance: int, count: int) -> list[dict[str, Any]]:
    """Clean passes of one model, audited: its mode and what is frozen stay, everything else differs from pass to pass.

    The laws are read off the first batch that comes, as in a training run.
    """
    rng = random.Random(f"{name} {instance}")
    first = Habit.drawn(rng, 0)
    model = built(name, instance)
    prepared(model, first, rng)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    compiled = instance % 6 == 5
    if compiled:
        torch._dynamo.reset()
        model, count = torch.compile(model, backend="aot_eager"), min(count, COMPILED)  # type: ignore[assignment]
    result = []
    for number in range(count):
        drawn = Habit.drawn(rng, number)
        habit = replace(drawn, training=first.training, frozen=first.frozen, dead=first.dead)
        if compiled:
            habit = replace(habit, compiled=True, watched=False, checkpointing="", shape="usual", padded=False)
        elif not number:
            habit = replace(habit, shape="usual")
        result.append(one_pass(model, optimizer, habit, name, 1000 * instance + number))
    return result


def one_pass(
    model: nn.Module, optimizer: torch.optim.Optimizer, habit: Habit, name: str, number: int
) -> dict[str, Any]:
    """One clean pass, audited."""
    checkpointed(model, habit)
    generator = torch.Generator().manual_seed(number)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    casting = torch.autocast("cpu", dtype=torch.bfloat16) if habit.autocast else nullcontext()
    for _ in range(habit.steps):
        optimizer.zero_grad()
        loss_of(model, habit, generator).backward()
        optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=habit.scaler)
    gauge: Any = None
    with ExitStack() as undo:
        if habit.watched:
            gauge = undo.enter_context(_watched(model))
        for _ in range(habit.passes):
            with casting:
                loss = loss_of(model, habit, generator)
            scaler.scale(loss).backward()
        laws = known_laws(model) or _laws(model, habit)
    if habit.scaler:
        scaler.unscale_(optimizer)
    if habit.clip is not None:
        nn.utils.clip_grad_norm_(trained, habit.clip)
    precision = torch.bfloat16 if habit.autocast else None
    result = conserved.audit(model, laws, precision=precision, accumulated=habit.passes, gauge=gauge, unused=["*"])
    return {
        "family": name,
        "number": number,
        "habit": asdict(habit),
        "status": result.verdict.status.value,
        "ok": result.ok,
        "conclusive": result.conclusive,
        "tested": result.tested,
        "worst": result.worst,
        "message": result.verdict.message[:300],
        "rows": [(row.name, row.residual, row.tolerance) for row in (*result.failures, *result.left_open)[:4]],
    }


def _laws(model: nn.Module, habit: Habit) -> Any:
    x = inputs_of(model, habit, torch.Generator().manual_seed(0))
    return conserved.recognize(model, **x) if isinstance(x, dict) else conserved.recognize(model, x)


def _watched(model: nn.Module) -> Any:
    from contextlib import contextmanager

    from conserved.auditing.attention_keys import keys_seen
    from conserved.auditing.softmax_gauge import Gauge, watch_norms

    @contextmanager
    def watching() -> Any:
        gauge = Gauge()
        with ExitStack() as undo:
            undo.enter_context(keys_seen(model, gauge.see))
            watch_norms(model, None, gauge, undo)
            yield gauge

    return watching()


def _job(task: tuple[str, int, int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    try:
        return some_passes(*task)
    except Exception as problem:
        where = traceback.format_exc().splitlines()[-3:]
        return [{"family": task[0], "number": task[1], "status": "error", "message": f"{problem!r} {where}"[:600]}]


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By family: passes, refuted, the share that was conclusive."""
    result = []
    for name in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == name and row["status"] != "error"]
        result.append(
            {
                "family": name,
                "passes": len(mine),
                "refuted": sum(row["status"] == "refuted" for row in mine),
                "conclusive": share(mine, watched=True),
                "conclusive_unwatched": share(mine, watched=False),
                "conclusive_compiled": share(mine, watched=False, compiled=True),
                "errors": sum(row["family"] == name and row["status"] == "error" for row in rows),
            }
        )
    return result


def share(rows: list[dict[str, Any]], *, watched: bool, compiled: bool = False) -> float:
    """The share of conclusive passes among those that were watched, those that were not, and those compiled."""
    asked = {"watched": watched, "compiled": compiled}.items()
    mine = [row["conclusive"] for row in rows if asked <= row["habit"].items()]
    return sum(mine) / len(mine) if mine else float("nan")


def main() -> None:
    """Draw passes over all families, audit them, print and save the table."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--each", type=int, default=26, help="passes of one model")
    parser.add_argument("--only", default="")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in (*FAMILIES, *OWN) if options.only in name]
    each = -(-options.passes // (len(names) * options.each))
    instances = range(options.first, options.first + each)
    tasks = [(name, instance, options.each) for instance in instances for name in names]
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with ExitStack() as undo:
        results: Any = map(_job, tasks)
        if options.workers > 1:
            pool = undo.enter_context(multiprocessing.get_context("spawn").Pool(options.workers))
            results = pool.imap_unordered(_job, tasks)
        for result in results:
            rows += result
            refuted = sum(row["status"] == "refuted" for row in rows)
            print(
                f"{result[0]['family']}: {len(rows)} passes, {refuted} refuted, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if time.monotonic() - began > options.seconds:
                break
    made = [row for row in rows if row["status"] != "error"]
    by_family = table_of(rows)
    for one in by_family:
        print(
            f"{one['family']:34s} {one['passes']:5d} passes, {one['refuted']} refuted, "
            f"{100 * one['conclusive']:.1f} % conclusive, {one['errors']} errors"
        )
    odd = [row for row in rows if row["status"] in ("refuted", "error")]
    for row in odd[:20]:
        print(json.dumps(row)[:900])
    why = Counter(row["message"].split(":")[0][:80] for row in made if not row["conclusive"])
    for text, count in why.most_common(12):
        print(f"  {count} not conclusive: {text}")
    summary = {
        "passes": len(made),
        "families": len(by_family),
        "refuted": sum(row["status"] == "refuted" for row in made),
        "conclusive": share(made, watched=True),
        "conclusive_unwatched": share(made, watched=False),
        "compiled": sum(row["habit"]["compiled"] for row in made),
        "conclusive_compiled": share(made, watched=False, compiled=True),
        "errors": len(rows) - len(made),
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(summary))
    for row in [row for row in made if not row["conclusive"] and row["habit"]["watched"]][:8]:
        print("open:", json.dumps(row)[:700])
    if options.out:
        open_ = [row for row in made if not row["conclusive"]]
        save("clean_passes", {**summary, "by_family": by_family, "odd": odd[:50], "open": open_[:100]}, options.out)


if __name__ == "__main__":
    main()
