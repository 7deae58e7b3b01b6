# ruff: noqa: E501  (an expression stays on one line, as it is shown in tables)
"""Functions of packages that the campaign checks.

Functions whose backward is not the derivative of their forward on purpose are left out: straight-through estimators of
quantisers and gradient reversals.
"""

from __future__ import annotations

from campaign.described import Description

_X, _XY = "x: normal(4, 6)", "x: normal(4, 6); y: normal(4, 6)"
_IMAGE, _IMAGES = "x: uniform(1, 3, 9, 11)", "x: uniform(1, 3, 9, 11); y: uniform(1, 3, 9, 11)"
_LARGE = "x: uniform(1, 1, 33, 33); y: uniform(1, 1, 33, 33)"
_LOGITS = "x: normal(2, 3, 5, 4)"
_LABELS = "labels = torch.arange(40).reshape(2, 5, 4) % 3\n"
_EMBEDDED = "x: normal(8, 6)"
_CLASSES = "classes = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1])\n"
_SEQUENCE = "x: normal(2, 8, 16)"
_POINTS = "x: normal(6, 3); y: normal(5, 3)"
_SIGNALS = "x: normal(1, 1, 400); y: normal(1, 1, 400)"

Entries = tuple[tuple[str, str], ...]
"""Expressions with the inputs they are functions of."""

