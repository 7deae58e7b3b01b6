"""Tiny models built by packages nobody here wrote, as their documentation builds them.

None of the packages is needed to use or to test this library. `PACKAGES` holds the versions that were measured; install
them without their dependencies (`pip install --no-deps --target DIR name==version …`) and put DIR on PYTHONPATH.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = {
    "axial-attention": "0.6.1",
    "bottleneck-transformer-pytorch": "0.1.4",
    "conformer": "0.3.2",
    "efficientnet-pytorch": "0.7.1",
    "egnn-pytorch": "0.2.8",
    "einops": "0.8.2",
    "g-mlp-pytorch": "0.1.5",
    "gateloop-transformer": "0.2.5",
    "glom-pytorch": "0.0.14",
    "halonet-pytorch": "0.0.5",
    "isab-pytorch": "0.3.0",
    "iTransformer": "0.8.1",
    "lambda-networks": "0.4.0",
    "lightning": "2.6.6",
    "linear-attention-transformer": "0.19.1",
    "litgpt": "0.5.13",
    "mambapy": "1.2.0",
    "Mega-pytorch": "0.1.0",
    "memory-efficient-attention-pytorch": "0.1.6",
    "minGRU-pytorch": "0.2.1",
    "mixture-of-experts": "0.2.3",
    "mlp-mixer-pytorch": "0.3.1",
    "monai": "1.6.1",
    "nbeats-pytorch": "1.8.0",
    "nystrom-attention": "0.0.14",
    "PaLM-pytorch": "0.2.2",
    "perceiver-pytorch": "0.11.0",
    "performer-pytorch": "1.1.4",
    "product-key-memory": "0.3.0",
    "pytorch-tabnet": "4.1.0",
    "pytorch-tcn": "1.2.3",
    "reformer-pytorch": "1.4.4",
    "rtdl": "0.0.13",
    "sinkhorn-transformer": "0.11.4",
    "siren-pytorch": "0.1.7",
    "slot-attention": "1.5.2",
    "soft-moe-pytorch": "0.1.9",
    "st-moe-pytorch": "0.1.8",
    "tab-transformer-pytorch": "0.6.1",
    "tabm": "0.0.3",
    "taylor-series-linear-attention": "0.2.0",
    "torch-geometric": "2.8.1",
    "unet": "0.8.1",
    "x-transformers": "2.31.10",
    "x-unet": "0.5.0",
}

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
TOKENS = torch.arange(8).reshape(2, 4) % 7


def of(path: str) -> Any:
    """The object at package.module.name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def litgpt(width: int = 8, **options: Any) -> Built:
    tiny = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": width,
        "head_size": width // 2,
        "intermediate_size": width + 2,
        "block_size": 4,
        "vocab_size": 7,
        "padded_vocab_size": 7,
    }
    config = of("litgpt.Config").from_name(options.pop("name"), **(tiny | options))
    return of("litgpt.GPT")(config), (TOKENS,), {}


def x_transformers(width: int = 8, **options: Any) -> Built:
    tiny = {"dim": width, "depth": 1, "heads": 2, "attn_dim_head": width // 2, "ff_mult": 1}
    wrapper = options.pop("wrapper", {})
    model = of("x_transformers.TransformerWrapper")(
        num_tokens=7, max_seq_len=4, attn_layers=of("x_transformers.Decoder")(**(tiny | options)), **wrapper
    )
    return model, (TOKENS,), {}


def x_encoder(width: int = 4) -> Built:
    layers = of("x_transformers.Encoder")(dim=width, depth=1, heads=2, attn_dim_head=width // 2, ff_mult=1)
    model = of("x_transformers.ViTransformerWrapper")(
        image_size=4, patch_size=2, channels=1, num_classes=3, attn_layers=layers
    )
    return model, (torch.randn(2, 1, 4, 4),), {}


def x_continuous(width: int = 4) -> Built:
    layers = of("x_transformers.Encoder")(dim=width, depth=1, heads=2, attn_dim_head=width // 2, ff_mult=1)
    model = of("x_transformers.ContinuousTransformerWrapper")(dim_in=3, dim_out=2, max_seq_len=4, attn_layers=layers)
    return model, (torch.randn(2, 4, 3),), {}


def x_encoder_decoder(width: int = 4) -> Built:
    sides = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {
            "num_tokens": 7,
            "depth": 1,
            "heads": 2,
            "max_seq_len": 4,
            "attn_dim_head": width // 2,
            "ff_mult": 1,
        }.items()
    }

    class Translating(nn.Module):
        """The model without its own loss, from source and target tokens to logits."""

        def __init__(self) -> None:
            super().__init__()
            self.model = of("x_transformers.XTransformer")(dim=width, **sides)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.model.encoder(source, return_embeddings=True)
            return self.model.decoder.net(target, context=memory)

    return Translating(), (TOKENS, TOKENS), {}


def plain(path: str, *inputs: Tensor, **options: Any) -> Built:
    """A class called with options, on example inputs."""
    return of(path)(**options), inputs, {}


def mamba(width: int = 4) -> Built:
    config = of("mambapy.mamba.MambaConfig")(
        d_model=width, n_layers=1, d_state=2, dt_rank=2, d_conv=2, pscan=False, expand_factor=1
    )
    return of("mambapy.mamba.Mamba")(config), (torch.randn(2, 4, width),), {}


def graph(path: str, *, edges: bool = True, **options: Any) -> Built:
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 4], [1, 2, 3, 4, 0, 2, 0, 1]])
    return of(path)(**options), (torch.randn(5, 3), edge_index), {}


