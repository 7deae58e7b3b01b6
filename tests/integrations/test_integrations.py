"""Unmodified training loops of other libraries: transformers.Trainer, Lightning, Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import LawSet, Leg, Monitor, Symmetry, View
from conserved.symmetry import ComplexScaling, GeneralLinear, Scaling
from conserved.tracking import RunStore, TensorBoard
from training import VOCABULARY, decoder, sentences

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("as_users_run_it")]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def llama_laws(model: nn.Module) -> LawSet:
    """What SCIENCE says of grouped rotary attention and SwiGLU, written down by hand for the names of transformers."""
    symmetries: list[Symmetry] = []
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for group in range(2):
            symmetries.append(_query_key(attention, group))
            symmetries.append(_value_output(attention, group))
        down, up = View.of(f"{mlp}.down_proj.weight", (16, 24), axes=1), View.of(f"{mlp}.up_proj.weight", (24, 16))
        symmetries.append(Symmetry(block=mlp, family="gated_neurons", kind=Scaling(), legs=(Leg(down), Leg(up, -1))))
    return LawSet(symmetries=tuple(symmetries), parameters=dict(model.named_parameters()))


def _query_key(at: str, group: int) -> Symmetry:
    grid = (2, 2, 2, 2, 16)
    queries = [View.of(f"{at}.q_proj.weight", (16, 16), grid=grid, axes=(3, 2), pick={0: group, 1: i}) for i in (0, 1)]
    key = View.of(f"{at}.k_proj.weight", (8, 16), grid=grid[1:], axes=(2, 1), pick={0: group})
    legs = (*map(Leg, queries), Leg(key, -1))
    return Symmetry(block=at, family="query_key", part=str(group), kind=ComplexScaling(), legs=legs)


def _value_output(at: str, group: int) -> Symmetry:
    value = View.of(f"{at}.v_proj.weight", (8, 16), grid=(2, 4, 16), axes=1, pick={0: group})
    outputs = [
        View.of(f"{at}.o_proj.weight", (16, 16), grid=(16, 2, 2, 4), axes=3, pick={1: group, 2: i}) for i in (0, 1)
    ]
    legs = (Leg(value), *(Leg(view, -1) for view in outputs))
    return Symmetry(block=at, family="value_output", part=str(group), kind=GeneralLinear(), legs=legs)


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = sentences(number, count=1)[0]
        return {"input_ids": row, "labels": row}


def arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 2,
        "save_steps": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "run_name": "tuning",
        "seed": 1,
    } | options
    return TrainingArguments(**chosen)


def test_a_trainer_fine_tuning_run_is_watched_and_tensorboard_shows_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, Trainer

    from conserved.integrations import ConservationCallback

    llama().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    callback = ConservationCallback(
        llama_laws(model), sinks=[tmp_path / "out" / "conserved.db", TensorBoard(tmp_path / "board")]
    )
    Trainer(
        model=model,
        args=arguments(tmp_path / "out", report_to="tensorboard", gradient_accumulation_steps=2),
        train_dataset=Text(),
        callbacks=[callback],
    ).train()
    assert callback.monitor is not None
    assert {entry.step for entry in callback.monitor.ledger()} == set(range(1, 7))
    assert not callback.monitor.alarms
    causes = {cause for entry in callback.monitor.ledger() for cause, amount in entry.causes.items() if amount}
    assert causes == {"momentum", "preconditioner", "decay"}
    with RunStore(tmp_path / "out" / "conserved.db") as store:
        assert store.runs() == ["tuning"]
        assert store.steps("tuning") == [1, 2, 3, 4, 5, 6]
    reader = EventAccumulator(str(tmp_path / "board"))
    reader.Reload()
    errors = reader.Scalars("conserved/drift/model.layers.0.self_attn")
    assert [event.step for event in errors] == [1, 2, 3, 4, 5, 6]
    assert errors[-1].value > errors[0].value >= 0


def test_the_laws_of_the_trained_model_hold_in_its_backward_pass() -> None:
    model = llama().double()
    batch = sentences(0)
    assert llama_laws(model).verify(lambda: model(input_ids=batch, labels=batch).loss).holds


def test_training_resumes_with_the_references_it_began_with(tmp_path: Path) -> None:
    from transformers import Trainer

    from conserved.integrations import ConservationCallback

    monitors = []
    for folder, resume in (("whole", False), ("parts", False), ("parts", True)):
        model = llama()
        callback = ConservationCallback(llama_laws(model))
        options: dict[str, Any] = {"max_steps": 3} if folder == "parts" and not resume else {}
        # The schedule must be that of the whole run.
        args = arguments(tmp_path / folder, lr_scheduler_type="constant", report_to="none", warmup_steps=0, **options)
        Trainer(model=model, args=args, train_dataset=Text(), callbacks=[callback]).train(
            resume_from_checkpoint=str(tmp_path / folder / "checkpoint-3") if resume else None
        )
        monitors.append(callback.monitor)
    whole, _, resumed = monitors
    assert whole is not None
    assert resumed is not None
    assert resumed.ledger() == [entry for entry in whole.ledger() if entry.step > 3]
    with RunStore(tmp_path / "parts" / "conserved.db") as store:
        assert store.steps("tuning") == [1, 2, 3, 4, 5, 6]
        assert store.entries("tuning") == whole.ledger()


def test_a_lightning_run_is_watched_clipped_and_resumed(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from conserved.integrations import LightningConservation

    class Decoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = decoder().double()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = batch["input_ids"]
            return F.cross_entropy(self.net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def fit(steps: int, *, resume: str | None = None) -> tuple[Any, LightningConservation]:
        torch.manual_seed(0)
        callback = LightningConservation(run="fit", loss="cross_entropy")
        trainer = lightning.Trainer(
            max_steps=steps,
            default_root_dir=tmp_path,
            logger=TensorBoardLogger(tmp_path, name="board", version="one"),
            callbacks=[callback],
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            log_every_n_steps=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.01,
            gradient_clip_algorithm="value",
        )
        loader = torch.utils.data.DataLoader(Text(), batch_size=4)
        trainer.fit(Decoder(), loader, ckpt_path=resume)
        return trainer, callback

    trainer, callback = fit(4)
    monitor = callback.monitor
    assert monitor is not None
    assert {entry.step for entry in monitor.ledger()} == {1, 2, 3, 4}
    assert not monitor.alarms
    assert max(abs(entry.causes["clipping"]) for entry in monitor.ledger()) > 1e-6
    reader = EventAccumulator(str(tmp_path / "board" / "one"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("conserved/drift/net.layers.0.attention")] == [1, 2, 3, 4]
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    _, later = fit(6, resume=str(tmp_path / "four.ckpt"))
    assert later.monitor is not None
    assert {entry.step for entry in later.monitor.ledger()} == {5, 6}
    assert all(
        torch.equal(value, monitor.reference.values[name]) for name, value in later.monitor.reference.values.items()
    )
    assert not later.monitor.alarms
    with RunStore(tmp_path / "conserved.db") as store:
        assert store.steps("fit") == [1, 2, 3, 4, 5, 6]


def test_an_accelerate_loop_is_a_plain_loop() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    loader = torch.utils.data.DataLoader(Text(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = Monitor(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            rows = batch["input_ids"]
            accelerator.backward(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                monitor.step()
            optimizer.zero_grad()
    entries = monitor.ledger()
    assert {entry.step for entry in entries} == {1, 2, 3, 4}
    assert max(abs(entry.residual) for entry in entries) < 1e-13


def test_integrations_are_found_by_name_only() -> None:
    import conserved.integrations

    with pytest.raises(AttributeError, match="KerasCallback"):
        _ = conserved.integrations.KerasCallback  # type: ignore[attr-defined]
