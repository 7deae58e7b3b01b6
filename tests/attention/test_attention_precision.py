"""Predicted rounding of dQ and dK: against float64, from what a listener hears of a running model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import conserved
from conserved import store
from conserved.attention import (
    AttentionPrecision,
    AttentionRounding,
    attention_rounding,
    centered,
    register_with_transformers,
    watch_precision,
)
from conserved.attention.precision_watch import kernel_of
from conserved.report import write_report


def heads(*, common: float, groups: int = 1, dtype: Any = torch.bfloat16, length: int = 64) -> list[Tensor]:
    """Queries, keys, values and an output gradient; four key heads with more and more in common."""
    torch.manual_seed(0)
    sizes = common * torch.tensor([0.0, 0.1, 1.0, 4.0]).reshape(1, 4, 1, 1)
    q = torch.randn(2, 4 * groups, length, 32)
    k, v = (0.2 * torch.randn(2, 4, length, 32) + sizes * torch.randn(2, 4, 1, 32) for _ in range(2))
    return [tensor.to(dtype) for tensor in (q, k, v, torch.randn(2, 4 * groups, length, 32))]


def true_errors(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output of the kernel, and the relative errors of its dQ and dK by head against float64."""
    results = []
    for dtype in (q.dtype, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        output = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **options)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))])
    actual, exact = results
    query, key = (
        ((a.double() - b).square().sum((0, 2, 3)) / b.square().sum((0, 2, 3))).sqrt()
        for a, b in zip(actual[1:3], exact[1:3], strict=True)
    )
    return actual[0], query, key


WINDOW = torch.ones(64, 64, dtype=torch.bool).tril() & ~torch.ones(64, 64, dtype=torch.bool).tril(-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("call", "read", "groups"),
    [
        ({"is_causal": True}, {"causal": True}, 1),
        ({}, {}, 1),
        ({"attn_mask": WINDOW}, {"mask": WINDOW}, 1),
        ({"attn_mask": WINDOW}, {"causal": True, "window": 9}, 1),
        ({"is_causal": True, "enable_gqa": True}, {"causal": True}, 3),
        ({"is_causal": True, "scale": 0.5}, {"causal": True, "scale": 0.5}, 1),
    ],
)
def test_the_prediction_is_the_true_error(
    call: dict[str, Any], read: dict[str, Any], groups: int, dtype: torch.dtype
) -> None:
    q, k, v, gradient = heads(common=1.0, groups=groups, dtype=dtype)
    output, query, key = true_errors(q, k, v, gradient, **call)
    rounding = attention_rounding(q, k, v, output, gradient, **read)
    assert float(query.max() / query.min()) > 10
    torch.testing.assert_close(rounding.query.double(), query, rtol=0.15, atol=0)
    # The processor's kernel rounds sums of dK more than once, which shows where nothing else is wrong.
    floor = torch.finfo(dtype).eps
    torch.testing.assert_close(rounding.key.double(), key, rtol=0.15, atol=floor)


def test_float32_is_held_against_float64() -> None:
    q, k, v, gradient = heads(common=1.0, dtype=torch.float32)
    output, query, _ = true_errors(q, k, v, gradient)
    rounding = attention_rounding(q, k, v, output, gradient)
    assert rounding.query.dtype == torch.float64
    assert 0.3 < float(rounding.query[3] / query[3]) < 3


def test_the_math_backend_is_predicted_to_be_accurate() -> None:
    q, k, v, gradient = heads(common=4.0)
    with sdpa_kernel(SDPBackend.MATH):
        output, query, _ = true_errors(q, k, v, gradient, is_causal=True)
    rounding = attention_rounding(q, k, v, output, gradient, causal=True, delta="scores")
    assert float(query.max()) < 0.01
    assert float(rounding.query.max()) < 0.01


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gradient = heads(common=1.0, groups=2)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    whole = attention_rounding(q, k, v, output, gradient, causal=True)
    monkeypatch.setattr("conserved.attention.rounding._BLOCK_ENTRIES", 16 * 64 * 7)
    parts = attention_rounding(q, k, v, output, gradient, causal=True)
    torch.testing.assert_close(parts.query, whole.query, rtol=1e-3, atol=0)
    torch.testing.assert_close(parts.key, whole.key, rtol=1e-3, atol=0)


