"""What all nodes of a cluster must have alike, so that all give the same bits."""

import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version

import torch

from fedspu.data.examples import DividedData
from fedspu.errors import FedSPUError
from fedspu.federation.plan import Plan, first_line
from fedspu.partial.clamped_norms import why_not_compiled


def cause(error: BaseException) -> str:
    """The last line that names an error: Ray puts tracebacks into its messages."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "Error: " in line]
    return named[-1] if named else f"{type(error).__name__}: {first_line(error)}"


def versions() -> dict[str, str]:
    """What must be the same on all nodes: other versions may give other bits."""
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "PyTorch": torch.__version__,
        "fedspu": version("fedspu"),
    }


def check_versions(wanted: Mapping[str, str]) -> None:
    """Refuse a node whose results could have other bits."""
    here = versions()
    for name, number in wanted.items():
        if here[name] != number:
            raise FedSPUError(
                f"the Ray node {socket.gethostname()} has {name} {here[name]}, but "
                f"this machine has {number}; install the same on all nodes"
            )


def check_kernels(plan: Plan, examples: DividedData) -> None:
    """Refuse a node that cannot run what all clients must use."""
    if plan.settings.train.kernels != "native":
        return
    reason = why_not_compiled(plan.build().train(), tuple(examples.data.x.shape[1:]))
    if reason:
        raise FedSPUError(
            f"the Ray node {socket.gethostname()} cannot run compiled code: {reason}; "
            "use train.kernels = 'torch'"
        )
