"""The audit: what it says of right gradients and of gradients that are missing, damaged, scaled or out of date."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conserved
from conserved import Symmetry, Verdict, audit, blocks, gauge, recognize
from conserved.auditing import Audit
from conserved.inference import FirstCall
from conserved.inference.cached_laws import cached_laws_of
from conserved.laws.observed_precision import observed_precision
from conserved.moment import Direction, Plan, Point
from conserved.testing import assert_gradients_conserve
from reference import moment_map as naive
from zoo import LAWFUL, Case, ids

TOKENS = (2, 16)


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return blocks.DecoderLM(64, 32, 2, 4, 48, **({"kv_heads": 2, "max_length": 16} | options)).to(dtype)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    tokens = torch.randint(64, TOKENS, generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, -1).flatten())


def backward(model: nn.Module, passes: int = 1) -> nn.Module:
    for seed in range(passes):
        loss_of(model, seed).backward()
    return model


def test_a_right_backward_pass_is_verified_and_says_what_it_cannot_see() -> None:
    result = audit(backward(decoder()), loss="cross_entropy")
    assert result.ok
    assert result.verdict == Verdict.VERIFIED
    assert len(result.rows) == len(recognize(decoder(), loss="cross_entropy"))
    assert result.worst == max(row.residual for row in result.rows) < 1e-4
    assert result.failures == ()
    assert "Identities do not see" in result.summary()
    assert result.record()["ok"] is True


@pytest.mark.parametrize("spoiled", [1.0, 1.5])
def test_an_audit_that_is_kept_does_not_keep_gradients(spoiled: float) -> None:
    model = backward(decoder())
    weight = next(p for name, p in model.named_parameters() if name.endswith("q.weight"))
    assert weight.grad is not None
    weight.grad *= spoiled
    alive = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    result = audit(model, loss="cross_entropy")
    assert bool(result.failures) == (spoiled != 1)
    model.zero_grad(set_to_none=True)
    assert alive
    assert not any(one() is not None for one in alive)
    assert result.rows
    assert result.coverage.parameters


@pytest.mark.parametrize("case", LAWFUL, ids=ids)
def test_residuals_are_those_of_the_identities_by_their_definition(case: Case) -> None:
    model = case.model()
    case.objective()(model).backward()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    grads = {name: _noisy(p) for name, p in model.named_parameters()}
    symmetries = case.laws(model).symmetries
    indices, tables = Plan.of(symmetries).evaluate([Point(theta), Direction(grads)], [(0, 1)], sizes=True).sizes()
    for index, (value, scale) in zip(indices, torch.cat(tables).tolist(), strict=True):
        symmetry = symmetries[index]
        slow_value, slow_scale = _slowly(symmetry, theta, grads)
        assert value == pytest.approx(slow_value, rel=1e-9, abs=1e-12)
        assert scale == pytest.approx(slow_scale, rel=1e-9)


def _noisy(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad + 0.1 * torch.randn_like(parameter)


def _slowly(symmetry: Symmetry, theta: dict[str, Tensor], grads: dict[str, Tensor]) -> tuple[float, float]:
    """‖μ‖ by the naive moment map; the scale from one leg at a time, with random signs averaged exactly."""
    form = {
        "general_linear": naive.general_linear,
        "complex_scaling": naive.complex_scaling,
        "scaling": naive.scaling,
        "one_scale": naive.one_scale,
        "translation": naive.translation,
    }[symmetry.kind.code]
    a = symmetry.matrices(theta)
    b = [leg.view.matrix(grads[leg.view.parameter]) for leg in symmetry.legs]
    squared = 0.0
    for leg, left, right in zip(symmetry.legs, a, b, strict=True):
        squared += float(form([leg.degree], [left], [right]).norm()) ** 2
        for column in range(right.shape[1]):
            # Products that share no entry of μ with another column's: the columns are independent summands.
            squared += _column(symmetry.kind.code, leg.degree, left, right, column)
    return float(form([leg.degree for leg in symmetry.legs], a, b).norm()), squared**0.5


def _column(code: str, degree: float, left: Tensor, right: Tensor, column: int) -> float:
    y = right[:, column]
    if code == "translation":
        return degree**2 * float(y @ y)
    x = left[:, column]
    if code == "general_linear":
        return float((x @ x) * (y @ y))
    if code == "complex_scaling":
        x, y = x.view(-1, 2), y.view(-1, 2)
        return float((x.square().sum(1) * y.square().sum(1)).sum())
    return degree**2 * float((x * y) @ (x * y))


def test_rows_come_worst_first_and_name_tensors_head_and_cause() -> None:
    model = backward(decoder())
    model.layers[1].attention.k.weight.grad[:8] *= 2  # type: ignore[index, union-attr]
    result = audit(model, loss="cross_entropy")
    assert not result.ok
    assert result.verdict == Verdict.REFUTED
    worst = result.rows[0]
    assert worst.name == "layers.1.attention.query_key[0]"
    assert worst.part == "0"
    assert worst.parameters == ("layers.1.attention.q.weight", "layers.1.attention.k.weight")
    assert "k.weight times 0.5" in worst.suggests[0]
    assert "dQ and dK" in worst.suggests[1]
    assert result["layers.1.attention.query_key[1]"].ok
    assert result.rows[0].residual == result.worst
    assert "layers.1.attention.query_key[0]" in result.summary()


@pytest.mark.parametrize("width", [32, 512])
def test_a_wrong_gradient_shows_at_any_width(width: int) -> None:
    """Against the sum of magnitudes of all products a residual would fade with the root of the width."""
    model = blocks.Attention(width, 4, rotary=True)
    model(torch.randn(24, width)).sin().mean().backward()
    model.k.weight.grad = torch.zeros_like(model.k.weight)
    result = audit(model)
    assert all(result[f"query_key[{head}]"].residual > 0.4 for head in range(4))


def test_both_parts_of_a_rotary_identity_are_audited() -> None:
    """A turned dK leaves every trace μ_real as it was when q and k are alike; the part along J changes."""
    model = blocks.Attention(4, 1, rotary=True).double()
    model(torch.randn(6, 4, dtype=torch.float64)).sin().mean().backward()
    k = model.k.weight
    assert k.grad is not None
    weight = k.detach().view(2, 2, 4)
    turned = torch.stack((-weight[:, 1], weight[:, 0]), 1).view(4, 4)
    # Along J·K the real part Σ⟨k, g⟩ does not move at all.
    k.grad += 0.5 * float(k.grad.norm()) / float(turned.norm()) * turned
    real = recognize(model).identities()["query_key[0]"][:, 0]
    assert float(real.abs().max()) < 1e-12
    assert not audit(model)["query_key[0]"].ok


def test_scaled_gradients_pass() -> None:
    model = backward(decoder())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 65536.0
    assert audit(model, loss="cross_entropy").ok


def test_a_missing_gradient_is_a_finding() -> None:
    model = backward(decoder())
    model.layers[0].feedforward.gate.weight.grad = None  # type: ignore[index, union-attr]
    result = audit(model, loss="cross_entropy")
    assert not result.ok
    assert [(item.parameter, item.trouble) for item in result.findings] == [
        ("layers.0.feedforward.gate.weight", "missing")
    ]
    assert "layers.0.feedforward.gate.weight is trainable and has no gradient" in result.summary()


def test_a_missing_gradient_that_breaks_nothing_else_leaves_the_verdict_open_and_can_be_excused() -> None:
    model = nn.ModuleDict({"used": blocks.SwiGLU(4, 6), "unused": nn.Linear(4, 4)})
    x = torch.randn(5, 4)
    laws = recognize(lambda: (model["used"](x).sin() + model["unused"](x)).sin().mean(), model)
    model["used"](x).sin().mean().backward()
    result = audit(model, laws)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert not result.ok
    assert "name them in unused=" in result.summary()
    assert audit(model, laws, unused=["unused.*"]).ok


def test_no_gradient_at_all_asks_for_a_backward_pass() -> None:
    with pytest.raises(ValueError, match=r"Call backward\(\) first"):
        audit(decoder())


def test_not_a_number_is_refuted_and_named() -> None:
    model = backward(decoder())
    model.layers[0].attention.q.weight.grad[0, 0] = float("nan")  # type: ignore[index, union-attr]
    result = audit(model)
    assert result.verdict == Verdict.REFUTED
    assert "not finite" in result.verdict.message
    assert "layers.0.attention.q.weight" in result.summary()
    assert not result["layers.0.attention.query_key[0]"].ok


def test_an_infinite_gradient_of_a_parameter_without_laws_is_found() -> None:
    model = backward(decoder())
    model.layers[0].feedforward.gate.weight.grad[0, 0] = float("inf")  # type: ignore[index, union-attr]
    assert audit(model).verdict == Verdict.REFUTED


def test_sparse_gradients_are_audited_as_dense_ones() -> None:
    torch.manual_seed(1)
    dense, sparse = decoder(), decoder()
    sparse.load_state_dict(dense.state_dict())
    sparse.embedding.sparse = True  # type: ignore[union-attr]
    one, other = (audit(backward(model), loss="cross_entropy") for model in (dense, sparse))
    assert sparse.embedding.weight.grad.is_sparse  # type: ignore[union-attr]
    assert other.ok
    assert other["stream_scale"].residual == pytest.approx(one["stream_scale"].residual, rel=1e-2)


def test_zero_gradients_are_noted_and_if_all_are_zero_nothing_is_said() -> None:
    model = backward(decoder())
    model.layers[0].feedforward.gate.weight.grad.zero_()  # type: ignore[index, union-attr]
    result = audit(model)
    assert [item.trouble for item in result.findings] == ["zero"]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    silent = audit(model)
    assert silent.verdict == Verdict.INCONCLUSIVE
    assert "No gradient reached" in silent.verdict.message
    assert not any(row.checked for row in silent.rows)


def test_frozen_parameters_take_their_laws_along_also_when_frozen_after_recognition() -> None:
    model = decoder()
    laws = recognize(model)
    model.layers[0].attention.k.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    result = audit(backward(model), laws)
    assert result.ok
    assert not [row for row in result.rows if "layers.0.attention.query_key" in row.name]
    assert [row for row in result.rows if "layers.1.attention.query_key" in row.name]
    assert result.findings == ()


def test_a_model_without_laws_is_not_called_right() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().mean().backward()
    result = audit(model)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert not result.ok
    assert "No law is known" in result.summary()


def test_parameters_that_moved_after_the_gradient_are_recognised_as_such() -> None:
    model = backward(decoder())
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    result = audit(model, loss="cross_entropy")
    assert not result.ok
    assert result.moved == pytest.approx(0.05, rel=0.02)
    assert "Audit before optimizer.step()" in result.verdict.message


def test_a_wrong_gradient_is_not_taken_for_a_step() -> None:
    model = backward(decoder())
    model.layers[0].attention.k.weight.grad *= 2  # type: ignore[index, union-attr]
    assert audit(model).moved is None


def test_an_adam_step_is_seen_but_not_called_gradient_descent() -> None:
    model = backward(decoder())
    torch.optim.Adam(model.parameters(), lr=0.01).step()
    result = audit(model)
    assert not result.ok
    assert result.moved is None


@pytest.mark.parametrize(("given", "limit"), [(None, 1e-4), (torch.float64, 1e-11), (torch.bfloat16, 2e-2)])
def test_precision_sets_the_tolerance(given: torch.dtype | None, limit: float) -> None:
    """Unless it is given, float64 is held to float32: libraries compute norms and softmax in that."""
    model = blocks.Attention(32, 4).double()
    model(torch.randn(24, 32, dtype=torch.float64)).sin().mean().backward()
    result = audit(model, precision=given)
    assert result.ok
    assert all(limit < row.tolerance < 1.5 * limit for row in result.rows)


@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_is_read_off_the_bits_of_the_gradients(half: torch.dtype, passes: int, clip: bool) -> None:
    model = decoder()
    with torch.autocast("cpu", dtype=half):
        losses = [loss_of(model, seed) for seed in range(passes)]
    for loss in losses:
        loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    result = audit(model, loss="cross_entropy")
    assert result.known == "bits"
    assert result.precision in (torch.bfloat16, torch.float16)
    assert result.ok


@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("passes", [1, 4])
def test_single_precision_is_not_taken_for_autocast(passes: int, clip: bool) -> None:
    model = backward(decoder(), passes)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert audit(model).known == "stored"


def test_the_grain_of_numbers_is_that_of_their_origin() -> None:
    def seen(samples: list[Tensor]) -> torch.dtype | None:
        return observed_precision([sample.numpy() for sample in samples])

    numbers = [torch.randn(512) for _ in range(4)]
    assert seen(numbers) is None
    assert seen([x * 0.3 for x in numbers]) is None
    for half in (torch.bfloat16, torch.float16):
        coarse = [x.to(half).float() for x in numbers]
        assert seen(coarse) == half
        assert seen([x * 0.3 for x in coarse]) is not None
        assert seen([coarse[0], *numbers[1:]]) is None
    assert seen([torch.zeros(512)]) is None
    assert seen([torch.ones(512)]) is None
    assert observed_precision([]) is None


def test_half_precision_gradients_that_were_accumulated_may_be_coarser() -> None:
    model = backward(decoder(torch.bfloat16))
    one, four = audit(model), audit(model, accumulated=4)
    assert four.rows[-1].tolerance > 1.5 * one.rows[-1].tolerance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": torch.int8}, "floating-point"),
        ({"accumulated": 0}, "Expected accumulated"),
        ({"laws": recognize(blocks.SwiGLU(3, 4))}, "Expected `laws` of this model"),
    ],
    ids=["precision", "accumulated", "laws"],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(backward(decoder()), **arguments)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = decoder()
    with pytest.raises(ValueError, match="meta device"):
        audit(model)


def test_the_parameters_and_modules_that_nothing_tests_are_listed_with_the_badge() -> None:
    result = audit(backward(decoder()))
    text = rf"verified, {result.coverage.percent} of parameters \(\d+ % of directions\), errors above 0\.\d+ %"
    assert re.fullmatch(text, result.badge)
    assert result.coverage.parameters == 1
    assert all(name.endswith("feedforward") for name in result.coverage.untested_modules)
    half = audit(backward(decoder()), laws=recognize(decoder()).select(lambda s: s.family == "gated_neurons"))
    assert 0 < half.coverage.parameters < 1
    assert "embedding.weight" in half.coverage.untested
    assert "layers.0.attention" in half.coverage.untested_modules
    assert f"verified, {half.coverage.percent} of parameters" in repr(half)


def test_a_law_up_to_epsilon_is_decided_where_the_norms_were_watched() -> None:
    tiny = decoder()
    with torch.no_grad():
        tiny.embedding.weight.mul_(1e-3)  # type: ignore[union-attr, operator]
    with gauge(tiny) as seen:
        backward(tiny)
    assert audit(tiny, gauge=seen).conclusive
    tiny.embedding.weight.grad *= 2  # type: ignore[union-attr, operator]
    assert [row.name for row in audit(tiny, gauge=seen).failures] == ["stream_scale"]


@pytest.mark.filterwarnings("ignore")
def test_what_epsilon_leaves_is_measured_head_by_head() -> None:
    """Norms of queries and keys with an ε of their size: laws of single heads, each with its own right-hand side."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-4)
    model = Qwen3ForCausalLM(config).double()
    for name, parameter in model.named_parameters():
        # With all gains trained, a scale can also go into them.
        parameter.requires_grad_("norm" not in name)
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 0.2
    tokens = torch.randint(32, (2, 6))
    with gauge(model) as watched:
        model(tokens, labels=tokens).loss.backward()
    result = audit(model, recognize(model, tokens), gauge=watched)
    heads = [row for row in result.rows if "query" in row.family]
    assert len(heads) == 6, "four heads of queries and two of keys have a scale each"
    assert max(row.residual for row in heads) < 1e-6, "norms run in float32 here"
    assert result.verdict == Verdict.VERIFIED, result


