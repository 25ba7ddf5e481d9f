"""Which results a change of the source leaves as they are."""

import pytest

from fused_softmax.bench import fingerprint


def files_of(operation):
    found = fingerprint._files_of_operations()[operation]
    return {path.relative_to(fingerprint.PACKAGE).as_posix() for path in found}


@pytest.mark.parametrize(
    ("operation", "imports", "leaves"),
    [
        ("softmax", "kernels/softmax.py", "kernels/sample_wide.py"),
        ("softmax", "plan/strategies.py", "plan/draws.py"),
        ("softmax", "classic/naive.py", "kernels/loss.py"),
        ("sample", "kernels/sample_wide.py", "kernels/softmax.py"),
        ("sample", "plan/draws.py", "kernels/loss.py"),
        ("linear_cross_entropy", "kernels/loss_transposed.py", "kernels/draw.py"),
    ],
)
def test_an_operation_is_of_what_it_imports(operation, imports, leaves):
    assert imports in files_of(operation)
    assert leaves not in files_of(operation)
    assert "launcher.c" in files_of(operation)


def test_a_figure_of_one_gpu_is_not_of_what_only_ranks_run_through():
    found = fingerprint._files_of_operations()
    of_ranks = found.pop("over ranks")
    assert {fingerprint.PACKAGE / path for path in fingerprint.OVER_RANKS} < of_ranks
    assert fingerprint.PACKAGE / "kernels/loss_peers.py" in of_ranks
    for operation in found:
        assert not files_of(operation) & {*fingerprint.OVER_RANKS, "kernels/loss_peers.py", "kernels/peers.py"}
    ops = fingerprint.PACKAGE / "ops"
    of_group = {path for each in ("*shard*.py", "*peer*.py") for path in ops.glob(each)}
    assert of_group <= {fingerprint.PACKAGE / path for path in fingerprint.OVER_RANKS}


def test_a_result_is_current_while_its_operations_are():
    then = {"kernels": "a", "kernels_of": {"softmax": "1", "sample": "2"}}
    now = {"kernels": "b", "kernels_of": {"softmax": "1", "sample": "3"}}
    assert not fingerprint.difference(then, now, ["softmax"])
    assert (
        fingerprint.difference(then, now, ["softmax", "sample"])
        == "of other kernels of sample (fingerprint a against b)"
    )
    assert fingerprint.difference(then, now, ["logsumexp"])
    assert fingerprint.difference(then, now)
    assert not fingerprint.difference(then, then)


def test_results_made_before_operations_had_fingerprints_go_by_that_of_all_kernels():
    now = {"kernels": "b", "kernels_of": {"softmax": "1"}}
    assert fingerprint.difference({"kernels": "a"}, now, ["softmax"]) == "of other kernels (fingerprint a against b)"
    assert not fingerprint.difference({"kernels": "b"}, now, ["softmax"])
    assert fingerprint.difference({}, now, ["softmax"]) == "made before fingerprints"