def efficientnet() -> Built:
    utils = import_module("efficientnet_pytorch.utils")
    blocks = [
        utils.BlockArgs(
            kernel_size=3,
            num_repeat=1,
            input_filters=32,
            output_filters=3,
            expand_ratio=2,
            id_skip=True,
            stride=[1],
            se_ratio=0.5,
        )
    ]
    options = utils.GlobalParams(
        width_coefficient=None,
        depth_coefficient=None,
        image_size=8,
        dropout_rate=0.0,
        num_classes=3,
        batch_norm_momentum=0.99,
        batch_norm_epsilon=1e-3,
        drop_connect_rate=0.0,
        depth_divisor=1,
        min_depth=None,
        include_top=True,
    )
    model = of("efficientnet_pytorch.EfficientNet")(blocks, options)
    return model.eval(), (torch.randn(2, 3, 8, 8),), {}


def ft_transformer() -> Built:
    model = of("rtdl.FTTransformer").make_baseline(
        n_num_features=3,
        cat_cardinalities=None,
        d_token=8,
        n_blocks=1,
        attention_dropout=0.0,
        ffn_d_hidden=3,
        ffn_dropout=0.0,
        residual_dropout=0.0,
        d_out=2,
    )

    class OnNumbers(nn.Module):
        """The model for a table without categories."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x, None)

    return OnNumbers(), (torch.randn(4, 3),), {}


def tab_ft() -> Built:
    model = of("tab_transformer_pytorch.FTTransformer")(
        categories=(3, 4), num_continuous=2, dim=4, dim_out=2, depth=1, heads=2, dim_head=2, num_residual_streams=1
    )
    return model, (torch.tensor([[0, 3], [2, 0], [1, 1]]), torch.randn(3, 2)), {}


def nbeats() -> Built:
    network = of("nbeats_pytorch.model.NBeatsNet")
    model = network(
        stack_types=(network.GENERIC_BLOCK, network.TREND_BLOCK),
        forecast_length=2,
        backcast_length=4,
        thetas_dim=(2, 2),
        nb_blocks_per_stack=1,
        hidden_layer_units=3,
    )
    return model, (torch.randn(3, 4),), {}


BUILDERS: dict[str, tuple[str, str, Any]] = {
    "litgpt pythia": ("litgpt", "cross_entropy", partial(litgpt, name="pythia-14m")),
    "litgpt llama 3": ("litgpt", "cross_entropy", partial(litgpt, name="Llama-3.2-1B", n_query_groups=1)),
    "litgpt llama 2": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Llama-2-7b-hf", n_query_groups=2)),
    "litgpt qwen 2.5": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Qwen2.5-0.5B", n_query_groups=1)),
    "litgpt qwen 3": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Qwen3-0.6B", n_query_groups=1)),
    "litgpt gemma": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Gemma-2b", n_query_groups=1)),
    "litgpt gemma 2": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Gemma-2-2b", n_query_groups=1)),
    "litgpt gemma 3": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="Gemma-3-1b-it", n_query_groups=1)),
    "litgpt phi 2": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="phi-2")),
    "litgpt phi 3": (
        "litgpt",
        "cross_entropy",
        partial(litgpt, width=4, name="Phi-3-mini-4k-instruct", n_query_groups=2),
    ),
    "litgpt falcon": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="falcon-7b", n_query_groups=1)),
    "litgpt olmo": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="OLMo-1B-hf", n_query_groups=2)),
    "litgpt olmo 2": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="OLMo-2-1124-7B", n_query_groups=2)),
    "litgpt stablelm": ("litgpt", "cross_entropy", partial(litgpt, width=4, name="stablelm-base-alpha-3b")),
    "litgpt mixtral": (
        "litgpt",
        "cross_entropy",
        partial(litgpt, width=4, name="Mixtral-8x7B-v0.1", n_query_groups=1, n_expert=3, n_expert_per_token=2),
    ),
    "x-transformers": ("x-transformers", "cross_entropy", x_transformers),
    "x-transformers, rotary, GLU, RMS": (
        "x-transformers",
        "cross_entropy",
        partial(
            x_transformers,
            rotary_pos_emb=True,
            rotary_emb_dim=4,
            ff_glu=True,
            ff_swish=True,
            use_rmsnorm=True,
            ff_no_bias=True,
            wrapper={"use_abs_pos_emb": False},
        ),
    ),
    "x-transformers, ReLU², grouped, QK norm": (
        "x-transformers",
        "cross_entropy",
        partial(x_transformers, ff_relu_squared=True, attn_kv_heads=1, attn_qk_norm=True),
    ),
    "x-transformers, ALiBi, sandwich norm": (
        "x-transformers",
        "cross_entropy",
        partial(x_transformers, width=4, alibi_pos_bias=True, sandwich_norm=True, wrapper={"use_abs_pos_emb": False}),
    ),
    "x-transformers, T5 bias, scale norm": (
        "x-transformers",
        "cross_entropy",
        partial(x_transformers, width=4, rel_pos_bias=True, use_scalenorm=True, wrapper={"tie_embedding": True}),
    ),
    "x-transformers, gated values, post-norm": (
        "x-transformers",
        "cross_entropy",
        partial(x_transformers, width=4, pre_norm=False, attn_gate_values=True, residual_attn=False),
    ),
    "x-transformers, talking heads, memory keys": (
        "x-transformers",
        "cross_entropy",
        partial(x_transformers, width=4, attn_num_mem_kv=2, attn_pre_talking_heads=True),
    ),
    "x-transformers ViT": ("x-transformers", "cross_entropy", x_encoder),
    "x-transformers, continuous": ("x-transformers", "regression", x_continuous),
    "x-transformers, encoder–decoder": ("x-transformers", "cross_entropy", x_encoder_decoder),
    "mambapy": ("mambapy", "regression", mamba),
    "mlp-mixer-pytorch": (
        "mlp-mixer-pytorch",
        "cross_entropy",
        partial(
            plain,
            "mlp_mixer_pytorch.MLPMixer",
            torch.randn(2, 1, 4, 4),
            image_size=4,
            channels=1,
            patch_size=2,
            dim=4,
            depth=1,
            num_classes=3,
            expansion_factor=1,
        ),
    ),
    "g-mlp-pytorch": (
        "g-mlp-pytorch",
        "cross_entropy",
        partial(plain, "g_mlp_pytorch.gMLP", TOKENS, num_tokens=7, dim=4, depth=1, seq_len=4, ff_mult=2),
    ),
    "perceiver-pytorch": (
        "perceiver-pytorch",
        "cross_entropy",
        partial(
            plain,
            "perceiver_pytorch.Perceiver",
            torch.randn(2, 4, 3),
            num_freq_bands=1,
            depth=1,
            max_freq=2.0,
            input_channels=3,
            input_axis=1,
            num_latents=2,
            latent_dim=4,
            latent_heads=2,
            cross_dim_head=2,
            latent_dim_head=2,
            num_classes=3,
        ),
    ),
    "linear-attention-transformer": (
        "linear-attention-transformer",
        "cross_entropy",
        partial(
            plain,
            "linear_attention_transformer.LinearAttentionTransformerLM",
            TOKENS,
            num_tokens=7,
            dim=4,
            depth=1,
            max_seq_len=4,
            heads=2,
            dim_head=2,
            causal=False,
            use_axial_pos_emb=False,
        ),
    ),
    "performer-pytorch": (
        "performer-pytorch",
        "cross_entropy",
        partial(
            plain,
            "performer_pytorch.PerformerLM",
            TOKENS,
            num_tokens=7,
            max_seq_len=4,
            dim=4,
            depth=1,
            heads=2,
            dim_head=2,
            ff_mult=1,
            auto_check_redraw=False,
            generalized_attention=True,
        ),
    ),
    "nystrom-attention": (
        "nystrom-attention",
        "regression",
        partial(
            plain,
            "nystrom_attention.Nystromformer",
            torch.randn(2, 4, 4),
            dim=4,
            depth=1,
            dim_head=2,
            heads=2,
            num_landmarks=2,
            attn_values_residual_conv_kernel=3,
        ),
    ),
    "PaLM-pytorch": (
        "PaLM-pytorch",
        "cross_entropy",
        partial(plain, "palm_pytorch.PaLM", TOKENS, num_tokens=7, dim=4, depth=1, heads=2, dim_head=2, ff_mult=1),
    ),
    "minGRU-pytorch": (
        "minGRU-pytorch",
        "regression",
        partial(plain, "minGRU_pytorch.minGRU", torch.randn(2, 4, 3), dim=3, expansion_factor=1.5),
    ),
    "gateloop-transformer": (
        "gateloop-transformer",
        "cross_entropy",
        partial(
            plain,
            "gateloop_transformer.Transformer",
            TOKENS,
            dim=4,
            num_tokens=7,
            depth=1,
            dim_head=2,
            heads=2,
            ff_mult=1,
            use_gate_looped_attn=False,
        ),
    ),
    "Mega-pytorch": (
        "Mega-pytorch",
        "cross_entropy",
        partial(
            plain,
            "mega_pytorch.Mega",
            TOKENS,
            num_tokens=7,
            dim=4,
            depth=1,
            ff_mult=1,
            ema_heads=2,
            attn_dim_qk=2,
            attn_dim_value=4,
            laplacian_attn_fn=True,
        ),
    ),
    "conformer": (
        "conformer",
        "regression",
        partial(
            plain,
            "conformer.Conformer",
            torch.randn(2, 4, 4),
            dim=4,
            depth=1,
            dim_head=2,
            heads=2,
            ff_mult=1,
            conv_expansion_factor=1,
            conv_kernel_size=3,
        ),
    ),
    "axial-attention": (
        "axial-attention",
        "regression",
        partial(plain, "axial_attention.AxialAttention", torch.randn(2, 3, 3, 4), dim=4, dim_index=-1, heads=2),
    ),
    "lambda-networks": (
        "lambda-networks",
        "regression",
        partial(plain, "lambda_networks.LambdaLayer", torch.randn(2, 4, 4, 4), dim=4, dim_k=2, n=4, heads=2, dim_out=4),
    ),
    "halonet-pytorch": (
        "halonet-pytorch",
        "regression",
        partial(
            plain,
            "halonet_pytorch.HaloAttention",
            torch.randn(1, 4, 4, 4),
            dim=4,
            block_size=2,
            halo_size=1,
            dim_head=2,
            heads=2,
        ),
    ),
    "isab-pytorch": (
        "isab-pytorch",
        "regression",
        partial(plain, "isab_pytorch.ISAB", torch.randn(2, 4, 4), dim=4, heads=2, num_latents=2),
    ),
    "slot-attention": (
        "slot-attention",
        "regression",
        partial(plain, "slot_attention.SlotAttention", torch.randn(2, 4, 4), num_slots=2, dim=4, iters=2, hidden_dim=4),
    ),
    "glom-pytorch": (
        "glom-pytorch",
        "regression",
        partial(plain, "glom_pytorch.Glom", torch.randn(2, 3, 4, 4), dim=2, levels=2, image_size=4, patch_size=2),
    ),
    "memory-efficient-attention-pytorch": (
        "memory-efficient-attention-pytorch",
        "regression",
        partial(
            plain,
            "memory_efficient_attention_pytorch.Attention",
            torch.randn(2, 4, 4),
            dim=4,
            heads=2,
            dim_head=2,
            memory_efficient=True,
            q_bucket_size=2,
            k_bucket_size=2,
        ),
    ),
    "soft-moe-pytorch": (
        "soft-moe-pytorch",
        "regression",
        partial(
            plain, "soft_moe_pytorch.SoftMoE", torch.randn(2, 4, 4), dim=4, seq_len=4, num_experts=2, expert_mult=1
        ),
    ),
    "mixture-of-experts": (
        "mixture-of-experts",
        "regression",
        partial(
            plain,
            "mixture_of_experts.MoE",
            torch.randn(2, 4, 4),
            dim=4,
            num_experts=3,
            hidden_dim=2,
            second_policy_train="all",
            second_policy_eval="all",
        ),
    ),
    "taylor-series-linear-attention": (
        "taylor-series-linear-attention",
        "regression",
        partial(
            plain,
            "taylor_series_linear_attention.TaylorSeriesLinearAttn",
            torch.randn(2, 4, 4),
            dim=4,
            dim_head=2,
            heads=2,
        ),
    ),
    "product-key-memory": (
        "product-key-memory",
        "regression",
        partial(
            plain,
            "product_key_memory.PKM",
            torch.randn(2, 4, 4),
            dim=4,
            heads=2,
            num_keys=3,
            topk=2,
            dim_head=4,
        ),
    ),
    "pytorch-tcn": (
        "pytorch-tcn",
        "regression",
        partial(
            plain,
            "pytorch_tcn.TCN",
            torch.randn(2, 2, 6),
            num_inputs=2,
            num_channels=[3, 3],
            kernel_size=2,
            dropout=0.0,
            use_norm="weight_norm",
        ),
    ),
    "torch-geometric GCN": (
        "torch-geometric",
        "regression",
        partial(graph, "torch_geometric.nn.GCN", in_channels=3, hidden_channels=4, num_layers=2, out_channels=2),
    ),
    "torch-geometric GAT": (
        "torch-geometric",
        "regression",
        partial(
            graph, "torch_geometric.nn.GAT", in_channels=3, hidden_channels=4, num_layers=2, out_channels=2, heads=2
        ),
    ),
    "torch-geometric GIN": (
        "torch-geometric",
        "regression",
        partial(graph, "torch_geometric.nn.GIN", in_channels=3, hidden_channels=3, num_layers=2, out_channels=2),
    ),
    "torch-geometric GraphSAGE": (
        "torch-geometric",
        "regression",
        partial(graph, "torch_geometric.nn.GraphSAGE", in_channels=3, hidden_channels=4, num_layers=2, out_channels=2),
    ),
    "torch-geometric TransformerConv": (
        "torch-geometric",
        "regression",
        partial(graph, "torch_geometric.nn.TransformerConv", in_channels=3, out_channels=2, heads=2),
    ),
    "siren-pytorch": (
        "siren-pytorch",
        "regression",
        partial(
            plain,
            "siren_pytorch.SirenNet",
            torch.randn(4, 2),
            dim_in=2,
            dim_hidden=4,
            dim_out=2,
            num_layers=2,
            w0_initial=1.0,
        ),
    ),
    "efficientnet-pytorch": ("efficientnet-pytorch", "cross_entropy", efficientnet),
    "rtdl FT-Transformer": ("rtdl", "regression", ft_transformer),
    "rtdl ResNet": (
        "rtdl",
        "regression",
        partial(
            plain,
            "rtdl.ResNet",
            torch.randn(4, 3),
            d_in=3,
            n_blocks=1,
            d_main=4,
            d_hidden=3,
            dropout_first=0.0,
            dropout_second=0.0,
            normalization="BatchNorm1d",
            activation="ReLU",
            d_out=2,
        ),
    ),
    "tab-transformer-pytorch": ("tab-transformer-pytorch", "regression", tab_ft),
    "tabm": (
        "tabm",
        "regression",
        partial(
            plain,
            "tabm.TabM",
            torch.randn(4, 3),
            n_num_features=3,
            d_out=2,
            n_blocks=1,
            d_block=4,
            dropout=0.0,
            k=2,
            arch_type="tabm",
            start_scaling_init="random-signs",
        ),
    ),
    "nbeats-pytorch": ("nbeats-pytorch", "regression", nbeats),
    "pytorch-tabnet": (
        "pytorch-tabnet",
        "regression",
        partial(
            plain,
            "pytorch_tabnet.tab_network.TabNet",
            torch.randn(4, 3),
            input_dim=3,
            output_dim=2,
            n_d=2,
            n_a=2,
            n_steps=2,
            n_independent=1,
            n_shared=1,
            group_attention_matrix=torch.eye(3).double(),
        ),
    ),
    "egnn-pytorch": (
        "egnn-pytorch",
        "regression",
        partial(plain, "egnn_pytorch.EGNN", torch.randn(2, 3, 4), torch.randn(2, 3, 3), dim=4, m_dim=2),
    ),
    "iTransformer": (
        "iTransformer",
        "regression",
        partial(
            plain,
            "iTransformer.iTransformer",
            torch.randn(2, 4, 3),
            num_variates=3,
            lookback_len=4,
            dim=4,
            depth=1,
            heads=2,
            dim_head=2,
            ff_mult=1,
            pred_length=(2,),
            num_mem_tokens=1,
            num_residual_streams=1,
            flash_attn=False,
        ),
    ),
    "x-unet": (
        "x-unet",
        "regression",
        partial(
            plain,
            "x_unet.XUnet",
            torch.randn(1, 1, 4, 4),
            dim=4,
            channels=1,
            dim_mults=(1, 1),
            num_blocks_per_stage=(1, 1),
            num_self_attn_per_stage=(0, 0),
            nested_unet_depths=(0, 0),
        ),
    ),
    "unet": (
        "unet",
        "regression",
        partial(
            plain,
            "unet.UNet2D",
            torch.randn(1, 1, 8, 8),
            in_channels=1,
            out_classes=2,
            num_encoding_blocks=2,
            out_channels_first_layer=2,
            padding=1,
        ),
    ),
    "monai UNet": (
        "monai",
        "regression",
        partial(
            plain,
            "monai.networks.nets.UNet",
            torch.randn(1, 1, 8, 8),
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            channels=(2, 3),
            strides=(2,),
        ),
    ),
    "monai ViT": (
        "monai",
        "regression",
        partial(
            plain,
            "monai.networks.nets.ViT",
            torch.randn(2, 1, 4, 4),
            in_channels=1,
            img_size=(4, 4),
            patch_size=(2, 2),
            hidden_size=4,
            mlp_dim=3,
            num_layers=1,
            num_heads=2,
            spatial_dims=2,
            classification=True,
            num_classes=3,
        ),
    ),
    "monai SegResNet": (
        "monai",
        "regression",
        partial(
            plain,
            "monai.networks.nets.SegResNet",
            torch.randn(1, 1, 4, 4),
            spatial_dims=2,
            init_filters=2,
            in_channels=1,
            out_channels=2,
            norm=("GROUP", {"num_groups": 2}),
            blocks_down=(1, 1),
            blocks_up=(1,),
        ),
    ),
    "monai DenseNet": (
        "monai",
        "cross_entropy",
        partial(
            plain,
            "monai.networks.nets.DenseNet",
            torch.randn(2, 1, 16, 16),
            spatial_dims=2,
            in_channels=1,
            out_channels=3,
            init_features=2,
            growth_rate=2,
            block_config=(1, 1),
            bn_size=1,
        ),
    ),
    "bottleneck-transformer-pytorch": (
        "bottleneck-transformer-pytorch",
        "regression",
        partial(
            plain,
            "bottleneck_transformer_pytorch.BottleStack",
            torch.randn(2, 4, 4, 4),
            dim=4,
            fmap_size=4,
            dim_out=4,
            proj_factor=2,
            num_layers=1,
            heads=2,
            dim_head=2,
            downsample=True,
        ),
    ),
    "lightning demo transformer": (
        "lightning",
        "cross_entropy",
        partial(
            plain,
            "lightning.pytorch.demos.transformer.Transformer",
            TOKENS,
            TOKENS,
            vocab_size=7,
            ninp=4,
            nhead=2,
            nhid=3,
            nlayers=1,
            dropout=0.0,
        ),
    ),
    "sinkhorn-transformer": (
        "sinkhorn-transformer",
        "cross_entropy",
        partial(
            plain,
            "sinkhorn_transformer.SinkhornTransformerLM",
            TOKENS,
            num_tokens=7,
            dim=4,
            heads=2,
            depth=1,
            max_seq_len=4,
            bucket_size=2,
        ),
    ),
}
"""Name, package, loss and builder of every model."""

EVALUATED = {
    "efficientnet-pytorch",
    "rtdl ResNet",
    "conformer",
    "unet",
    "monai DenseNet",
    "bottleneck-transformer-pytorch",
    "pytorch-tabnet",
    "mixture-of-experts",
    "tabm",
}
"""Put into evaluation mode: running statistics of batch norms, or capacities and thresholds of routers."""

RANDOM = {
    "slot-attention": "draws its slots",
    "mixture-of-experts": "",
}
"""Models that draw random numbers in use."""
