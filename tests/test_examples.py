"""The examples run: tiny trainings, alone, over two ranks, of a bias and by rewards; generate() by our sampler, and a
server's loop.
"""

import errno
import importlib.util
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from products import one_in

import fused_softmax
from fused_softmax.core.route import Route
from fused_softmax.ops.sampling import sample as sampling
from fused_softmax.ops.sampling import speculative
from fused_softmax.ops.segments import segments

EXAMPLES = Path(__file__).parents[1] / "examples"


def module_of(name):
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as for whoever runs one, who finds what the examples share
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def run_example(name, *arguments, cwd, path=()):
    """One in a process of its own, as its users run it. path: folders before all others of the import path."""
    path = os.pathsep.join([*map(str, path), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def train_tiny():
    pytest.importorskip("transformers", reason="the example trains a model of the transformers package")
    pytest.importorskip("altair", reason="the example draws its curves")
    return module_of("train_tiny")


@pytest.fixture
def generate():
    pytest.importorskip("transformers", reason="the example generates by a model of the transformers package")
    return module_of("generate")


@pytest.fixture
def graph_attention():
    return module_of("graph_attention")


@pytest.fixture
def attention_bias():
    pytest.importorskip("altair", reason="the example draws its curves")
    return module_of("attention_bias")


@pytest.fixture
def grpo_tiny(monkeypatch):
    """As where TRL is not installed."""
    pytest.importorskip("transformers", reason="the example trains a model of the transformers package")
    pytest.importorskip("altair", reason="the example draws its curves")
    module = module_of("grpo_tiny")
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    return module


@pytest.fixture
def server_step():
    return module_of("server_step")


@pytest.fixture
def two_ranks(monkeypatch):
    pytest.importorskip("altair", reason="the example draws its curves")
    monkeypatch.syspath_prepend(EXAMPLES)  # where the ranks, which are other processes, find what they run
    return module_of("two_ranks")


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
    tokens = train_tiny.sequences(64, 32, 100, torch.Generator().manual_seed(0))
    pairs = torch.stack((tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), 1)
    table = torch.randperm(100, generator=torch.Generator().manual_seed(7))
    follows = (table[pairs[:, 0]] == pairs[:, 1]).float().mean()
    assert 0.9 < follows < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps"), (["-o", "no_such_folder/x.png"], "no folder no_such_folder"),
        (["-o", "x.txt"], "must end in one of .png, .svg, .pdf, got x.txt"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, message, train_tiny, capsys):
    with pytest.raises(SystemExit):
        train_tiny.main([*SMALL, *options])
    assert message in capsys.readouterr().err


def test_generate_draws_by_our_sampler_and_a_prompt_alone_as_beside_others(generate, device, capsys):
    model = generate.tiny_model().to(device).eval()
    prompts, filters = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device), {"temperature": 0.8, "top_k": 20}
    both = generate.generate(model, prompts, 4, filters, generate.hf.sampler(7))
    assert both.shape == (2, 7)
    for i in range(2):
        alone = generate.generate(model, prompts[i : i + 1], 4, filters, generate.hf.sampler(7 + i))
        assert torch.equal(alone, both[i : i + 1])


@pytest.mark.exhaustive
def test_generates_draws_have_the_probabilities_of_transformers_filters_and_are_drawn(
    generate, device, tmp_path, capsys
):
    out = tmp_path / "draws.png"
    first, _ = generate.main(["--new-tokens", "2", "--draws", "40", "--device", device, "-o", str(out)])
    assert len(first) == 5
    said = capsys.readouterr().out
    assert str(first) in said
    assert "us by fused_softmax" in said
    assert "us by transformers" in said
    assert out.read_bytes().startswith(b"\x89PNG")
    model, prompt = generate.tiny_model().to(device).eval(), torch.tensor([[1, 2, 3]], device=device)
    peaked, flat = (
        generate.measure(model, prompt, 1, 100, {"temperature": temperature, "top_k": 4}) for temperature in (0.05, 1.0)
    )
    for figures in (peaked, flat):
        assert (figures.expected > 0).sum() <= 4
        assert (figures.drawn[figures.expected == 0] == 0).all()
        assert figures.distance < 0.2
    assert peaked.expected.max() > flat.expected.max()


def test_a_server_gives_a_request_the_same_tokens_in_a_batch_with_drafts_and_alone(server_step, device, capsys):
    """Nine requests are one of each kind. They share two places, and the last arrives when the first have left."""
    sizes = ["--places", "2", "--requests", "9", "--steps", "3", "--drafts", "2", "--vocab", "40"]
    found = server_step.main([*sizes, "--device", device])
    assert [len(request.tokens) for request in found] == [3, 2, 1] * 3
    said = capsys.readouterr().out
    assert said.count("as alone") == 9
    assert "but alone" not in said
    assert re.search(r"tokens/s, .* ms a step; of model and sampler, the sampler takes \d+%", said)


def by_hand(server_step, request, model):
    """(tokens, log-probabilities) of a request, by a call of sample a token, of numbers and without a batch."""
    ids, logprobs = list(request.prompt), []
    penalties = {name: getattr(request, name) for name in server_step.PENALTIES} if request.penalized else {}
    for _ in range(request.n_tokens):
        logits = model(torch.tensor(ids[-1:], device=model[1].weight.device))
        if penalties:
            penalties["token_ids"] = torch.tensor([ids], device=logits.device)
        drawn = fused_softmax.sample(
            logits, request.temperature, request.top_k, request.top_p, request.min_p, seed=request.seed,
            position=len(ids), bitmask=server_step.bitmask(request.forbidden, logits.shape[1]).to(logits.device)[None],
            return_logprobs="raw", **penalties,
        )  # fmt: skip
        ids.append(drawn.tokens.item())
        logprobs.append(drawn.logprobs.item())
    return ids[len(request.prompt) :], logprobs


def in_steps(batch, requests):
    """How many steps a batch took for requests that come as soon as there is a place."""
    waiting, n_steps = list(requests), 0
    while waiting or any(batch.there):
        waiting = [request for request in waiting if not batch.put(request)]
        batch.launch()
        batch.collect()
        n_steps += 1
    return n_steps


def server_is_right(server_step, model, n_tokens):
    """Serve every kind of request in batches of 3 places, and compare each with calls by hand: the two batches."""
    requests = server_step.users(18, model[1].out_features, n_tokens)
    batches = [server_step.Batch(3, model, n_tokens + 2), server_step.Batch(3, model, n_tokens + 2, 2)]
    for batch in batches:
        in_steps(batch, [each for each in requests if each.speculative == bool(batch.n_drafts)])
    for request in requests:
        tokens, logprobs = by_hand(server_step, request, model)
        assert request.tokens == tokens, request
        assert request.logprobs == pytest.approx(logprobs if request.wants_logprobs else [], abs=1e-5)
    return batches


@pytest.fixture
def torchs(monkeypatch):
    """Tokens drawn by torch's operations, which on a CPU are quicker than interpreted kernels."""
    monkeypatch.setattr(sampling, "route_of", lambda *tensors, **_: Route.COMPOSED)
    monkeypatch.setattr(speculative, "runs_here", lambda *tensors: False)


def test_a_servers_tokens_are_those_of_sample_by_hand(server_step, torchs):
    """Of filters, a grammar, penalties of the own prompt and output, and drafts."""
    server_is_right(server_step, server_step.model_of(40, 16, "cpu"), 8)


@pytest.mark.gpu
def test_a_servers_graphs_give_the_tokens_of_sample_by_hand(server_step):
    plain, drafted = server_is_right(server_step, server_step.model_of(5000, 64, "cuda"), 12)
    assert {("forward",), ("draw", True, True)} <= set(plain.graphs)
    assert {("forward",), ("draw", False, True)} <= set(drafted.graphs)


def test_a_request_waits_for_its_step_and_for_a_place(server_step, torchs, monkeypatch):
    launch, there = server_step.Batch.launch, []

    def watched(batch):
        if not batch.n_drafts:
            there.append([each and each.seed for each in batch.there])
        return launch(batch)

    monkeypatch.setattr(server_step.Batch, "launch", watched)
    first, second = (server_step.Request((1,), 2, seed=seed) for seed in (1, 2))
    late = server_step.Request((1,), 1, arrives=6, seed=3)
    server_step.serve([late, first, second], 1, server_step.model_of(40, 16, "cpu"), 1)
    assert there == [[1], [1], [2], [2], [None], [None], [3], [None]]
    assert [len(each.tokens) for each in (first, second, late)] == [2, 2, 1]


def test_drafts_save_steps(server_step, torchs):
    """What follows a token here is always the same, so that from its second round on every draft is right."""
    model = server_step.model_of(7, 16, "cpu")
    request = server_step.Request((3, 1), 40, temperature=0.0, speculative=True)
    assert in_steps(server_step.Batch(2, model, 42, 3), [request]) <= 18
    assert request.tokens == by_hand(server_step, request, model)[0]


def test_a_speculative_request_may_not_ask_for_penalties(server_step):
    with pytest.raises(ValueError, match="a speculative request has no penalties"):
        server_step.Request((1,), 1, speculative=True, frequency=0.1)


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_a_server_ends_what_it_cannot_draw(server_step, n_drafts, device):
    model = server_step.model_of(40, 16, device)
    model[1].weight[:, 0] = torch.nan
    request, batch = server_step.Request((3,), 3), server_step.Batch(2, model, 4, n_drafts)
    assert (in_steps(batch, [request]), request.tokens) == (1, [])


def test_a_server_draws_what_a_grammar_allows_and_ends_an_empty_one(server_step, device):
    model = server_step.model_of(40, 16, device)
    allowed = server_step.Request((3,), 3, forbidden=tuple(c for c in range(40) if c not in (7, 33)))
    nothing = server_step.Request((3,), 3, forbidden=tuple(range(40)))
    server_step.serve([allowed, nothing], 2, model, 0)
    assert set(allowed.tokens) <= {7, 33}
    assert len(allowed.tokens) == 3
    assert nothing.tokens == []


def test_a_vocabulary_over_two_ranks_is_learnt_as_by_one(two_ranks, tmp_path, capsys):
    """31 classes: the last of the ranks has a column of padding."""
    out = tmp_path / "curves.png"
    sizes = ["--vocab", "31", "--hidden", "16", "--tokens", "32", "--length", "8", "--dtype", "float64"]
    alone, over = two_ranks.main(["--steps", "8", *sizes, "-o", str(out)])
    (losses,) = alone.losses
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.1
    assert len(over.losses) == 2
    for of_rank in over.losses:
        assert of_rank == pytest.approx(losses, rel=1e-9)
    assert (alone.logits_bytes, over.logits_bytes) == (28 * 31 * 8, 28 * 16 * 8)
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "losses are at most" in said
    assert "2 ranks: loss" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks"), (["-o", "no_such_folder/x.png"], "no folder no_such_folder"),
        (["-o", "x.txt"], "must end in one of .png, .svg, .pdf, got x.txt"),
        (["--device", "cuda", "--ranks", "64"], "a GPU for each of the 64 ranks"),
    ],
)  # fmt: skip
def test_bad_options_of_two_ranks_are_named(options, message, two_ranks, capsys):
    with pytest.raises(SystemExit):
        two_ranks.main(options)
    assert message in capsys.readouterr().err


