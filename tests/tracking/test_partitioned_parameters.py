"""Parameters as DeepSpeed's ZeRO-3 keeps them: empty, with a range of their entries on each process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conserved import audit, recognize
from conserved.layout import gradient_of, named_parameters_of


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def partitioned(whole: nn.Module, *, groups: int = 1) -> nn.Module:
    """Return a network whose parameters are in the state that ZeRO-3 leaves them in before the optimizer steps.

    With several groups, gradients are in the partitions that the backward pass fills, and not scaled.
    """
    model = network()
    flat = torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None])
    partitions: dict[int, Tensor] = {}
    positions: dict[int, tuple[int, int, int]] = {}
    optimizer: Any = SimpleNamespace(
        grad_position=positions,
        get_param_id=lambda p: p.ds_id,
        fp32_partitioned_groups_flat=[SimpleNamespace(grad=flat if groups == 1 else None)] * groups,
        offload_optimizer=False,
        _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition=partitions,
    )
    start = 0
    for number, (source, parameter) in enumerate(zip(whole.parameters(), model.parameters(), strict=True)):
        entries = source.numel()
        # A range is padded to a multiple of the number of processes.
        held: Any = torch.cat([source.detach().flatten(), torch.full((2,), torch.nan)])
        held.ds_numel = entries + 2
        assert source.grad is not None
        partitions[number], positions[number] = 2 * source.grad.flatten(), (0, start, entries)
        start += entries
        more = {"ds_id": number, "ds_numel": entries, "ds_shape": source.shape, "ds_tensor": held}
        vars(parameter).update(more, ds_process_group=dist.group.WORLD, _z3_optimizer=optimizer)
        parameter.data = torch.empty(0)
    return model


def trained() -> nn.Sequential:
    whole = network()
    whole(torch.randn(5, 6)).square().sum().backward()
    return whole


@pytest.mark.parametrize(("groups", "factor"), [(1, 1), (2, 2)])
def test_names_shapes_values_and_gradients_are_those_of_whole_parameters(groups: int, factor: int) -> None:
    whole = trained()
    found = named_parameters_of(partitioned(whole, groups=groups))
    assert [*found] == [name for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        assert found[name].shape == parameter.shape
        assert torch.equal(found[name].full_tensor(), parameter)
        gradient: Any = gradient_of(found[name])
        assert parameter.grad is not None
        assert torch.equal(gradient.full_tensor(), factor * parameter.grad)


@pytest.mark.parametrize("wrong", [False, True])
def test_an_audit_reads_them(wrong: bool) -> None:
    whole = trained()
    laws = recognize(network(), torch.randn(5, 6))
    if wrong:
        assert isinstance(whole[2].weight, Tensor)
        assert whole[2].weight.grad is not None
        whole[2].weight.grad[:, 1] *= 1.5
    result = audit(partitioned(whole), laws)
    assert result.tested == len(laws)
    assert bool(result.failures) == wrong
