"""Models of Hugging Face, from small configurations."""

# ruff: noqa: E501  # lists of settings, one model after the other

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.wild.zoo import Built, add, images, words

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "num_labels": 3,
    "pad_token_id": 0,
}


def build(auto: str, kind: str, example: Callable[[], Any], **changes: Any) -> Built:
    """A small model of one kind, with random weights, and an example for it."""
    import transformers

    settings = {**_SMALL, **changes}
    settings = {k: v for k, v in settings.items() if v is not None}
    config = transformers.AutoConfig.for_model(kind, **settings)
    for name in ("use_cache", "use_mamba_kernels"):
        if getattr(config, name, None):
            setattr(config, name, False)
    # Experts in one product do not run in float64.
    config._experts_implementation = "eager"
    model = getattr(transformers, auto).from_config(config)
    return model, example()


def texts() -> dict[str, torch.Tensor]:
    """Two rows of tokens."""
    tokens = words()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


_SEQ = "AutoModelForSequenceClassification"
_NO_MIDDLE: dict[str, Any] = {"intermediate_size": None}
_TEXT: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {"max_position_embeddings": 80}, "distilbert": {},
    "albert": {"embedding_size": 16}, "electra": {"embedding_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16,
                   "true_hidden_size": 16},
    "squeezebert": {"embedding_size": 32}, "deberta": {}, "deberta-v2": {},
    "mpnet": {"max_position_embeddings": 80}, "convbert": {"embedding_size": 32},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32,
               "d_head": 8, "n_head": 4, "d_inner": 48},
    "fnet": {}, "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12},
    "yoso": {}, "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": {"embedding_size": 32}, "xlm-roberta": {"max_position_embeddings": 80},
    "camembert": {"max_position_embeddings": 80}, "ernie": {}, "ibert":
    {"max_position_embeddings": 80}, "layoutlm": {}, "longformer":
    {"attention_window": 4, "max_position_embeddings": 80}, "big_bird":
    {"attention_type": "original_full"}, "megatron-bert": {},
    "data2vec-text": {"max_position_embeddings": 80}, "luke": {"entity_vocab_size": 9,
                                                                "entity_emb_size": 16,
                                                                "max_position_embeddings": 80},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2,
                   "bos_token_id": 1},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 4}, "xlnet":
    {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48,
     "max_position_embeddings": None},
    "tapas": {}, "roc_bert": {},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False,
                 "num_buckets": 4, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
                 "feed_forward_size": 48, "attention_head_size": 8},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
           "eos_token_id": 1, "decoder_start_token_id": 0},
    "mt5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "eos_token_id": 1, "decoder_start_token_id": 0},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "eos_token_id": 2},
    "mbart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4,
              "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "eos_token_id": 2},
}  # fmt: skip


def _sentences() -> dict[str, torch.Tensor]:
    tokens = words()
    tokens[:, -1] = 2
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _t5_sentences() -> dict[str, torch.Tensor]:
    tokens = words()
    tokens[:, -1] = 1
    return {"input_ids": tokens}


for _kind, _changes in _TEXT.items():
    _how = _t5_sentences if "t5" in _kind else texts
    if _kind in ("bart", "mbart"):
        _how = _sentences
    add("hf-text", _kind, partial(build, _SEQ, _kind, _how, **_changes))

