"""Read the layout of a model off its parameters, whatever stack cut them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from conserved.layout.deepspeed import is_linked
from conserved.layout.dtensor import dtensor_layout, mesh_ranks
from conserved.layout.flat_shards import FlatShard, named_parameters_of
from conserved.layout.given import GivenLayout, given_layout
from conserved.layout.groups import whole_world
from conserved.layout.megatron import carries_attributes, megatron_layout, stage_ranks
from conserved.layout.table import ModelLayout, ParameterLayout


def layout_of(
    model: nn.Module, given: GivenLayout | None = None, holdings: Mapping[str, str] | None = None
) -> ModelLayout:
    """Return where the pieces of every parameter of a model are.

    What is written by hand counts first, then the placements of DTensors, then the attributes of Megatron Core. A plain
    tensor of a model without any of these is replicated over all processes.

    Args:
        model: the model, inside its wrappers or with them.
        given: a layout by hand, by patterns of names; see `given_layout`.
        holdings: how processes hold parameters, as their values say: "replica", "piece" or "constant".

    Returns:
        The table; empty outside a distributed run.

    Raises:
        ValueError: `given` names no parameter of the model.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return ModelLayout()
    parameters = named_parameters_of(model)
    table: dict[str, ParameterLayout] = {}
    marked = carries_attributes(parameters)
    if marked:
        table |= megatron_layout(model, parameters)
    world = whole_world()
    plain = ParameterLayout() if world is None else ParameterLayout(replicated=(world,))
    placed = {name: layout for name, p in parameters.items() if (layout := dtensor_layout(p)) is not None}
    placed |= {name: p.placement() for name, p in parameters.items() if isinstance(p, FlatShard)}
    table |= placed
    if holdings and world is not None:
        roles = {"replica": plain, "piece": ParameterLayout(own=(world,)), "constant": ParameterLayout()}
        table |= {name: roles[word] for name, word in holdings.items() if name not in placed}
    by_hand = given_layout([*parameters], given) if given else {}
    table |= by_hand
    return ModelLayout(
        {name: table.get(name, plain) for name in parameters},
        gathered=frozenset(placed).difference(by_hand),
        joint=marked
        or bool(placed)
        or bool(by_hand)
        or "piece" in (holdings or {}).values()
        or is_linked(parameters.values()),
        meshes=_joint_processes(parameters, marked=marked, described=bool(by_hand) or bool(holdings)),
    )


def _joint_processes(parameters: Mapping[str, Tensor], *, marked: bool, described: bool) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that audit together: those of a stage, or of the meshes; empty for all of them."""
    if described:
        return ()
    if marked:
        stage = stage_ranks()
        return (stage,) if stage else ()
    return mesh_ranks(parameters.values())


def replica_groups(model: nn.Module, given: GivenLayout | None = None) -> dict[tuple[int, ...], list[str]]:
    """Return the parameters that processes should hold alike, by the ranks of their group.

    Args:
        model: the model.
        given: a layout by hand.

    Returns:
        By global ranks, names in the order of the model.
    """
    return {group.ranks: names for group, names in layout_of(model, given).replica_groups().items()}