BIASED = ["--vocab", "5", "--batch", "1", "--length", "8", "--dim", "8", "--layers", "1", "--furthest", "4"]


def test_a_bias_is_learnt_alike_by_torch_and_by_us(attention_bias, device, tmp_path, capsys):
    out = tmp_path / "curves.png"
    theirs, ours = attention_bias.main([*BIASED, "--steps", "2", "--device", device, "-o", str(out)])
    assert len(theirs.losses) == len(ours.losses) == 2
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-3)
    assert ours.table.abs().min() > 0  # every distance has its gradient
    torch.testing.assert_close(ours.table, theirs.table, rtol=0, atol=5e-3)
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "losses are at most" in said
    assert said.count("in 2 steps of") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "3"], "--length: must be a whole number from 4 to"), (["--heads", "0"], "--heads"),
        (["-o", "x.txt"], "must end in one of .png, .svg, .pdf, got x.txt"),
    ],
)  # fmt: skip
def test_bad_options_of_a_bias_are_named(options, message, attention_bias, capsys):
    with pytest.raises(SystemExit):
        attention_bias.main([*BIASED, *options])
    assert message in capsys.readouterr().err


REWARDED = ["--vocab", "16", "--hidden", "16", "--layers", "1", "--prompts", "2", "--generations", "4", "--length", "4"]


