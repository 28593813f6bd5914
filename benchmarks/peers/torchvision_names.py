"""Names that torchvision needs to be imported beside a PyTorch for the CPU.

From the package index it comes for CUDA, and does not find its compiled operators then.
None of them is used by a peer, but torchvision describes two when it is imported.
"""

from torch.library import Library

operators = Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    operators.define(
        f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
