r"""Federated averaging by pfl-research, on the same clients in the same rounds.

    python benchmarks/peers/pfl_research.py --work WORK.npz --rounds 10 --net cifar10

Its ``FederatedAveraging`` on its ``SimulatedBackend`` and ``PyTorchModel``, in one
process; user datasets are tensors in memory, as its documentation advises for small
ones, and are kept with the batches it caches. The user sampler is told whom to choose.
The evaluation that it would do on training users in the first round is switched off.
PyTorch uses all cores unless ``--threads`` says otherwise. Started by torchrun it plays
the users in several processes, balanced by their number of examples:

    python -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
        --nproc-per-node 2 benchmarks/peers/pfl_research.py --threads 1 ...

Two things it does not do: it does not shuffle a user's examples between epochs, and it
averages parameters alone, so that the statistics of batch norms run on from user to
user. Both make its rounds cheaper. Updates are weighted by examples.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import StepCounter, load_by, parser, report, seconds_of_process, warm_up
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Told:
    """Says which user is next; it begins again at the end, as pfl looks far ahead."""

    def __init__(self, cohorts: Iterable[Iterable[int]]) -> None:
        self.users = list(chain.from_iterable(cohorts))
        self.taken = 0

    def __call__(self) -> int:
        """The next user."""
        user = self.users[self.taken % len(self.users)]
        self.taken += 1
        return user


class WithLoss(nn.Module):
    """A network with the two methods that pfl-research asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What is minimised; the network stays in training mode throughout."""
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is evaluated."""
        return {}


class Unevaluated(FederatedAveraging):
    """Federated averaging, without the evaluation in the first round."""

    def get_next_central_contexts(self, *given: Any, **more: Any) -> Any:
        """The round's context."""
        contexts, model, metrics = super().get_next_central_contexts(*given, **more)
        if contexts is not None:
            contexts = tuple(replace(c, do_evaluation=False) for c in contexts)
        return contexts, model, metrics


class Clock(TrainingProcessCallback):
    """Notes how long rounds take."""

    def __init__(self) -> None:
        self.startup = 0.0
        self.seconds: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        """The first round begins."""
        self.startup = seconds_of_process()
        self.began = perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended, and the next begins."""
        now = perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        return False, Metrics()


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, help="all cores if not given")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # pfl draws from it, alike in all processes
    work = load_by(given)

    users = {
        k: PyTorchTensorDataset(tensors=work.examples(k), user_id=str(k))
        for k in work.participants
    }
    sizes = {k: len(user) for k, user in users.items()}
    data = FederatedDataset(users.__getitem__, Told(work.cohorts), sizes)
    network = WithLoss(work.model()).train()
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=central,
    )
    warm_up(work)
    clock, counter = Clock(), StepCounter(but=central)
    Unevaluated().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=given.rounds,
            evaluation_frequency=given.rounds + 1,
            train_cohort_size=len(work.cohorts[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs,
            local_learning_rate=work.net.lr,
            local_batch_size=work.net.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    steps, processes = counter.steps, 1
    if dist.is_initialized():
        total = torch.tensor(steps)
        dist.all_reduce(total)
        steps, processes = int(total), dist.get_world_size()
        if dist.get_rank() > 0:
            return
    report(
        *("pfl-research", given, work, clock.startup, clock.seconds, steps),
        final=network.network.state_dict(),
        packages=("pfl",),
        threads=torch.get_num_threads(),
        processes=processes,
    )


if __name__ == "__main__":
    main()
