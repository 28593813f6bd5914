"""Padded copies in which zeros that stand for neurons would count."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import Neurons, map_neurons, slim_model
from fedspu.errors import ModelError
from fedspu.neurons.slim import slim_neurons
from fedspu.neurons.slimming.padding import padding_of
from fedspu.neurons.slimming.uncounted import Uncounting
from fedspu.neurons.table import Call
from tests.neurons.test_slim import assert_same
from tests.oracles.models import Fn, seeded
from tests.oracles.zoo import noise

WIDTH = 8
LEFT = torch.tensor([0, 2, 5, 6])  # two of each half

Mix = Callable[[Any, Any], Any]


def by_hand(model: Any, h: Any) -> Any:
    centred = h - h.mean(-1, keepdim=True)
    return model.gain * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def with_numbers(model: Any, h: Tensor) -> Tensor:
    """Where a channel was zero, it is not any more; the largest one divides all."""
    h = torch.exp(h) + 1
    h += 0.5
    return h / h.amax(-1, keepdim=True)


MIXES: dict[str, Mix] = {
    "layer norm": lambda model, h: model.layer(h),
    "bare layer norm": lambda model, h: F.layer_norm(h, h.shape[-1:]),
    "rms norm": lambda model, h: F.rms_norm(h, (h.shape[-1],), model.gain),
    "by hand": by_hand,
    "numbers": with_numbers,
    "spread": lambda model, h: h / h.std(-1, keepdim=True),
    "spread of all": lambda model, h: h / (1 + h.var()),
    "channels first": lambda model, h: F.group_norm(
        h.transpose(1, 2), 2, model.gain, model.gain
    ).transpose(1, 2),
}


class Stream(nn.Module):
    """A residual stream whose width stands in a config, where it is not changed."""

    def __init__(self, mix: Mix, width: int = WIDTH) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=width, mix=mix)
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.more, self.less = nn.Linear(width, 6), nn.Linear(6, width)
        self.layer = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if h.shape[-1] != self.config.width:
            raise ValueError(f"expected {self.config.width} channels")
        h = h + self.less(torch.tanh(self.more(self.config.mix(self, h))))
        logits: Tensor = self.head(self.config.mix(self, h))
        return logits


def narrow(model: Any, mix: Mix) -> Any:
    """The same model as if it had been made with the neurons that are left alone."""
    small: Any = Stream(mix, len(LEFT)).double()
    state = {}
    for name, tensor in model.state_dict().items():
        for dim, size in enumerate(tensor.shape):
            if size == WIDTH:
                tensor = tensor.index_select(dim, LEFT)
        state[name] = tensor
    small.load_state_dict(state)
    return small


def mapped(mix: Mix) -> tuple[nn.Module, Neurons, Tensor]:
    with seeded(0):
        model, x = Stream(mix).double(), noise(2, 4, 5).double()
    for parameter in (model.layer.weight, model.layer.bias):
        nn.init.uniform_(parameter, 0.5, 1.5)
    return model, map_neurons(model, x), x


def cut(model: nn.Module, neurons: Neurons, left: Tensor) -> Any:
    """A slim copy with these neurons of the stream, and all others."""
    group = next(g for g in neurons.groups if g.size == WIDTH)
    assert group.slim
    assert group.padded
    return slim_model(model, neurons, neurons.everything() | {group.name: left})


@pytest.fixture(params=MIXES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A slim copy, the model made narrow, and an example."""
    mix = MIXES[request.param]
    model, neurons, x = mapped(mix)
    return cut(model, neurons, LEFT), narrow(model, mix), x


pytestmark = pytest.mark.filterwarnings("ignore::fedspu.NeuronWarning")


def test_neurons_that_are_gone_do_not_count(case: Any) -> None:
    slim, small, x = case
    assert_same(slim(x), small(x))
    more = torch.cat([x, x - 1])
    assert_same(slim(more), small(more))


def test_gradients_are_those_of_a_model_without_them(case: Any) -> None:
    slim, small, x = case
    for each in (slim, small):
        each(x).pow(2).sum().backward()
    wanted = dict(small.named_parameters())
    for name, parameter in slim.named_parameters():
        if wanted[name].grad is not None:
            assert_same(parameter.grad, wanted[name].grad)


