"""The version of this package, in the one place that packaging reads it from."""

__version__ = "0.2.0"
