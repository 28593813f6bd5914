"""Vectors of eight floats and of sixteen give the same bits."""

import copy
import platform

import pytest
import torch
from torch import Tensor, nn

from fedspu import models as built_in
from fedspu.compiled import library
from fedspu.partial.chain.native import calls, models, network
from tests.partial.native.nets import native_gradients, parts

has_both = "avx512f" in library.processor().split()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> library.Found:
    """The library for processors without AVX-512."""
    compiler = library.find_compiler()
    assert compiler is not None
    path = tmp_path_factory.mktemp("narrow") / "chain.so"
    library.build(compiler, path, library.PREBUILT[platform.machine()])
    return library.Found(library._opened(path), "narrow", path)


def nets() -> dict[str, tuple[nn.Module, tuple[int, int, int]]]:
    """Networks that use every part of the code in which images are summed."""
    torch.manual_seed(0)
    groups = nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.GELU()),
        *(nn.AvgPool2d(2), nn.Dropout(0.3), nn.Conv2d(5, 13, 2, stride=2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(13 * 2 * 2, 5)),
    )
    return {
        "cifar10": (built_in.build("cifar10", 5), (3, 32, 32)),
        "speech": (built_in.build("speech", 5), (1, 32, 32)),
        "groups": (groups, (2, 9, 8)),
    }


def computed(model: nn.Module, shape: tuple[int, int, int], p: float) -> list[Tensor]:
    """Everything that the code computes: gradients, an epoch, judging."""
    torch.manual_seed(1)
    x, y = torch.randn(37, *shape), torch.randint(5, (37,))
    spans = parts(model, p, 0)
    torch.manual_seed(2)  # for dropout
    out, grads = native_gradients(model, spans, x, torch.randn(37, 5))
    sgd = calls.Sgd(0.1, momentum=0.9, decay=0.01, clip=1.0)
    training = models.make_training(model, spans, x, y, sgd, is_truncated=False)
    assert training is not None
    training.epoch(iter(torch.arange(37).split(20)), 5)
    judge = models.make_judge(model.eval(), shape)
    assert judge is not None
    return [out, *grads.values(), *model.state_dict().values(), judge(x)]


@pytest.mark.skipif(not has_both, reason="this processor has no AVX-512")
@pytest.mark.parametrize("p", [0.2, 1.0])
@pytest.mark.parametrize("name", ["cifar10", "speech", "groups"])
def test_the_width_of_vectors_changes_no_bit(
    name: str, p: float, narrow: library.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shape = nets()[name]
    wide = computed(copy.deepcopy(model), shape, p)
    for module in (network, models):
        monkeypatch.setattr(module, "find", lambda: narrow)
    assert all(map(torch.equal, wide, computed(model, shape, p)))


def pointwise(found: library.Found) -> list[Tensor]:
    """What the code computes for gates, RMS norms and clamps, by itself."""
    torch.manual_seed(0)
    x, other, grad = torch.randn(3, 7, 101)
    weight, scale = torch.randn(101), torch.rand(7)
    results = torch.zeros(9, 7, 101)
    bits = torch.zeros(89, dtype=torch.uint8)
    given = [tensor.data_ptr() for tensor in (x, other, grad)]
    into = [result.data_ptr() for result in results]
    code = found.library
    assert code is not None
    for kind in range(3):
        code.gate_backward(kind, x.numel(), *given, *into[2 * kind : 2 * kind + 2])
    norm = x.data_ptr(), weight.data_ptr(), scale.data_ptr(), grad.data_ptr()
    assert code.rms_backward(7, 101, *norm, *into[6:8]) == 0
    code.clamp_forward(x.numel(), given[0], 0.0, 1.0, into[8], bits.data_ptr())
    return [*results, bits]


@pytest.mark.skipif(not has_both, reason="this processor has no AVX-512")
def test_nor_does_it_change_gates_norms_and_clamps(narrow: library.Found) -> None:
    assert all(map(torch.equal, pointwise(library.find()), pointwise(narrow)))
