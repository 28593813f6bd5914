"""fedspu on Flower: a strategy for your own app, and apps that are ready to run.

``FedSPUStrategy`` is used in a ``ServerApp``; ``fedspu.flower.client_app`` has the
``ClientApp`` that answers it. Both need the extra ``flower``.
"""

from fedspu.flower.strategy import FedSPUStrategy

__all__ = ["FedSPUStrategy"]
