"""Vision: vit-pytorch, timm, pytorchcv, segmentation-models-pytorch, MONAI."""

# ruff: noqa: E501  # lists of settings, one model after the other

import importlib
from functools import partial
from typing import Any

import torch

from benchmarks.wild.zoo import Built, add, images


def _vit_pytorch(module: str, name: str, size: int = 32, **settings: Any) -> Built:
    found = importlib.import_module(f"vit_pytorch.{module}")
    return getattr(found, name)(**settings), images(size)


_PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": 32, "depth": 2, "heads": 4,
              "mlp_dim": 48}  # fmt: skip
_HEADED = {**_PLAIN, "dim_head": 8}
for _module, _name, _settings in [
    ("vit", "ViT", _HEADED), ("simple_vit", "SimpleViT", _HEADED),
    ("deepvit", "DeepViT", _HEADED), ("rvt", "RvT", _HEADED),
    ("parallel_vit", "ViT", {**_HEADED, "num_parallel_branches": 2}),
    ("learnable_memory_vit", "ViT", _HEADED), ("vit_for_small_dataset", "ViT", _HEADED),
    ("simple_vit_with_register_tokens", "SimpleViT", _HEADED),
    ("simple_vit_with_qk_norm", "SimpleViT", _HEADED),
    ("simple_vit_with_patch_dropout", "SimpleViT", _HEADED),
    ("cait", "CaiT", {**_HEADED, "cls_depth": 1}),
    ("xcit", "XCiT", {**_HEADED, "cls_depth": 1}),
    ("pit", "PiT", {**_HEADED, "depth": (1, 1)}),
    ("t2t", "T2TViT", {"image_size": 32, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48,
                       "num_classes": 3, "t2t_layers": ((7, 4), (3, 2))}),
    ("cct", "CCT", {"img_size": (32, 32), "embedding_dim": 32, "n_conv_layers": 1,
                    "kernel_size": 7, "stride": 4, "padding": 3, "num_layers": 2,
                    "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 3}),
    ("cross_vit", "CrossViT", {"image_size": 32, "num_classes": 3, "depth": 1,
                               "sm_dim": 16, "sm_patch_size": 8, "sm_enc_depth": 1,
                               "sm_enc_heads": 2, "sm_enc_mlp_dim": 32, "lg_dim": 24,
                               "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_heads": 2,
                               "lg_enc_mlp_dim": 32, "cross_attn_depth": 1,
                               "cross_attn_heads": 2}),
    ("nest", "NesT", {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2,
                      "num_hierarchies": 2, "block_repeats": (1, 1), "num_classes": 3}),
]:  # fmt: skip
    add("vit-pytorch", f"{_module}", partial(_vit_pytorch, _module, _name, **_settings))
for _module, _name, _size, _settings in [
    ("levit", "LeViT", 64, {"image_size": 64, "num_classes": 3, "stages": 3,
                            "dim": (16, 24, 32), "depth": 1, "heads": (2, 2, 4),
                            "mlp_mult": 2}),
    ("cvt", "CvT", 64, {"num_classes": 3, "s1_emb_dim": 16, "s2_emb_dim": 24,
                        "s3_emb_dim": 32, "s2_heads": 2, "s3_heads": 2, "s3_depth": 1}),
    ("twins_svt", "TwinsSVT", 128, {"num_classes": 3, "s1_emb_dim": 16, "s2_emb_dim": 16,
                                    "s3_emb_dim": 32, "s4_emb_dim": 32, "s3_depth": 1,
                                    "s4_depth": 1, "s1_local_patch_size": 4,
                                    "s2_local_patch_size": 4, "s3_local_patch_size": 4,
                                    "s4_local_patch_size": 4, "s1_global_k": 4,
                                    "s2_global_k": 4, "s3_global_k": 4, "s4_global_k": 4}),
    ("regionvit", "RegionViT", 128, {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1),
                                     "window_size": 4, "num_classes": 3}),
    ("crossformer", "CrossFormer", 128, {"num_classes": 3, "dim": (32, 32, 64, 64),
                                         "depth": (1, 1, 1, 1),
                                         "global_window_size": (4, 4, 2, 1),
                                         "local_window_size": 4}),
    ("scalable_vit", "ScalableViT", 128, {"num_classes": 3, "dim": 16,
                                          "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1),
                                          "ssa_dim_key": 8, "reduction_factor": (8, 4, 2, 1),
                                          "window_size": (4, 4, 4, 4)}),
    ("max_vit", "MaxViT", 128, {"num_classes": 3, "dim": 16, "depth": (1, 1),
                                "dim_conv_stem": 8, "dim_head": 8, "window_size": 4}),
]:  # fmt: skip
    add(
        "vit-pytorch",
        _module,
        partial(_vit_pytorch, _module, _name, _size, **_settings),
    )


# timm ---------------------------------------------------------------------------------


def timm_model(name: str, size: int, **settings: Any) -> Built:
    """A model of timm by its name, with random weights, and images for it."""
    import timm

    return timm.create_model(name, num_classes=3, **settings), images(size)


_TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
for _name, _size, _settings in [
    ("vit_tiny_patch16_224", 32, _TINY), ("deit_tiny_distilled_patch16_224", 32, _TINY),
    ("eva02_tiny_patch14_224", 32, {**_TINY}), ("beit_base_patch16_224", 32, _TINY),
    ("cait_xxs24_224", 32, _TINY), ("xcit_nano_12_p16_224", 32,
                                    {"img_size": 32, "patch_size": 8, "embed_dim": 32,
                                     "depth": 2, "num_heads": 4}),
    ("mixer_s32_224", 64, {"img_size": 64},),
    ("gmlp_ti16_224", 32, {"img_size": 32}),
    ("resmlp_12_224", 32, {"img_size": 32}),
    ("swin_tiny_patch4_window7_224", 32, {"img_size": 32, "window_size": 4,
                                          "embed_dim": 16, "depths": (2, 2),
                                          "num_heads": (2, 4)}),
    ("swinv2_tiny_window8_256", 32, {"img_size": 32, "window_size": 4, "embed_dim": 16,
                                     "depths": (2, 2), "num_heads": (2, 4)}),
    ("swinv2_cr_tiny_224", 32, {"img_size": 32, "window_size": 4, "embed_dim": 16,
                                "depths": (2, 2), "num_heads": (2, 4)}),
    ("twins_svt_small", 64, {"img_size": 64, "embed_dims": (16, 16, 32, 32),
                             "num_heads": (2, 2, 4, 4), "depths": (1, 1, 1, 1)}),
    ("twins_pcpvt_small", 64, {"img_size": 64, "embed_dims": (16, 16, 32, 32),
                               "num_heads": (2, 2, 4, 4), "depths": (1, 1, 1, 1)}),
    ("nest_tiny", 64, {"img_size": 64}),
    ("coat_tiny", 64, {"img_size": 64, "embed_dims": (16, 16, 16, 16),
                       "serial_depths": (1, 1, 1, 1)}),
    ("convit_tiny", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 2}),
    ("crossvit_tiny_240", 240, {}), ("levit_128s", 64, {"img_size": 64}),
    ("pit_ti_224", 64, {"img_size": 64}), ("tnt_s_patch16_224", 32,
                                           {"img_size": 32, "depth": 2}),
    ("visformer_tiny", 64, {"img_size": 64, "embed_dim": 32}),
    ("pvt_v2_b0", 64, {}), ("mvitv2_tiny", 64, {"img_size": 64}),
    ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}), ("coatnet_pico_rw_224", 64,
                                                       {"img_size": 64}),
    ("edgenext_xx_small", 64, {}), ("mobilevit_xxs", 64, {}), ("mobilevitv2_050", 64, {}),
    ("poolformer_s12", 64, {}),
    ("davit_tiny", 64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32),
                        "num_heads": (2, 2, 4, 4)}),
    ("samvit_base_patch16", 32, {**_TINY, "window_size": 2, "global_attn_indexes": (1,)}),
    ("fastvit_t8", 64, {}), ("repvit_m0_9", 64, {}), ("tiny_vit_5m_224", 64,
                                                      {}),
    ("efficientvit_b0", 64, {}), ("efficientvit_m0", 64, {"img_size": 64}),
    ("gcvit_xxtiny", 64, {"img_size": 64}), ("focalnet_tiny_srf", 64, {}), ("inception_next_atto", 64, {}),
    ("vit_tiny_r_s16_p8_224", 64, {"img_size": 64, "embed_dim": 32, "depth": 1,
                                   "num_heads": 4}),
]:  # fmt: skip
    add("timm-vit", _name, partial(timm_model, _name, _size, **_settings))
