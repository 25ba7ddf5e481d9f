"""Statistics in compiled code as registered operators: a backward pass that comes to one raises when it runs.

A compiler traces the backward pass of all that it returns, and hands zeros to what nobody differentiates. So only the
gradient that comes back tells whether a statistic is differentiated or only read: anything but 0 is an error. On a GPU
it is an assertion on the device, because the host does not wait.
"""

import torch

NO_GRADIENT = "(Tensor statistic, Tensor beside, str message) -> Tensor"
REFUSED = "(Tensor gradient, Tensor beside, str message) -> Tensor"


def no_gradient(statistic, beside, message):
    """The statistic. beside: a result with a gradient, by which autograd finds its way to the inputs."""
    return statistic.clone()


def refused(gradient, beside, message):
    """0 for `beside`, or RuntimeError where a gradient came back to the statistic."""
    came = gradient.any()
    if gradient.device.type == "cpu":
        if came:
            raise RuntimeError(message)
    else:
        torch.ops.aten._assert_async.msg(~came, message)
    return torch.zeros_like(beside)


def fake_no_gradient(statistic, beside, message):
    return torch.empty_like(statistic)


def fake_refused(gradient, beside, message):
    return torch.empty_like(beside)


def save(ctx, inputs, output):
    _, beside, ctx.message = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(beside)


def gradient(ctx, came):
    if came is None:
        return None, None, None
    (beside,) = ctx.saved_tensors
    return None, torch.ops.fused_softmax.no_gradient_backward.default(came, beside, ctx.message), None


def batched_no_gradient(operator, info, in_dims, statistic, beside, message):
    return operator(statistic, beside, message), in_dims[0]


def batched_refused(operator, info, in_dims, came, beside, message):
    return operator(came, beside, message), in_dims[1]
