"""The networks that are measured, besides the paper's own."""

from itertools import pairwise

from torch import Tensor, nn

from fedspu.models.mlp import MLP
from fedspu.models.mobilenet import MobileNet
from fedspu.models.resnet import BasicBlock, ResNet18, conv_norm

mlp = MLP
resnet18 = ResNet18
mobilenet = MobileNet


class Transformer(nn.Module):
    """An encoder of four layers, 256 wide, over the vectors of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of sequences (n, 64, 64)."""
        scores: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return scores


# Of Hugging Face, with the same layers: 256 wide, four heads, over 64 tokens.

_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 10,
}


_WIDE = {
    **_SIZES,
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
}
"""The width of BERT's base model, in two layers."""


def bert(is_wide: bool = False) -> nn.Module:
    """A small BERT that classifies."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = _WIDE if is_wide else _SIZES
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(intermediate_size=4 * sizes["hidden_size"], **sizes, **off)
    return _Scores(BertForSequenceClassification(config))


def llama(is_wide: bool = False) -> nn.Module:
    """A small Llama that classifies, with half as many heads for keys and values."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = _WIDE if is_wide else _SIZES
    config = LlamaConfig(
        intermediate_size=-(-8 * sizes["hidden_size"] // 3),
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        **sizes,
    )
    config.use_cache = False
    return _Scores(LlamaForSequenceClassification(config))


class _Scores(nn.Module):
    """The class scores that a model of Hugging Face gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Scores of rows of tokens."""
        scores: Tensor = self.model(input_ids=x).logits
        return scores


def group_norm_resnet() -> nn.Sequential:
    """A narrow residual network, with group norms of four groups."""
    layers: list[nn.Module] = [conv_norm(3, 16, kernel_size=3, padding=1), nn.ReLU()]
    for i, (before, after) in enumerate(pairwise((16, 16, 32, 64))):
        stride = 1 if i == 0 else 2
        layers += [BasicBlock(before, after, stride), BasicBlock(after, after, 1)]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    for layer in list(model.modules()):
        for name, inner in list(layer.named_children()):
            if isinstance(inner, nn.BatchNorm2d):
                setattr(layer, name, nn.GroupNorm(4, inner.num_features))
    return model
