"""Remember, for one round, what a first layer's frozen neurons give for an example.

Their weights do not change, so neither does what they give, as long as an example is
the same each time it is seen: no augmentation. Only a layer that reads the model's own
input takes part, so that no batch statistics lie below it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.core.forwards import replaced_forward
from fedspu.errors import ModelError


class FrozenCache:
    """Up to ``budget`` bytes of what frozen neurons gave, example by example.

    Say which examples a batch has, and train as ever::

        cache = FrozenCache(64_000_000)
        with partial_training(model, neurons, active, cache=cache) as trainable:
            ...
            with cache.examples(batch):  # their numbers, the same in every epoch
                loss = criterion(model(x[batch]), y[batch])

    What does not fit is computed each time. A new context begins with nothing.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ModelError(f"a cache of {budget} bytes: expected 0 or more")
        self.budget = budget
        self._numbers: Tensor | None = None
        self._input: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.held = 0
        self._rows: dict[Hashable, dict[int, Tensor]] = {}

    @contextmanager
    def examples(self, numbers: Any) -> Iterator[None]:
        """Inside, a batch consists of the examples of these numbers."""
        before, self._numbers = self._numbers, torch.as_tensor(numbers)
        try:
            yield
        finally:
            self._numbers = before

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, it is known what the model's own input is."""
        own = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            is_one = len(args) == 1 and isinstance(args[0], Tensor)
            self._input = args[0] if is_one else None
            try:
                return own(*args, **kwargs)
            finally:
                self._input = None

        self.clear()
        with replaced_forward(model, forward):
            yield
        self.clear()

    def knows(self, x: Tensor) -> bool:
        """Whether ``x`` is the model's own input, of examples whose numbers we have."""
        own = self._input
        return (
            own is not None
            and self._numbers is not None
            and not x.requires_grad
            and len(x) == len(own) == len(self._numbers)
            and x.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        )

    def get(
        self, key: Hashable, x: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What ``compute`` gives for a batch, of which some may be known already."""
        assert self._numbers is not None
        where = (key, x.storage_offset(), x.shape[1:], x.stride())
        rows = self._rows.setdefault(where, {})
        numbers: list[int] = self._numbers.tolist()
        missing = [i for i, number in enumerate(numbers) if number not in rows]
        fresh: dict[int, Tensor] = {}
        if missing:
            found = compute(x if len(missing) == len(numbers) else x[missing])
            if len(missing) == len(numbers):
                self._keep(rows, numbers, found)
                return found
            fresh = dict(zip(missing, found, strict=True))
            self._keep(rows, [numbers[i] for i in missing], found)
        return torch.stack(
            [fresh[i] if i in fresh else rows[n] for i, n in enumerate(numbers)]
        )

    def _keep(self, rows: dict[int, Tensor], numbers: list[int], found: Tensor) -> None:
        size = found[0].nbytes
        for number, row in zip(numbers, found, strict=True):
            if self.held + size > self.budget:
                return
            if number not in rows:
                rows[number] = row.clone()
                self.held += size
