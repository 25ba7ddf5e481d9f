"""The ways on which a gradient of a loss is made, for tests of what all of them have to agree on."""

import torch

from fused_softmax.core import route

ROUTES = ("kernels", "twice", "create_graph", "batched", "compiled", "torch.func", "vmap", "torch", "torch compiled")


def gradients(way, function, leaves, of=lambda y: y, monkeypatch=None):
    """The gradients of the sum of `of(function(*leaves))`, on one of the ROUTES."""
    if way.startswith("torch") and way != "torch.func":
        monkeypatch.setattr(route, "INTERPRET", False)  # of CPU tensors: torch's operations
    if way.endswith("compiled"):
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    total = lambda *leaves: of(function(*leaves)).sum()  # noqa: E731
    if way in ("torch.func", "vmap"):
        grad = torch.func.grad(total, argnums=tuple(range(len(leaves))))
        if way == "torch.func":
            return grad(*leaves)
        return tuple(each[1] for each in torch.vmap(grad)(*[torch.stack((each * 0, each)) for each in leaves]))
    leaves = [each.detach().clone().requires_grad_() for each in leaves]
    y = total(*leaves)
    if way == "twice":
        torch.autograd.grad(y, leaves, retain_graph=True)
    if way == "batched":
        dy = torch.stack((torch.zeros_like(y), torch.ones_like(y)))
        return tuple(each[1] for each in torch.autograd.grad(y, leaves, dy, is_grads_batched=True))
    return torch.autograd.grad(y, leaves, create_graph=way == "create_graph")
