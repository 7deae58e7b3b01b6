"""Experiments on small, real data that is at hand everywhere."""