def test_a_scale_that_a_norm_forgets_up_to_epsilon_is_left_open_when_it_is_off_and_never_green() -> None:
    tiny = decoder()
    with torch.no_grad():
        tiny.embedding.weight.mul_(1e-3)  # type: ignore[union-attr, operator]
    result = audit(backward(tiny), loss="cross_entropy")
    assert result["stream_scale"].residual > result["stream_scale"].tolerance
    assert result.verdict == Verdict.INCONCLUSIVE
    assert result.failures == ()
    usual = backward(decoder())
    usual.embedding.weight.grad *= 3  # type: ignore[union-attr, operator]
    spoiled = audit(usual)
    assert spoiled.failures == ()
    assert [row.name for row in spoiled.left_open] == ["stream_scale"]
    assert spoiled.ok
    assert not spoiled.conclusive
    assert spoiled.badge == "inconclusive"


# Ways in.


def test_assert_gradients_conserve_passes_fails_and_says_why() -> None:
    model = decoder()
    result = assert_gradients_conserve(model, lambda: loss_of(model), loss="cross_entropy")
    assert isinstance(result, Audit)
    model.layers[0].attention.v.weight.grad *= 2  # type: ignore[index, union-attr]
    with pytest.raises(AssertionError, match=r"layers.0.attention.value_output\[0\]"):
        assert_gradients_conserve(model)


