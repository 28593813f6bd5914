"""Small models with the patterns of public architectures, as their authors write them.

Language models, vision Transformers, audio models and odd CNNs differ from the plain
layers of ``zoo.py`` in how they move data: rotary positions, heads that share keys, one
matrix for queries, keys and values, gates packed into one matrix, norms in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD = 16, 4, 4


class FloatRMSNorm(nn.Module):
    """Computes in float32 whatever it is given, as Llama's and T5's norms do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class TransposedLinear(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2 has."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.width = width_out
        self.weight = nn.Parameter(torch.randn(width_in, width_out) / 4)
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.width)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rotary(x: Tensor) -> Tensor:
    """Turn pairs of channels by their position, (batch, heads, tokens, channels)."""
    speeds = 100 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    angles = torch.cat([angles, angles], -1).to(x.dtype)
    return x * angles.cos() + rotate_half(x) * angles.sin()


class GroupedQueryAttention(nn.Module):
    """Llama's: rotary positions, and two heads for each head of keys and values."""

    def __init__(self, groups: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.groups = groups
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=bias)
        self.k_proj = nn.Linear(WIDTH, groups * HEAD, bias=bias)
        self.v_proj = nn.Linear(WIDTH, groups * HEAD, bias=bias)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:-1], -1, HEAD).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotary(q), rotary(k)
        times = HEADS // self.groups
        k, v = (
            z[:, :, None].expand(-1, -1, times, -1, -1).reshape(len(z), HEADS, -1, HEAD)
            for z in (k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return out


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values; ``interleaved`` as in GPT-NeoX."""

    def __init__(self, interleaved: bool, layer: Any = nn.Linear) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.qkv = layer(WIDTH, 3 * WIDTH)
        self.proj = layer(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        if self.interleaved:
            qkv = self.qkv(x).view(n, length, HEADS, 3 * HEAD).transpose(1, 2)
            q, k, v = qkv.chunk(3, -1)
        else:
            qkv = self.qkv(x).reshape(n, length, 3, HEADS, HEAD)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * HEAD**-0.5 @ k.transpose(-2, -1)).softmax(-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(n, length, WIDTH))
        return out


class WindowAttention(nn.Module):
    """Swin's: windows, a table of biases for each head, a cyclic shift."""

    index: Tensor

    def __init__(self, shift: int = 1) -> None:
        super().__init__()
        self.shift = shift
        self.table = nn.Parameter(torch.randn(9, HEADS))
        places = torch.stack(torch.meshgrid(*[torch.arange(2)] * 2, indexing="ij"))
        flat = places.flatten(1)
        offsets = flat[:, :, None] - flat[:, None] + 1
        self.register_buffer("index", offsets[0] * 3 + offsets[1])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, c = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(n, height // 2, 2, width // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, 4, c)
        qkv = self.qkv(x).reshape(-1, 4, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) + bias[None]).softmax(-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(-1, 4, c))
        out = out.view(n, height // 2, width // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        out = out.reshape(n, height, width, c)
        return torch.roll(out, (self.shift, self.shift), (1, 2))


class PackedGLU(nn.Module):
    """Gate and value from one matrix, as in Phi-3 and x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """A residual block: attention, then a gated layer."""

    def __init__(self, attention: nn.Module, norm: Any = FloatRMSNorm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = attention, PackedGLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


@dataclass
class Output:
    """An output object; ``hidden`` is there too, but is not what is learned."""

    logits: Tensor
    hidden: Tensor


class LanguageModel(nn.Module):
    """Token embeddings, two blocks, and the embedding again as the head."""

    def __init__(self, attention: Callable[[], nn.Module], norm: Any = FloatRMSNorm):
        super().__init__()
        self.embedding = nn.Embedding(29, WIDTH)
        self.blocks = nn.ModuleList(Block(attention(), norm) for _ in range(2))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, 29, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return Output(self.head(x), x)


class T5Attention(nn.Module):
    """No scale, and biases by bucketed distance."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.bias = nn.Embedding(5, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(len(x), -1, HEADS, HEAD).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        places = torch.arange(x.shape[1])
        distance = (places[None] - places[:, None]).clamp(-2, 2) + 2
        scores = q @ k.transpose(3, 2) + self.bias(distance).permute(2, 0, 1)[None]
        weights = F.softmax(scores.float(), -1).type_as(scores)
        out: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return out


class Vision(nn.Module):
    """Patches, a class token, a table of positions, an unused mask token."""

    def __init__(self, attention: Callable[[], nn.Module], plain_table: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        table = torch.randn(1, 5, WIDTH)
        self.positions: Any = table if plain_table else nn.Parameter(table)
        self.block = Block(attention(), nn.LayerNorm)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.block(x + self.positions.to(x.dtype))
        logits: Tensor = self.head(torch.cat([x[:, 0], x[:, 1:].mean(1)], -1))
        return logits


def sinusoids(x: Tensor) -> Tensor:
    """A table of positions, (tokens, channels), that is computed in every pass."""
    speeds = 100 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)


class SimpleVision(nn.Module):
    """Patches and computed positions, as vit-pytorch's SimpleViT had."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.block = Block(FusedAttention(False), nn.LayerNorm)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.block(x + sinusoids(x)).mean(1))
        return logits


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.norm, self.attention = nn.LayerNorm(WIDTH), WindowAttention()
        self.merge = nn.Linear(4 * WIDTH, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        x = x + self.attention(self.norm(x))
        quarters = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        logits: Tensor = self.head(
            F.gelu(self.merge(torch.cat(quarters, -1))).mean((1, 2))
        )
        return logits


class Audio(nn.Module):
    """A feature extractor, and a weight-normed convolution for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.extract = nn.Conv1d(1, WIDTH, 8, 4)
        conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=4)
        self.positions = nn.utils.parametrizations.weight_norm(conv, dim=2)
        self.block = Block(FusedAttention(False), nn.LayerNorm)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.extract(x))
        x = x + F.gelu(self.positions(x)[..., :-1])
        logits: Tensor = self.head(self.block(x.transpose(1, 2)).mean(1))
        return logits


class Caching(nn.Module):
    """Keeps a tensor of its last forward pass, as LeViT does in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training or "scale" not in self.kept:
            self.kept["scale"] = 2 * self.scale
        logits: Tensor = self.fc2(F.relu(self.fc1(x)) * self.kept["scale"])
        return logits

    def train(self, mode: bool = True) -> "Caching":
        super().train(mode)
        if mode:
            self.kept = {}
        return self


class Graph(nn.Module):
    """Messages along edges, added up at each node, as torch_geometric does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            sent = layer(x).index_select(0, edges[0])
            got = sent.new_zeros(len(x), sent.shape[1])
            index = edges[1][:, None].expand_as(sent)
            x = F.relu(got.scatter_add_(0, index, sent))
        return x


class Squeeze(nn.Module):
    """1x1 convolutions and ReLU in place, side by side, as SqueezeNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(3, 16, 1)
        self.left, self.right = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(32, 3, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.squeeze(x))
        x = torch.cat([self.relu(self.left(x)), self.relu(self.right(x))], 1)
        logits: Tensor = self.last(x).mean((2, 3))
        return logits


class SelectiveKernel(nn.Module):
    """Two halves, weighed against each other, as SKNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.paths = nn.ModuleList(nn.Conv2d(8, 8, k, padding=k // 2) for k in (1, 3))
        self.attend = nn.Linear(8, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        halves = F.relu(self.conv(x)).chunk(2, 1)
        both = torch.stack([p(h) for p, h in zip(self.paths, halves, strict=True)], 1)
        weights = self.attend(both.sum(1).mean((2, 3))).view(len(x), 2, 8).softmax(1)
        logits: Tensor = self.head(
            (both * weights[..., None, None]).sum(1).mean((2, 3))
        )
        return logits


class Recurrence(nn.Module):
    """Mamba's: a state for each channel and each of a few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 12)
        self.in_proj = nn.Linear(12, 2 * 16, bias=False)
        self.conv = nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.x_proj = nn.Linear(16, 4 + 2 * 6, bias=False)
        self.dt_proj = nn.Linear(4, 16)
        self.a_log = nn.Parameter(torch.randn(16, 6))
        self.d = nn.Parameter(torch.ones(16))
        self.out_proj = nn.Linear(16, 12, bias=False)
        self.head = nn.Linear(12, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        x, gate = self.in_proj(stream).transpose(1, 2).chunk(2, 1)
        x = F.silu(self.conv(x)[..., : tokens.shape[1]])
        dt, b, c = self.x_proj(x.transpose(1, 2)).split([4, 6, 6], -1)
        dt = F.softplus(self.dt_proj(dt)).transpose(1, 2)
        a = torch.exp(-torch.exp(self.a_log.float())[None, :, None] * dt[..., None])
        add = dt[..., None] * b[:, None] * x[..., None]
        state = torch.zeros(len(x), 16, 6, dtype=x.dtype)
        out = []
        for t in range(tokens.shape[1]):
            state = a[:, :, t] * state + add[:, :, t]
            out.append(torch.matmul(state, c[:, t, :, None])[:, :, 0])
        y = (torch.stack(out, -1) + x * self.d[None, :, None]) * F.silu(gate)
        logits: Tensor = self.head(stream + self.out_proj(y.transpose(1, 2)))
        return logits


@dataclass(frozen=True)
class Pattern:
    """A model, its example, and the largest share that may be active at p = .5."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    share: float = 0.6


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _words() -> Tensor:
    return 7 * torch.arange(10).view(2, 5) % 29


def _asked() -> dict[str, Tensor]:
    return {"input_ids": _words(), "attention_mask": torch.ones(2, 5).long()}


def _lm(attention: Callable[[], nn.Module], norm: Any = FloatRMSNorm) -> Any:
    return lambda: LanguageModel(attention, norm)


def _vision(plain_table: bool) -> Any:
    return lambda: Vision(lambda: FusedAttention(False), plain_table)


PATTERNS = [
    Pattern("llama", _lm(GroupedQueryAttention), _asked),
    Pattern("rotary_all_heads", _lm(lambda: GroupedQueryAttention(4)), _asked),
    Pattern("rotary_one_key", _lm(lambda: GroupedQueryAttention(1)), _asked),
    Pattern("qwen_biases", _lm(lambda: GroupedQueryAttention(2, bias=True)), _words),
    Pattern("fused_qkv", _lm(lambda: FusedAttention(False)), _words),
    Pattern("interleaved_qkv", _lm(lambda: FusedAttention(True)), _words),
    Pattern(
        "gpt2",
        _lm(lambda: FusedAttention(False, TransposedLinear), nn.LayerNorm),
        _words,
    ),
    Pattern("t5", _lm(T5Attention), _asked),
    Pattern("mamba", Recurrence, _words),
    Pattern("vit", _vision(plain_table=False), lambda: _noise(2, 3, 8, 8)),
    Pattern("vit_plain_table", _vision(plain_table=True), lambda: _noise(2, 3, 8, 8)),
    Pattern("vit_computed_table", SimpleVision, lambda: _noise(2, 3, 8, 8)),
    Pattern("swin", Windows, lambda: _noise(2, 3, 16, 16)),
    Pattern("wav2vec2", Audio, lambda: _noise(2, 1, 64)),
    Pattern("levit_cache", Caching, lambda: _noise(2, 6)),
    Pattern("graph", Graph, lambda: (_noise(7, 6), torch.arange(24).view(2, 12) % 7)),
    Pattern("squeezenet", Squeeze, lambda: _noise(2, 3, 8, 8)),
    Pattern("sknet", SelectiveKernel, lambda: _noise(2, 3, 6, 6)),
]