_LM = "AutoModelForCausalLM"
_GQA = {"num_key_value_heads": 2, "head_dim": 8}
_CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": _NO_MIDDLE, "gpt_neo": {"attention_types": [[["global", "local"], 1]],
                                    "num_layers": 2, "num_heads": 4},
    "gpt_neox": {}, "gptj": {"rotary_dim": 4, "n_inner": 48}, "gpt_bigcode": _NO_MIDDLE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "bloom": {"n_head": 4,
                                                                 "n_layer": 2},
    "codegen": {"rotary_dim": 4, "n_inner": 48, "n_head": 4}, "llama": _GQA,
    "mistral": _GQA, "mixtral": {**_GQA, "num_local_experts": 3}, "qwen2": _GQA,
    "qwen3": _GQA, "qwen2_moe": {**_GQA, "num_experts": 3, "moe_intermediate_size": 16,
                                 "shared_expert_intermediate_size": 16,
                                 "num_experts_per_tok": 2},
    "gemma": _GQA, "gemma2": {**_GQA, "query_pre_attn_scalar": 8}, "gemma3_text": _GQA,
    "phi": {"partial_rotary_factor": 0.5}, "phi3": {**_GQA}, "stablelm": {
        "num_key_value_heads": 4}, "starcoder2": _GQA, "falcon": {"ffn_hidden_size": 48},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
    "olmo": {"num_key_value_heads": 4}, "olmo2": {"num_key_value_heads": 2},
    "smollm3": _GQA, "granite": _GQA, "cohere": {**_GQA}, "persimmon": {},
    "nemotron": {**_GQA}, "glm": {**_GQA}, "ernie4_5": _GQA, "lfm2":
    {**_GQA, "block_multiple_of": 8, "block_ff_dim": 48}, "recurrent_gemma":
    {"num_key_value_heads": 1, "lru_width": 32, "block_types":
     ["recurrent", "attention"], "attention_window_size": 8},
    "mamba": {"state_size": 4, "num_heads": None, "num_attention_heads": None},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1,
               "num_attention_heads": None, "chunk_size": 4},
    "falcon_mamba": {"state_size": 4, "num_attention_heads": None},
    "rwkv": {"attention_hidden_size": 32}, "xlstm": {"num_heads": 4,
                                                     "embedding_dim": 32},
    "bamba": {**_GQA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4,
              "mamba_n_groups": 1, "mamba_chunk_size": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
                    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                    "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1,
                    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace":
                    1},
    "biogpt": {}, "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2,
                           "attention_heads": 4},
    "openai-gpt": {"afn": "gelu"}, "ctrl": {"dff": 48}, "exaone4": _GQA, "hunyuan_v1_dense":
    _GQA, "seed_oss": _GQA, "helium": _GQA, "diffllama": _GQA,
}  # fmt: skip


def _lm() -> dict[str, torch.Tensor]:
    return {"input_ids": words()}


for _kind, _changes in _CAUSAL.items():
    add("hf-causal", _kind, partial(build, _LM, _kind, _lm, **_changes))

_IMG = "AutoModelForImageClassification"
_VIT = {"image_size": 32, "patch_size": 8}
_VISION: dict[str, dict[str, Any]] = {
    "vit": _VIT, "beit": _VIT, "data2vec-vision": _VIT, "dinov2": _VIT,
    "dinov2_with_registers": _VIT, "vit_msn": _VIT, "ijepa": _VIT, "siglip_vision_model":
    _VIT,
    "swin": {**_VIT, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
             "window_size": 2},
    "swinv2": {**_VIT, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
               "num_heads": [2, 4], "window_size": 4},
    "convnext": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    "convnextv2": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
               "depths": [1, 1, 1, 1]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
               "depths": [1, 1, 1, 1], "groups_width": 4, "layer_type": "y"},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
            "num_groups": 4},
    "poolformer": {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                  "num_attention_heads": [1, 2, 2, 4], "num_encoder_blocks": 4,
                  "decoder_hidden_size": 16},
    "pvt": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4], "num_encoder_blocks": 4, "image_size": 64},
    "pvt_v2": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
               "num_attention_heads": [1, 2, 2, 4], "num_encoder_blocks": 4,
               "image_size": 64},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes":
                  [8, 8, 16, 16, 24, 24, 32], "image_size": 64, "num_attention_heads": 4},
    "mobilevitv2": {"image_size": 64, "base_attn_unit_dims": [16, 24, 32], "width_multiplier": 0.5},
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 4},
    "mobilenet_v2": {"depth_multiplier": 0.25, "min_depth": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 64,
                     "hidden_dim": 320, "num_attention_heads": None},
    "levit": {"image_size": 64, "num_labels": 3, "hidden_sizes": [16, 24, 32], "num_attention_heads":
              [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]},
    "focalnet": {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2],
                 "focal_windows": [3, 3]},
    "hiera": {"image_size": [32, 32], "embed_dim": 16, "depths": [1, 1, 1],
              "num_heads": [1, 2, 4], "patch_stride": [4, 4], "patch_size": [7, 7],
              "masked_unit_size": [4, 4], "num_query_pool": 2},
    "swiftformer": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "vivit": {}, "textnet": {}, "perceiver": {"num_latents": 4, "d_latents": 16, "d_model": 32,
                                 "num_blocks": 1, "num_self_attends_per_block": 1,
                                 "num_self_attention_heads": 2,
                                 "num_cross_attention_heads": 2},
    "clip_vision_model": _VIT,
}  # fmt: skip


