"""How many kernels lists of calls take on an H100, which need not be here: this script prints them as JSON."""

import json

import torch

import fused_softmax as ours
import fused_softmax.nn
from fused_softmax.bench.entries.first_calls import BATCHES, CONTEXTS
from fused_softmax.core.elsewhere import run, stand_in_for
from fused_softmax.core.plan import H100
from fused_softmax.warm.work import key_of

BF16, VOCABULARY = torch.bfloat16, 128256


def made(*shape, dtype=BF16, grad=False):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def softmax(n, n_cols=VOCABULARY, **how):
    return ours.softmax(made(n, n_cols, **how), -1)


def loss(n, n_classes=VOCABULARY, **options):
    return ours.cross_entropy(made(n, n_classes, grad=True), made(n, dtype=torch.int64), **options)


def log_prob(n, grad=False, n_kept=None):
    x, target = made(n, VOCABULARY, grad=grad), made(n, dtype=torch.int64)
    kept = None if n_kept is None else (made(n_kept, dtype=torch.int32), made(n + 1, dtype=torch.int64))
    return ours.log_prob(x, target, return_entropy=True, kept=kept)[:2]


def divergence(n, grad=False, **options):
    x, y = made(n, VOCABULARY, grad=grad), made(n, VOCABULARY)
    return ours.divergence(x, y, **options)


def sample(n, **filters):
    return ours.sample(made(n, VOCABULARY), 0.7, seed=1, **filters)


def route(n, grad=False, **options):
    return ours.route(made(n, 256, grad=grad), 8, **options).weights


def attention(length, grad=False, **options):
    q, k, v = (made(2, 8, length, 64, grad=grad) for _ in range(3))
    return ours.attention(q, k, v, deterministic=True, **options)


def decode(n_keys):
    keys = made(8, 8, n_keys, 128)
    return ours.attention(made(8, 32, 1, 128), keys, keys, enable_gqa=True)


def segments(n, grad=False):
    x, offsets = made(n, 8, grad=grad), made(n // 40, dtype=torch.int64)
    return ours.segment_softmax(x, offsets)


LISTS = {
    "softmax, batches": [lambda n=n: softmax(n) for n in BATCHES],
    "softmax, vocabularies": [lambda n=n: softmax(4096, n) for n in (128256, 128000, 129280, 127936)],
    "softmax, both passes": [lambda: softmax(4096, grad=True)],
    "softmax over dim 1": [lambda: ours.softmax(made(64, 4096, 512), 1)],
    "loss": [lambda: loss(4096)],
    "loss, numbers of rows": [lambda n=n: loss(n) for n in (2048, 4096, 5000, 8192, 20000)],
    "loss, smoothed": [lambda: loss(4096, label_smoothing=0.1)],
    "loss, vocabularies": [lambda n=n: loss(4096, n) for n in (128256, 128000, 129280)],
    "log_prob, numbers of rows": [lambda n=n: log_prob(n) for n in (1, 7, 512, 20000)],
    "log_prob, both passes": [lambda: log_prob(4096, True)],
    "log_prob, lists": [lambda n=n: log_prob(n, True, 50 * n + 1) for n in (1, 7, 512, 20000)],
    "divergence, numbers of rows": [lambda n=n: divergence(n) for n in (1, 7, 512, 20000)],
    "divergence, both passes": [lambda: divergence(4096, True)],
    "divergence, of two passes": [lambda: divergence(4096, True, kind="jsd")],
    "T, batches": [lambda n=n: sample(n) for n in BATCHES],
    "top-k, batches": [lambda n=n: sample(n, top_k=50) for n in BATCHES],
    "route, batches": [lambda n=n: route(n) for n in BATCHES],
    "route, both passes": [lambda: route(4096, True, return_aux_loss=True)],
    "segments, numbers of elements": [lambda n=n: segments(n) for n in (400_000, 1_000_000, 14_000_000)],
    "segments, both passes": [lambda: segments(1_000_000, True)],
    "attention, lengths": [lambda n=n: attention(n, is_causal=True) for n in (1024, 2048, 4096, 8192)],
    "attention, both passes": [lambda: attention(2048, True, is_causal=True)],
    "decode, contexts": [lambda n=n: decode(n) for n in CONTEXTS],
}


def main():
    found = []
    stand_in_for(H100, found)
    counts = {}
    for name, calls in LISTS.items():
        found.clear()
        for call in calls:
            run(call)
        counted = {key_of(each) for each in found if "registers_of" in each.options}  # compiled for their registers too
        counts[name] = len({key_of(each) for each in found}) + len(counted)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
