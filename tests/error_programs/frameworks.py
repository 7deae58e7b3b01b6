"""Errors inside the loops of others: transformers.Trainer and Lightning, each with its default callback."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import Monitor
from error_programs.case import case
from error_programs.models import Decoder


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(23, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class LossInside(nn.Module):
    """A decoder that returns its loss, as models of transformers do."""

    def __init__(self, *, detach: bool = False) -> None:
        super().__init__()
        self.decoder, self.detach = Decoder(), detach

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.decoder(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def _trainer(model: nn.Module, *, callbacks: tuple[Any, ...] = (), base: Any = None, **options: Any) -> Monitor:
    from transformers import Trainer, TrainingArguments

    from conserved.integrations import ConservationCallback

    callback = ConservationCallback(sinks=(), report=False)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
            "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
            "lr_scheduler_type": "constant",
        } | options  # fmt: skip
        made = (base or Trainer)(
            model=model, args=TrainingArguments(**given), train_dataset=Text(), callbacks=[*callbacks, callback]
        )
        made.train()
    assert callback.monitor is not None
    return callback.monitor


@case("Trainer: the optimizer is made of another copy of the model", "loop", words="no optimizer steps", at=1)
def trainer_of_a_copy(wrong: bool) -> Monitor:
    import copy

    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            held = copy.deepcopy(self.model) if wrong else self.model
            self.optimizer = torch.optim.AdamW(held.parameters(), lr=1e-2)
            return self.optimizer

    return _trainer(LossInside(), base=Own)


@case(
    "Trainer: training_step clears gradients after every micro-batch",
    "loop",
    words="cleared|thrown away|only the last|gradient",
    at=1,
)
def trainer_clears(wrong: bool) -> Monitor:
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            if wrong:
                model.zero_grad()
            return super().training_step(model, *args, **kwargs)

    return _trainer(LossInside(), base=Own, gradient_accumulation_steps=2)


@case("Trainer: a callback puts the model into eval mode", "loop", words="eval mode", at=3)
def trainer_eval(wrong: bool) -> Monitor:
    from transformers import Trainer, TrainerCallback

    class Own(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            model.train()
            if wrong and self.state.global_step >= 2:
                model.train = lambda mode=True: model
                nn.Module.train(model, False)
            return super().training_step(model, *args, **kwargs)

    model = LossInside()
    model.decoder = Decoder(drop=0.1)
    return _trainer(model, base=Own, callbacks=(TrainerCallback(),))


@case("Trainer: a callback re-initialises the head", "update", words="wrote", at=3)
def trainer_writes(wrong: bool) -> Monitor:
    from transformers import TrainerCallback

    class Resets(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if wrong and state.global_step == 3:
                kwargs["model"].decoder.head.reset_parameters()

    return _trainer(LossInside(), callbacks=(Resets(),))


@case("Trainer: a frozen embedding is thawed and no group holds it", "loop", words="no optimizer steps", at=3)
def trainer_thaws(wrong: bool) -> Monitor:
    from transformers import TrainerCallback

    class Thaws(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if wrong and state.global_step == 2:
                kwargs["model"].decoder.embedding.requires_grad_(True)

    model = LossInside()
    model.decoder.embedding.requires_grad_(False)
    return _trainer(model, callbacks=(Thaws(),))


def _lightning(module: Any, **options: Any) -> Monitor:
    import lightning

    from conserved.integrations import LightningConservation

    callback = LightningConservation(sinks=(), log=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=options.pop("max_steps", 6), accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[callback], **options,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Text(), batch_size=4))
    assert callback.monitor is not None
    return callback.monitor


def _module(*, wrong: str = "", drop: float = 0.0) -> Any:
    import lightning

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder(drop=drop)
            self.automatic_optimization = "manual" not in wrong

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x)

        def training_step(self, batch: Any, index: int) -> Any:
            if wrong == "eval" and self.global_step >= 2:
                self.decoder.eval()
            x = batch["input_ids"]
            logits = self(x)
            if wrong == "detached":
                logits = logits + 0 * self.decoder.head.weight.sum()
                logits = logits.detach() + 0 * self.decoder.head.weight.sum()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            if "manual" in wrong:
                optimizer: Any = self.optimizers()
                if wrong == "manual, right":
                    optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None
            return loss

        def configure_optimizers(self) -> Any:
            held = self.decoder.blocks if wrong == "part" else self.decoder
            return torch.optim.AdamW(held.parameters(), lr=1e-2)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if wrong != "kept":
                optimizer.zero_grad()

    return Language()


@case("Lightning: manual optimization without zero_grad()", "loop", words="zero_grad", at=2)
def lightning_manual(wrong: bool) -> Monitor:
    return _lightning(_module(wrong="manual" if wrong else "manual, right"))


@case("Lightning: optimizer_zero_grad is overridden and does nothing", "loop", words="zero_grad", at=2)
def lightning_kept(wrong: bool) -> Monitor:
    return _lightning(_module(wrong="kept" if wrong else ""))


@case("Lightning: configure_optimizers holds the blocks only", "loop", words="no optimizer steps", at=1)
def lightning_part(wrong: bool) -> Monitor:
    return _lightning(_module(wrong="part" if wrong else ""))


@case("Lightning: a part is put into eval mode", "loop", words="eval mode", at=3)
def lightning_eval(wrong: bool) -> Monitor:
    return _lightning(_module(wrong="eval" if wrong else "", drop=0.1))


@case("Lightning: logits are detached and every gradient is zero", "loop", "gradient", words="gradient|zero", at=1)
def lightning_detached(wrong: bool) -> Monitor:
    return _lightning(_module(wrong="detached" if wrong else ""))