for _name in (
    "resnet18", "resnet18d", "resnext50_32x4d", "seresnet18", "skresnet18", "res2net50_14w_8s",
    "resnest14d", "densenet121", "dla34", "hrnet_w18_small", "regnetx_002", "regnety_002",
    "efficientnet_b0", "efficientnetv2_rw_t", "mobilenetv3_small_050", "mnasnet_small",
    "ghostnet_050", "ghostnetv2_100", "tinynet_e", "lcnet_050", "convnext_atto",
    "convnextv2_atto", "cspresnet50", "cspdarknet53", "darknet53", "vovnet39a", "ese_vovnet19b_dw",
    "repvgg_a0", "mobileone_s0", "nf_resnet50", "dm_nfnet_f0", "resnetv2_50", "rexnet_100",
    "hardcorenas_a", "selecsls42", "xception41", "dpn48b",
    "gernet_s", "vgg11", "lambda_resnet26t",
    "eca_resnext26ts", "gcresnet33ts", "fbnetc_100", "spnasnet_100",
    "mixnet_s", "hgnet_tiny", "starnet_s1", "mambaout_femto", "rdnet_tiny",
):  # fmt: skip
    add("timm-cnn", _name, partial(timm_model, _name, 64))


# pytorchcv, segmentation, medical, tabular, graphs ------------------------------------


