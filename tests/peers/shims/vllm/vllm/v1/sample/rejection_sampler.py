from dataclasses import replace

import torch
from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
from vllm.v1.sample.sampler import Sampler, SamplerOutput

import fused_softmax

PLACEHOLDER_TOKEN_ID = -1


def sample_recovered_tokens(*args, **kwargs):
    raise NotImplementedError


class RejectionSampler(torch.nn.Module):
    def __init__(self, sampler, spec_config=None, device=None):
        super().__init__()
        assert spec_config is None
        self.sampler = sampler

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        """The sampler draws the bonus token. The row after the drafts then allows no other."""
        bonus = self.sampler(logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata)
        logits = logits[metadata.target_logits_indices].float()
        device, vocab = logits.device, logits.shape[1]
        lengths = torch.tensor(metadata.num_draft_tokens, device=device)
        n, k = len(lengths), metadata.max_spec_len
        has_draft = torch.arange(k + 1, device=device) < lengths[:, None]
        if not sampling_metadata.no_penalties:
            logits = self._penalized(logits, sampling_metadata, has_draft)

        def of_sequences(given, empty, width=k + 1):
            if given is None:
                return None
            rows = torch.full((n, width, *given.shape[1:]), empty, dtype=given.dtype, device=device)
            rows[has_draft[:, :width]] = given
            return rows

        target = of_sequences(logits, -torch.inf)
        target[torch.arange(n, device=device), lengths, bonus.sampled_token_ids.view(-1)] = 0
        drawn = fused_softmax.speculative_sample(
            target, of_sequences(metadata.draft_token_ids, -1, k), None,
            0.0 if sampling_metadata.all_greedy else sampling_metadata.temperature, sampling_metadata.top_k,
            sampling_metadata.top_p, draft_probs=of_sequences(draft_probs, 0, k), draft_lengths=lengths,
            seed=self._seeds(sampling_metadata.generators, n, device),
            logit_bias=of_sequences(self._bias(sampling_metadata, metadata, has_draft, vocab), 0),
        )  # fmt: skip
        return SamplerOutput(drawn.tokens.int(), None)

    @staticmethod
    def _seeds(generators, n, device):
        seeds = torch.randint(2**63 - 1, (n,), device=device)
        for row, generator in generators.items():
            seeds[row] = torch.randint(2**63 - 1, (), generator=generator, device=device)
        return seeds

    @staticmethod
    def _before(sampling_metadata):
        """The tokens before each draft."""
        given = zip(sampling_metadata.output_token_ids, sampling_metadata.spec_token_ids, strict=True)
        return [[*output, *drafts[:j]] for output, drafts in given for j in range(len(drafts))]

    def _penalized(self, logits, sampling_metadata, has_draft):
        sequence = has_draft.nonzero()[:, 0]
        of_sequences = ("prompt_token_ids", "presence_penalties", "frequency_penalties", "repetition_penalties")
        own = {name: getattr(sampling_metadata, name)[sequence] for name in of_sequences}
        return Sampler.apply_penalties(logits, replace(sampling_metadata, **own), self._before(sampling_metadata))

    def _bias(self, sampling_metadata, metadata, has_draft, vocab):
        """-inf where a token is not allowed."""
        mask, words = sampling_metadata.allowed_token_ids_mask, sampling_metadata.bad_words_token_ids
        if mask is None and not words:
            return None
        sequence = has_draft.nonzero()[:, 0]
        bias = torch.zeros(len(sequence), vocab, device=has_draft.device)
        if mask is not None:
            bias.masked_fill_(mask[sequence], -torch.inf)
        if words:
            apply_bad_words_with_drafts(bias, words, self._before(sampling_metadata), metadata.num_draft_tokens)
        return bias