def test_a_single_key_has_no_gradient_and_all_of_dq_is_rounding() -> None:
    q, k, v, gradient = (tensor[:, :, :1] for tensor in heads(common=1.0))
    rounding = attention_rounding(q, k, v, v + 0.01, gradient)
    assert torch.isinf(rounding.query).all()


def test_rows_that_see_no_key_do_not_count() -> None:
    q, k, v, gradient = heads(common=1.0)
    mask = WINDOW.clone()
    mask[:3] = False
    output, query, _ = true_errors(q, k, v, gradient, attn_mask=mask)
    rounding = attention_rounding(q, k, v, output, gradient, mask=mask)
    torch.testing.assert_close(rounding.query.double(), query, rtol=0.15, atol=0)


def test_shapes_are_validated() -> None:
    q, k, v, gradient = heads(common=1.0)
    with pytest.raises(ValueError, match="Expected tensors of four axes"):
        attention_rounding(q[0], k, v, q, gradient)
    with pytest.raises(ValueError, match="multiple of key heads"):
        attention_rounding(q[:, :3], k, v, q[:, :3], gradient[:, :3])
    with pytest.raises(ValueError, match="tokens along the third axis"):
        attention_rounding(q, k, v, q.transpose(1, 2), gradient.transpose(1, 2))


