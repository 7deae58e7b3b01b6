"""Errors of the loop: gradients that are not this step's, optimizers that do not hold the model, modes, scalers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conserved import Monitor
from error_programs.case import TinyLM, backward, batch, case, mlp


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


@case("zero_grad() is not called", "loop", words="zero_grad", at=2, source="TrainCheck: stackoverflow-60335387")
def no_zero_grad(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            if not wrong:
                optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("zero_grad() of another optimizer", "loop", words="zero_grad", at=2)
def zero_grad_elsewhere(wrong: bool) -> Monitor:
    model, teacher = mlp(), mlp()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.05), torch.optim.SGD(teacher.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            (other if wrong else optimizer).zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("zero_grad() of a part of the model", "loop", words="zero_grad", at=2)
def zero_grad_of_a_part(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            (model[5] if wrong else model).zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("zero_grad() between backward() and step()", "loop", words="cleared")
def cleared(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            if not wrong:
                optimizer.zero_grad()
            backward(model)
            if wrong:
                optimizer.zero_grad()
            optimizer.step()
            monitor.step()
    return monitor


@case("zero_grad(set_to_none=False) between backward() and step()", "loop", words="cleared")
def cleared_in_place(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            if not wrong:
                optimizer.zero_grad(set_to_none=False)
            backward(model)
            if wrong:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            monitor.step()
    return monitor


@case("optimizer.step without parentheses", "loop", words="No optimizer made a step")
def step_not_called(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step if wrong else optimizer.step()
            monitor.step()
    return monitor


@case("step() is called twice", "loop", words="twice")
def step_twice(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            if wrong:
                optimizer.step()
            monitor.step()
    return monitor


@case("two optimizers step the same weights", "loop", words="two optimizers")
def two_optimizers(wrong: bool) -> Monitor:
    model = mlp()
    body = torch.optim.AdamW(model.parameters() if wrong else model[:5].parameters(), lr=1e-2)
    head = torch.optim.AdamW(model[5].parameters(), lr=1e-2)
    with Monitor(model, [body, head]) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model)
            body.step()
            head.step()
            monitor.step()
    return monitor


@case("gradients are clipped after the step", "loop", words="after optimizer.step")
def clipped_too_late(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            if not wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            monitor.step()
    return monitor


def _scaled(wrong: str) -> Monitor:
    model = mlp()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            x, y = batch()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if wrong != "clipped":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if wrong == "stepped":
                optimizer.step()
            else:
                scaler.step(optimizer)
            scaler.update()
            monitor.step()
    return monitor


@case("gradients are clipped before unscale_()", "loop", words="clipped while the scaler")
def clipped_while_scaled(wrong: bool) -> Monitor:
    return _scaled("clipped" if wrong else "")


@case("optimizer.step() instead of scaler.step()", "loop", words="scaler's factor")
def scaler_left_out(wrong: bool) -> Monitor:
    model = mlp()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            x, y = batch()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if wrong:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            monitor.step()
    return monitor


@case("a frozen head in the optimizer, trained norms outside", "loop", words="no optimizer steps",
      source="TrainCheck: pytorch-forum-84911")  # fmt: skip
def frozen_transfer(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("1.") if wrong else name.startswith("3."))
    optimizer = torch.optim.Adam(model[3].parameters(), lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the optimizer holds parameters from before sharding replaced them", "loop", words="no optimizer steps",
      source="TrainCheck: accelerate-2665")  # fmt: skip
def replaced_parameters(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    if not wrong:
        optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the wrapper steps a copy of the model", "loop", words="no optimizer steps",
      source="TrainCheck, later: gradients not applied in a wrapper")  # fmt: skip
def optimizer_of_a_copy(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(copy.deepcopy(model) if wrong else model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a new head after the optimizer was made", "loop", words="no optimizer steps")
def new_head(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    model[5] = nn.Linear(12, 4)
    if not wrong:
        optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a layer that is unfrozen and in no group", "loop", words="no optimizer steps", at=3)
def unfrozen_and_forgotten(wrong: bool) -> Monitor:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 2:
                model[0].requires_grad_(True)
                if not wrong:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a head untied when the model was moved", "loop", words="one tensor|two parameters", at=3)
def untied_in_mid_run(wrong: bool) -> Monitor:
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for number in range(5):
            if number == 2 and wrong:
                model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
            model.zero_grad()
            backward(model, "tokens")
            optimizer.step()
            monitor.step()
    return monitor


@case("a head that was tied by its values only", "loop", words="two parameters")
def untied_from_the_start(wrong: bool) -> Monitor:
    model = TinyLM(tied=not wrong)
    if wrong:
        model.head.weight.data.copy_(model.embedding.weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model, "tokens")
            optimizer.step()
            monitor.step()
    return monitor


@case("two parameters in one memory", "loop", "update", words="one memory")
def tied_by_memory(wrong: bool) -> Monitor:
    model = TinyLM(tied=not wrong)
    if wrong:
        model.head.weight.data = model.embedding.weight.data
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            model.zero_grad()
            backward(model, "tokens")
            optimizer.step()
            monitor.step()
    return monitor


@case("eval() after an evaluation and no train()", "loop", words="eval mode", at=4)
def eval_left_on(wrong: bool) -> Monitor:
    model = mlp(drop=0.2)
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                model.eval()
                with torch.no_grad():
                    model(batch()[0])
                if not wrong:
                    model.train()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("a model that was loaded in eval mode is trained", "loop", words="eval mode")
def never_train(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4)).eval()
    if not wrong:
        model.train()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("an evaluation in train mode", "loop", words="train mode", at=4)
def evaluated_in_train_mode(wrong: bool) -> Monitor:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                model.train(wrong)
                with torch.no_grad():
                    for _ in range(3):
                        model(batch()[0])
                model.train()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the state of the optimizer is cleared in mid-run", "loop", words="state of AdamW was lost", at=4)
def state_cleared(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3 and wrong:
                optimizer.state.clear()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the scheduler is that of another optimizer", "loop", words="another AdamW", at=2)
def foreign_scheduler(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if wrong:
        optimizer = adamw(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            scheduler.step()
            monitor.step()
    return monitor


@case("the schedule ends before the run", "loop", words="rate of SGD is zero", at=4)
def schedule_too_short(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 3 if wrong else 8
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / steps))
    with Monitor(model, optimizer) as monitor:
        for _ in range(7):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            scheduler.step()
            monitor.step()
    return monitor


@case("an average that does not move", "loop", words="averaged model", at=2)
def average_stands_still(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1.0 if wrong else 0.9))
    with Monitor(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            average.update_parameters(model)
            monitor.step()
    return monitor


def _resumed(restore: Any) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    with Monitor(model, optimizer) as first:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            first.step()
        saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
        saved["monitor"] = copy.deepcopy(first.state_dict())
    model = mlp()
    optimizer = adamw(model)
    restore(model, optimizer, saved)
    with Monitor(model, optimizer) as monitor:
        monitor.load_state_dict(saved["monitor"])
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
    return monitor


@case("the optimizer's state is not restored", "loop", words="state of AdamW", at=4)
def optimizer_not_restored(wrong: bool) -> Monitor:
    def restore(model: nn.Module, optimizer: Any, saved: Any) -> None:
        model.load_state_dict(saved["model"])
        if not wrong:
            optimizer.load_state_dict(saved["optimizer"])

    return _resumed(restore)


@case("a layer is missing in the checkpoint", "loop", words="3.weight", at=4, source="TrainCheck: transformers-29903")
def layer_not_restored(wrong: bool) -> Monitor:
    def restore(model: nn.Module, optimizer: Any, saved: Any) -> None:
        state = dict(saved["model"])
        if wrong:
            del state["3.weight"]
        model.load_state_dict(state, strict=False)
        optimizer.load_state_dict(saved["optimizer"])

    return _resumed(restore)


@case("autocast in a region that is not left", "precision", words="autocast", at=4)
def autocast_left_on(wrong: bool) -> Monitor:
    model = mlp()
    optimizer = adamw(model)
    region: Any = torch.autocast("cpu", torch.bfloat16) if wrong else nullcontext()
    with Monitor(model, optimizer) as monitor:
        for number in range(6):
            if number == 3:
                region.__enter__()
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            monitor.step()
        region.__exit__(None, None, None)
    return monitor
