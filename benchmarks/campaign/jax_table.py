"""Functions of JAX and of packages built on it that the campaign checks."""

from __future__ import annotations

from campaign.described import Description

_X, _XY = "x: normal(4, 6)", "x: normal(4, 6); y: normal(4, 6)"
_SQUARE = "x: normal(5, 5)"
_POSITIVE = "x: uniform(4, 6)"

_NN = (
    "relu", "relu6", "sigmoid", "softplus", "silu", "log_sigmoid", "leaky_relu", "hard_sigmoid", "hard_tanh",
    "hard_swish", "elu", "celu", "selu", "gelu", "glu", "soft_sign", "squareplus", "mish", "softmax", "log_softmax",
    "logsumexp", "standardize", "sparse_plus", "tanh",
)  # fmt: skip

_NUMPY_ONE = (
    "jnp.sin(x)", "jnp.arctan(x)", "jnp.sinc(x)", "jnp.exp2(x)", "jnp.expm1(x)", "jnp.cbrt(x)", "jnp.cumsum(x, 0)",
    "jnp.cumprod(x, 1)", "jnp.sort(x, 1)", "jnp.median(x, 1)", "jnp.quantile(x, 0.3, axis=0)", "jnp.prod(x, 1)",
    "jnp.var(x, 0)", "jnp.std(x, 1, ddof=1)", "jnp.max(x, 1)", "jnp.roll(x, 2, 1)", "jnp.flip(x, 0)",
    "jnp.pad(x, ((1, 2), (0, 1)), mode='reflect')", "jnp.pad(x, ((1, 2), (0, 1)), mode='wrap')",
    "jnp.tile(x, (2, 3))", "jnp.repeat(x, 2, 0)", "jnp.tril(x)", "jnp.diff(x, axis=1)", "jnp.gradient(x, axis=1)",
    "jnp.trapezoid(x, axis=1)", "jnp.cov(x)", "jnp.corrcoef(x)", "jnp.unwrap(x)", "jnp.nan_to_num(x)",
    "jnp.linalg.norm(x, axis=1)", "jnp.linalg.norm(x, ord='nuc')", "jnp.linalg.pinv(x)",
    "jnp.linalg.svd(x, compute_uv=False)", "jnp.partition(x, 2, axis=1)", "jnp.clip(x, -0.5, 0.7)",
    "jnp.fft.irfft(jnp.fft.rfft(x) * jnp.arange(4))", "jnp.convolve(x[0], x[1])",
    "jnp.interp(x[0], jnp.arange(6.0), x[1])",
    "jnp.take_along_axis(x, jnp.argsort(x, 1), 1)", "x.at[jnp.array([0, 2, 0])].add(2 * x[:3])",
    "x.at[1].set(x[0] ** 2)", "x.at[:, 1].mul(3 * x[:, 2])", "x.at[0].max(x[1])",
)  # fmt: skip

_NUMPY_TWO = (
    "jnp.logaddexp(x, y)", "jnp.hypot(x, y)", "jnp.arctan2(x, y)", "jnp.cross(x[:, :3], y[:, :3])",
    "jnp.where(x > y, x, y ** 2)",
    "jnp.kron(x[:2, :2], y[:2, :3])", "jnp.einsum('ij,kj->ik', x, y)", "jnp.maximum(x, y)",
    "jnp.float_power(jnp.abs(x) + 0.1, y)",
)  # fmt: skip

_SQUARE_CALLS = (
    "jnp.linalg.det(x)", "jnp.linalg.slogdet(x)[1]", "jnp.linalg.inv(x + 3 * jnp.eye(5))",
    "jnp.linalg.cholesky(x @ x.T + jnp.eye(5))", "jnp.linalg.qr(x)[1]", "jnp.linalg.eigvalsh(x + x.T)",
    "jnp.linalg.matrix_power(x, 3)", "jax.scipy.linalg.expm(0.3 * x)",
    "jax.scipy.linalg.solve_triangular(x + 3 * jnp.eye(5), x)",
    "jnp.linalg.solve(x + 3 * jnp.eye(5), x)", "jax.scipy.linalg.lu(x)[2]",
)  # fmt: skip

