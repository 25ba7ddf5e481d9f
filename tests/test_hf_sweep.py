"""Every model of transformers of which a tiny one can be built, by attention: eager's outputs, gradients and tokens.

test_hf_models.py has one of each kind.
"""

import pytest

pytest.importorskip("transformers")

import hf_models

from fused_softmax import hf
from fused_softmax.ops import attention as attention_ops
from fused_softmax.route import Route


@pytest.mark.parametrize("folder", hf_models.folders())
def test_every_model_is_as_with_eager(folder, monkeypatch):
    monkeypatch.setattr(attention_ops, "route_of", lambda *tensors, **_: Route.COMPOSED)
    hf.register()
    built = [hf_models.check(each) for each in hf_models.classes_of(folder)]
    if not any(built):
        pytest.skip("no tiny model of this folder's classes can be built")
