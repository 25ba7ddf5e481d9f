"""Layers that stand in for transformers' own, by the names under which `kernelize` looks for them.

A layer has no state: only its forward is used, whose self is the module of transformers.
"""

import torch
from torch import Tensor, nn

from fused_softmax.ops.losses.cross_entropy import cross_entropy
from fused_softmax.ops.routing.route import route


class ForCausalLMLoss(nn.Module):
    """The loss of next tokens, in float32, as transformers.loss.loss_utils.ForCausalLMLoss gives it.

    logits: [..., vocab_size], of which no float32 copy is made. labels: [batch, length], shifted here; or shift_labels,
    which are shifted already. num_items_in_batch: what the sum is divided by, in place of the number of targets.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if shift_labels is None:
            if labels is None:
                raise ValueError("ForCausalLMLoss: labels and shift_labels are both None")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        loss = cross_entropy(
            logits.reshape(-1, vocab_size), target, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum", dtype=torch.float32,
        )  # fmt: skip
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class SoftmaxTopKRouter(nn.Module):
    """Logits [n, n_experts], and weights and int64 experts [n, top_k], as the routers of that name in transformers.

    Laguna's bears the name too, and is another: scores are sigmoids of capped logits, and a bias helps to choose.
    A row of NaN has weights NaN.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        dtype = logits.dtype
        if hasattr(self, "e_score_correction_bias"):
            logits = logits.float()
            if (softcap := self.router_logit_softcapping) > 0.0:
                logits = torch.tanh(logits / softcap) * softcap
            bias = self.e_score_correction_bias.detach()
            out = route(logits, self.top_k, score="sigmoid", bias=bias, return_counts=False)
        else:
            renormalize = getattr(self, "norm_topk_prob", True)
            out = route(logits, self.top_k, renormalize=renormalize, return_counts=False)
        routed = out.indices >= 0  # a router of transformers gives every row some experts
        return logits, out.weights.masked_fill(~routed, torch.nan).to(dtype), out.indices.clamp(min=0).long()