def test_assert_gradients_conserve_fails_where_nothing_is_tested() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="No law is known"):
        assert_gradients_conserve(model, lambda: model(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match="scalar tensor"):
        assert_gradients_conserve(model, lambda: model(torch.ones(1, 2)))


def test_a_hook_audits_every_so_many_steps_and_raises_before_anything_moves() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = conserved.AuditHook(model, optimizer, every=2, loss="cross_entropy")
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert watch.audits == 2
    assert watch.last is not None
    assert watch.last.ok
    loss_of(model).backward()
    model.layers[0].attention.v.weight.grad *= 2  # type: ignore[index, union-attr]
    before = model.head.weight.detach().clone()  # type: ignore[union-attr, operator]
    with pytest.raises(conserved.GradientsDoNotConserveError, match="value_output") as raised:
        optimizer.step()
    assert not raised.value.audit.ok
    assert torch.equal(model.head.weight, before)  # type: ignore[union-attr, arg-type]
    watch.remove()
    optimizer.step()


def test_a_hook_can_log_instead(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    conserved.AuditHook(model, optimizer, every=1, on_failure="log")
    loss_of(model).backward()
    model.layers[0].attention.v.weight.grad *= 2  # type: ignore[index, union-attr]
    with caplog.at_level(logging.ERROR, logger="conserved.audit"):
        optimizer.step()
    assert "value_output" in caplog.text


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_hook_notices_autocast_that_accumulation_and_clipping_hide() -> None:
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = conserved.AuditHook(model, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    assert watch.last is not None
    assert (watch.last.known, watch.last.precision) == ("given", torch.bfloat16)


@pytest.mark.parametrize("arguments", [{"every": 0}, {"on_failure": "explode"}], ids=["every", "on_failure"])
@pytest.mark.usefixtures("as_users_run_it")
def test_a_hook_refuses_bad_arguments(arguments: dict[str, Any]) -> None:
    model = decoder()
    with pytest.raises(ValueError, match=r"Expected every|Expected on_failure"):
        conserved.AuditHook(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_an_update_that_is_smaller_than_the_spacing_of_bfloat16_does_not_land() -> None:
    for dtype, lands in ((torch.bfloat16, False), (torch.float32, True)):
        model = backward(decoder(dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with conserved.check_update(model) as update:
            optimizer.step()
            optimizer.zero_grad()
        assert update.ok is lands
    assert update.worst > 0.9


def test_without_gradients_nothing_is_said_about_landing() -> None:
    with conserved.check_update(decoder()) as update:
        pass
    assert update.verdict == Verdict.INCONCLUSIVE


def test_without_processes_nothing_is_said_about_replicas() -> None:
    result = conserved.check_replicas(backward(decoder()))
    assert result.verdict == Verdict.INCONCLUSIVE


def test_a_lost_gradient_is_refuted_however_small_it_would_have_been() -> None:
    """Gradients of queries and keys are a hundred-millionth of the others, and that of the keys is lost."""
    model = blocks.Attention(16, 2)
    with torch.no_grad():
        model.q.weight.mul_(1e-5)
        model.k.weight.mul_(1e-5)
    model(torch.randn(24, 16)).sin().mean().backward()
    model.k.weight.grad = torch.zeros_like(model.k.weight)
    result = audit(model)
    assert {row.name for row in result.failures} == {"query_key[0]", "query_key[1]"}


def _without_gradient(model: Any) -> None:
    model[2].weight.grad = None


def _other_gradient(model: Any) -> None:
    gradient = model[2].weight.grad
    model[2].weight.grad = gradient + torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3))


def _other_parameter(model: Any) -> None:
    former = model[0].weight
    model[0].weight = nn.Parameter(former.detach().clone())
    model[0].weight.grad = former.grad


def _other_precision(model: Any) -> None:
    for parameter in model.parameters():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.double()
        parameter.grad = None if gradient is None else gradient.double()


def _one_memory(model: Any) -> None:
    model[2].weight.data = model[4].weight.data


def _transposed(model: Any) -> None:
    model[2].weight.data = model[2].weight.data.T.contiguous().T


CHANGES: dict[str, Callable[[Any], object]] = {
    "a gradient is gone": _without_gradient,
    "a gradient is another": _other_gradient,
    "a parameter is another": _other_parameter,
    "a parameter is frozen": lambda model: model[2].weight.requires_grad_(False),
    "the precision is another": _other_precision,
    "two parameters have one memory": _one_memory,
    "a parameter lies otherwise": _transposed,
}


@pytest.mark.parametrize("given", [True, False], ids=["laws given", "laws inferred"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_of_a_model_is_not_used_once_it_has_changed(change: str, given: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    laws = recognize(model, x)
    with FirstCall(model) as first:
        model(x).square().sum().backward()
        first.laws()
        for _ in range(2):
            assert audit(model, laws if given else None).ok
        CHANGES[change](model)
        result = audit(model, laws if given else None)
        saved = cached_laws_of(model)
        saved.walk = saved.audited = None
        afresh = audit(model, replace(laws) if given else None)
    assert result.record() == afresh.record()