_LAX = (
    "jax.lax.associative_scan(jnp.multiply, x)",
    "jax.lax.cumlogsumexp(x, 1)", "jax.lax.cummax(x, 1)",
    "jax.lax.rsqrt(x ** 2 + 1)",
    "jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (1, 1), 'SAME')",
    "jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), 'VALID')",
    "jax.lax.top_k(x, 2)[0]", "jax.lax.dynamic_update_slice(x, 2 * x[:2, :2], (1, 3))",
    "jax.lax.dynamic_slice(x, (1, 2), (2, 3))",
    "jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1]",
    "jax.lax.fori_loop(0, 3, lambda i, v: jnp.sin(v) + x, x)", "jax.lax.cond(True, jnp.sin, jnp.cos, x)",
    "jax.checkpoint(lambda v: jnp.sin(jnp.tanh(v)))(x)", "jax.vmap(lambda r: r / jnp.sum(r ** 2))(x)",
    "jax.lax.conv_general_dilated(x[None, None], x[None, None, :2, :3], (1, 2), 'SAME', rhs_dilation=(2, 1))",
    "jax.lax.map(lambda r: jax.nn.softmax(r) * r, x)", "jax.jvp(lambda v: jnp.sin(v) * v, (x,), (jnp.cos(x),))[1]",
    "jax.hessian(lambda r: jnp.sum(jnp.sin(r) * r[::-1]))(x[0])",
)  # fmt: skip

_SCIPY = (
    "gammaln", "digamma", "erf", "erfc", "erfinv", "logit", "expit", "entr", "i0e", "i1e", "ndtr", "log_ndtr",
)  # fmt: skip

_LOG1PEXP = """
@jax.custom_vjp
def log1pexp(x):
    return jnp.log1p(jnp.exp(x))

log1pexp.defvjp(lambda x: (log1pexp(x), x), lambda x, g: (g * (1 - 1 / (1 + jnp.exp(x))),))
"""

_RMS_NORM = """
@jax.custom_vjp
def norm(x, w):
    return w * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

def forward(x, w):
    return norm(x, w), (x, w)

def backward(saved, g):
    x, w = saved
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    h = g * w
    return r * h - x * r ** 3 * jnp.mean(h * x, -1, keepdims=True), jnp.sum(g * x * r, 0)

norm.defvjp(forward, backward)
"""

_FIXED_POINT = """
def step(a, v):
    return jnp.tanh(0.4 * a * v + a)

@jax.custom_vjp
def fixed(a):
    return jax.lax.fori_loop(0, 60, lambda i, v: step(a, v), jnp.zeros_like(a))

def forward(a):
    y = fixed(a)
    return y, (a, y)

def backward(saved, g):
    a, y = saved
    _, pull_a = jax.vjp(lambda a: step(a, y), a)
    _, pull_y = jax.vjp(lambda y: step(a, y), y)
    return pull_a(jax.lax.fori_loop(0, 60, lambda i, v: g + pull_y(v)[0], g))

fixed.defvjp(forward, backward)
"""

_CUSTOM = (
    Description("jax.custom_vjp", "log1pexp(x)", _X, _LOG1PEXP),
    Description("jax.custom_vjp", "norm(x, w)", "x: normal(4, 6); w: normal(6)", _RMS_NORM),
    Description("jax.custom_vjp", "fixed(a)", "a: normal(6)", _FIXED_POINT),
)

_ATTENTION = "q: normal(2, 8, 2, 4); k: normal(2, 8, 2, 4); v: normal(2, 8, 2, 4)"

_MHA = """
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
sizes = BlockSizes(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)
"""