def test_such_a_copy_can_be_copied_saved_and_exported(case: Any) -> None:
    slim, _, x = case
    wanted = slim(x)
    assert torch.equal(copy.deepcopy(slim)(x), wanted)
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(slim, (x,), dynamic_shapes=sizes).module()
    more = torch.cat([x, x - 1])
    assert_same(exported(more), slim(more))


def test_it_can_be_pickled() -> None:
    # With a mix that has a name; pickle does not take the others.
    model, neurons, x = mapped(by_hand)
    slim = cut(model, neurons, LEFT)
    assert torch.equal(pickle.loads(pickle.dumps(slim))(x), slim(x))


def test_slimming_it_again_is_slimming_once() -> None:
    model, neurons, x = mapped(MIXES["layer norm"])
    stream = next(g for g in neurons.groups if g.size == WIDTH)
    first = neurons.everything() | {stream.name: LEFT}
    last = {name: torch.arange(len(kept)) for name, kept in first.items()}
    last[stream.name] = torch.tensor([1, 2])
    again = slim_model(cut(model, neurons, LEFT), slim_neurons(neurons, first), last)
    assert_same(again(x), cut(model, neurons, LEFT[1:3])(x))


def test_channels_of_two_norm_groups_may_be_kept_unevenly() -> None:
    # Only a group norm in which each group knows its own channels is right.
    model, neurons, x = mapped(MIXES["channels first"])
    left = torch.tensor([1, 4, 5, 7])
    slim = cut(model, neurons, left)
    full: Any = model

    def normed(h: Tensor) -> Tensor:
        parts = []
        for half in (left[:1], left[1:]):
            part = h[..., half]
            mean = part.mean((1, 2), keepdim=True)
            var = part.var((1, 2), unbiased=False, keepdim=True)
            gain = full.gain[half]
            parts.append((part - mean) / (var + 1e-5).sqrt() * gain + gain)
        return torch.cat([h.new_zeros(*h.shape[:2], 1), *parts], -1)

    def mixed(h: Tensor) -> Tensor:  # the zero goes where no channel is left
        return normed(h)[..., [0, 1, 0, 0, 2, 3, 0, 4]]

    kept = torch.zeros(WIDTH, dtype=torch.float64)
    kept[left] = 1
    h = full.embed(x) * kept
    h = (h + full.less(torch.tanh(full.more(mixed(h))))) * kept
    assert_same(slim(x), full.head(mixed(h)))


def test_a_norm_group_of_which_nothing_is_left_is_zero() -> None:
    model, neurons, x = mapped(MIXES["channels first"])
    slim = cut(model, neurons, torch.tensor([0, 2]))
    slim(x).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in slim.parameters())


def test_a_table_that_a_model_computes_is_added_to_kept_channels_alone() -> None:
    def tabled(model: Any, h: Any) -> Any:
        width = torch.arange(model.config.width, dtype=h.dtype)
        return model.layer(h + torch.arange(h.shape[1])[:, None] * width.sin())

    model, neurons, x = mapped(tabled)
    stream = next(g for g in neurons.groups if g.size == WIDTH)
    assert (stream.permutable, stream.slim) == (False, True)
    slim = cut(model, neurons, LEFT)

    def of_kept(model: Any, h: Any) -> Any:
        table = torch.arange(WIDTH, dtype=h.dtype).sin()[LEFT]
        return model.layer(h + torch.arange(h.shape[1])[:, None] * table)

    assert_same(slim(x), narrow(model, of_kept)(x))


def test_a_line_that_does_both_keeps_the_neurons_whole() -> None:
    # One line, one layer, one operation: but only one of its two means counts them.
    def twice(model: Any, h: Tensor) -> Tensor:
        for part in (h, model.more(h)):
            h = h / (1 + part.std(-1, keepdim=True))
        return h

    _, neurons, _ = mapped(twice)
    stream = next(g for g in neurons.groups if g.size == WIDTH)
    assert not stream.slim


