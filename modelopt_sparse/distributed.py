"""What torch.distributed asks of the rest: the only file that imports it."""

import torch
from torch import Tensor

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, distribute_tensor
else:  # builds of torch without distributed support have no sharded weights either
    DTensor = distribute_tensor = None


def is_sharded(weight: Tensor) -> bool:
    """Whether this process holds a part of the weight only (fully_shard, tensor parallelism)."""
    return DTensor is not None and isinstance(weight, DTensor)


def mask_like(mask: Tensor, weight: Tensor) -> Tensor:
    """A full mask, placed the way a sharded ``weight`` is. Every rank holds the same full mask, so nothing is sent."""
    if DTensor is None or distribute_tensor is None:
        return mask
    if isinstance(mask, DTensor):  # tensor parallelism replicates buffers, over a part of the weight's mesh
        mask = mask.full_tensor()
    if not isinstance(weight, DTensor):
        return mask
    mask = mask.to(weight.device_mesh.device_type)
    # a weight that is offloaded between steps lies on another device than its mesh
    return distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None).to(weight.device)
