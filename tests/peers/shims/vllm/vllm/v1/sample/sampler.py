from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import fused_softmax


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any


class Sampler(torch.nn.Module):
    logprobs_mode = "raw_logprobs"

    @staticmethod
    def apply_penalties(logits, metadata, output_token_ids):
        """repetition counts the prompt's tokens too, so there are two calls. Prompts are padded with an id past the
        vocabulary, which does nothing.
        """
        ids = [torch.tensor(each, dtype=torch.int64, device=logits.device) for each in output_token_ids]
        ids = pad_sequence(ids, batch_first=True, padding_value=-1)
        both = torch.cat([metadata.prompt_token_ids, ids], 1)
        logits = fused_softmax.penalize(logits, both, metadata.repetition_penalties)
        return fused_softmax.penalize(logits, ids, 1.0, metadata.presence_penalties, metadata.frequency_penalties)
