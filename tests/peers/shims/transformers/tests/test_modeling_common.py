import torch


def ids_tensor(shape, vocab_size):
    return torch.randint(vocab_size, shape, device="cuda")