_MHA_INPUTS = "q: normal(1, 32, 2, 16); k: normal(1, 32, 2, 16); v: normal(1, 32, 2, 16)"
_NORM_INPUTS = "x: normal(4, 16, 64); w: normal(64); b: normal(64)"
_INTERPRETED = "jax (Pallas, interpreted)"

_PALLAS = (
    Description(_INTERPRETED, "mha(q, k, v, None, block_sizes=sizes, interpret=True)", _MHA_INPUTS, _MHA),
    Description(_INTERPRETED, "mha(q, k, v, None, causal=True, block_sizes=sizes, interpret=True)", _MHA_INPUTS, _MHA),
    Description(
        _INTERPRETED,
        "layer_norm(x, w, b, interpret=True)",
        _NORM_INPUTS,
        "from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm",
    ),
    Description(
        _INTERPRETED,
        "rms_norm(x, w, b, interpret=True)",
        _NORM_INPUTS,
        "from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm",
    ),
)

_OPTAX = (
    ("squared_error(x, y)", _XY), ("huber_loss(x, y)", _XY), ("log_cosh(x, y)", _XY), ("l2_loss(x, y)", _XY),
    ("cosine_similarity(x, y)", _XY), ("cosine_distance(x, y)", _XY),
    ("hinge_loss(x, jnp.sign(jnp.arange(6) - 2.5))", _X),
    ("sigmoid_binary_cross_entropy(x, jnp.arange(6) % 2)", _X), ("softmax_cross_entropy(x, jax.nn.softmax(y))", _XY),
    ("softmax_cross_entropy_with_integer_labels(x, jnp.array([1, 0, 5, 2]))", _X),
    ("poly_loss_cross_entropy(x, jax.nn.one_hot(jnp.array([1, 0, 5, 2]), 6))", _X),
    ("sigmoid_focal_loss(x, (jnp.arange(6) % 2).astype(x.dtype))", _X), ("smooth_labels(jax.nn.softmax(x), 0.1)", _X),
    ("kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(y))", _XY),
    ("convex_kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(y))", _XY),
    ("kl_divergence_with_log_targets(jax.nn.log_softmax(x), jax.nn.log_softmax(y))", _XY),
    ("ctc_loss(x[None].repeat(3, 1), jnp.zeros((1, 12)), jnp.array([[1, 2, 2]]), jnp.zeros((1, 3)))", _X),
    ("multiclass_hinge_loss(x, jnp.array([1, 0, 5, 2]))", _X),
    ("multiclass_perceptron_loss(x, jnp.array([1, 0, 5, 2]))", _X),
    ("multiclass_sparsemax_loss(x, jnp.array([1, 0, 5, 2]))", _X), ("sparsemax_loss(x, jnp.arange(6) % 2)", _X),
    ("ntxent(x, jnp.array([0, 0, 1, 1]))", _X), ("triplet_margin_loss(x, y, x * y)", _XY),
    ("ranking_softmax_loss(x, jax.nn.softmax(y))", _XY),
    ("make_fenchel_young_loss(jax.nn.logsumexp)(x[0], jax.nn.softmax(y[0]))", _XY),
    ("perceptron_loss(x, jnp.sign(jnp.arange(6) - 2.5))", _X),
)  # fmt: skip

_PROJECTIONS = (
    "projection_simplex(x[0])", "projection_l1_ball(x[0], 1.0)", "projection_l2_ball(x[0], 1.0)",
    "projection_l2_sphere(x[0])",
    "projection_l1_sphere(x[0])", "projection_linf_ball(x[0], 0.7)", "projection_box(x, -0.5, 0.5)",
    "projection_hypercube(x)",
)  # fmt: skip

