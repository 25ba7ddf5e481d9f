import torch


def attention_mask_func(scores, mask):
    return scores.masked_fill_(mask, -10000.0)


def get_default_causal_mask(sq):
    """True above the diagonal, where a key is later than its query."""
    places = torch.arange(sq, device="cuda")
    return places > places[:, None]