def _pytorchcv(name: str, size: int, **settings: Any) -> Built:
    from pytorchcv.model_provider import get_model

    return get_model(name, **settings), images(size)


for _name, _size in [
    ("alexnet", 224), ("squeezenet_v1_1", 224), ("shufflenet_g3_w1", 224),
    ("shufflenetv2_wd2", 224), ("menet108_8x1_g3", 224), ("mobilenet_wd4", 224),
    ("mobilenetv2_wd4", 224), ("mobilenetv3_small_wd2", 224), ("igcv3_wd4", 224),
    ("peleenet", 224), ("nin_cifar10", 32), ("resnet20_cifar10", 32),
    ("densenet40_k12_cifar10", 32), ("condensenet74_c4_g4", 224),
    ("ror3_56_cifar10", 32), ("xdensenet40_2_k24_bc_cifar10", 32),
    ("diapreresnet20_cifar10", 32), ("efficientnet_b0", 64), ("ghostnet", 224),
    ("hardnet39ds", 224), ("isqrtcovresnet18", 64), ("channelnet", 224),
    ("shakeshakeresnet20_2x16d_cifar10", 32), ("vovnet27s", 224),
]:  # fmt: skip
    add("pytorchcv", _name, partial(_pytorchcv, _name, _size))


def _smp(name: str, encoder: str, **settings: Any) -> Built:
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)(encoder, encoder_weights=None, classes=2, **settings)
    return model, images(64)


for _name, _encoder in [
    ("Unet", "tu-resnet18"), ("UnetPlusPlus", "tu-resnet18"), ("FPN", "tu-resnet18"),
    ("Linknet", "tu-resnet18"), ("PSPNet", "tu-resnet18"), ("PAN", "tu-resnet18"),
    ("MAnet", "tu-resnet18"), ("DeepLabV3", "tu-resnet18"), ("DeepLabV3Plus", "efficientnet-b0"),
    ("Unet", "efficientnet-b0"), ("UPerNet", "tu-resnet18"), ("Segformer", "tu-resnet18"),
    ("Unet", "mit_b0"),
]:  # fmt: skip
    add("smp", f"{_name}-{_encoder}", partial(_smp, _name, _encoder))


def _monai(name: str, example: tuple[int, ...], **settings: Any) -> Built:
    import monai.networks.nets as nets

    return getattr(nets, name)(**settings), torch.randn(example)


_D2 = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
for _name, _shape, _settings in [
    ("UNet", (2, 1, 32, 32), {**_D2, "channels": (4, 8, 16), "strides": (2, 2),
                              "num_res_units": 0}),
    ("UNet", (2, 1, 16, 16, 16), {**_D2, "spatial_dims": 3, "channels": (4, 8, 16),
                                  "strides": (2, 2), "num_res_units": 2}),
    ("BasicUNet", (2, 1, 32, 32), {**_D2, "features": (4, 4, 8, 8, 16, 4)}),
    ("DynUNet", (2, 1, 32, 32), {**_D2, "kernel_size": [3, 3, 3], "strides": [1, 2, 2],
                                 "upsample_kernel_size": [2, 2], "filters": [4, 8, 16]}),
    ("SegResNet", (2, 1, 32, 32), {**_D2, "init_filters": 8}),
    ("AttentionUnet", (2, 1, 32, 32), {**_D2, "channels": (4, 8, 16), "strides": (2, 2)}),
    ("UNETR", (2, 1, 32, 32), {**_D2, "img_size": (32, 32), "feature_size": 4,
                               "hidden_size": 32, "mlp_dim": 48, "num_heads": 4}),
    ("SwinUNETR", (2, 1, 64, 64), {**_D2, "feature_size": 12, "depths": (1, 1, 1, 1),
                                   "num_heads": (2, 2, 2, 2), "window_size": 4}),
    ("VNet", (2, 1, 32, 32), {**_D2}), ("DenseNet121", (2, 1, 64, 64), {**_D2}),
    ("ViT", (2, 1, 32, 32), {"in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8),
                             "hidden_size": 32, "mlp_dim": 48, "num_layers": 2,
                             "num_heads": 4, "classification": True, "spatial_dims": 2}),
    ("FlexibleUNet", (2, 3, 64, 64), {"in_channels": 3, "out_channels": 2,
                                      "backbone": "efficientnet-b0", "spatial_dims": 2,
                                      "pretrained": False}),
    ("HighResNet", (2, 1, 16, 16), {**_D2}),
]:  # fmt: skip
    add(
        "monai",
        f"{_name}-{len(_shape) - 2}d",
        partial(_monai, _name, _shape, **_settings),
    )
