"""Every model of transformers of which a tiny one can be built, by attention: eager's outputs, gradients and tokens.

test_hf_models.py has one of each kind.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import hf_models

from fused_softmax.core.route import Route
from fused_softmax.hf import attention as hf
from fused_softmax.ops.attention import attention as attention_ops


@pytest.mark.parametrize("folder", hf_models.folders())
def test_every_model_is_as_with_eager(folder, monkeypatch):
    monkeypatch.setattr(attention_ops, "route_of", lambda *tensors, **_: Route.COMPOSED)
    hf.register()
    try:
        classes = hf_models.classes_of(folder)
    except ImportError as error:
        pytest.skip(f"its code needs another package: {error}")
    built = [hf_models.check(each) for each in classes]
    if not any(built):
        pytest.skip("no tiny model of this folder's classes can be built")


def test_the_page_lists_whose_attention_is_their_own():
    found = defaultdict(set)
    for folder in hf_models.folders():
        try:
            for each in hf_models.classes_of(folder):
                found[hf.attention_of(each)].add(folder)
        except ImportError:  # of a package that is not here
            continue
    page = (Path(__file__).parents[1] / "docs" / "patch.md").read_text()
    lists = re.findall(r"^(?:`\w+`,\s)+`\w+`\.$", page, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", each) for each in lists] == [sorted(found["own"]), sorted(found["eager's masks"])]