@pytest.mark.parametrize("by", one_in(2, ["hand", "TRL"]))
def test_rewards_rise_alike_with_our_log_probabilities(by, grpo_tiny, device, tmp_path, monkeypatch, capsys):
    if by == "TRL":
        pytest.importorskip("trl", reason="TRL's trainer trains")
        monkeypatch.setattr(grpo_tiny, "find_spec", lambda _: True)
    out = tmp_path / "curves.png"
    theirs, ours = grpo_tiny.main(["--steps", "3", *REWARDED, "--device", device, "-o", str(out)])
    assert len(theirs.rewards) == len(ours.rewards) == 3
    assert theirs.rewards == pytest.approx(ours.rewards, abs=1e-3)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-4)
    assert len(set(ours.losses)) == 3
    for a, b in zip(theirs.found, ours.found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert all(run.peak_bytes > 0 for run in (theirs, ours))
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert ("TRL is not installed" in said) == (by == "hand")
    assert said.count("in 3 steps") == 2
    assert "at most apart: log-probabilities" in said
    who = "torch" if by == "hand" else "TRL"
    assert f"loss of the last step: {who} {theirs.losses[-1]:.5f}, fused_softmax {ours.losses[-1]:.5f}" in said


def test_a_graph_learns_whom_to_believe(graph_attention, device, monkeypatch):
    """On a CPU by torch's operations, as its users run it: to interpret a hundred steps takes minutes."""
    if device == "cpu":
        monkeypatch.setattr(segments, "route_of", lambda *tensors, **_: Route.COMPOSED)
    before, after = graph_attention.main(["--device", device])
    assert before < after
    assert after > 0.9


@pytest.mark.parametrize("name", ["two_ranks", "train_tiny", "generate", "attention_bias", "grpo_tiny"])
def test_a_picture_that_exists_is_kept(request, name, tmp_path, capsys):
    out = tmp_path / "curves.png"
    out.write_text("mine")
    with pytest.raises(SystemExit):
        request.getfixturevalue(name).main(["-o", str(out)])
    assert "curves.png exists; --force overwrites it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    link = tmp_path / "link.png"
    link.symlink_to("nowhere.png")
    with pytest.raises(SystemExit):
        request.getfixturevalue(name).main(["-o", str(link)])
    assert "link.png exists; --force overwrites it" in capsys.readouterr().err


WHOLE = ("0", "-1", "x", "1.5", "", "nan", "9" * 30)
PICTURES = ("x.txt", "x", "no_such_folder/x.png", "folder.png", "a" * 300 + ".png", "/proc/x.png", "/sys/x.png")
WRONG = {
    "train_tiny": {
        **dict.fromkeys(("steps", "vocab", "hidden", "layers", "tokens", "length"), WHOLE),
        "hidden ": ("65", "127", "129"), "dtype": ("float16",), "out": PICTURES,
    },
    "generate": {
        **dict.fromkeys(("new-tokens", "top-k", "draws"), WHOLE), "seed": WHOLE[1:],
        "temperature": ("0", "-1", "inf", "nan", "x"), "top-p": ("0", "1.1", "-1", "nan", "x"),
        "min-p": ("-0.1", "1.1", "x"), "prompt": ("The sea",), "model": ("no/such/model", "nope/nope", ".", ""),
        "out": PICTURES,
    },
    "attention_bias": {
        **dict.fromkeys(("steps", "vocab", "batch", "length", "heads", "dim", "layers", "furthest"), WHOLE),
        "dim ": ("257", "500"), "length ": ("3",), "dtype": ("float16",), "out": PICTURES,
    },
    "grpo_tiny": {
        **dict.fromkeys(("steps", "vocab", "hidden", "layers", "prompts", "generations", "length"), WHOLE),
        "vocab ": ("7",), "generations ": ("1",), "hidden ": ("65", "127"), "dtype": ("float16",), "out": PICTURES,
    },
    "two_ranks": {
        **dict.fromkeys(("ranks", "steps", "vocab", "hidden", "tokens", "length"), WHOLE),
        "dtype": ("bfloat16",), "out": PICTURES,
    },
    "graph_attention": dict.fromkeys(("steps", "nodes", "edges", "heads"), WHOLE),
    "server_step": {
        **dict.fromkeys(("places", "requests", "steps", "vocab", "hidden"), WHOLE), "drafts": WHOLE[1:],
    },
}  # fmt: skip
ABSENT = {"device": ("", "nope", "cuda:x", "cuda:999", "cpu:1")}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_value_of_every_option_is_one_line_and_exit_code_2(request, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    example = request.getfixturevalue(name)
    for option, values in (WRONG[name] | ABSENT).items():
        for value in values:
            with pytest.raises(SystemExit) as ended:
                example.main([f"--{option.strip()}={value}"])
            said = capsys.readouterr()
            assert (ended.value.code, said.out) == (2, ""), (option, value)
            (line,) = said.err.splitlines()
            assert f"--{option.strip()}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize("name", WRONG)
def test_every_option_of_an_example_is_tried(request, name, capsys):
    with pytest.raises(SystemExit):
        request.getfixturevalue(name).main(["--help"])
    options = set(re.findall(r"^  (?:-o OUT, |-h, )?--([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options - {"help", "force"} == {option.strip() for option in WRONG[name] | ABSENT}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", one_in(4, WRONG))
def test_a_terminal_shows_at_once_that_an_example_works(name, tmp_path):
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / f"{name}.py", "--help"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal
    )
    os.close(terminal)
    said = os.read(screen, 1)  # raises if nothing is written
    assert (said, process.poll()) == (b"|", None)
    assert process.communicate()[0].startswith(b"usage: ")
    rest = b""
    with suppress(OSError):  # raised where the last writer has left the terminal
        while more := os.read(screen, 2**16):  # a part of what there is, if there is much
            rest += more
    assert rest.endswith(b" \r")
    os.close(screen)


def test_a_model_that_is_nowhere_is_said_at_once(tmp_path):
    """transformers asked the hub six times for each of two files, and printed each of them."""
    ended = run_example("generate", "--model", "nope/nope", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("generate.py: error: --model nope/nope: ")


@pytest.mark.parametrize("name", one_in(2, ["train_tiny", "two_ranks"]))
def test_a_training_prints_its_figures_and_nothing_else(request, name, tmp_path):
    """The profiler, by which memory is measured on a CPU, logs its start and end, and warns."""
    request.getfixturevalue(name)  # or it is skipped
    ended = run_example(name, "--steps", "2", "--device", "cpu", "--vocab", "31", "--tokens", "32", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == f"wrote {name}.png"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", WRONG)
def test_a_gpu_that_is_not_there_is_said(request, name, capsys):
    with pytest.raises(SystemExit, match="2"):
        request.getfixturevalue(name).main(["--device", "cuda"])
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("name", "package", "arguments"), [
    ("generate", "transformers", []),
    ("attention_bias", "altair", ["--steps", "1", "--vocab", "5", "--batch", "1", "--length", "8"]),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_in_one_line(name, package, arguments, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name={package!r})")
    ended = run_example(name, *arguments, cwd=tmp_path, path=[tmp_path])
    assert ended.returncode == 1
    (line,) = (each for each in ended.stderr.splitlines() if "error" in each)
    assert f"{package} is missing" in line
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("error", "said"), [
    (KeyboardInterrupt(), "interrupted"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/curves.png"), "No space left on device: curves.png"),
    (OSError(errno.EPIPE, os.strerror(errno.EPIPE)), "Broken pipe"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "too little memory: CUDA out of memory"),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 549755813632 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "too little memory: can't allocate memory: you tried to allocate 549755813632 bytes",
    ),
])  # fmt: skip
def test_what_stops_an_example_later_is_one_line(error, said, attention_bias, capsys):
    attention_bias.options.in_one_line(type(error), error, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f": error: {said}")


def test_a_fault_of_an_example_keeps_its_traceback(attention_bias, capsys):
    attention_bias.options.in_one_line(ZeroDivisionError, ZeroDivisionError("division by zero"), None)
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_apply_llama_trains_as_before(capsys):
    pytest.importorskip("transformers", reason="the example trains a model of the transformers package")
    found = module_of("apply_llama").main(["--tokens", "16", "--vocab", "50", "--steps", "1", "--layers", "1"])
    assert found["apply"].loss == pytest.approx(found["plain"].loss, rel=1e-4)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "loss       LlamaForCausalLM.lm_head, 50 classes: linear_cross_entropy"
    assert re.fullmatch(r"apply: loss \d+\.\d{4}, \d+\.\d ms a step", said[-1])


PAGE = (EXAMPLES.parent / "docs/examples.md").read_text()
TABLE = dict(re.findall(r"^\| \[(\w+)\.py\]\(#\w+\) \| (\d+) \|", PAGE, re.MULTILINE))
FEW = {
    "train_tiny": ["--steps", "2"],
    "apply_llama": ["--steps", "1"],
    "grpo_tiny": ["--steps", "2"],
    "generate": ["--draws", "20", "--new-tokens", "3"],
    "server_step": ["--requests", "4", "--steps", "3"],
    "attention_bias": ["--steps", "2"],
    "graph_attention": ["--steps", "2"],
    "two_ranks": ["--steps", "2"],
}


def test_the_page_has_every_example():
    programs = {path.stem for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text()}
    assert programs == FEW.keys() == TABLE.keys()


@pytest.mark.parametrize("name", FEW)
def test_an_example_says_how_long_it_takes(name):
    about = " ".join((EXAMPLES / f"{name}.py").read_text().split('"""')[1].split())
    assert re.findall(r"takes about (\d+) s on two CPU cores\.", about) == [TABLE[name]]
    assert re.search(r"\bprints\b", about)


def without_numbers(line):
    return re.sub(r"(?:(?<= )-)?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N", re.sub(r"\[[\d, ]*\]", "[]", line))


@pytest.mark.parametrize("name", one_in(3, FEW))
def test_an_example_prints_what_the_page_says(name, tmp_path, monkeypatch):
    """On a CPU, in fewer steps. A line of dots stands for more lines like the one above it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("FUSED_SOFTMAX_INTERPRET", raising=False)
    for package in ("transformers", "altair", "trl"):
        pytest.importorskip(package, reason="examples need it")
    said = re.search(rf"^```\n\$ python examples/{name}\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    ended = run_example(name, *FEW[name], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    printed = [without_numbers(line) for line in ended.stdout.splitlines()]
    expected = [without_numbers(line) for line in said.splitlines()]
    for i, line in enumerate(expected):
        if line == "...":
            while printed[0] != expected[i + 1]:
                assert printed.pop(0) == expected[i - 1]
        else:
            assert printed.pop(0) == line
    assert printed == []
