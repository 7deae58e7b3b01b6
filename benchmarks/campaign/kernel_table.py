# ruff: noqa: E501  (an expression stays on one line, as it is shown in tables)
"""Triton kernels of packages that run as plain Python: what needs a GPU and no compiler but Triton's.

Sequences of 70 end in a part of every chunk; widths of 32 keep a check and its script short.
"""

from __future__ import annotations

from campaign.described import Description

Entries = tuple[tuple[str, str], ...]
"""Expressions with the inputs they are functions of."""

_QKV = "q: normal(1, 70, 2, 32); k: normal(1, 70, 2, 32); v: normal(1, 70, 2, 32)"
_GATED = _QKV + "; g: normal(1, 70, 2)"
_BETA = _QKV + "; b: uniform(1, 70, 2)"
_BOTH = _GATED + "; b: uniform(1, 70, 2)"
_BY_KEY = _QKV + "; g: normal(1, 70, 2, 32)"
_KDA = _BY_KEY + "; b: uniform(1, 70, 2)"
_STATE = "; s: normal(1, 2, 32, 32)"
_X = "x: normal(3, 37, 96)"
_XY = _X + "; y: normal(3, 37, 96)"
_NORM = _X + "; w: normal(96); b: normal(96)"
_LOGITS = "x: normal(37, 190)"
_HEAD = "x: normal(37, 48); w: normal(190, 48)"

_FIRST_CONFIGURATION = """\
from triton.runtime.autotuner import Autotuner
_init = Autotuner.__init__
Autotuner.__init__ = lambda self, fn, names, configs, *rest, **options: _init(self, fn, names, configs[:1], *rest, **options)
"""
"""Of every kernel its first configuration alone: trying all of them takes a minute for each kernel."""

_FLA = """\
import importlib
import fla.ops
from torch.nn.functional import logsigmoid, normalize, softplus
labels = torch.arange(37) % 190

def op(name):
    folder, _, function = name.partition(".")
    return getattr(importlib.import_module("fla.ops." + folder), function)
"""

_LIGER = """\
import importlib
labels = torch.arange(37) % 190

def op(name):
    return getattr(importlib.import_module("liger_kernel.ops"), name).apply
"""

