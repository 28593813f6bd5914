"""Federated averaging as a bare PyTorch loop: DataLoader, nn.Module, SGD, one process.

    python benchmarks/peers/bare.py --work WORK.npz --rounds 10 --net cifar10

Nothing is sent or copied that the algorithm does not need, and PyTorch uses all cores
unless ``--threads`` says otherwise. ``--batches whole`` takes a batch's examples at
once, where the usual DataLoader takes them one by one and stacks them. All examples are
float32 tensors before the first round.
"""

from time import perf_counter

import torch
from common import average, load_by, parser, report, seconds_of_process, train, warm_up
from torch.utils.data import TensorDataset


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, help="all cores if not given")
    options.add_argument("--batches", choices=("loader", "whole"), default="loader")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    work = load_by(given)
    examples = {k: TensorDataset(*work.examples(k)) for k in work.participants}
    model, state = work.model(), work.initial

    warm_up(work)
    startup, seconds, steps = seconds_of_process(), [], 0
    for cohort in work.cohorts:
        began = perf_counter()
        trained = []
        for client in cohort:
            model.load_state_dict(state)
            steps += train(model, examples[client], work, given.batches)
            own = {name: values.clone() for name, values in model.state_dict().items()}
            trained.append((len(examples[client]), own))
        state = average(trained)
        seconds.append(perf_counter() - began)
    report(
        *("bare", given, work, startup, seconds, steps, state),
        threads=torch.get_num_threads(),
        batches=given.batches,
    )


if __name__ == "__main__":
    main()
