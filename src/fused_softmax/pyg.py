"""What PyTorch Geometric calls: softmax, with the arguments of torch_geometric.utils.softmax, which it does not need.

`fused_softmax.enable(pyg=True)` puts it in the place of PyG's.
"""

import fused_softmax.register.library  # noqa: F401  registers the operators, as the first public name does
from fused_softmax.ops.segments.pyg import softmax

__all__ = ["softmax"]