def test_the_present_pass_alone_is_changed() -> None:
    model, neurons, x = mapped(MIXES["layer norm"])
    slim = cut(model, neurons, LEFT)
    with pytest.raises(RuntimeError):
        slim(x[..., :2])
    assert not torch.overrides._get_current_function_mode_stack()
    assert not padding_of(slim)._modes
    assert slim(x).shape == (2, 4, 3)


def test_another_width_than_the_one_that_was_proved_is_refused() -> None:
    call = Call("", f"{__name__}.added:{added.__code__.co_firstlineno + 1}", "add")
    with Uncounting(nn.Identity(), {call: {-1: (2, [1])}}):
        assert added(torch.zeros(3, 2)).tolist() == [[0, 1]] * 3
        with pytest.raises(ModelError, match=r"expects 2 channels .* \(3, 5\)"):
            added(torch.zeros(3, 5))
    assert added(torch.zeros(1, 2)).tolist() == [[1, 1]]


def added(x: Tensor) -> Tensor:
    return x + 1


def test_neurons_of_two_layers_in_one_norm_are_both_left_out() -> None:
    class Joined(nn.Module):
        """Two streams side by side under one norm; their widths are in a config."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(widths=[4, 6])
            self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 6)
            self.norm, self.out = nn.LayerNorm(10), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([self.first(x), self.second(x).tanh()], -1)
            parts = self.norm(h).split(self.config.widths, -1)
            logits: Tensor = self.out(torch.cat(parts, -1))
            return logits

    with seeded(0):
        model, x = Joined().double(), noise(7, 5).double()
    neurons = map_neurons(model, x)
    assert [(g.name, g.size, g.slim) for g in neurons.groups] == [
        ("first", 4, True),
        ("second", 6, True),
    ]
    active = {"first": torch.tensor([1, 2]), "second": torch.tensor([0, 3, 4])}
    h = torch.cat([model.first(x), model.second(x).tanh()], -1)
    left = torch.tensor([1, 2, 4, 7, 8])
    normed = F.layer_norm(h[:, left], (5,))
    wanted = normed @ model.out.weight[:, left].t() + model.out.bias
    assert_same(slim_model(model, neurons, active)(x), wanted)


class Masking(nn.Module):
    """Covers tokens in training with a parameter that nothing else reaches."""

    def __init__(self, is_wide: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(5, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3),
        )
        self.cover = nn.Parameter(torch.ones(WIDTH if is_wide else 5))
        self.is_wide = is_wide

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_wide:
            x = self.covered(x)
        h = self.first(x)
        if self.training and self.is_wide:
            h = self.covered(h)
        logits: Tensor = self.last(self.norm(h))
        return logits

    def covered(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = self.cover
        return h


@pytest.mark.parametrize("is_wide", [True, False])
def test_what_only_training_reaches_does_not_keep_a_copy_from_training(
    is_wide: bool,
) -> None:
    with seeded(0):
        model, x = Masking(is_wide).double(), noise(2, 4, 5).double()
    neurons = map_neurons(model, x)
    (group,) = neurons.groups
    assert (group.slim, group.padded) == (True, is_wide)
    slim: Any = slim_model(model, neurons, {group.name: LEFT})
    slim.train()(x).pow(2).sum().backward()
    assert slim.first.weight.grad.isfinite().all()
    if is_wide:  # covered with what the neurons that are left have of the cover
        cover = slim.cover[LEFT]
        wanted = F.layer_norm(cover, (4,), slim.norm.weight, slim.norm.bias)
        wanted = wanted @ slim.last.weight.t() + slim.last.bias
        assert_same(slim(x)[:, 0], wanted.expand(2, 3))


def test_whole_numbers_may_be_clamped() -> None:
    with seeded(0):
        model = Fn(
            lambda self, x: self.last(
                torch.relu(self.first(x))[:, torch.arange(9).clamp(max=3)].mean(1)
            ),
            first=nn.Linear(5, 6),
            last=nn.Linear(6, 3),
        )
        x = noise(2, 7, 5)
    (group,) = map_neurons(model, x).groups
    assert group.slim
