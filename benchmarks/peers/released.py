"""FedSPU as its authors' released code does it, rebuilt from a description of it.

    python benchmarks/peers/released.py --work WORK.npz --rounds 1 --net cifar10

Three things set the pace there, and are done here in the same way:

- examples are rows of a pandas frame, and ``Dataset.__getitem__`` turns one row into a
  tensor by ``torch.tensor(series)``, for every example of every epoch;
- gradients of the whole model are computed, and hooks then multiply those of frozen
  neurons by zero;
- clients' personal models live on the server, and travel whole to the client and back,
  beside the active neurons' parameters, as arrays in NumPy's format.

Columns of the frame have names, as ``pandas.read_csv`` gives them there, which needs a
pandas before 3: later ones refuse ``series[0]``. ``--columns numbers`` numbers them,
which is about three times as fast and works in all.

Friendlier than the released code: that parses its files anew for every turn, averages
entry by entry in Python, runs the test examples after training, and runs on Flower.
Here frames are made before the first round, averaging is NumPy's, nothing is evaluated,
and all is one process.
"""

import io
import warnings
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from common import Work, load_by, parser, report, seconds_of_process, warm_up
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Arrays = dict[str, np.ndarray]
Active = dict[str, np.ndarray]  # layer -> its active neurons
Index = tuple[np.ndarray, ...]  # of a tensor's active entries, as np.ix_ gives it


class Rows(Dataset[tuple[Tensor, int]]):
    """A client's examples, one row of a frame each."""

    def __init__(
        self, frame: pd.DataFrame, labels: np.ndarray, shape: Sequence[int]
    ) -> None:
        self.frame, self.labels, self.shape = frame, labels, shape

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        values = torch.tensor(self.frame.iloc[index])
        image = values.reshape(*self.shape).float() / 255
        return (image - 0.5) / 0.5, int(self.labels[index])