PACKAGES: tuple[tuple[str, str, Entries], ...] = (
    (
        "kornia",
        "import kornia as K\n" + _LABELS,
        (
            ("K.losses.ssim_loss(x, y, 5)", _IMAGES),
            ("K.losses.dice_loss(x, labels)", _LOGITS),
            ("K.losses.focal_loss(x, labels, 0.5, reduction='mean')", _LOGITS),
            ("K.losses.tversky_loss(x, labels, 0.4, 0.6)", _LOGITS),
            ("K.losses.lovasz_softmax_loss(x, labels)", _LOGITS),
            ("K.losses.lovasz_hinge_loss(x[:, :1], labels % 2)", _LOGITS),
            ("K.losses.psnr_loss(x, y, 1.0)", _IMAGES),
            ("K.losses.js_div_loss_2d(x / x.sum((-2, -1), True), y / y.sum((-2, -1), True))", _IMAGES),
            ("K.losses.kl_div_loss_2d(x / x.sum((-2, -1), True), y / y.sum((-2, -1), True))", _IMAGES),
            ("K.losses.total_variation(x)", _IMAGE),
            ("K.losses.inverse_depth_smoothness_loss(x[:, :1], y)", _IMAGES),
            ("K.losses.charbonnier_loss(x, y)", _XY),
            ("K.losses.cauchy_loss(x, y)", _XY),
            ("K.losses.geman_mcclure_loss(x, y)", _XY),
            ("K.losses.welsch_loss(x, y)", _XY),
            ("K.filters.gaussian_blur2d(x, (3, 5), (1.0, 1.5))", _IMAGE),
            ("K.filters.median_blur(x, (3, 3))", _IMAGE),
            ("K.filters.sobel(x)", _IMAGE),
            ("K.filters.laplacian(x, 3)", _IMAGE),
            ("K.filters.bilateral_blur(x, (3, 3), 0.3, (1.0, 1.0))", _IMAGE),
            ("K.filters.guided_blur(x, y, 3, 0.1)", _IMAGES),
            ("K.filters.unsharp_mask(x, (3, 3), (1.0, 1.0))", _IMAGE),
            ("K.filters.motion_blur(x, 3, 30.0, 0.5)", _IMAGE),
            ("K.filters.spatial_gradient(x)", _IMAGE),
            ("K.geometry.transform.rotate(x, torch.tensor([31.0]).to(x))", _IMAGE),
            (
                "K.geometry.transform.warp_perspective(x, torch.eye(3)[None].to(x) + 0.01 * h[None], (7, 8))",
                "x: uniform(1, 3, 9, 11); h: normal(3, 3)",
            ),
            ("K.geometry.transform.resize(x, (6, 15), antialias=True)", _IMAGE),
            ("K.geometry.transform.pyrdown(x)", _IMAGE),
            ("K.geometry.subpix.spatial_soft_argmax2d(x)", _IMAGE),
            ("K.geometry.subpix.conv_soft_argmax2d(x)", _IMAGE),
            ("K.geometry.conversions.quaternion_to_rotation_matrix(x)", "x: normal(5, 4)"),
            ("K.geometry.conversions.axis_angle_to_rotation_matrix(x)", "x: normal(5, 3)"),
            ("K.geometry.conversions.quaternion_to_axis_angle(x)", "x: normal(5, 4)"),
            ("K.geometry.conversions.quaternion_exp_to_log(x)", "x: normal(5, 4)"),
            ("K.geometry.linalg.relative_transformation(x, y)", "x: normal(2, 4, 4); y: normal(2, 4, 4)"),
            ("K.color.rgb_to_lab(x)", _IMAGE),
            ("K.color.rgb_to_hsv(x)", _IMAGE),
            ("K.color.rgb_to_luv(x)", _IMAGE),
            ("K.color.rgb_to_hls(x)", _IMAGE),
            ("K.color.rgb_to_ycbcr(x)", _IMAGE),
            ("K.color.hsv_to_rgb(x)", _IMAGE),
            ("K.enhance.adjust_gamma(x, 1.7)", _IMAGE),
            ("K.enhance.adjust_saturation(x, 1.4)", _IMAGE),
            ("K.enhance.histogram(x.reshape(1, -1), torch.linspace(0, 1, 5).to(x), torch.tensor(0.2).to(x))", _IMAGE),
            ("K.enhance.linear_transform(x, y, z)", "x: normal(4, 6); y: normal(6, 6); z: normal(1, 6)"),
            ("K.morphology.dilation(x, torch.ones(3, 3).to(x))", _IMAGE),
            ("K.morphology.erosion(x, torch.ones(3, 3).to(x))", _IMAGE),
        ),
    ),
    (
        "entmax",
        "import entmax\nlabels = torch.tensor([1, 0, 5, 2])\n",
        (
            ("entmax.sparsemax(x, -1)", _X),
            ("entmax.sparsemax(x, 0)", _X),
            ("entmax.entmax15(x, -1)", _X),
            ("entmax.entmax15(x, 1, k=4)", "x: normal(3, 6, 4)"),
            ("entmax.entmax_bisect(x, 1.3)", _X),
            ("entmax.entmax_bisect(x, a)", "x: normal(4, 6); a: uniform(4, 1)"),
            ("entmax.sparsemax_bisect(x)", _X),
            ("entmax.normmax_bisect(x, 2)", _X),
            ("entmax.budget_bisect(x, 2)", _X),
            ("entmax.sparsemax_loss(x, labels)", _X),
            ("entmax.entmax15_loss(x, labels)", _X),
            ("entmax.entmax_bisect_loss(x, labels, 1.3)", _X),
            ("entmax.sparsemax_bisect_loss(x, labels)", _X),
        ),
    ),
    (
        "geomloss",
        "from geomloss import SamplesLoss\n",
        (
            ("SamplesLoss('sinkhorn', p=2, blur=0.5, backend='tensorized')(x, y)", _POINTS),
            ("SamplesLoss('sinkhorn', p=1, blur=0.5, debias=False, backend='tensorized')(x, y)", _POINTS),
            ("SamplesLoss('gaussian', blur=0.7, backend='tensorized')(x, y)", _POINTS),
            ("SamplesLoss('laplacian', blur=0.7, backend='tensorized')(x, y)", _POINTS),
            ("SamplesLoss('energy', backend='tensorized')(x, y)", _POINTS),
        ),
    ),
    (
        "POT",
        "import ot\nuniform6, uniform5 = torch.full((6,), 1 / 6), torch.full((5,), 0.2)\n",
        (
            ("ot.sinkhorn2(uniform6.to(x), uniform5.to(x), ot.dist(x, y), 1.0)", _POINTS),
            ("ot.emd2(uniform6.to(x), uniform5.to(x), ot.dist(x, y))", _POINTS),
            ("ot.gromov.gromov_wasserstein2(ot.dist(x, x), ot.dist(y, y), uniform6.to(x), uniform5.to(x))", _POINTS),
            ("ot.gaussian.bures_wasserstein_distance(x[0], y[0], x.T @ x, y.T @ y)", _POINTS),
            ("ot.unbalanced.sinkhorn_unbalanced2(uniform6.to(x), uniform5.to(x), ot.dist(x, y), 1.0, 1.0)", _POINTS),
            ("ot.wasserstein_1d(x[:, 0], y[:, 0], p=2)", _POINTS),
            ("ot.sliced_wasserstein_distance(x, y, n_projections=5, seed=0)", _POINTS),
        ),
    ),
    (
        "zuko",
        "import zuko\nfrom zuko.transforms import *\n",
        (
            ("MonotonicRQSTransform(w, h, d)(x)", "x: normal(4); w: normal(4, 5); h: normal(4, 5); d: normal(4, 4)"),
            ("MonotonicAffineTransform(a, b)(x)", "x: normal(4); a: normal(4); b: normal(4)"),
            ("SOSPolynomialTransform(a)(x)", "x: normal(4); a: normal(4, 2, 3)"),
            ("SoftclipTransform()(x)", _X),
            ("SoftclipTransform().inv(x)", "x: uniform(4, 6)"),
            ("BernsteinTransform(w)(x)", "x: uniform(4); w: normal(4, 8)"),
            ("SignedPowerTransform(a)(x)", "x: normal(4); a: normal(4)"),
            ("CosTransform()(x)", "x: uniform(4, 6)"),
            ("RotationTransform(a)(x)", "x: normal(4); a: normal(4, 4)"),
            ("LULinearTransform(a)(x)", "x: normal(4); a: normal(4, 4)"),
            ("module: zuko.nn.MonotonicMLP(3, 2, hidden_features=[5])", "x: normal(4, 3)"),
            ("module: zuko.nn.MaskedMLP(torch.ones(4, 3, dtype=torch.bool).tril(), [5])", "x: normal(6, 3)"),
        ),
    ),
    (
        "nflows",
        "from nflows.transforms.splines import *\nfrom nflows import transforms\n",
        (
            (
                "rational_quadratic_spline(x, w, h, d)",
                "x: uniform(6); w: normal(6, 4); h: normal(6, 4); d: normal(6, 5)",
            ),
            (
                "rational_quadratic_spline(x, w, h, d, inverse=True)",
                "x: uniform(6); w: normal(6, 4); h: normal(6, 4); d: normal(6, 5)",
            ),
            (
                "cubic_spline(x, w, h, a, b)",
                "x: uniform(6); w: normal(6, 4); h: normal(6, 4); a: normal(6, 1); b: normal(6, 1)",
            ),
            ("quadratic_spline(x, w, h)", "x: uniform(6); w: normal(6, 4); h: normal(6, 5)"),
            ("linear_spline(x, w)", "x: uniform(6); w: normal(6, 4)"),
            ("module: transforms.LULinear(4)", "x: normal(5, 4)"),
            ("module: transforms.QRLinear(4, 3)", "x: normal(5, 4)"),
            ("module: transforms.SVDLinear(4, 2)", "x: normal(5, 4)"),
            ("module: transforms.HouseholderSequence(4, 3)", "x: normal(5, 4)"),
            ("module: transforms.MaskedAffineAutoregressiveTransform(4, 8)", "x: normal(5, 4)"),
        ),
    ),
    (
        "normflows",
        "import normflows as nf\n",
        (
            ("module: nf.flows.Planar((4,))", "x: normal(5, 4)"),
            ("module: nf.flows.Radial((4,))", "x: normal(5, 4)"),
            ("module: nf.flows.LULinearPermute(4)", "x: normal(5, 4)"),
            ("module: nf.flows.ActNorm((4,))", "x: normal(5, 4)"),
            ("module: nf.flows.MaskedAffineAutoregressive(4, 8)", "x: normal(5, 4)"),
            ("module: nf.flows.CoupledRationalQuadraticSpline(4, 1, 8)", "x: normal(5, 4)"),
            ("module: nf.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8)", "x: normal(5, 4)"),
        ),
    ),
    (
        "torchdiffeq",
        "from torchdiffeq import odeint, odeint_adjoint\nt = torch.linspace(0, 1, 4)\n"
        "class Field(torch.nn.Module):\n    def __init__(self, w):\n        super().__init__()\n        self.w = w\n"
        "    def forward(self, t, y):\n        return torch.tanh(y @ self.w) * (1 + t)\n",
        (
            ("odeint(Field(w), x, t.to(x), method='rk4')", "x: normal(4); w: normal(4, 4)"),
            ("odeint(Field(w), x, t.to(x), method='dopri5')", "x: normal(4); w: normal(4, 4)"),
            (
                "odeint_adjoint(Field(w), x, t.to(x), method='rk4', options={'step_size': 0.02}, adjoint_params=(w,))",
                "x: normal(4); w: normal(4, 4)",
            ),
            (
                "odeint_adjoint(Field(w), x, t.to(x), rtol=1e-5, atol=1e-5, adjoint_params=(w,))",
                "x: normal(4); w: normal(4, 4)",
            ),
            (
                "odeint(Field(w), x, torch.cat([s[:1] * 0, s.cumsum(0)]), method='rk4')",
                "x: normal(4); w: normal(4, 4); s: uniform(3)",
            ),
        ),
    ),
    (
        "torchcde",
        "import torchcde\nt = torch.linspace(0, 1, 8)\n",
        (
            ("torchcde.natural_cubic_coeffs(x)", "x: normal(2, 8, 3)"),
            ("torchcde.hermite_cubic_coefficients_with_backward_differences(x)", "x: normal(2, 8, 3)"),
            ("torchcde.CubicSpline(torchcde.natural_cubic_coeffs(x)).evaluate(3.3)", "x: normal(2, 8, 3)"),
            ("torchcde.CubicSpline(torchcde.natural_cubic_coeffs(x)).derivative(3.3)", "x: normal(2, 8, 3)"),
            (
                "torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(x)).evaluate(3.3)",
                "x: normal(2, 8, 3)",
            ),
        ),
    ),
    (
        "xitorch",
        "import xitorch, xitorch.linalg, xitorch.optimize, xitorch.integrate, xitorch.interpolate\n"
        "from xitorch import LinearOperator\n",
        (
            (
                "xitorch.linalg.solve(LinearOperator.m(a @ a.T + 3 * torch.eye(5).to(a)), b)",
                "a: normal(5, 5); b: normal(5, 2)",
            ),
            ("xitorch.linalg.symeig(LinearOperator.m(a + a.T), neig=3)[0]", "a: normal(5, 5)"),
            ("xitorch.linalg.svd(LinearOperator.m(a), k=3)[1]", "a: normal(5, 5)"),
            (
                "xitorch.optimize.rootfinder(lambda y, a: torch.tanh(a @ y) + y - 0.3, torch.zeros(5).to(a), (a,))",
                "a: normal(5, 5)",
            ),
            (
                "xitorch.integrate.quad(lambda t, a: torch.sin(a * t), torch.tensor(0.0).to(a), torch.tensor(1.0).to(a), (a,))",
                "a: normal(5)",
            ),
            (
                "xitorch.interpolate.Interp1D(torch.linspace(0, 1, 7).to(y), y, method='cspline')(x)",
                "x: uniform(5); y: normal(7)",
            ),
        ),
    ),
    (
        "qpth",
        "import sys, types\n# Another solver, which is not used.\nsys.modules.setdefault('cvxpy', types.ModuleType('cvxpy'))\nfrom qpth.qp import QPFunction\ne = torch.Tensor()\n",
        (
            (
                "QPFunction(verbose=-1)(q @ q.mT + torch.eye(4).to(q), p, g, h.abs() + 1, e.to(q), e.to(q))",
                "q: normal(2, 4, 4); p: normal(2, 4); g: normal(2, 3, 4); h: normal(2, 3)",
            ),
            (
                "QPFunction(verbose=-1)(q @ q.mT + torch.eye(4).to(q), p, g, h.abs() + 1, a, b)",
                "q: normal(2, 4, 4); p: normal(2, 4); g: normal(2, 3, 4); h: normal(2, 3); a: normal(2, 1, 4); b: normal(2, 1)",
            ),
        ),
    ),
    (
        "gpytorch",
        "import gpytorch\nfrom gpytorch import kernels as k\np = torch.arange(10.0).reshape(5, 2).sin()\n",
        (
            ("k.RBFKernel().to(x)(x).to_dense()", "x: normal(5, 2)"),
            ("k.MaternKernel(nu=2.5).to(x)(x).to_dense()", "x: normal(5, 2)"),
            ("k.MaternKernel(nu=1.5).to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.MaternKernel(nu=0.5).to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.PeriodicKernel().to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.RQKernel().to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.CosineKernel().to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.PiecewisePolynomialKernel(2).to(x)(x, y).to_dense()", "x: normal(5, 2); y: normal(4, 2)"),
            ("k.ArcKernel(k.MaternKernel(nu=2.5)).to(x)(x, y).to_dense()", "x: uniform(5, 2); y: uniform(4, 2)"),
            ("k.RBFKernelGrad().to(x)(x).to_dense()", "x: normal(3, 2)"),
            (
                "gpytorch.functions.MaternCovariance.apply(p, p.flip(0), s, 2.5, lambda a, b: torch.cdist(a, b))",
                "s: uniform(1, 1)",
            ),
            (
                "gpytorch.functions.RBFCovariance.apply(p, p.flip(0), s, lambda a, b: torch.cdist(a, b) ** 2)",
                "s: uniform(1, 1)",
            ),
            ("gpytorch.functions.log_normal_cdf(x)", _X),
            (
                "gpytorch.inv_quad_logdet(x @ x.T + torch.eye(5).to(x), b, logdet=True)",
                "x: normal(5, 5); b: normal(5, 2)",
            ),
        ),
    ),
    (
        "linear_operator",
        "import linear_operator as lo\nfrom linear_operator.operators import *\n",
        (
            ("lo.solve(to_linear_operator(x @ x.T + torch.eye(5).to(x)), b)", "x: normal(5, 5); b: normal(5, 2)"),
            (
                "lo.sqrt_inv_matmul(to_linear_operator(x @ x.T + torch.eye(5).to(x)), b)",
                "x: normal(5, 5); b: normal(5, 2)",
            ),
            ("lo.pivoted_cholesky(to_linear_operator(x @ x.T + torch.eye(5).to(x)), 3)", "x: normal(5, 5)"),
            ("ToeplitzLinearOperator(x) @ b", "x: normal(5); b: normal(5, 2)"),
            (
                "KroneckerProductLinearOperator(to_linear_operator(x), to_linear_operator(y)) @ b",
                "x: normal(3, 3); y: normal(2, 2); b: normal(6, 2)",
            ),
            ("InterpolatedLinearOperator(to_linear_operator(x)) @ b", "x: normal(5, 5); b: normal(5, 2)"),
            ("lo.diagonalization(to_linear_operator(x @ x.T + torch.eye(5).to(x)), 'symeig')[0]", "x: normal(5, 5)"),
        ),
    ),
    (
        "torchmetrics",
        "import torchmetrics.functional as M\nfrom torchmetrics.functional import audio, image, regression\n",
        (
            ("image.structural_similarity_index_measure(x, y, data_range=1.0)", _LARGE),
            ("image.peak_signal_noise_ratio(x, y, data_range=1.0)", _IMAGES),
            ("image.total_variation(x)", _IMAGE),
            ("image.spectral_angle_mapper(x, y)", _IMAGES),
            ("image.universal_image_quality_index(x, y)", _LARGE),
            ("image.error_relative_global_dimensionless_synthesis(x, y)", _IMAGES),
            ("image.image_gradients(x)", _IMAGE),
            ("audio.signal_noise_ratio(x, y)", _XY),
            ("audio.scale_invariant_signal_distortion_ratio(x, y)", _XY),
            ("M.pearson_corrcoef(x[0], y[0])", _XY),
            ("M.concordance_corrcoef(x[0], y[0])", _XY),
            ("M.cosine_similarity(x, y)", _XY),
            ("M.r2_score(x[0], y[0])", _XY),
            ("M.explained_variance(x, y)", _XY),
            ("M.log_cosh_error(x, y)", _XY),
            ("M.minkowski_distance(x, y, 3)", _XY),
            ("M.kl_divergence(x.softmax(-1), y.softmax(-1))", _XY),
            ("M.tweedie_deviance_score(0.1 + x * x, y.exp(), 1.5)", _XY),
            ("M.pairwise_cosine_similarity(x, y)", _XY),
            ("M.pairwise_minkowski_distance(x, y, 3)", _XY),
        ),
    ),
    (
        "pytorch-msssim",
        "from pytorch_msssim import ssim, ms_ssim\n",
        (
            ("ssim(x, y, data_range=1.0, win_size=5)", _IMAGES),
            ("ms_ssim(x, y, data_range=1.0, win_size=3)", _LARGE),
        ),
    ),
    (
        "pytorch-metric-learning",
        "from pytorch_metric_learning import losses as L\n" + _CLASSES,
        tuple(
            (f"L.{call}(x, classes)", _EMBEDDED)
            for call in (
                "ContrastiveLoss()",
                "TripletMarginLoss()",
                "CircleLoss()",
                "NTXentLoss()",
                "MultiSimilarityLoss()",
                "SupConLoss()",
                "AngularLoss()",
                "FastAPLoss()",
                "GeneralizedLiftedStructureLoss()",
                "LiftedStructureLoss()",
                "IntraPairVarianceLoss()",
                "NCALoss()",
                "SignalToNoiseRatioContrastiveLoss()",
                "TupletMarginLoss()",
                "RankedListLoss(0.5, 5)",
                "PNPLoss()",
                "NPairsLoss()",
                "DynamicSoftMarginLoss()",
                "HistogramLoss(n_bins=10)",
            )
        )
        + tuple(
            (f"L.{call}.to(x)(x, classes)", _EMBEDDED)
            for call in (
                "ArcFaceLoss(3, 6)",
                "CosFaceLoss(3, 6)",
                "NormalizedSoftmaxLoss(3, 6)",
                "ProxyAnchorLoss(3, 6)",
                "ProxyNCALoss(3, 6)",
                "SoftTripleLoss(3, 6)",
                "SubCenterArcFaceLoss(num_classes=3, embedding_size=6)",
                "SphereFaceLoss(3, 6)",
                "LargeMarginSoftmaxLoss(3, 6)",
                "P2SGradLoss(6, 3)",
            )
        ),
    ),
    (
        "monai",
        "import monai.losses as L\ntarget = (torch.arange(40).reshape(2, 1, 5, 4) % 3 == 0).float()\n",
        (
            ("L.DiceLoss(sigmoid=True)(x[:, :1], target.to(x))", _LOGITS),
            ("L.GeneralizedDiceLoss(sigmoid=True)(x[:, :1], target.to(x))", _LOGITS),
            ("L.TverskyLoss(sigmoid=True)(x[:, :1], target.to(x))", _LOGITS),
            ("L.FocalLoss()(x[:, :1], target.to(x))", _LOGITS),
            ("L.DiceCELoss(sigmoid=True)(x[:, :1], target.to(x))", _LOGITS),
            ("L.LocalNormalizedCrossCorrelationLoss(2, 3)(x, y)", _LARGE),
            ("L.SSIMLoss(2, win_size=5)(x, y)", _LARGE),
            ("L.GlobalMutualInformationLoss(num_bins=8)(x, y)", _IMAGES),
            ("L.BendingEnergyLoss()(x)", "x: normal(1, 2, 7, 8)"),
            ("L.DiffusionLoss()(x)", "x: normal(1, 2, 7, 8)"),
            ("L.BarlowTwinsLoss()(x, y)", _XY),
            ("L.ContrastiveLoss()(x, y)", _XY),
            ("L.HausdorffDTLoss(sigmoid=True)(x[:, :1], target.to(x))", _LOGITS),
            ("L.MultiScaleLoss(torch.nn.MSELoss(reduction='none'))(x, y)", _LARGE),
            ("L.SoftclDiceLoss()(x[:, :1].sigmoid(), target.to(x))", _LOGITS),
            ("L.JukeboxLoss(2)(x, y)", _IMAGES),
        ),
    ),
    (
        "torch-geometric",
        "import torch_geometric as G\nfrom torch_geometric import nn as gnn\nfrom torch_geometric.nn import aggr\n"
        "edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 5, 3, 0]])\nindex = torch.tensor([0, 0, 1, 1, 2, 2])\n",
        (
            ("G.utils.softmax(x, index)", "x: normal(6, 3)"),
            ("G.utils.scatter(x, index, 0, reduce='mean')", "x: normal(6, 3)"),
            ("G.utils.scatter(x, index, 0, reduce='max')", "x: normal(6, 3)"),
            ("G.utils.segment(x, torch.tensor([0, 2, 6]), 'sum')", "x: normal(6, 3)"),
            ("aggr.SoftmaxAggregation(t=0.7)(x, index)", "x: normal(6, 3)"),
            ("aggr.StdAggregation()(x, index)", "x: normal(6, 3)"),
            ("aggr.MedianAggregation()(x, index)", "x: normal(6, 3)"),
            ("aggr.QuantileAggregation(0.3)(x, index)", "x: normal(6, 3)"),
            ("aggr.PowerMeanAggregation(p=2.0)(x.abs(), index)", "x: normal(6, 3)"),
            ("aggr.VarAggregation()(x, index)", "x: normal(6, 3)"),
            ("module: gnn.PairNorm()", "x: normal(6, 3)"),
            ("module: gnn.GraphNorm(3)", "x: normal(6, 3)"),
            ("module: gnn.DiffGroupNorm(3, 2)", "x: normal(6, 3)"),
            ("gnn.GCNConv(3, 4).to(x)(x, edges)", "x: normal(6, 3)"),
            ("gnn.GATv2Conv(3, 4).to(x)(x, edges)", "x: normal(6, 3)"),
            ("gnn.SAGEConv(3, 4).to(x)(x, edges)", "x: normal(6, 3)"),
            (
                "gnn.PNAConv(3, 4, ['mean', 'std', 'max'], ['identity', 'amplification'], torch.tensor([1, 4, 1])).to(x)(x, edges)",
                "x: normal(6, 3)",
            ),
            ("gnn.TransformerConv(3, 4).to(x)(x, edges)", "x: normal(6, 3)"),
            ("gnn.ARMAConv(3, 4).to(x)(x, edges)", "x: normal(6, 3)"),
            ("gnn.ChebConv(3, 4, 3).to(x)(x, edges)", "x: normal(6, 3)"),
            ("gnn.global_add_pool(x, index)", "x: normal(6, 3)"),
        ),
    ),
    (
        "e3nn",
        "from e3nn import o3, nn as enn, math as emath\n",
        (
            ("o3.spherical_harmonics([0, 1, 2, 3], x, True)", "x: normal(5, 3)"),
            ("o3.spherical_harmonics(4, x, False)", "x: normal(5, 3)"),
            ("emath.soft_one_hot_linspace(x, 0.0, 2.0, 5, basis='smooth_finite', cutoff=True)", "x: uniform(6)"),
            ("emath.soft_one_hot_linspace(x, 0.0, 2.0, 5, basis='bessel', cutoff=True)", "x: uniform(6)"),
            ("emath.soft_one_hot_linspace(x, 0.0, 2.0, 5, basis='gaussian', cutoff=False)", "x: uniform(6)"),
            ("emath.soft_unit_step(x)", _X),
            ("o3.matrix_to_angles(o3.angles_to_matrix(x[0], x[1], x[2]))", "x: uniform(3, 4)"),
            ("o3.quaternion_to_matrix(torch.nn.functional.normalize(x, dim=-1))", "x: normal(5, 4)"),
            ("o3.axis_angle_to_matrix(x, y)", "x: normal(5, 3); y: uniform(5)"),
            ("o3.wigner_D(2, x[0], x[1], x[2])", "x: uniform(3)"),
            ("o3.FullTensorProduct('1o', '1o').to(x)(x, y)", "x: normal(5, 3); y: normal(5, 3)"),
            ("o3.Norm('2x0e + 1x1o').to(x)(x)", "x: normal(4, 5)"),
            ("enn.NormActivation('2x0e + 1x1o', torch.sigmoid).to(x)(x)", "x: normal(4, 5)"),
        ),
    ),
    (
        "geoopt",
        "from geoopt.manifolds.stereographic import math as g\nfrom geoopt.manifolds.lorentz import math as lorentz\nimport geoopt\nk = torch.tensor(-1.0)\n",
        (
            ("g.mobius_add(x, y, k=k.to(x))", "x: uniform(4, 3); y: uniform(4, 3)"),
            ("g.dist(0.3 * x, 0.3 * y, k=k.to(x))", "x: uniform(4, 3); y: uniform(4, 3)"),
            ("g.expmap(0.3 * x, y, k=k.to(x))", "x: uniform(4, 3); y: uniform(4, 3)"),
            ("g.logmap(0.3 * x, 0.3 * y, k=k.to(x))", "x: uniform(4, 3); y: uniform(4, 3)"),
            ("g.expmap0(x, k=k.to(x))", "x: uniform(4, 3)"),
            ("g.logmap0(0.3 * x, k=k.to(x))", "x: uniform(4, 3)"),
            ("g.gyration(0.3 * x, 0.3 * y, x, k=k.to(x))", "x: uniform(4, 3); y: uniform(4, 3)"),
            ("g.mobius_matvec(m, 0.3 * x, k=k.to(x))", "m: normal(3, 3); x: uniform(4, 3)"),
            ("g.artan_k(0.5 * x, k=k.to(x))", "x: uniform(4, 3)"),
            (
                "lorentz.dist(lorentz.expmap0(x, k=-k.to(x)), lorentz.expmap0(y, k=-k.to(x)), k=-k.to(x))",
                "x: normal(4, 3); y: normal(4, 3)",
            ),
            ("geoopt.linalg.sym_funcm(x @ x.T + torch.eye(4).to(x), torch.log)", "x: normal(4, 4)"),
            ("geoopt.linalg.expm(0.3 * x)", "x: normal(4, 4)"),
        ),
    ),
    (
        "pytorch-wavelets",
        "import pytorch_wavelets as W\n",
        (
            ("W.DWTForward(J=2, wave='db3', mode='zero').to(x)(x)[0]", "x: normal(1, 1, 16, 12)"),
            ("W.DWTForward(J=1, wave='db2', mode='symmetric').to(x)(x)[1][0]", "x: normal(1, 1, 16, 12)"),
            ("W.DWTForward(J=1, wave='db2', mode='periodization').to(x)(x)[1][0]", "x: normal(1, 1, 16, 12)"),
            ("W.DWT1DForward(J=2, wave='db3', mode='reflect').to(x)(x)[0]", "x: normal(1, 2, 24)"),
            (
                "W.DWTInverse(wave='db2', mode='symmetric').to(x)((x, [y]))",
                "x: normal(1, 1, 8, 8); y: normal(1, 1, 3, 8, 8)",
            ),
            ("W.DTCWTForward(J=2).to(x)(x)[0]", "x: normal(1, 1, 16, 16)"),
            ("W.ScatLayer().to(x)(x)", "x: normal(1, 1, 16, 16)"),
            ("W.DWT1DInverse(wave='db2', mode='zero').to(x)((x, [y]))", "x: normal(1, 1, 8); y: normal(1, 1, 8)"),
        ),
    ),
    (
        "ptwt",
        "import ptwt\n",
        (
            ("ptwt.wavedec(x, 'db3', level=2, mode='zero')", "x: normal(2, 24)"),
            ("ptwt.wavedec2(x, 'db2', level=1, mode='reflect')[0]", "x: normal(1, 12, 14)"),
            ("ptwt.waverec(ptwt.wavedec(x, 'db2', level=2), 'db2')", "x: normal(2, 24)"),
            ("ptwt.cwt(x, torch.tensor([1.0, 2.0]), 'mexh')[0]", "x: normal(2, 24)"),
            ("ptwt.swt(x, 'haar', level=2)", "x: normal(2, 24)"),
        ),
    ),
    (
        "auraloss",
        "import auraloss.time as A\nimport auraloss.freq as Q\n",
        (
            ("A.SISDRLoss()(x, y)", _SIGNALS),
            ("A.ESRLoss()(x, y)", _SIGNALS),
            ("A.DCLoss()(x, y)", _SIGNALS),
            ("A.LogCoshLoss()(x, y)", _SIGNALS),
            ("A.SNRLoss()(x, y)", _SIGNALS),
            ("A.SDSDRLoss()(x, y)", _SIGNALS),
            ("Q.STFTLoss(fft_size=64, hop_size=16, win_length=64)(x, y)", _SIGNALS),
            ("Q.MultiResolutionSTFTLoss([64, 32], [16, 8], [64, 32])(x, y)", _SIGNALS),
        ),
    ),
    (
        "rotary-embedding-torch",
        "from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb\n",
        (
            ("RotaryEmbedding(8).to(x).rotate_queries_or_keys(x)", "x: normal(1, 2, 6, 8)"),
            (
                "RotaryEmbedding(4, use_xpos=True).to(x).rotate_queries_and_keys(x, y)",
                "x: normal(1, 2, 6, 8); y: normal(1, 2, 6, 8)",
            ),
        ),
    ),
    (
        "x-transformers",
        "from x_transformers.x_transformers import Attention, Encoder, FeedForward, RMSNorm, ScaleNorm, GRUGating\n",
        (
            ("module: Attention(16, dim_head=4, heads=2)", _SEQUENCE),
            ("module: Attention(16, dim_head=4, heads=2, causal=True, qk_norm=True)", _SEQUENCE),
            ("module: Attention(16, dim_head=4, heads=2, sparse_topk=3)", _SEQUENCE),
            ("module: FeedForward(16, glu=True, swish=True)", _SEQUENCE),
            ("module: FeedForward(16, relu_squared=True)", _SEQUENCE),
            ("module: ScaleNorm(16)", _SEQUENCE),
            ("module: Encoder(dim=16, depth=1, heads=2, attn_dim_head=64, rotary_pos_emb=True)", _SEQUENCE),
            ("module: Encoder(dim=16, depth=1, heads=2, attn_dim_head=4, sandwich_norm=True)", _SEQUENCE),
        ),
    ),
    (
        "local-attention",
        "from local_attention import LocalAttention\n",
        (
            (
                "LocalAttention(window_size=4, causal=True, dim=8).to(q)(q, k, v)",
                "q: normal(1, 2, 8, 8); k: normal(1, 2, 8, 8); v: normal(1, 2, 8, 8)",
            ),
            (
                "LocalAttention(window_size=4, use_xpos=True, causal=True, dim=8).to(q)(q, k, v)",
                "q: normal(1, 2, 8, 8); k: normal(1, 2, 8, 8); v: normal(1, 2, 8, 8)",
            ),
        ),
    ),
    (
        "performer-pytorch",
        "from performer_pytorch.performer_pytorch import FastAttention, softmax_kernel, linear_attention, gaussian_orthogonal_random_matrix\n",
        (
            (
                "module: FastAttention(8, nb_features=16)",
                "q: normal(1, 2, 8, 8); k: normal(1, 2, 8, 8); v: normal(1, 2, 8, 8)",
            ),
            (
                "module: FastAttention(8, nb_features=16, generalized_attention=True)",
                "q: normal(1, 2, 8, 8); k: normal(1, 2, 8, 8); v: normal(1, 2, 8, 8)",
            ),
            (
                "linear_attention(q.exp(), k.exp(), v)",
                "q: normal(1, 2, 8, 8); k: normal(1, 2, 8, 8); v: normal(1, 2, 8, 8)",
            ),
        ),
    ),
    (
        "nystrom-attention",
        "from nystrom_attention.nystrom_attention import NystromAttention, moore_penrose_iter_pinv\n",
        (
            ("moore_penrose_iter_pinv(x.softmax(-1), 6)", "x: normal(1, 4, 4)"),
            ("module: NystromAttention(16, dim_head=4, heads=2, num_landmarks=4)", _SEQUENCE),
        ),
    ),
    (
        "linformer",
        "from linformer import LinformerSelfAttention\n",
        (("module: LinformerSelfAttention(16, 8, k=4, heads=2)", _SEQUENCE),),
    ),
    (
        "reformer-pytorch",
        "from reformer_pytorch.reversible import ReversibleSequence\nfrom torch import nn\n",
        (
            (
                "module: ReversibleSequence(nn.ModuleList([nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)])]))",
                _SEQUENCE,
            ),
        ),
    ),
    (
        "egnn-pytorch",
        "from egnn_pytorch import EGNN\n",
        (
            ("module: EGNN(dim=8)", "x: normal(1, 5, 8); y: normal(1, 5, 3)"),
            ("module: EGNN(dim=8, norm_coors=True, soft_edges=True)", "x: normal(1, 5, 8); y: normal(1, 5, 3)"),
        ),
    ),
    (
        "invariant-point-attention",
        "from invariant_point_attention import InvariantPointAttention\n",
        (
            (
                "InvariantPointAttention(dim=8, heads=2, require_pairwise_repr=False).to(x)(x, rotations=torch.eye(3).to(x).expand(1, 5, 3, 3), translations=y)",
                "x: normal(1, 5, 8); y: normal(1, 5, 3)",
            ),
        ),
    ),
    (
        "soft-moe-pytorch",
        "from soft_moe_pytorch import SoftMoE\n",
        (("module: SoftMoE(16, seq_len=8, num_experts=2)", _SEQUENCE),),
    ),
    (
        "hyper-connections",
        "from hyper_connections import HyperConnections\n",
        (("module: HyperConnections(2, dim=16, branch=torch.nn.Linear(16, 16))", "x: normal(4, 8, 16)"),),
    ),
    (
        "torch-harmonics",
        "import torch_harmonics as H\n",
        (("torch.view_as_real(H.RealSHT(8, 16, grid='equiangular').to(x.device)(x.double()))", "x: normal(1, 8, 16)"),),
    ),
    (
        "info-nce-pytorch",
        "from info_nce import InfoNCE\n",
        (("InfoNCE()(x, y)", _XY), ("InfoNCE(negative_mode='unpaired')(x, y, x * y)", _XY)),
    ),
    (
        "einx",
        "import einx\n",
        (
            ("einx.sum('a [b]', x)", _X),
            ("einx.dot('a [b], c [b] -> a c', x, y)", _XY),
            ("einx.softmax('a [b]', x)", _X),
            ("einx.get_at('[a] b, c -> c b', x, torch.tensor([1, 0, 1]))", _X),
            ("einx.logsumexp('[a] b', x)", _X),
        ),
    ),
    (
        "einops",
        "from einops import rearrange, reduce, repeat, einsum, pack\n",
        (
            ("rearrange(x, 'a (b c) -> c (b a)', b=2)", _X),
            ("reduce(x, 'a (b c) -> b', 'max', b=2)", _X),
            ("reduce(x, 'a (b c) -> b a', 'prod', b=2)", _X),
            ("repeat(x, 'a b -> (b 2) a')", _X),
            ("einsum(x, y, 'a b, c b -> a c')", _XY),
            ("pack([x, y], 'a *')[0]", _XY),
        ),
    ),
    (
        "diffusers",
        "from diffusers.models.embeddings import get_timestep_embedding, apply_rotary_emb\nfrom diffusers.models import normalization as N, activations as A, upsampling as U, downsampling as D\n",
        (
            ("get_timestep_embedding(x, 8)", "x: uniform(5)"),
            ("module: A.GEGLU(16, 8)", _SEQUENCE),
            ("module: A.SwiGLU(16, 8)", _SEQUENCE),
            ("module: N.RMSNorm(16, 1e-6)", _SEQUENCE),
            ("module: N.LpNorm()", _SEQUENCE),
            ("module: N.GlobalResponseNorm(3)", "x: normal(1, 4, 5, 3)"),
            ("U.upfirdn2d_native(x, k, up=2, pad=(2, 1))", "x: normal(1, 2, 6, 6); k: normal(3, 3)"),
            ("D.downsample_2d(x, k, 2)", "x: normal(1, 2, 6, 6); k: uniform(4, 4)"),
            ("U.upsample_2d(x, k, 2)", "x: normal(1, 2, 6, 6); k: uniform(4, 4)"),
            ("apply_rotary_emb(x, (c, s), use_real=True)", "x: normal(1, 2, 6, 8); c: normal(6, 8); s: normal(6, 8)"),
            ("module: N.AdaLayerNormContinuous(16, 4)", "x: normal(2, 8, 16); y: normal(2, 4)"),
        ),
    ),
    ("loralib", "import loralib\n", (("module: loralib.Linear(6, 5, r=2)", _X),)),
    (
        "g-mlp-pytorch",
        "from g_mlp_pytorch.g_mlp_pytorch import gMLPBlock\n",
        (
            ("module: gMLPBlock(dim=16, dim_ff=16, seq_len=8)", _SEQUENCE),
            ("module: gMLPBlock(dim=16, dim_ff=16, seq_len=8, causal=True, heads=2)", _SEQUENCE),
        ),
    ),
)


def descriptions() -> list[Description]:
    """Return every function in the table, in a fixed order."""
    return [
        Description(package, call, inputs, setup) for package, setup, entries in PACKAGES for call, inputs in entries
    ]
