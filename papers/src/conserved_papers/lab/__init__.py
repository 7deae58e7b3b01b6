"""Experiments on small, real data that is at hand everywhere."""

CODES = (
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "relu-attention",
    "schedules",
    "ledger",
    "optimizers",
    "counts",
)
"""The figures that can be reproduced; those of full size are called figure2-full and so on."""