class Server:
    """Holds the global model, and everyone's personal one."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.state = _arrays(work.initial)
        self.personal = {k: dict(self.state) for k in range(work.num_clients)}
        self.rng = np.random.default_rng(0)
        self.layers = _layers(work.net.build())

    def play(
        self, cohort: Sequence[int], rows: dict[int, Rows], model: nn.Module
    ) -> int:
        """Play one round; the number of steps."""
        updates, steps = [], 0
        for client in cohort:
            active = self._draw(self.work.capacity(client))
            where = _where(self.layers, active, self.state)
            part = {name: values[where[name]] for name, values in self.state.items()}
            down = _pack(part), _pack(self.personal[client])

            up, taken = take_turn(self.work, model, where, rows[client], *down)

            steps += taken
            part, self.personal[client] = map(_unpack, up)
            updates.append((where, part, len(rows[client])))
        self._average(updates)
        return steps

    def _draw(self, p: float) -> Active:
        """Random neurons of every layer but the last, whose outputs are all active."""
        active = {}
        for name, size in self.layers[:-1]:
            number = max(1, int(p * size))
            active[name] = np.sort(self.rng.choice(size, number, replace=False))
        last, size = self.layers[-1]
        active[last] = np.arange(size)
        return active

    def _average(self, updates: list[tuple[dict[str, Index], Arrays, int]]) -> None:
        for name, values in self.state.items():
            if values.ndim == 0:  # how many batches a norm has seen
                continue
            total, weight = np.zeros(values.shape), np.zeros(values.shape)
            for where, part, num_examples in updates:
                total[where[name]] += num_examples * part[name]
                weight[where[name]] += num_examples
            mean = total / np.maximum(weight, 1)
            new = np.where(weight > 0, mean, values)
            self.state[name] = new.astype(values.dtype)


def take_turn(
    work: Work,
    model: nn.Module,
    where: dict[str, Index],
    rows: Rows,
    packed_part: bytes,
    packed_personal: bytes,
) -> tuple[tuple[bytes, bytes], int]:
    """Merge, train with masked gradients, send back; the number of steps as well."""
    part, own = _unpack(packed_part), _unpack(packed_personal)
    for name, values in part.items():
        own[name] = own[name].copy()
        own[name][where[name]] = values
    model.load_state_dict({name: torch.from_numpy(v) for name, v in own.items()})
    hooks = []
    for name, parameter in model.named_parameters():
        mask = torch.zeros_like(parameter)
        mask[tuple(map(torch.from_numpy, where[name]))] = 1
        hooks.append(parameter.register_hook(lambda g, mask=mask: g * mask))

    optimizer = torch.optim.SGD(model.parameters(), lr=work.net.lr)
    loader = DataLoader(rows, batch_size=work.net.batch_size, shuffle=True)
    model.train()
    steps = 0
    for _ in range(work.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    for hook in hooks:
        hook.remove()

    own = _arrays(model.state_dict())
    part = {name: values[where[name]] for name, values in own.items()}
    return (_pack(part), _pack(own)), steps


def _layers(model: nn.Module) -> list[tuple[str, int]]:
    """The weighted layers in order, with how many neurons each has."""
    kinds = (nn.Conv2d, nn.Linear)
    return [
        (name, len(layer.weight))
        for name, layer in model.named_children()
        if isinstance(layer, kinds)
    ]


def _where(
    layers: list[tuple[str, int]], active: Active, state: Arrays
) -> dict[str, Index]:
    """Each tensor's active entries: those between active neurons."""
    where: dict[str, Index] = {}
    before: tuple[str, int] | None = None
    for name, size in layers:
        weight, rows = state[f"{name}.weight"], active[name]
        columns = np.arange(weight.shape[1])
        if before is not None:
            repeat = weight.shape[1] // before[1]  # positions of a flattened map
            inputs = active[before[0]]
            columns = (inputs[:, None] * repeat + np.arange(repeat)).ravel()
        kernel = [np.arange(length) for length in weight.shape[2:]]
        where[f"{name}.weight"] = np.ix_(rows, columns, *kernel)
        where[f"{name}.bias"] = (rows,)
        norm = name.replace("conv", "bn")
        for entry in ("weight", "bias", "running_mean", "running_var"):
            where.setdefault(f"{norm}.{entry}", (rows,))
        where[f"{norm}.num_batches_tracked"] = ()
        before = name, size
    return where


def _arrays(state: dict[str, Tensor]) -> Arrays:
    return {name: values.numpy().copy() for name, values in state.items()}


def _pack(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _unpack(packed: bytes) -> Arrays:
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _rows(work: Work, client: int, columns: str) -> Rows:
    share = work.shares[client]
    frame = pd.DataFrame(work.pixels[share].reshape(len(share), -1).astype(np.int64))
    if columns == "names":
        frame.columns = [f"pixel{number}" for number in frame.columns]
    return Rows(frame, work.labels[share], work.net.shape)


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, help="all cores if not given")
    options.add_argument("--columns", choices=("names", "numbers"), default="names")
    given = options.parse_args()
    if given.columns == "names" and int(pd.__version__.split(".")[0]) >= 3:
        raise SystemExit("--columns names needs a pandas before 3; or give numbers")
    warnings.simplefilter("ignore", FutureWarning)  # of just that
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    work = load_by(given)
    rows = {k: _rows(work, k, given.columns) for k in work.participants}
    server, model = Server(work), work.model()
    warm_up(work)

    startup, seconds, steps = seconds_of_process(), [], 0
    for cohort in work.cohorts:
        began = perf_counter()
        steps += server.play(cohort, rows, model)
        seconds.append(perf_counter() - began)
    report(
        *("released", given, work, startup, seconds, steps),
        final={name: torch.from_numpy(v) for name, v in server.state.items()},
        packages=("pandas",),
        threads=torch.get_num_threads(),
        columns=given.columns,
    )


if __name__ == "__main__":
    main()
