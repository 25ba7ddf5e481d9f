"""What losses over two GPUs take, beside what bounds them: `torchrun --nproc-per-node 2 lab/over_two_gpus.py`.

A linear layer's loss cannot take less than half of one GPU's products and, unless they overlap, the reduction of the
input's gradient. Each time is the median of the slower rank, us, of an eager call that the ranks begin together; the
figures are in docs/shards.md.
"""

import os
import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import fused_softmax
from fused_softmax import cross_entropy, divergence, linear_cross_entropy, linear_divergence, logsumexp, softmax

ROWS, HIDDEN, CLASSES = 8192, 4096, 128256


def time_of(call, repeats=12):
    for _ in range(3):
        call()
    found, flag = [], torch.zeros(1, device="cuda")
    for _ in range(repeats):
        dist.all_reduce(flag)  # the ranks begin together
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def report(name, call):
    taken = time_of(call)
    if dist.get_rank() == 0:
        print(f"{name:72}{taken:10.1f}", flush=True)
    return taken


def loss(logits, target, options):
    y = cross_entropy(logits, target, **options)
    return torch.autograd.grad(y if torch.is_tensor(y) else y.loss, [logits])


def softmax_and_gradient(logits, dy, options):
    return torch.autograd.grad(softmax(logits, 1, **options), [logits], dy)


def loss_of_dtensor(logits, target):
    logits.grad = None
    with fused_softmax.enabled(), loss_parallel():
        torch.nn.functional.cross_entropy(logits, target).backward()


def diverged(logits, teacher, kind, options):
    return torch.autograd.grad(divergence(logits, teacher, kind=kind, **options), [logits])


def linear_diverged(x, w, h, v, options):
    return torch.autograd.grad(linear_divergence(x, w, h, v, **options), [x, w])


def products(x, w, z):
    return x @ w.t(), z @ w, z.t() @ x


def linear(x, w, target, options):
    return torch.autograd.grad(linear_cross_entropy(x, w, target, **options), [x, w])


def of_logits(transports, target, columns):
    logits = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy, weight = torch.randn_like(logits), torch.rand(columns, device="cuda") + 0.5
    for over in transports:
        name = over["transport"]
        for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"return_token_stats": True}):
            report(f"loss and gradient, {name}, {[*options]}", partial(loss, logits, target, options | over))
        report(f"logsumexp, {name}", partial(logsumexp, logits.detach(), 1, **over))
        report(f"softmax and its gradient, {name}", partial(softmax_and_gradient, logits, dy, over))
    teacher = torch.randn_like(logits)
    for kind in ("kl", "reverse_kl", "jsd", "tvd"):
        report(f"{kind} and gradient of these columns alone", partial(diverged, logits, teacher, kind, {}))
        for over in transports:
            report(f"{kind} and gradient, {over['transport']}", partial(diverged, logits, teacher, kind, over))
    parallel = DTensor.from_local(logits.detach(), init_device_mesh("cuda", (2,)), [Shard(1)], run_check=False)
    call = partial(loss_of_dtensor, parallel.requires_grad_(), target)
    report("loss and gradient of a DTensor under enable() and loss_parallel()", call)


def of_layer(transports, target, columns):
    x = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(columns, HIDDEN, device="cuda") / 64).bfloat16().requires_grad_()
    z, dx = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)
    bound = report("half of one GPU's products", partial(products, x.detach(), w.detach(), z))
    bound += report("the reduction of the input's gradient", partial(dist.all_reduce, dx))
    for over in transports:
        taken = report(f"linear_cross_entropy and gradients, {over['transport']}", partial(linear, x, w, target, over))
        if dist.get_rank() == 0:
            print(f"  {taken / bound:.3f} of both", flush=True)
    h, v = torch.randn_like(dx), torch.randn_like(w)
    for over in ({}, *transports):
        name = over.get("transport", "these classes alone")
        report(f"linear_divergence and gradients, {name}", partial(linear_diverged, x, w, h, v, over))


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(0)
    target = torch.randint(CLASSES, (ROWS,), device="cuda")
    transports = [{"group": dist.group.WORLD, "transport": transport} for transport in ("peer", "collective")]
    of_logits(transports, target, CLASSES // 2)
    of_layer(transports, target, CLASSES // 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
