"""Two collectives under the names that torch 2.13 gave them, which warns once a rank of those that 2.11 knows."""

from typing import Any

import torch.distributed as dist

_named: Any = dist
all_gather_single = _named.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter_single = (
    _named.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