_EQUINOX = (
    ("eqx.nn.LayerNorm(6)(x[0])", _X), ("eqx.nn.RMSNorm(6)(x[0])", _X), ("eqx.nn.GroupNorm(2, 4)(x)", _X),
    ("eqx.nn.Conv1d(4, 3, 3, key=key)(x)", _X), ("eqx.nn.ConvTranspose1d(4, 3, 3, stride=2, key=key)(x)", _X),
    ("eqx.nn.MultiheadAttention(2, 6, key=key)(x, x, x)", _X), ("eqx.nn.GRUCell(6, 6, key=key)(x[0], x[1])", _X),
    ("eqx.nn.LSTMCell(6, 6, key=key)(x[0], (x[1], x[2]))", _X), ("eqx.nn.RotaryPositionalEmbedding(6)(x)", _X),
    ("eqx.nn.AvgPool1d(2, 2)(x)", _X), ("eqx.nn.MaxPool1d(3, 1)(x)", _X), ("eqx.nn.AdaptiveAvgPool1d(3)(x)", _X),
    ("eqx.nn.PReLU(0.3)(x)", _X), ("eqx.nn.MLP(6, 3, 5, 2, key=key)(x[0])", _X),
)  # fmt: skip

_FLAX = (
    ("nnx.dot_product_attention(q, k, v)", _ATTENTION), ("nnx.LayerNorm(6, rngs=nnx.Rngs(0))(x)", _X),
    ("nnx.RMSNorm(6, rngs=nnx.Rngs(0))(x)", _X), ("nnx.GroupNorm(6, num_groups=2, rngs=nnx.Rngs(0))(x)", _X),
    ("nnx.BatchNorm(6, use_running_average=False, rngs=nnx.Rngs(0))(x)", _X),
    ("nnx.InstanceNorm(6, rngs=nnx.Rngs(0))(x[None])", _X),
    ("nnx.Conv(6, 3, (3,), rngs=nnx.Rngs(0))(x[None])", _X),
    ("nnx.ConvTranspose(6, 3, (3,), rngs=nnx.Rngs(0))(x[None])", _X),
    ("nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))(x[None])", _X),
    ("nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0))(x)", _X),
    ("nnx.avg_pool(x[None], (2,))", _X), ("nnx.max_pool(x[None], (2,), (2,))", _X),
)  # fmt: skip


def descriptions() -> list[Description]:
    """Return every function in the table, in a fixed order."""
    entries = [Description("jax.nn", f"jax.nn.{name}(x)", _X) for name in _NN]
    entries += [
        Description("jax.nn", "jax.nn.dot_product_attention(q, k, v)", _ATTENTION),
        Description("jax.nn", "jax.nn.dot_product_attention(q, k, v, is_causal=True)", _ATTENTION),
        Description(
            "jax.nn", "jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(2, 0))", _ATTENTION
        ),
    ]
    entries += [Description("jax.numpy", call, _X) for call in _NUMPY_ONE]
    entries += [Description("jax.numpy", call, _XY) for call in _NUMPY_TWO]
    entries += [Description("jax.numpy", call, _SQUARE) for call in _SQUARE_CALLS]
    entries += [Description("jax.lax", call, _X) for call in _LAX]
    entries += [Description("jax.scipy.special", f"jax.scipy.special.{name}(x)", _POSITIVE) for name in _SCIPY]
    entries += [Description("jax.scipy.special", "jax.scipy.special.betaln(x, y)", "x: uniform(4); y: uniform(4)")]
    entries += [Description("jax.scipy.special", "jax.scipy.special.gammainc(x, y)", "x: uniform(4); y: uniform(4)")]
    entries += _CUSTOM
    entries += _PALLAS
    entries += [Description("optax", f"optax.losses.{call}", inputs, "import optax\n") for call, inputs in _OPTAX]
    entries += [Description("optax", f"optax.projections.{call}", _X, "import optax\n") for call in _PROJECTIONS]
    key = "import equinox as eqx\nkey = jax.random.key(1)\n"
    entries += [Description("equinox", call, inputs, key) for call, inputs in _EQUINOX]
    entries += [Description("flax", call, inputs, "from flax import nnx\n") for call, inputs in _FLAX]
    return entries
