"""The examples run: a few steps of the tiny training, by which both losses go the same way."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_tiny.py"


@pytest.fixture
def train_tiny():
    pytest.importorskip("transformers", reason="the example trains a model of the transformers package")
    pytest.importorskip("matplotlib", reason="the example draws its curves")
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = ["--vocab", "31", "--hidden", "16", "--layers", "1", "--tokens", "32", "--length", "8"]


def test_both_losses_fall_alike_and_are_drawn(train_tiny, device, tmp_path, capsys):
    out = tmp_path / "curves.png"
    curves = train_tiny.main(["--steps", "6", *SMALL, "--device", device, "-o", str(out)])
    theirs, ours = (curve.losses for curve in curves)
    assert len(theirs) == len(ours) == 6
    assert theirs == pytest.approx(ours, rel=1e-3)
    assert ours[-1] < ours[0]
    assert all(curve.peak_bytes > 0 for curve in curves)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "losses are at most" in capsys.readouterr().out


def test_tokens_follow_the_rule_but_for_the_noise(train_tiny):
    import torch

    tokens = train_tiny.sequences(64, 32, 100, torch.Generator().manual_seed(0))
    pairs = torch.stack((tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), 1)
    table = torch.randperm(100, generator=torch.Generator().manual_seed(7))
    follows = (table[pairs[:, 0]] == pairs[:, 1]).float().mean()
    assert 0.9 < follows < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--steps", "0"], "--steps"), (["-o", "no_such_folder/x.png"], "no folder no_such_folder")],
)
def test_bad_options_are_named(options, message, train_tiny, capsys):
    with pytest.raises(SystemExit):
        train_tiny.main([*SMALL, *options])
    assert message in capsys.readouterr().err