class Layer(nn.Module):
    """Attention whose keys and values have a large bias, with a function of one's own choice."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(32, 96), attend
        with torch.no_grad():
            self.qkv.bias[32:] = 10 * torch.randn(64)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def run(layer: nn.Module, steps: int = 2) -> Any:
    x = torch.randn(3, 40, 32, generator=torch.Generator().manual_seed(0))
    with watch_precision(layer, sequences=2) as precision:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                layer(x).float().square().mean().backward()
            precision.step()
    return precision


def test_a_watched_model_shows_what_is_rounding_and_what_mends_it() -> None:
    torch.manual_seed(0)
    plain = run(Layer(lambda *args, **options: F.scaled_dot_product_attention(*args, **options)))
    assert len(plain.rows) == 8
    assert {row.step for row in plain.rows} == {0, 1}
    assert plain.worst.query > 0.5
    [alarm] = [alarm for alarm in plain.alarms if alarm.law.endswith("dQ")]
    assert alarm.code == "precision"
    assert "conserved.attention.centered" in alarm.message
    assert "mostly rounding" in plain.summary()
    torch.manual_seed(0)
    mended = run(Layer(centered()))
    assert len(mended.rows) == 8
    assert mended.worst.query < 0.02
    assert not mended.alarms


def test_the_gauge_says_what_is_rounding_and_its_verdict_stays() -> None:
    torch.manual_seed(0)
    layer = Layer(lambda *args, **options: F.scaled_dot_product_attention(*args, **options))
    x = torch.randn(3, 40, 32)
    with conserved.gauge(layer) as gauge, torch.autocast("cpu", torch.bfloat16):
        layer(x).float().square().mean().backward()
    assert "precision: dQ of" in gauge.summary()
    assert all(alarm.code == "precision" for alarm in gauge.attention_precision.alarms)
    with conserved.gauge(layer) as single:
        layer(x).square().mean().backward()
    assert single.attention_precision.rows == ()
    assert "precision" not in single.summary()


def monitored(attend: Any, folder: Path, steps: int = 4) -> conserved.Monitor:
    """Train one layer of attention in bfloat16 autocast under a monitor that audits every step."""
    torch.manual_seed(0)
    layer = Layer(attend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    with conserved.Monitor(layer, optimizer, audit=1, every=1, sinks=[store.SQLite(folder / "runs.db")]) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                layer(torch.randn(3, 40, 32)).float().square().mean().backward()
            optimizer.step()
            monitor.step()
    return monitor


def test_a_monitor_notes_rounding_of_attention_and_raises_no_alarm(tmp_path: Path) -> None:
    monitor = monitored(lambda *args, **options: F.scaled_dot_product_attention(*args, **options), tmp_path)
    assert not monitor.alarms
    [note] = monitor.notes
    assert "mostly rounding" in note
    assert "conserved.attention.centered" in note
    precision = monitor.attention_precision
    assert len({row.step for row in precision.rows}) >= 3
    assert precision.worst is not None
    assert precision.worst.query > 0.5
    assert precision.plot(tmp_path / "heads.svg").stat().st_size > 1000
    assert monitor.audits[-1].readings()["audit/dQ_rounding"] > 0.5
    assert monitor.audits[-1].readings()["audit/mostly_rounding"] > 0


def test_a_monitor_notes_nothing_of_centered_attention(tmp_path: Path) -> None:
    monitor = monitored(centered(), tmp_path)
    assert not monitor.alarms
    assert not monitor.notes
    assert monitor.audits[-1].readings()["audit/dQ_rounding"] < 0.05
    assert monitor.audits[-1].readings()["audit/mostly_rounding"] == 0


def test_the_report_of_a_run_has_a_line_about_attention_in_half_precision(tmp_path: Path) -> None:
    monitored(lambda *args, **options: F.scaled_dot_product_attention(*args, **options), tmp_path)
    write_report(tmp_path / "runs.db", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "of its heads were mostly rounding of the kernel" in page
    assert "audit/dQ_rounding" in page


def test_scalars_of_a_step_have_the_rounding_of_attention(tmp_path: Path) -> None:
    class Kept(store.Sink):
        records: ClassVar[list[Any]] = []

        def begin(self, run: Any) -> None:
            pass

        def write(self, record: Any) -> None:
            self.records.append(record)

    torch.manual_seed(0)
    layer = Layer(lambda *args, **options: F.scaled_dot_product_attention(*args, **options))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    with conserved.Monitor(layer, optimizer, audit=1, every=1, sinks=[Kept()]) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                layer(torch.randn(3, 40, 32)).float().square().mean().backward()
            optimizer.step()
            monitor.step()
    scalars = [record.scalars() for record in Kept.records]
    assert any(record.get("audit/dQ_rounding", 0.0) > 0.5 for record in scalars)


def test_a_long_run_keeps_a_bounded_number_of_steps() -> None:
    saved, single = AttentionPrecision(), AttentionPrecision()
    names = ("query", "key", "query_norm", "key_norm")
    single.add("attention", "flash", AttentionRounding(**dict.fromkeys(names, torch.ones(2))))
    for step in range(2000):
        saved.take(single, step)
    steps = {row.step for row in saved.rows}
    assert 128 <= len(steps) <= 256
    assert 0 in steps
    assert max(steps) > 1900


def test_a_model_of_transformers_is_heard_under_its_own_names() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.randint(3, 32, (2, 12))
    for name in ("sdpa", register_with_transformers()):
        model.set_attn_implementation(name)
        with watch_precision(model) as precision:
            model(input_ids=tokens).logits.float().square().mean().backward()
        assert [row.name for row in precision.rows[::4]] == ["model.layers.1.self_attn", "model.layers.0.self_attn"]
        assert all(0 < row.query < 1 and "Flash" in row.kernel for row in precision.rows)


def test_the_kernel_is_known_by_its_backward_function() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    assert kernel_of(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).contiguous() + 1)[1] == "output"
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(F.scaled_dot_product_attention(q, q, q)) == ("math", "scores")


def test_dropout_and_biases_are_left_out_with_a_reason() -> None:
    class Dropping(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    with watch_precision(model := Dropping()) as precision:
        model(torch.randn(1, 2, 8, 4, requires_grad=True)).sum().backward()
    assert precision.rows == ()
    assert precision.skipped == {"": "it drops probabilities at random"}
    assert "left out" in precision.summary()


def test_the_run_does_not_change() -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        layer = Layer(lambda *args, **options: F.scaled_dot_product_attention(*args, **options))
        x = torch.randn(3, 40, 32)
        if watched:
            with watch_precision(layer):
                layer(x).square().mean().backward()
        else:
            layer(x).square().mean().backward()
        gradients.append(layer.qkv.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_results_are_shown_and_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    precision = run(Layer(lambda *args, **options: F.scaled_dot_product_attention(*args, **options)))
    assert precision.plot(tmp_path / "dq.svg").stat().st_size > 1000
    assert precision._repr_html_().count("<tr>") == 4
    record = json.loads(json.dumps(precision.record()))
    assert len(record["rows"]) == 8
    assert record["alarms"][0]["code"] == "precision"
    assert set(precision.latest()) == set(precision.series())
    assert len(precision.series()["[0].dQ_rounding"]) == 2


def test_arguments_of_the_watch_are_validated() -> None:
    with pytest.raises(TypeError), watch_precision(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="at least one sequence"), watch_precision(nn.Linear(2, 2), sequences=0):
        pass
    with watch_precision(nn.Linear(2, 2)) as precision:
        pass
    assert "No attention" in precision.summary()
    with pytest.raises(ValueError, match="Expected predictions to draw"):
        precision.plot("nothing.svg")
