"""transformers itself, which must be installed, with this package in its processors of logits.

Temperatures, and what this package has no function for, stay transformers' own. Names that the installed version
does not have become classes that no chosen test uses.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.generation import logits_process

import fused_softmax

if importlib.util.find_spec("parameterized") is None:  # of tests that are not chosen
    sys.modules["parameterized"] = SimpleNamespace(
        parameterized=SimpleNamespace(expand=lambda cases: lambda test: test)
    )

for file in Path(__file__).parent.rglob("test_logits_process.py"):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.generation"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, type(alias.name, (), {}))


def _filled(masked, value):
    return masked if value == -torch.inf else masked.masked_fill(masked == -torch.inf, value)


def _top_k(self, input_ids, scores):
    return _filled(fused_softmax.top_k_mask_logits(scores, self.top_k), self.filter_value)


def _with_the_greatest(masked, self, scores):
    """Keeps the min_tokens_to_keep greatest too."""
    if self.min_tokens_to_keep > 1:
        masked = torch.maximum(masked, fused_softmax.top_k_mask_logits(scores, self.min_tokens_to_keep))
    return _filled(masked, self.filter_value)


def _top_p(self, input_ids, scores):
    return _with_the_greatest(fused_softmax.top_p_mask_logits(scores, self.top_p), self, scores)


def _min_p(self, input_ids, scores):
    return _with_the_greatest(fused_softmax.min_p_mask_logits(scores, self.min_p), self, scores)


def _repetition(self, input_ids, scores):
    return fused_softmax.penalize(scores, input_ids[:, self.prompt_ignore_length or 0 :], self.penalty)


def _repetition_of_encoder(self, input_ids, scores):
    return fused_softmax.penalize(scores, self.encoder_input_ids, self.penalty)


logits_process.TopKLogitsWarper.__call__ = _top_k
logits_process.TopPLogitsWarper.__call__ = _top_p
logits_process.MinPLogitsWarper.__call__ = _min_p
logits_process.RepetitionPenaltyLogitsProcessor.__call__ = _repetition
logits_process.EncoderRepetitionPenaltyLogitsProcessor.__call__ = _repetition_of_encoder
