"""Weights and gradients in files are judged as those of a running model are."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from typer.testing import CliRunner

from conserved import Monitor, recognize
from conserved.auditing import audit_dump
from conserved.cli.app import app
from conserved.laws import LawSet
from conserved.laws.renaming import laws_for


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


class Wrapped(nn.Module):
    """Calls the module inside, as wrappers of data parallelism do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result


def trained(tmp_path: Path, *, factor: float = 1.0) -> nn.Module:
    """A model after a backward pass, its laws in a file, its weights and gradients in a folder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Gated(), nn.Linear(8, 4))
    x = torch.randn(32, 8)
    recognize(model, x).save(tmp_path / "laws.json")
    F.cross_entropy(model(x), torch.randint(0, 4, (32,))).backward()
    gradient: Any = model.get_parameter("1.up.weight").grad
    gradient.mul_(factor)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file(gradients, tmp_path / "gradients.safetensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        save_checkpoint({"weights": weights, "gradients": gradients}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return model


@pytest.mark.parametrize("folder", [".", "saved"])
def test_right_gradients_in_files_are_verified(tmp_path: Path, folder: str) -> None:
    trained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = audit_dump(tmp_path / folder, tmp_path / "laws.json")
    assert result.ok
    assert result.tested == len(LawSet.load(tmp_path / "laws.json"))


def test_a_wrong_gradient_in_a_file_is_refuted_by_the_command(tmp_path: Path) -> None:
    trained(tmp_path, factor=1.1)
    arguments = ["audit", "--gradients", str(tmp_path), "--laws", str(tmp_path / "laws.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "1.gated_neurons" in result.output


def test_a_checkpoint_that_names_other_classes_is_not_read(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Path.home))
    with pytest.raises(ValueError, match="Expected a table of contents"):
        audit_dump(tmp_path / "saved", tmp_path / "laws.json")


def test_a_folder_without_a_dump_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(ValueError, match=r"weights\*\.safetensors"):
        audit_dump(tmp_path / "empty", tmp_path / "laws.json")


def test_a_monitor_takes_laws_of_a_twin_from_a_file_under_the_names_of_a_wrapped_model(tmp_path: Path) -> None:
    model: Any = trained(tmp_path)
    model[1] = Wrapped(model[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, optimizer, laws=tmp_path / "laws.json", audit=1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        monitor.step()
    names = {name for symmetry in monitor.laws for name in symmetry.parameters}
    assert "1.module.up.weight" in names
    assert monitor.audits[-1].ok
    assert not monitor.alarms
    monitor.close()


def test_laws_of_other_stages_are_left_out_with_the_reason(tmp_path: Path) -> None:
    model: Any = trained(tmp_path)
    laws = LawSet.load(tmp_path / "laws.json")
    stage = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("0.")}
    result = laws_for(laws, stage)
    assert "1.gated_neurons" in result.names
    lost = {item.name: item.reason for item in result.dropped}
    assert all("0." in lost[name] or "stage" in lost[name] for name in set(laws.names) - set(result.names))
    assert set(result.names) < set(laws.names)


def test_parts_of_a_pipeline_are_watched_under_their_own_names() -> None:
    torch.manual_seed(0)
    parts = nn.ModuleList([Gated(), Gated()])
    optimizer = torch.optim.SGD(parts.parameters(), 0.1)
    monitor = Monitor(parts, optimizer, audit=1)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = parts[0](torch.randn(8, 8))
        parts[1](hidden).square().mean().backward()
        optimizer.step()
        monitor.step()
    assert {"0.gated_neurons", "1.gated_neurons"} <= set(monitor.laws.names)
    assert [entry.status for entry in monitor.audits] == ["verified", "verified"]
    monitor.close()
