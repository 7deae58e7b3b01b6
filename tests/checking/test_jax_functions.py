"""Functions of JAX are checked by the same tests, through `jax.vjp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import conserved

KEYS = jax.random.split(jax.random.PRNGKey(0), 3)


def _normalise(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def _with_backward(projects: bool) -> Callable[..., Any]:
    """An RMS norm with a backward of its own, which may leave out the projection."""

    @jax.custom_vjp
    def norm(x: Any, gain: Any) -> Any:
        return _normalise(x, gain)

    def backward(saved: Any, dy: Any) -> Any:
        x, gain = saved
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        unit, d_unit = x * scale, dy * gain
        along = unit * jnp.mean(d_unit * unit, -1, keepdims=True) if projects else 0
        return scale * (d_unit - along), jnp.sum(dy * unit, tuple(range(x.ndim - 1)))

    norm.defvjp(lambda x, gain: (norm(x, gain), (x, gain)), backward)
    return norm


def _inputs(kind: Any) -> tuple[Any, Any]:
    return jax.random.normal(KEYS[0], (2, 4)).astype(kind), (1 + jax.random.normal(KEYS[1], (4,)) / 4).astype(kind)


@pytest.mark.parametrize("kind", [jnp.float32, jnp.bfloat16])
def test_a_wrong_custom_vjp_is_refuted_without_a_reference(kind: Any) -> None:
    # Compiled: JAX traces a function anew in every pass otherwise.
    wrong = conserved.check(jax.jit(_with_backward(projects=False)), *_inputs(kind), seconds=5.0)
    assert not wrong.ok
    assert {name for test in wrong.failures for name in test.gradients} >= {"x"}


def test_a_right_custom_vjp_is_verified() -> None:
    assert conserved.check(jax.jit(_with_backward(projects=True)), *_inputs(jnp.float32), seconds=5.0).ok


def test_compiled_functions_keywords_integers_and_several_outputs() -> None:
    def gather(table: Any, index: Any, *, power: float) -> Any:
        rows = table[index] * power
        return {"rows": rows, "index": index, "total": rows.sum()}

    table = jax.random.normal(KEYS[2], (5, 4))
    result = conserved.check(jax.jit(gather), table, jnp.array([0, 3, 3]), power=2.0, seconds=5.0)
    assert result.ok
    assert {name for test in result.tests for name in test.gradients} == {"table"}


def test_a_function_that_is_not_differentiable_says_so() -> None:
    with pytest.raises(conserved.UncheckableError):
        conserved.check(lambda index: index + 1, jnp.arange(3))


def test_a_function_of_jax_is_checked_in_double_precision() -> None:
    """`jax.enable_x64` is no plain function in newer releases; where it fails, a check silently stays in float32."""
    x = jax.random.normal(jax.random.key(0), (4, 6))
    result = conserved.check(jnp.cbrt, x)
    assert result.reference == "float64"
    assert result.verdict.holds, str(result)