KERNELS: tuple[tuple[str, str, Entries], ...] = (
    (
        "fla-core",
        _FLA,
        (
            (
                "op('kda.chunk_kda')(q, normalize(k, dim=-1), v, logsigmoid(g), b, initial_state=s, output_final_state=True)",
                _KDA + _STATE,
            ),
            (
                "op('kda.fused_recurrent_kda')(q, normalize(k, dim=-1), v, logsigmoid(g), b, output_final_state=True)",
                _KDA,
            ),
            (
                "op('gated_delta_rule.chunk_gated_delta_rule')(q, normalize(k, dim=-1), v, logsigmoid(g), b, initial_state=s, output_final_state=True)",
                _BOTH + _STATE,
            ),
            (
                "op('gated_delta_rule.chunk_gated_delta_rule')(q, k, v, logsigmoid(g), b, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)[0]",
                _BOTH,
            ),
            (
                "op('delta_rule.chunk_delta_rule')(q, normalize(k, dim=-1), v, b, initial_state=s, output_final_state=True)",
                _BETA + _STATE,
            ),
            (
                "op('delta_rule.fused_recurrent_delta_rule')(q, normalize(k, dim=-1), v, b, initial_state=s, output_final_state=True)",
                _BETA + _STATE,
            ),
            (
                "op('gated_delta_product.chunk_gated_delta_product')(q, normalize(k, dim=-1), v, logsigmoid(g), b, 2)[0]",
                "q: normal(1, 35, 2, 32); k: normal(1, 70, 2, 32); v: normal(1, 70, 2, 32); g: normal(1, 35, 2); b: uniform(1, 70, 2)",
            ),
            ("op('gla.chunk_gla')(q, k, v, logsigmoid(g), initial_state=s, output_final_state=True)", _BY_KEY + _STATE),
            (
                "op('gla.fused_recurrent_gla')(q, k, v, gk=logsigmoid(g), initial_state=s, output_final_state=True, reverse=True)",
                _BY_KEY + _STATE,
            ),
            (
                "op('simple_gla.chunk_simple_gla')(q, k, v, logsigmoid(g), initial_state=s, output_final_state=True)",
                _GATED + _STATE,
            ),
            ("op('simple_gla.parallel_simple_gla')(q, k, v, logsigmoid(g))[0]", _GATED),
            (
                "op('simple_gla.fused_recurrent_simple_gla')(q, k, v, logsigmoid(g), initial_state=s, output_final_state=True)",
                _GATED + _STATE,
            ),
            (
                "op('gsa.chunk_gsa')(q, k, v, s, logsigmoid(g))[0]",
                _QKV + "; s: normal(1, 70, 2, 32); g: normal(1, 70, 2, 32)",
            ),
            ("op('abc.chunk_abc')(q, k, v, s)[0]", _QKV + "; s: normal(1, 70, 2, 32)"),
            (
                "op('hgrn.chunk_hgrn')(x, logsigmoid(g), initial_state=s, output_final_state=True)",
                "x: normal(1, 70, 64); g: normal(1, 70, 64); s: normal(1, 64)",
            ),
            (
                "op('hgrn.fused_recurrent_hgrn')(x, logsigmoid(g), initial_state=s, output_final_state=True)",
                "x: normal(1, 70, 64); g: normal(1, 70, 64); s: normal(1, 64)",
            ),
            (
                "op('rwkv6.chunk_rwkv6')(q, k, v, logsigmoid(g), u, initial_state=s, output_final_state=True)",
                _BY_KEY + "; u: normal(2, 32)" + _STATE,
            ),
            (
                "op('rwkv6.fused_recurrent_rwkv6')(q, k, v, logsigmoid(g), u, initial_state=s, output_final_state=True)",
                _BY_KEY + "; u: normal(2, 32)" + _STATE,
            ),
            (
                "op('rwkv7.chunk_rwkv7')(q, -0.6065 * torch.sigmoid(g), k, v, -normalize(a, dim=-1), normalize(a, dim=-1) * torch.sigmoid(b))[0]",
                _BY_KEY + "; a: normal(1, 70, 2, 32); b: normal(1, 70, 2, 32)",
            ),
            (
                "op('generalized_delta_rule.chunk_dplr_delta_rule')(q, k, v, -normalize(a, dim=-1), normalize(a, dim=-1) * torch.sigmoid(b), -0.6065 * torch.sigmoid(g), initial_state=s, output_final_state=True)",
                _BY_KEY + "; a: normal(1, 70, 2, 32); b: normal(1, 70, 2, 32)" + _STATE,
            ),
            (
                "op('generalized_delta_rule.chunk_iplr_delta_rule')(q, k, v, -normalize(a, dim=-1), normalize(a, dim=-1) * torch.sigmoid(b))[0]",
                _QKV + "; a: normal(1, 70, 2, 32); b: normal(1, 70, 2, 32)",
            ),
            (
                "op('comba.chunk_comba')(q, normalize(k, dim=-1), v, normalize(p, dim=-1), logsigmoid(g), b, initial_state=s, output_final_state=True)",
                _BOTH + "; p: normal(1, 70, 2, 32)" + _STATE,
            ),
            (
                "op('mesa_net.chunk_mesa_net')(q, normalize(k, dim=-1), v, logsigmoid(g), b, 0.5 + softplus(l))[0]",
                _BOTH + "; l: normal(2, 32)",
            ),
            (
                "op('ttt.chunk_ttt_linear')(q, normalize(k, dim=-1), v, w, b, 0.1 * torch.sigmoid(e), chunk_size=16)[0]",
                "q: normal(1, 64, 2, 32); k: normal(1, 64, 2, 32); v: normal(1, 64, 2, 32); w: normal(2, 32); b: normal(2, 32); e: normal(1, 64, 2, 1)",
            ),
            (
                "op('based.parallel_based')(q, k, v)",
                "q: normal(1, 70, 2, 16); k: normal(1, 70, 2, 16); v: normal(1, 70, 2, 32)",
            ),
            (
                "op('rebased.parallel_rebased')(q, k, v)",
                "q: normal(1, 70, 2, 16); k: normal(1, 70, 2, 16); v: normal(1, 70, 2, 32)",
            ),
            ("op('retention.parallel_retention')(q, k, v)[0]", _QKV),
            (
                "op('linear_attn.fused_chunk_linear_attn')(q, k, v, normalize=False, initial_state=s, output_final_state=True)",
                _QKV + _STATE,
            ),
            (
                "op('lightning_attn.chunk_lightning_attn')(q, k, v, 1, 4, initial_state=s, output_final_state=True)",
                _QKV + _STATE,
            ),
            (
                "op('log_linear_attn.chunk_log_linear_attn')(q, k, v, logsigmoid(g), softplus(l))[0]",
                "q: normal(1, 128, 1, 32); k: normal(1, 128, 1, 32); v: normal(1, 128, 2, 32); g: normal(1, 128, 2); l: normal(1, 128, 2, 8)",
            ),
            ("op('attn.parallel_attn')(q, k, v, g=logsigmoid(g), window_size=9)", _GATED),
            ("op('forgetting_attn.parallel_forgetting_attn')(q, k, v, logsigmoid(g), window_size=9)", _GATED),
            ("op('stickbreaking_attn.parallel_stickbreaking_attn')(q, k, v)[0]", _QKV),
            ("op('parallax.parallel_parallax')(q, r, k, v)", _QKV + "; r: normal(1, 70, 2, 32)"),
            (
                "op('path_attn.parallel_path_attn')(q, k, v, normalize(w, dim=-1), b, logsigmoid(g))[0]",
                _BOTH + "; w: normal(1, 70, 2, 32)",
            ),
            ("op('deltaformer.deltaformer_attn')(q, k, v, b)", _BETA),
            ("op('wall_attn.parallel_wall_attn')(q, k, v, logsigmoid(g))", _BY_KEY),
            (
                "op('gdn2.chunk_gdn2')(q, normalize(k, dim=-1), v, logsigmoid(g), torch.sigmoid(b), torch.sigmoid(w), initial_state=s, output_final_state=True)",
                _BY_KEY + "; b: normal(1, 70, 2, 32); w: normal(1, 70, 2, 32)" + _STATE,
            ),
            (
                "op('gated_oja_rule.chunk_gated_oja_rule')(q, k, normalize(v, dim=-1), logsigmoid(g), b, initial_state=s, output_final_state=True)",
                _KDA + _STATE,
            ),
            (
                "op('momentum_delta_rule.chunk_momentum_delta_rule')(q, k, v, logsigmoid(g), logsigmoid(m), beta=b)[0]",
                _BOTH + "; m: normal(1, 70, 2)",
            ),
            (
                "op('precond_kda.chunk_precond_kda')(q, normalize(k, dim=-1), v, logsigmoid(g), logsigmoid(h), c, b)[0]",
                _KDA + "; h: normal(1, 70, 2); c: uniform(1, 70, 2)",
            ),
            (
                "op('precond_gated_delta_rule.chunk_precond_gated_delta_rule')(q, k, v, logsigmoid(h), logsigmoid(g), c, b)[0]",
                _BOTH + "; h: normal(1, 70, 2); c: uniform(1, 70, 2)",
            ),
            (
                "op('attnres.fused_attnres')(q, [x, y, z], w)",
                "q: normal(64); x: normal(1, 37, 64); y: normal(1, 37, 64); z: normal(1, 37, 64); w: normal(64)",
            ),
            (
                "op('attnres.fused_attnres')(q, [x, y, z], w, output_rms_weight=o)",
                "q: normal(64); x: normal(1, 37, 64); y: normal(1, 37, 64); z: normal(1, 37, 64); w: normal(64); o: normal(64)",
            ),
        ),
    ),
    (
        "fla-core modules",
        "import fla.modules\nfrom fla.modules.activations import ops as A\nfrom fla.modules.norm import layernorm as N, fused_norm_gate as G, layernorm_gated as L\nfrom fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_loss\nfrom fla.modules.fused_kl_div.ops import fused_kl_div_loss\nfrom fla.modules.fused_cross_entropy.ops import cross_entropy_loss\nfrom fla.modules.causal_conv1d import causal_conv1d\nfrom fla.modules.l2warp import l2_warp\nlabels = torch.arange(37) % 190\n",
        (
            ("A.SwiGLUFunction.apply(x, y)", _XY),
            ("A.swiglu_linear(x, y, w, b)", _XY + "; w: normal(40, 96); b: normal(40)"),
            ("A.SigmoidGLUFunction.apply(x, y)", _XY),
            ("A.powglu(x, y, 3.0)", _XY),
            ("A.powglu_linear(x, y, w, b, 3.0)", _XY + "; w: normal(40, 96); b: normal(40)"),
            ("A.logsigmoid(x, 16.0)", _X),
            ("A.elu_p1(x)", _X),
            ("A.SwishFunction.apply(x)", _X),
            ("A.bias_gelu(x, b)", _X + "; b: normal(96)"),
            ("A.SquaredReLUFunction.apply(x)", _X),
            ("N.layer_norm(x, w, b, residual=y, prenorm=True)", _NORM + "; y: normal(3, 37, 96)"),
            ("N.rms_norm(x, w, b, residual=y, prenorm=True)", _NORM + "; y: normal(3, 37, 96)"),
            ("N.group_norm(x, w, b, num_groups=4)", _NORM),
            ("N.layer_norm_linear(x, w, b, m, c)", _NORM + "; m: normal(40, 96); c: normal(40)"),
            ("N.group_norm_linear(x, w, b, m, c, num_groups=4)", _NORM + "; m: normal(40, 96); c: normal(40)"),
            ("G.layer_norm_gated(x, g, w, b, 'swish')", _NORM + "; g: normal(3, 37, 96)"),
            (
                "G.rms_norm_gated(x, g, w, b, 'sigmoid', residual=y, prenorm=True)",
                _NORM + "; g: normal(3, 37, 96); y: normal(3, 37, 96)",
            ),
            (
                "G.rms_norm_swish_gate_linear(x, g, w, b, m, c)",
                _NORM + "; g: normal(3, 37, 96); m: normal(40, 96); c: normal(40)",
            ),
            ("L.rmsnorm_fn(x, w, b, z=z, group_size=32, norm_before_gate=False)", _NORM + "; z: normal(3, 37, 96)"),
            ("L.layernorm_fn(x, w, b, z=z, norm_before_gate=True)", _NORM + "; z: normal(3, 37, 96)"),
            (
                "fused_linear_cross_entropy_loss(x, labels.to(x.device), w, b, label_smoothing=0.1)",
                _HEAD + "; b: normal(190)",
            ),
            (
                "fused_linear_cross_entropy_loss(x, labels.to(x.device), w, logit_softcapping=5.0, reduction='sum')",
                _HEAD,
            ),
            ("fused_kl_div_loss(x, y, w, v)", _HEAD + "; y: normal(37, 48); v: normal(190, 48)"),
            (
                "cross_entropy_loss(x, labels.to(x.device), label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.01)[0]",
                _LOGITS,
            ),
            ("cross_entropy_loss(x, labels.to(x.device), logit_softcapping=5.0, lse_square_scale=0.01)", _LOGITS),
            (
                "causal_conv1d(x, w, b, residual=y, activation='silu')[0]",
                "x: normal(2, 70, 64); w: normal(64, 4); b: normal(64); y: normal(2, 70, 64)",
            ),
            (
                "causal_conv1d(x, w, b, initial_state=s, output_final_state=True, activation='swish')",
                "x: normal(2, 70, 64); w: normal(64, 4); b: normal(64); s: normal(2, 64, 4)",
            ),
        ),
    ),
    (
        "liger-kernel",
        _LIGER,
        (
            ("op('LigerAttnResFunction')(x, q, w, 1e-6)", "x: normal(4, 2, 37, 64); q: normal(64); w: normal(64)"),
            ("op('LigerFusedCETVDFunction')(x, y, labels.to(x.device))", _LOGITS + "; y: normal(37, 190)"),
            (
                "op('LigerFusedLinearJSDFunction')(x, w, y, v, None, 0.3)",
                _HEAD + "; y: normal(37, 48); v: normal(190, 48)",
            ),
            ("op('LigerFusedLinearKLDivFunction')(x, w, y.softmax(-1))", _HEAD + "; y: normal(37, 190)"),
            (
                "op('LigerMLPFunction')(x, g, u, d)",
                "x: normal(2, 9, 32); g: normal(48, 32); u: normal(48, 32); d: normal(32, 48)",
            ),
            (
                "op('LigerModulatedRMSNormFunction')(x, w, s, b, 1e-6, 0.0, 'llama', False)",
                "x: normal(2, 37, 96); w: normal(96); s: normal(2, 96); b: normal(2, 96)",
            ),
            (
                "op('LigerMultiTokenAttentionFunction')(s, w, b, 1, 1)",
                "s: normal(1, 4, 24, 24); w: normal(4, 4, 3, 3); b: normal(4)",
            ),
            ("op('LigerPolyNormFunction')(x, w, b, 1e-6, False)", "x: normal(3, 37, 96); w: normal(3); b: normal(1)"),
            ("op('LigerTVDLossFunction')(p.softmax(-1), q.softmax(-1))", "p: normal(37, 190); q: normal(37, 190)"),
            ("op('LigerFusedGateUpSiLUMulFunction')(x)", "x: normal(3, 37, 96)"),
            ("op('LigerSiLUMulFunction')(x, y, 1.5, 0.5)", _XY),
            ("op('LigerRMSNormFunction')(x, w, 1e-6, 1.0, 'gemma', False)", _X + "; w: normal(96)"),
            ("op('LigerFusedAddRMSNormFunction')(x, y, w, 1e-6, 1.0, 'gemma', False)", _XY + "; w: normal(96)"),
            ("op('LigerCrossEntropyFunction')(x, labels.to(x.device), None, -100, 0.01, 0.1, 'mean', 5.0)[0]", _LOGITS),
            (
                "op('LigerCrossEntropyFunction')(x, labels.to(x.device), c, -100, 0.0, 0.1, 'mean')[0]",
                _LOGITS + "; c: uniform(190)",
            ),
            (
                "op('LigerFusedLinearCrossEntropyFunction')(x, w, labels.to(x.device), b, None, -100, 0.01, 0.1, 'mean', 5.0)[0]",
                _HEAD + "; b: normal(190)",
            ),
            ("op('LigerEmbeddingFunction')(x, labels.to(x.device))", _LOGITS.replace("37", "190")),
            (
                "op('LigerMHCPostResFunction')(x, f, p, r)",
                "x: normal(2, 9, 4, 64); f: normal(2, 9, 64); p: normal(2, 9, 4); r: normal(2, 9, 4, 4)",
            ),
            ("op('LigerMHCPreFunction')(x, h)", "x: normal(2, 9, 4, 64); h: normal(2, 9, 4)"),
            (
                "op('LigerJSDFunction')(x.log_softmax(-1), y.log_softmax(-1), None, 0.0)",
                _LOGITS + "; y: normal(37, 190)",
            ),
            (
                "op('LigerJSDFunction')(x.log_softmax(-1), y.log_softmax(-1), None, 1.0)",
                _LOGITS + "; y: normal(37, 190)",
            ),
            ("op('LigerKLDivLossFunction')(x.log_softmax(-1), y.softmax(-1), 'sum')", _LOGITS + "; y: normal(37, 190)"),
            ("op('LigerGroupNormFunction')(x, w, b, 6, 3, 1e-6)", "x: normal(2, 6, 50); w: normal(6); b: normal(6)"),
            (
                "op('LigerFusedNeighborhoodAttentionFunction')(q, k, v, 5, 2, None)",
                "q: normal(1, 2, 40, 32); k: normal(1, 2, 40, 32); v: normal(1, 2, 40, 32)",
            ),
        ),
    ),
    (
        "mamba-ssm",
        "from mamba_ssm.ops.triton import layer_norm as N, layernorm_gated as L, k_activations as K\nfrom mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined\nfrom torch.nn.functional import softplus\n",
        (
            (
                "mamba_chunk_scan_combined(x, t, -a.exp(), b, c, 32, dt_softplus=True)",
                "x: normal(1, 70, 2, 32); t: normal(1, 70, 2); a: normal(2); b: normal(1, 70, 1, 16); c: normal(1, 70, 1, 16)",
            ),
            (
                "mamba_chunk_scan_combined(x, softplus(t), -a.exp(), b, c, 32, D=d, z=z, initial_states=s, return_final_states=True)",
                "x: normal(1, 70, 2, 32); t: normal(1, 70, 2); a: normal(2); b: normal(1, 70, 1, 16); c: normal(1, 70, 1, 16); d: normal(2); z: normal(1, 70, 2, 32); s: normal(1, 2, 32, 16)",
            ),
            (
                "mamba_chunk_scan_combined(x, t, -a.exp(), b, c, 32, D=d, dt_bias=e, dt_softplus=True, dt_limit=(0.1, 1.0))",
                "x: normal(1, 70, 2, 32); t: normal(1, 70, 2); a: normal(2); b: normal(1, 70, 2, 16); c: normal(1, 70, 2, 16); d: normal(2, 32); e: normal(2)",
            ),
            ("N.layer_norm_fn(x, w, b, residual=y, prenorm=True)", _NORM + "; y: normal(3, 37, 96)"),
            ("N.rms_norm_fn(x, w, None, residual=y, x1=y, weight1=b)", _NORM + "; y: normal(3, 37, 96)"),
            (
                "L.rmsnorm_fn(x, w, None, z=z, group_size=32, norm_before_gate=False)",
                _X + "; w: normal(96); z: normal(3, 37, 96)",
            ),
            ("L.layernorm_fn(x, w, b, z=z, group_size=32)", _NORM + "; z: normal(3, 37, 96)"),
            ("K.swiglu(x)", _X),
        ),
    ),
    (
        "flash-attn",
        "from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn\nfrom flash_attn.ops.triton.cross_entropy import cross_entropy_loss\nfrom flash_attn.ops.triton.rotary import apply_rotary\nlabels = torch.arange(37) % 190\n",
        (
            ("layer_norm_fn(x, w, b, residual=y, prenorm=True)", _NORM + "; y: normal(3, 37, 96)"),
            ("rms_norm_fn(x, w, None, x1=y, weight1=b, zero_centered_weight=True)", _NORM + "; y: normal(3, 37, 96)"),
            ("layer_norm_fn(x, w, b, rowscale=r)", _NORM.replace("3, 37", "37") + "; r: uniform(37)"),
            (
                "cross_entropy_loss(x, labels.to(x.device), label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.01)[0]",
                _LOGITS,
            ),
        ),
    ),
    (
        "cut-cross-entropy",
        "from cut_cross_entropy import linear_cross_entropy\nlabels = torch.arange(37) % 190\n",
        (
            (
                "linear_cross_entropy(x, w, labels.to(x.device), filter_eps=None, impl='cce')",
                _HEAD.replace("48", "128"),
            ),
            (
                "linear_cross_entropy(x, w, labels.to(x.device), softcap=5.0, filter_eps=None, reduction='none', impl='cce')",
                _HEAD.replace("48", "128"),
            ),
        ),
    ),
    (
        "adasplash",
        "import adasplash\n",
        (
            ("adasplash.triton_entmax_v1(x, alpha=1.5, n_iter=30)", _LOGITS),
            (
                "adasplash.adasplash(q, k, v)",
                "q: normal(1, 2, 70, 32); k: normal(1, 2, 70, 32); v: normal(1, 2, 70, 32)",
            ),
            (
                "adasplash.adasplash_no_block_mask(q, k, v, alpha=1.5, is_causal=True, niter=30)",
                "q: normal(1, 2, 70, 32); k: normal(1, 2, 70, 32); v: normal(1, 2, 70, 32)",
            ),
        ),
    ),
)


def descriptions() -> list[Description]:
    """Return every kernel in the table, packages in turn so that a short run sees all of them."""
    columns = [
        [Description(package, call, inputs, _FIRST_CONFIGURATION + setup, gpu=True) for call, inputs in entries]
        for package, setup, entries in KERNELS
    ]
    longest = max(map(len, columns))
    return [column[row] for row in range(longest) for column in columns if row < len(column)]
