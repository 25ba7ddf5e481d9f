"""Sampling under torch.compile, export, fake tensors, vmap and CUDA graphs: one operator, an eager call's tokens."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_softmax import penalize, sample, speculative_sample, top_k_renorm_probs, top_p_mask_logits

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, calls are composed"
)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


def compiled(function, **options):
    """`function`, compiled whole, and the graphs it was compiled to."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, backend=backend, **{"fullgraph": True} | options), graphs


def operators(graph):
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("fused_softmax.")]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def rows(n, device):
    """Logits, seeds and positions of n rows."""
    x = torch.randn(n, 40, generator=torch.Generator().manual_seed(n)) * 2
    return x.to(device), torch.arange(n, device=device) - 1, torch.arange(n, device=device) * 2**33


CALLS = {
    "plain": lambda x, s, p: sample(x, seed=s, position=p),
    "numbers": lambda x, s, p: sample(x, 0.7, 5, 0.9, 0.05, order="joint", seed=3, position=2**40),
    "one seed": lambda x, s, p: sample(x, 0.7, seed=3),
    "one seed in a tensor": lambda x, s, p: sample(x, 0.7, seed=s[0]),
    "tensors": lambda x, s, p: sample(
        x, x[:, 0].abs(), s, seed=s, position=p, logit_bias=x, row_indices=s.flip(0), return_logprobs="raw"
    ),
    "all results": lambda x, s, p: sample(
        x, top_p=0.8, seed=s, return_logprobs="processed", top_logprobs=3, return_kept=True
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_compiled_code_holds_one_operator(call, device):
    given = rows(3, device)
    function, graphs = compiled(CALLS[call])
    assert_same(function(*given), CALLS[call](*given))
    assert operators(graphs[0]) == ["fused_softmax.sample.default"]


def test_out_is_written_within_compiled_code(device):
    x, seed, _ = rows(3, device)
    out = torch.full((3,), -7, device=device)
    function, _ = compiled(lambda x, seed, out: sample(x, seed=seed, out=out))
    assert function(x, seed, out).tokens.data_ptr() == out.data_ptr()
    assert torch.equal(out, sample(x, seed=seed).tokens)


def test_numbers_may_change_within_compiled_code(device):
    x, seed, _ = rows(2, device)
    function, _ = compiled(lambda x, *numbers: sample(x, *numbers, seed=seed))
    for numbers in ((0.5, 5, 0.9, 0.1), (0.6, 6, 0.8, 0.2), (1, 0, 2.0, 0.0)):
        assert_same(function(x, *numbers), sample(x, *numbers, seed=seed))
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        sample(x, -1.0, seed=seed)


OF_NUMBERS = {
    "penalize": lambda x, s, a, b: (penalize(x, s[:, None], 1 + a, a, b),),
    "filters": lambda x, s, a, b: (top_p_mask_logits(x, a), top_k_renorm_probs(x.abs(), int(10 * b))),
}


@pytest.mark.parametrize("call", OF_NUMBERS)
def test_numbers_of_what_has_no_operator_may_change_within_compiled_code(call, device):
    x, seed, _ = rows(2, device)
    function, _ = compiled(OF_NUMBERS[call])
    for numbers in ((0.5, 0.7), (0.6, 0.8), (0.75, 0.9)):
        assert_same(function(x, seed, *numbers), OF_NUMBERS[call](x, seed, *numbers))


def test_any_number_of_rows_is_one_graph(device):
    function, graphs = compiled(lambda x, s, p: sample(x, 0.7, 5, seed=s, position=p), dynamic=True)
    for n in (3, 5):
        given = rows(n, device)
        assert_same(function(*given), sample(given[0], 0.7, 5, seed=given[1], position=given[2]))
    assert len([graph for graph in graphs if operators(graph)]) == 1


def test_shapes_of_a_tree_are_compared_once_its_parents_have_made_a_size_a_number(device):
    x, _, _ = rows(3, device)

    def call(x, drafts, top_p, bits):
        asked = {"top_p": top_p, "bitmask": bits, "verify": "tree", "parents": [-1, -1], "seed": 1}
        return speculative_sample(x, drafts, **asked)[:3]

    given = x[None], torch.tensor([[1, 2]], device=device), x[None, :, 0].sigmoid(), torch.full((1, 3, 2), -1).int()
    given = [each.to(device) for each in given]
    function, _ = compiled(call, dynamic=True)
    assert_same(function(*given), call(*given))


def test_the_devices_own_generator_draws_anew_within_compiled_code(device):
    x = torch.zeros(4, 4096, device=device)
    function, _ = compiled(lambda x: sample(x, 0.7))
    torch.manual_seed(1)
    first, second = function(x).tokens, function(x).tokens
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(sample(x, 0.7).tokens, first)


def test_a_generator_breaks_the_graph_and_gives_the_same_tokens(device):
    x, generator = rows(3, device)[0], torch.Generator(device)
    function, _ = compiled(lambda x, generator: sample(x + 0, 0.7, generator=generator), fullgraph=False)
    found = function(x, generator.manual_seed(3))
    assert_same(found, sample(x, 0.7, generator=generator.manual_seed(3)))


OTHERS = {
    "speculative": lambda x, s, p: speculative_sample(x[None], s[None, 1:], temperature=0.7, seed=s[0]),
    "penalize": lambda x, s, p: (penalize(x, s[:, None], 1.2, presence=0.5),),
    "filters": lambda x, s, p: (top_p_mask_logits(x, 0.9), top_k_renorm_probs(x.abs(), s)),
}


@pytest.mark.parametrize("call", OTHERS)
def test_what_has_no_operator_is_traced_whole(call, device):
    given = rows(3, device)
    function, graphs = compiled(OTHERS[call])
    assert_same(function(*given), OTHERS[call](*given))
    assert set(operators(graphs[0])) == ({"fused_softmax.sample.default"} if call == "speculative" else set())


def test_an_exported_program_draws_any_number_of_rows(device):
    class Step(torch.nn.Module):
        def forward(self, x, seed, position):
            return sample(x, 0.7, 5, 0.9, seed=seed, position=position)

    n = torch.export.Dim("n", min=2, max=64)
    dims = {name: {0: n} for name in ("x", "seed", "position")}
    program = torch.export.export(Step(), rows(3, device), dynamic_shapes=dims)
    given = rows(7, device)
    assert_same(program.module()(*given), Step()(*given))


def test_fake_tensors_have_the_results_of_true_ones(device):
    def facts(drawn):
        return [None if each is None else (each.shape, each.dtype, each.stride()) for each in drawn]

    given = rows(3, device)
    for call in CALLS.values():
        with FakeTensorMode() as mode:
            fake = facts(call(*map(mode.from_tensor, given)))
        assert fake == facts(call(*given))


@pytest.mark.parametrize("draft_logits", [False, True])
def test_drafts_of_fake_tensors_have_the_results_of_true_ones(draft_logits, device):
    """Top-p draws again until no row is left, and how many are left nobody can ask of them."""

    def facts(x, drafts):
        drawn = speculative_sample(x[None], drafts[None], x[None, 1:] if draft_logits else None, top_p=0.8, seed=1)
        return [(each.shape, each.dtype, each.stride()) for each in drawn[:3]]

    given = rows(3, device)[0], torch.tensor([1, 2], device=device)
    with FakeTensorMode() as mode:
        fake = facts(*map(mode.from_tensor, given))
    assert fake == facts(*given)


def test_vmap_is_composed_of_torchs_operations(device):
    x, seed, position = rows(6, device)
    x = x.view(2, 3, 40)
    tokens = torch.vmap(lambda x: sample(x, 0.7, 5, seed=seed[:3], position=position[:3]).tokens)(x)
    assert torch.equal(
        tokens, torch.stack([sample(each, 0.7, 5, seed=seed[:3], position=position[:3])[0] for each in x])
    )


def test_rows_of_one_seed_under_vmap_are_numbered_as_a_call_sees_them(device):
    x = rows(6, device)[0].view(2, 3, 40)
    found = torch.vmap(lambda x: sample(x, seed=5).tokens)(x)
    assert torch.equal(found, torch.stack([sample(each, seed=5).tokens for each in x]))


@pytest.mark.parametrize("options", [{}, {"top_k": 2, "return_logprobs": "processed", "top_logprobs": 2}], ids=str)
def test_draws_of_no_row_and_rows_without_a_draw(options, device):
    """The kernels read the first logit before they know whether there is one."""
    none = torch.empty(0, 9, device=device)
    drawn = sample(none, seed=1, row_indices=torch.tensor([0, -1], device=device), **options)
    assert drawn.tokens.tolist() == [0, 0]
    assert drawn.valid.tolist() == [False, False]
    drawn = sample(torch.ones(2, 9, device=device), seed=1, row_indices=torch.arange(0, device=device), **options)
    assert len(drawn.tokens) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_a_captured_graph_draws_anew_at_every_replay(filters):
    x = torch.randn(8, 32000, device="cuda")
    seed, position = torch.arange(8, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def step():
        by_seed = sample(x, **filters, seed=seed, position=position).tokens
        position.add_(1)
        one_seed = sample(x, **filters, seed=9).tokens
        return by_seed, sample(x, **filters, generator=generator).tokens, one_seed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        found = step()
    torch.cuda.synchronize()  # torch fills the capture's seed on another stream than the replay's
    position.zero_()
    generator.manual_seed(2)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append([each.clone() for each in found])
    position.zero_()
    generator.manual_seed(2)
    assert all(torch.equal(a, b) for ours in replayed for a, b in zip(ours, step(), strict=True))
    assert not torch.equal(replayed[0][1], replayed[1][1])
    assert all(torch.equal(ours[2], sample(x, **filters, seed=9).tokens) for ours in replayed)


def drawn(x, drafts, seed, position):
    return speculative_sample(x, drafts, temperature=0.8, top_k=9, seed=seed, position=position)[:3]


def drafts_of(n, device):
    x, seed, position = rows(3 * n, device)
    return x.view(n, 3, 40), torch.zeros(n, 2, dtype=torch.int64, device=device), seed[:n], position[:n]


@pytest.mark.timeout(200)
@pytest.mark.exhaustive
def test_noise_is_compiled_by_inductor(device):
    """What it inlines would double with each of ten rounds: it used to take minutes, and all memory."""
    given = drafts_of(2, device)
    assert_same(torch.compile(drawn)(*given), drawn(*given))


def test_noise_under_vmap_of_compiled_code(device):
    x, drafts, seed, position = drafts_of(6, device)
    words = x.view(2, 3, 3, 40), drafts.view(2, 3, 2), seed.view(2, 3), position[:3]

    def function(*words):
        return torch.vmap(drawn, in_dims=(0, 0, 0, None))(*words)

    assert_same(compiled(function)[0](*words), function(*words))