def _pixels(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(size)}


_ODD_SIZES = dict.fromkeys(("vit", "deit", "beit", "data2vec-vision", "dinov2", "dinov2_with_registers", "vit_msn", "ijepa", "dinov3_vit", "swin", "swinv2", "focalnet", "hiera", "siglip_vision_model", "clip_vision_model"), 32)  # fmt: skip
for _kind, _changes in _VISION.items():
    if _kind in ("vivit", "perceiver", "efficientnet_"):
        continue
    _auto = "AutoModel" if _kind.endswith("vision_model") else _IMG
    _size = _ODD_SIZES.get(_kind, 64)
    _more = {**_NO_MIDDLE, **_changes} if "hidden_sizes" in _changes else _changes
    if (
        "hidden_sizes" in _changes
        or "embed_dim" in _changes
        or "embed_dims" in _changes
    ):
        _more = {"hidden_size": None, **_more}
        if "num_attention_heads" not in _more:
            _more["num_attention_heads"] = None
    add(
        "hf-vision",
        _kind,
        partial(build, _auto, _kind, partial(_pixels, _size), **_more),
    )


def _video() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32)}


add("hf-vision", "videomae", partial(
    build, "AutoModelForVideoClassification", "videomae", _video, **_VIT, num_frames=4,
    tubelet_size=2))  # fmt: skip
add("hf-vision", "timesformer", partial(
    build, "AutoModelForVideoClassification", "timesformer", _video, **_VIT, num_frames=4))  # fmt: skip


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 1600)}


_CONV = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8],
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
         "num_feat_extract_layers": 2, "classifier_proj_size": 16}  # fmt: skip
for _kind in ("wav2vec2", "hubert", "sew", "unispeech", "unispeech-sat", "wavlm",
              "data2vec-audio", "sew-d", "wav2vec2-conformer"):  # fmt: skip
    add("hf-audio", _kind, partial(
        build, "AutoModelForAudioClassification", _kind, _sound, **_CONV,
        **({"squeeze_factor": 2} if "sew" in _kind else {}),
        **({"max_source_positions": 200} if "conformer" in _kind else {})))  # fmt: skip
add("hf-audio", "audio-spectrogram-transformer", partial(
    build, "AutoModelForAudioClassification", "audio-spectrogram-transformer",
    lambda: {"input_values": torch.randn(2, 32, 32)}, patch_size=8, max_length=32,
    num_mel_bins=32, frequency_stride=8, time_stride=8))  # fmt: skip
add("hf-audio", "whisper", partial(
    build, "AutoModelForAudioClassification", "whisper",
    lambda: {"input_features": torch.randn(2, 16, 40)}, d_model=32, encoder_layers=2,
    decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=20,
    classifier_proj_size=16))  # fmt: skip
add("hf-audio", "patchtst", partial(
    build, "AutoModel", "patchtst", lambda: {"past_values": torch.randn(2, 32, 3)},
    context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=32,
    ffn_dim=48, num_labels=None))  # fmt: skip
add("hf-audio", "patchtsmixer", partial(
    build, "AutoModel", "patchtsmixer", lambda: {"past_values": torch.randn(2, 32, 3)},
    context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16,
    num_labels=None))  # fmt: skip
