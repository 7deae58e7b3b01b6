"""A default monitor names silent errors within a step, and says nothing of their correct twins."""

from __future__ import annotations

import importlib
import pkgutil
import random
import re

import pytest
import torch

import error_programs
from error_programs import (
    flows,
    forum,
    gradients,
    kernels,
    loops,
    losses,
    patches,
    reports,
    runs,
    settings,
    states,
    structures,
    surroundings,
    tasks,
    trainers,
    updates,
)
from error_programs.case import CASES, Case, Program
from error_programs.reasons import REASONS
from told import told

SAMPLE = random.Random(0).sample([one for one in CASES if one.program.__module__ == loops.__name__], 2)
SAMPLE += random.Random(0).sample(
    [one for one in CASES if one.program.__module__ == updates.__name__ and one.how == "default"], 3
)
"""The whole table is `benchmarks/silent_errors.py`."""

PROGRAMS = (
    flows.cleared_in_accumulation, flows.closure_without_zero_grad, flows.detached_loss, flows.detached_features,
    flows.encoder_without_gradients, flows.unregistered_layers, flows.softmax_twice, flows.sigmoid_twice,
    flows.gradients_of_the_other_pass, flows.nothing_to_learn, flows.dead_adapter, flows.equal_units,
    settings.frozen_module_attribute, settings.misspelt_requires_grad, settings.rate_as_attribute,
    settings.rate_in_defaults, settings.training_attribute, settings.dropout_in_eval, settings.schedule_never_stepped,
    settings.schedule_twice, settings.underflow, settings.master_not_copied, settings.uphill,
    states.schedule_not_restored, states.state_in_another_order, states.prefix_mismatch, states.average_of_itself,
    states.flipped_buffer, states.statistics_reset, states.flipped_moment, states.one_state_lost,
    states.momentum_cleared, updates.swallowed,
    losses.nll_of_logits, losses.nll_of_probabilities, losses.signed_binary_labels,
    losses.labels_shifted_twice, losses.causal_mask_missing, losses.input_changed_in_place,
    gradients.clipped_per_micro_batch, gradients.shared_gradient, gradients.rounding_without_gradient,
    gradients.flat_buffer_off_by_one,
    structures.parameter_made_plain, structures.not_batch_first, structures.spectral_norm_evaluated_first,
    runs.options_changed, reports.average_built_anew, reports.scaler_forgotten,
    reports.validation_gradients, reports.skipped_for_ever, reports.softmax_over_batch,
    reports.labels_transposed, gradients.hook_stays_on,
    trainers.unknown_option, trainers.swapped_betas, trainers.best_by_reference,
    trainers.weight_put_back,
    trainers.frozen_by_resume, trainers.hook_returns_detached, tasks.generator_never_steps,
    kernels.padding_inverted, reports.frozen_by_zeros, patches.moments_rounded, patches.scale_as_buffer,
    tasks.positions_over_batch, tasks.statistics_never_move, tasks.dropout_made_in_forward, tasks.depth_in_eval,
    forum.cleared_after_first, forum.layerwise_rate, forum.second_never_stepped, forum.unscaled_loss,
    forum.value_clipped_scaled, forum.average_of_another, forum.norms_twice, forum.labels_before, forum.sign_lost,
    forum.loop_inside_autocast, forum.sorted_classes, forum.weights_broadcast, forum.assigned_target,
    forum.optimizer_in_loop, forum.empty_state_loaded, forum.trained_copy, forum.nan_rows,
    surroundings.absolute_broadcast, surroundings.left_flat_buffer, surroundings.sharpness_not_cleared,
)  # fmt: skip
"""One program for each question that an identity asks."""

SAMPLE += [one for one in CASES if one.program in PROGRAMS]


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one.name)
def test_an_error_is_named_and_its_twin_is_not_accused(one: Case) -> None:
    torch.manual_seed(0)
    alarms = told(one.program(True))
    named = [a for a in alarms if a.kind in one.kinds and re.search(one.words, a.message, re.S)]
    assert named, [str(alarm) for alarm in alarms]
    assert min(alarm.step for alarm in named) <= one.at + 1
    assert alarms[0] in named, "the cause comes first"
    codes = {alarm.code for alarm in named}
    torch.manual_seed(0)
    right = one.program(False)
    assert [str(alarm) for alarm in right.alarms] == []
    assert codes.isdisjoint(alarm.code for alarm in right.statements)


NOTED = {
    trainers.steps_at_first: "the first step has one pass and those after it have 4",
    trainers.seeded_every_step: "steps begin with the same random numbers",
    trainers.attack_stays: "a pass whose inputs need a gradient",
    tasks.loss_weights_left_out: "parameters outside of the model have a gradient and no optimizer: (5, 5)",
    trainers.average_overwritten: "an average of the model was set to the model itself",
    tasks.critic_stays_frozen: "made no step since step 1, and its tensors are frozen",
    patches.rest_of_epoch: "step 3 has the gradients of 3 passes and those before it have 2",
    patches.swallowed_decay: "weight decay 0.05 of AdamW changes no bfloat16 weight",
    patches.empty_frequencies: "buffers that no checkpoint has are all zeros: frequencies",
    forum.never_scheduled: "CosineAnnealingLR was never stepped in 12 steps",
    surroundings.never_averaged: "AveragedModel was never updated in 6 steps",
    surroundings.rounded_gradients: "rounded to bfloat16 before they are used",
}
"""Programs of which a line says what may be meant or not."""


@pytest.mark.parametrize("program", NOTED, ids=lambda program: program.__name__)
def test_a_line_says_what_may_be_meant(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "conserved")
    for wrong in (True, False):
        caplog.clear()
        torch.manual_seed(0)
        assert not program(wrong).alarms
        assert any(NOTED[program] in record.getMessage() for record in caplog.records) == wrong


def test_optimizers_that_step_in_hooks_of_one_backward_pass_take_no_turns() -> None:
    torch.manual_seed(0)
    assert [str(alarm) for alarm in patches.fused_step_per_micro_batch(False).alarms] == []


def test_reasons_are_given_for_errors_that_exist() -> None:
    for module in pkgutil.iter_modules(error_programs.__path__):
        importlib.import_module(f"error_programs.{module.name}")
    assert {name for names in REASONS.values() for name in names} <= {one.name for one in CASES}
