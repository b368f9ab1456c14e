"""Networks as pairs of pure functions, Model(init, apply)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "model": {
        "mlp": "MlpConfig",
        "resnet": "ResNetConfig",
        "vgg": "VggConfig",
        "unet": "UNetConfig",
        "cosmoflow": "CosmoFlowConfig",
        "volume_unet": "VolumeUNetConfig",
        "cnn": "CnnConfig",
        "locally_connected": "LocallyConnectedConfig",
        "smoe": "SmoeConfig",
        "bert": "BertConfig",
        "causal_lm": "CausalLmConfig",
        "gnn": "GnnConfig",
        "ggnn": "GgnnConfig",
        "dlrm": "DlrmConfig",
        "kge": "KgeConfig",
        "raw": "RawConfig",
        "emos": "EmosConfig",
        "point_mlp": "PointMlpConfig",
        "field_cnn": "FieldCnnConfig",
        "field_unet": "FieldUNetConfig",
        "unet3d": "UNet3dConfig",
        "conv_lstm": "ConvLstmConfig",
        "bias_unet": "BiasUNetConfig",
        "spread_net": "SpreadNetConfig",
        "mean_and_spread": "MeanAndSpreadConfig",
        "member_attention": "MemberAttentionConfig",
    }
}
