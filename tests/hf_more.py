"""Further architectures of the transformers library from small random configurations, in its default implementation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

VOCAB, LENGTH = 7, 4
IDS = torch.arange(8).reshape(2, LENGTH) % VOCAB


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model class with a tiny config and the inputs it is called with."""

    name: str
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    loss: str = "cross_entropy"

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model in evaluation mode, without a cache among its outputs."""
        config = getattr(transformers, self.config)(**self.options)
        model = getattr(transformers, self.model)(config)
        return model.eval(), (), dict(self.inputs)


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 3,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 3,
    "decoder_ffn_dim": 3,
    "max_position_embeddings": LENGTH,
    "dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 3,
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 3,
}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 3,
    "max_position_embeddings": LENGTH + 2,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS}


def image(*shape: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(*shape, generator=torch.Generator().manual_seed(0))}


def causal(name: str, prefix: str, **options: Any) -> Architecture:
    return Architecture(
        name=name,
        model=f"{prefix}ForCausalLM",
        config=f"{prefix}Config",
        options=TEXT | options,
        inputs={"input_ids": IDS, "use_cache": False},
    )


def other(
    name: str, model: str, config: str, options: dict[str, Any], inputs: dict[str, Any], loss: str = "cross_entropy"
) -> Architecture:
    return Architecture(name=name, model=model, config=config, options=options, inputs=inputs, loss=loss)


MORE: list[Architecture] = [
    causal("OLMo", "Olmo"),
    causal("OLMo 2", "Olmo2"),
    causal("Cohere", "Cohere"),
    causal("Cohere 2", "Cohere2"),
    causal("GLM", "Glm"),
    causal("GLM 4", "Glm4"),
    causal("Gemma", "Gemma"),
    causal("Granite", "Granite"),
    causal("Phi", "Phi", num_key_value_heads=2),
    causal("StableLM", "StableLm"),
    causal("StarCoder 2", "Starcoder2"),
    causal("Nemotron", "Nemotron"),
    causal("Persimmon", "Persimmon"),
    causal("SmolLM 3", "SmolLM3", no_rope_layers=[1]),
    causal("Helium", "Helium"),
    causal("Arcee", "Arcee"),
    causal("ERNIE 4.5", "Ernie4_5"),
    causal("Exaone 4", "Exaone4"),
    causal("Seed-OSS", "SeedOss"),
    causal("OLMoE", "Olmoe", experts_implementation="eager", num_experts=3, num_experts_per_tok=2),
    causal(
        "Qwen 2 mixture",
        "Qwen2Moe",
        experts_implementation="batched_mm",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=2,
        shared_expert_intermediate_size=2,
    ),
    causal(
        "Granite mixture", "GraniteMoe", experts_implementation="batched_mm", num_local_experts=3, num_experts_per_tok=2
    ),
    causal("GPT-OSS", "GptOss", experts_implementation="eager", num_local_experts=3, num_experts_per_tok=2),
    causal(
        "DeepSeek-V2",
        "DeepseekV2",
        experts_implementation="eager",
        num_key_value_heads=2,
        moe_intermediate_size=2,
        n_routed_experts=3,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=3,
        kv_lora_rank=2,
        qk_rope_head_dim=2,
        qk_nope_head_dim=2,
        v_head_dim=2,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
    ),
    other(
        "Mamba (transformers)",
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "state_size": 2,
            "num_hidden_layers": 1,
            "expand": 1,
            "conv_kernel": 2,
            "time_step_rank": 2,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "Falcon-Mamba",
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "state_size": 2,
            "num_hidden_layers": 1,
            "expand": 1,
            "conv_kernel": 2,
            "time_step_rank": 2,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "Mamba 2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "state_size": 2,
            "num_hidden_layers": 1,
            "expand": 1,
            "conv_kernel": 2,
            "num_heads": 2,
            "head_dim": 2,
            "n_groups": 1,
            "chunk_size": 2,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "RWKV (transformers)",
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": VOCAB,
            "context_length": LENGTH,
            "hidden_size": 4,
            "num_hidden_layers": 2,
            "attention_hidden_size": 4,
            "intermediate_size": 3,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "Jamba",
        "JambaForCausalLM",
        "JambaConfig",
        TEXT
        | {
            "num_hidden_layers": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 2,
            "mamba_d_conv": 2,
            "mamba_expand": 1,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
            "experts_implementation": "eager",
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "Falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": VOCAB, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_hidden_size": 3},
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 4, "n_layer": 1, "n_head": 2},
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "GPT-J",
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": VOCAB,
            "n_embd": 4,
            "n_layer": 1,
            "n_head": 1,
            "n_inner": 3,
            "n_positions": LENGTH,
            "rotary_dim": 2,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "num_layers": 1,
            "num_heads": 2,
            "intermediate_size": 3,
            "max_position_embeddings": LENGTH,
            "attention_types": [[["global"], 1]],
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "CodeGen",
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "vocab_size": VOCAB,
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 4,
            "n_inner": 3,
            "n_positions": LENGTH,
            "n_ctx": LENGTH,
            "rotary_dim": 2,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    other(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 4,
            "d_kv": 2,
            "d_ff": 3,
            "num_layers": 1,
            "num_heads": 2,
            "relative_attention_num_buckets": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        PAIR | {"use_cache": False},
    ),
    other(
        "T5, gated",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 4,
            "d_kv": 2,
            "d_ff": 3,
            "num_layers": 1,
            "num_heads": 2,
            "relative_attention_num_buckets": 4,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
        },
        PAIR | {"use_cache": False},
    ),
    other("BART", "BartForConditionalGeneration", "BartConfig", SEQ2SEQ, PAIR | {"use_cache": False}),
    other(
        "Pegasus",
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        SEQ2SEQ | {"pad_token_id": 0},
        PAIR | {"use_cache": False},
    ),
    other(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 3, "max_source_positions": 3, "max_target_positions": LENGTH, "pad_token_id": None},
        {
            "input_features": torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)),
            "decoder_input_ids": IDS,
            "use_cache": False,
        },
    ),
    other(
        "RoBERTa",
        "RobertaForMaskedLM",
        "RobertaConfig",
        ENCODER | {"pad_token_id": 1, "max_position_embeddings": LENGTH + 2},
        {"input_ids": IDS},
    ),
    other(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": 4,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 3,
            "max_position_embeddings": LENGTH,
            "dropout": 0.0,
            "pad_token_id": None,
        },
        {"input_ids": IDS},
    ),
    other(
        "ELECTRA",
        "ElectraForMaskedLM",
        "ElectraConfig",
        ENCODER | {"embedding_size": 3, "max_position_embeddings": LENGTH},
        {"input_ids": IDS},
    ),
    other(
        "ALBERT",
        "AlbertForMaskedLM",
        "AlbertConfig",
        ENCODER | {"embedding_size": 3, "num_hidden_layers": 2, "max_position_embeddings": LENGTH},
        {"input_ids": IDS},
    ),
    other(
        "DeBERTa",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER | {"max_position_embeddings": LENGTH, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        {"input_ids": IDS},
    ),
    other(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 3,
            "max_position_embeddings": LENGTH,
            "pad_token_id": None,
            "local_attention": 4,
            "reference_compile": False,
        },
        {"input_ids": IDS},
    ),
    other(
        "FNet",
        "FNetForMaskedLM",
        "FNetConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "intermediate_size": 3,
            "max_position_embeddings": LENGTH,
            "type_vocab_size": 2,
            "hidden_dropout_prob": 0.0,
            "pad_token_id": None,
        },
        {"input_ids": IDS},
    ),
    other(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {
                "vocab_size": VOCAB,
                "hidden_size": 4,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 3,
                "max_position_embeddings": LENGTH,
                "projection_dim": 3,
                "eos_token_id": 6,
                "pad_token_id": None,
                "bos_token_id": None,
            },
            "vision_config": VISION | {"projection_dim": 3},
            "projection_dim": 3,
        },
        {"input_ids": IDS} | image(2, 1, 4, 4),
        "regression",
    ),
    other("CLIP vision", "CLIPVisionModel", "CLIPVisionConfig", VISION, image(2, 1, 4, 4), "regression"),
    other(
        "SigLIP vision",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        VISION | {"vision_use_head": False},
        image(2, 1, 4, 4),
        "regression",
    ),
    other("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", VISION | {"mlp_ratio": 1}, image(2, 1, 4, 4)),
    other("DeiT", "DeiTForImageClassification", "DeiTConfig", VISION, image(2, 1, 4, 4)),
    other("BEiT", "BeitForImageClassification", "BeitConfig", VISION, image(2, 1, 4, 4)),
    other(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 8,
            "patch_size": 2,
            "num_channels": 1,
            "embed_dim": 4,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "mlp_ratio": 1.0,
            "num_labels": 3,
            "drop_path_rate": 0.0,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "SegFormer",
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "num_channels": 1,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [4, 4],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [1, 1],
            "num_labels": 3,
            "hidden_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "ConvNeXt (transformers)",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "num_channels": 1,
            "patch_size": 2,
            "num_stages": 2,
            "hidden_sizes": [2, 3],
            "depths": [1, 1],
            "num_labels": 3,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "ConvNeXt 2",
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {
            "num_channels": 1,
            "patch_size": 2,
            "num_stages": 2,
            "hidden_sizes": [2, 3],
            "depths": [1, 1],
            "num_labels": 3,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "ResNet (transformers)",
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "num_channels": 1,
            "embedding_size": 2,
            "hidden_sizes": [2, 3],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 3,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "RegNet",
        "RegNetForImageClassification",
        "RegNetConfig",
        {
            "num_channels": 1,
            "embedding_size": 4,
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "groups_width": 4,
            "num_labels": 3,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "PoolFormer",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {
            "num_channels": 1,
            "patch_size": 3,
            "stride": 2,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [2, 3],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "mlp_ratio": 1.0,
            "num_labels": 3,
        },
        image(2, 1, 8, 8),
    ),
    other(
        "Wav2Vec 2",
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 3,
            "conv_dim": [3, 3],
            "conv_stride": [2, 2],
            "conv_kernel": [3, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 2,
            "num_conv_pos_embedding_groups": 2,
            "hidden_dropout": 0.0,
            "apply_spec_augment": False,
        },
        {"input_values": torch.randn(2, 24, generator=torch.Generator().manual_seed(0))},
        "regression",
    ),
]
"""Beside the families of `hf_zoo`."""
