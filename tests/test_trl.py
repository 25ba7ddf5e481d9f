"""TRL's trainers by ours: its losses and weights after steps, its functions' results and gradients, what is left to it.

Models are tiny and random, and nothing is downloaded.
"""

import importlib
import inspect
import math
import os
import random
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from products import one_in

pytest.importorskip("trl", reason="these run TRL's trainers")

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from trl.experimental import gkd
from trl.kernels import chunked_divergence
from trl.trainer import utils

import fused_softmax
import fused_softmax.trl
from fused_softmax.core import route
from fused_softmax.register import trl as of_trl

VOCABULARY, SPECIAL = 40, 3
HIDDEN = "trl.trainer.utils._ChunkedLogProbFunction"
ROWS = "trl.trainer.utils.selective_log_softmax"
BOTH = "trl.trainer.utils.selective_log_softmax_and_entropy"
PAIRS = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
JSD = "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss"


def found(path):
    """What TRL's modules have by that name now."""
    module, _, name = path.rpartition(".")
    if module.endswith("Trainer"):
        return inspect.getattr_static(gkd.GKDTrainer, name)
    return getattr(importlib.import_module(module), name)


SEAMS = (HIDDEN, ROWS, BOTH, PAIRS, JSD)
OWN = {path: (found(path),) for path in SEAMS}  # by tuples, for apply() finds what a module has bound


@contextmanager
def applied():
    fused_softmax.trl.apply()
    try:
        yield
    finally:
        fused_softmax.trl.undo()


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not of_trl._replaced
    assert all(found(path) is OWN[path][0] for path in SEAMS)


def words(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SPECIAL, VOCABULARY, shape, generator=generator).tolist()


def said(*shape, seed):
    return [" ".join(map(str, line)) + " " for line in words(*shape, seed=seed)]


def tokenizer():
    """Of words that are the numbers of their tokens, after three special ones."""
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    known = {word: token for token, word in enumerate((*special.values(), *map(str, range(SPECIAL, VOCABULARY))))}
    of_words = Tokenizer(WordLevel(known, unk_token="<unk>"))
    of_words.pre_tokenizer = WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, **special)
    made.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    return made


KINDS = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "softcap": ("Gemma2ForCausalLM", {"final_logit_softcapping": 1.5, "head_dim": 8}),
    "scale": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "divisor": ("GraniteForCausalLM", {"logits_scaling": 3.0}),
    "bias": ("PhiForCausalLM", {}),
}


def model(seed=0, width=16, kind="llama"):
    name, options = KINDS[kind]
    of = getattr(transformers, name)
    config = of.config_class(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1 if kind != "bias" else 2, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
        bos_token_id=None, initializer_range=0.3, **{"tie_word_embeddings": False} | options,
    )  # fmt: skip
    torch.manual_seed(seed)
    return of(config)


CONFIG = {
    "max_steps": 2, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.5, "bf16": False,
    "use_cpu": True, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
    "seed": 3, "disable_tqdm": True,
}  # fmt: skip


def sft(folder, of, **options):
    data = Dataset.from_dict({"prompt": said(4, 3, seed=1), "completion": said(4, 5, seed=2)})
    config = trl.SFTConfig(folder, **CONFIG | {"max_length": 16} | options)
    return trl.SFTTrainer(of, args=config, train_dataset=data, processing_class=tokenizer())


def dpo(folder, of, **options):
    data = Dataset.from_dict(
        {"prompt": said(4, 3, seed=1), "chosen": said(4, 5, seed=2), "rejected": said(4, 4, seed=3)}
    )
    config = trl.DPOConfig(folder, **CONFIG | options)
    return trl.DPOTrainer(of, ref_model=model(5), args=config, train_dataset=data, processing_class=tokenizer())


def grpo(folder, of, **options):
    def reward(completion_ids, **_):
        return [sum(token % 2 == 0 for token in tokens) / 4 for tokens in completion_ids]

    given = CONFIG | {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 5, "beta": 0.0,
        "shuffle_dataset": False, "temperature": 0.8,
    }  # fmt: skip
    config = trl.GRPOConfig(folder, **given | options)
    data = Dataset.from_dict({"prompt": said(4, 3, seed=1)})
    return trl.GRPOTrainer(of, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer())


def distillation(folder, of, **options):
    given = CONFIG | {"max_completion_length": 5, "beta": 0.3} | options
    data = Dataset.from_dict({"prompt": said(4, 3, seed=1)})
    return trl.DistillationTrainer(
        of, teacher_model=model(7, 24), args=trl.DistillationConfig(folder, **given), train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip


def distilled_by_gkd(folder, of, **options):
    random.seed(5)
    given = CONFIG | {"max_length": 16, "max_new_tokens": 4, "lmbda": 0.5, "beta": 0.3} | options
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(said(4, 3, seed=1), said(4, 5, seed=2), strict=True)
    ]
    return gkd.GKDTrainer(
        of, teacher_model=model(7, 24), args=gkd.GKDConfig(folder, **given),
        train_dataset=Dataset.from_dict({"messages": turns}), processing_class=tokenizer(),
    )  # fmt: skip


def trained(make, folder, ours, **options):
    """(what was logged at each step, the weights, what explain() said of the calls) of a trainer."""
    with (
        warnings.catch_warnings(action="ignore"),
        applied() if ours else nullcontext(),
        fused_softmax.explain() as explained,
    ):
        of = model(kind=options.pop("kind", "llama")).to(options.pop("dtype", torch.float32))
        trainer = make(str(folder), of, **options)
        trainer.train()
    numbers = [
        {name: value for name, value in line.items() if value is not None and not re.search("time|second", name)}
        for line in trainer.state.log_history
    ]
    return numbers, dict(trainer.model.named_parameters()), list(explained)


def check_alike(make, seam, by, folder, **options):
    """One trainer by TRL's functions and by ours: what it logs and its weights. Returns the calls."""
    theirs, weights, calls = trained(make, folder, False, **options)
    assert not calls
    ours, found, calls = trained(make, folder, True, **options)
    rtol = (
        2e-2 if options.get("bf16") or "dtype" in options else 1e-3
    )  # whose hidden states' gradients are rounded once more than TRL's
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, rel=rtol, abs=1e-5, nan_ok=True), (mine, its)
    for name, weight in weights.items():
        torch.testing.assert_close(
            found[name], weight, rtol=rtol, atol=rtol / 10, msg=lambda said, n=name: f"{n}: {said}"
        )
    outer = [each for each in calls if each.depth == 0 and each.function.startswith("trl.")]
    assert {each.function for each in outer} == {seam}
    assert "TRL" not in {each.route for each in outer}
    assert by in {each.function for each in calls if each.depth == 1}
    return calls


def kto(folder, of, **options):
    data = Dataset.from_dict(
        {"prompt": said(4, 3, seed=1), "completion": said(4, 5, seed=2), "label": [True, False, True, False]}
    )
    config = trl.KTOConfig(folder, **CONFIG | options)
    return trl.KTOTrainer(of, ref_model=model(5), args=config, train_dataset=data, processing_class=tokenizer())


def orpo(folder, of, **options):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    data = Dataset.from_dict(
        {"prompt": said(4, 3, seed=1), "chosen": said(4, 5, seed=2), "rejected": said(4, 4, seed=3)}
    )
    config = ORPOConfig(folder, **CONFIG | {"max_length": 16} | options)
    return ORPOTrainer(of, args=config, train_dataset=data, processing_class=tokenizer())


def tpo(folder, of, **options):
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    data = Dataset.from_dict(
        {
            "prompt": said(4, 3, seed=1), "chosen": said(4, 5, seed=2), "rejected": said(4, 4, seed=3),
            "reference": said(4, 6, seed=4),
        }
    )  # fmt: skip
    return TPOTrainer(of, args=TPOConfig(folder, **CONFIG | options), train_dataset=data, processing_class=tokenizer())


GRPO = {"entropy_coef": 0.05}
TRAINERS = {
    "SFT": (sft, HIDDEN, {}),
    "SFT, two batches a step": (sft, HIDDEN, {"gradient_accumulation_steps": 2}),
    "SFT, dynamic": (sft, HIDDEN, {"loss_type": "dft"}),
    "SFT, checkpoints": (sft, HIDDEN, {"gradient_checkpointing": True}),
    "SFT, tied": (sft, HIDDEN, {"kind": "tied"}),
    "SFT, softcap": (sft, HIDDEN, {"kind": "softcap"}),
    "SFT, scale": (sft, HIDDEN, {"kind": "scale"}),
    "SFT, divisor": (sft, HIDDEN, {"kind": "divisor"}),
    "SFT, bias": (sft, HIDDEN, {"kind": "bias"}),
    "SFT, autocast": (sft, HIDDEN, {"bf16": True}),
    "DPO": (dpo, HIDDEN, {}),
    "DPO, weighted": (dpo, HIDDEN, {"use_weighting": True}),
    "GRPO": (grpo, HIDDEN, GRPO),
    "GRPO, high entropies": (grpo, HIDDEN, GRPO | {"top_entropy_quantile": 0.4}),
    "GRPO, without truncated": (grpo, HIDDEN, {"mask_truncated_completions": True}),
    "GRPO, twice": (grpo, HIDDEN, {"num_iterations": 2, "max_steps": 3}),
    "GRPO, a head of float32": (grpo, HIDDEN, {"cast_lm_head_to_fp32": True, "dtype": torch.bfloat16}),
    "KTO": (kto, HIDDEN, {}),
    "ORPO": (orpo, ROWS, {}),
    "TPO": (tpo, BOTH, {}),
    "Distillation": (distillation, PAIRS, {}),
    "Distillation, reverse, scale": (distillation, PAIRS, {"beta": 1.0, "kind": "scale"}),
    "GKD": (distilled_by_gkd, JSD, {}),
    "GKD, forward": (distilled_by_gkd, JSD, {"beta": 0.0, "gradient_accumulation_steps": 2, "lmbda": 0.0}),
}
BY = {HIDDEN: "linear_log_prob", ROWS: "log_prob", BOTH: "log_prob", PAIRS: "divergence", JSD: "divergence"}


def check_trainer(name, folder):
    make, seam, options = TRAINERS[name]
    check_alike(make, seam, BY[seam], folder, **options)


def test_common_trainers_train_as_by_trls_own(tmp_path):
    for name in ("SFT", "DPO", "GRPO", "GKD"):
        check_trainer(name, tmp_path / name)


@pytest.mark.parametrize("name", one_in(3, [name for name in TRAINERS if name not in ("SFT", "DPO", "GRPO", "GKD")]))
def test_trainers_train_as_by_trls_own(name, tmp_path):
    check_trainer(name, tmp_path)


def test_a_head_that_an_adapter_freezes(tmp_path):
    peft = pytest.importorskip("peft", reason="an adapter freezes the head")

    def adapted(folder, of, **options):
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        return sft(folder, peft.get_peft_model(of, adapter), **options)

    check_alike(adapted, HIDDEN, "linear_log_prob", tmp_path)


def test_a_model_that_is_compiled_calls_ours(tmp_path):
    torch._dynamo.reset()
    calls = check_alike(sft, HIDDEN, "linear_log_prob", tmp_path, torch_compile=True, torch_compile_backend="eager")
    assert len([each for each in calls if each.function == HIDDEN]) == 2
    torch._dynamo.reset()


def test_a_reference_model_and_policies_that_differ(tmp_path):
    model().save_pretrained(tmp_path / "saved")

    def of_path(folder, of, **options):
        return grpo(folder, str(tmp_path / "saved"), **options)

    check_alike(of_path, HIDDEN, "linear_log_prob", tmp_path, beta=0.1, num_iterations=2, max_steps=3)


# Each function by itself, held to TRL's own.

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def numbers(*shape, seed=0, dtype=torch.float32, scale=2.0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(dtype).requires_grad_()


def both(path, *args, leaves, **kwargs):
    """[(results, gradients of the leaves)] of TRL's own and of ours; each float result has a gradient of its own."""
    outcomes = []
    for ours in (False, True):
        with applied() if ours else nullcontext(), fused_softmax.explain() as explained:
            function = found(path)
            function = getattr(function, "__func__", getattr(function, "apply", function))
            results = function(*args, **kwargs)
            results = results if isinstance(results, tuple | list) else (results,)
            results = [each for each in results if each is not None]
            gives = [each for each in results if each.requires_grad]
            weights = [torch.linspace(0.5, 1, each.numel()).view(each.shape).to(each.dtype) for each in gives]
            gradients = torch.autograd.grad(gives, leaves, weights, allow_unused=True)
        if ours:
            assert [(each.function, each.route != "TRL") for each in explained if each.depth == 0][:1] == [(path, True)]
        outcomes.append((results, gradients))
    return outcomes


def check_both(dtype, *args, **kwargs):
    (results, gradients), (ours, of_ours) = both(*args, **kwargs)
    assert len(results) == len(ours)
    for mine, its in zip(ours, results, strict=True):
        assert mine.requires_grad == its.requires_grad
        torch.testing.assert_close(mine, its.to(mine.dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for mine, its in zip(of_ours, gradients, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            assert mine.dtype == its.dtype
            torch.testing.assert_close(mine, its, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize(
    ("dtype", "of_weight", "of_bias"),
    [
        (torch.float32, torch.float32, None), (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("softcap", "scale", "outputs"),
    [(None, 1.0, FIELDS), (1.5, 0.5, FIELDS[:2]), (None, -2, ("log_probs", "log_sum_sq_probs")), (2, 1, FIELDS[:1])],
)
def test_log_probs_of_hidden_states(dtype, of_weight, of_bias, softcap, scale, outputs):
    hidden, weight = numbers(9, 8, dtype=dtype, scale=0.5), numbers(VOCABULARY, 8, seed=1, dtype=of_weight, scale=0.5)
    bias = None if of_bias is None else numbers(VOCABULARY, seed=2, dtype=of_bias, scale=0.5)
    targets = torch.tensor(words(9, seed=3))
    leaves = [each for each in (hidden, weight, bias) if each is not None]
    given = hidden, weight, bias, targets, 0.7, 32768, softcap, scale, outputs
    check_both(torch.bfloat16 if torch.bfloat16 in (dtype, of_weight) else dtype, HIDDEN, *given, leaves=leaves)


def test_log_probs_of_hidden_states_under_autocast():
    hidden, weight = numbers(9, 8, scale=1), numbers(VOCABULARY, 8, seed=1, scale=1)
    targets = torch.tensor(words(9, seed=3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_both(torch.bfloat16, HIDDEN, hidden, weight, None, targets, 1, 32768, leaves=[hidden, weight])
        with applied():
            log_probs = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1, 32768)[0]
    lowered = fused_softmax.linear_log_prob(hidden.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(log_probs, lowered)


def test_a_head_of_float32_beside_16_bits_has_a_gradient_of_32_bits():
    hidden, weight = numbers(9, 8, dtype=torch.bfloat16, scale=1), numbers(VOCABULARY, 8, seed=1, scale=1)
    targets = torch.tensor(words(9, seed=3))
    with applied():
        log_probs = utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768)[0]
    (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
    if route.INTERPRET:  # where torch's operations compute, the head is lowered for them
        assert not torch.equal(gradient, gradient.bfloat16().float())


def test_no_row_that_counts_has_gradients_of_0():
    hidden, weight, bias = numbers(9, 8), numbers(VOCABULARY, 8, seed=1), numbers(VOCABULARY, seed=2)
    targets, leaves = torch.empty(0, dtype=torch.int64), [hidden, weight, bias]
    check_both(torch.float32, HIDDEN, hidden[:0], weight, bias, targets, 0.7, 32768, leaves=leaves)
    teacher = (numbers(9, 8, seed=3).detach()[:0], weight.detach(), None)
    check_both(torch.float32, PAIRS, hidden[:0], weight, bias, *teacher, 0.5, leaves=leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [None, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_log_probs_of_logits(dtype, masked, index):
    logits, tokens = numbers(3, 5, VOCABULARY, dtype=dtype), torch.tensor(words(3, 5, seed=1)).to(index)
    mask = None if masked is None else (torch.arange(15).view(3, 5) % 3 != 0).to(masked)
    if index == torch.int64:  # as torch.gather takes them, by which TRL computes here
        check_both(dtype, ROWS, logits, tokens, 0.7, mask, leaves=[logits])
        check_both(dtype, BOTH, logits, tokens, True, 0.7, mask, leaves=[logits])
        check_both(dtype, BOTH, logits, tokens, False, 0.7, mask, leaves=[logits])
    else:
        with applied():
            found_32 = utils.selective_log_softmax_and_entropy(logits, tokens, row_mask=mask)
            wanted = utils.selective_log_softmax_and_entropy(logits, tokens.long(), row_mask=mask)
        assert all(torch.equal(a, b) for a, b in zip(found_32, wanted, strict=True))


def test_several_log_probs_of_a_row():
    logits, tokens = numbers(3, 5, VOCABULARY), torch.tensor(words(3, 5, 4, seed=1))
    check_both(torch.float32, ROWS, logits, tokens, leaves=[logits])


def test_rows_that_a_mask_leaves_out_may_hold_anything():
    logits, tokens = numbers(2, VOCABULARY).detach(), torch.tensor([3, -100])
    logits[1] = math.nan
    logits.requires_grad_()
    with applied():
        log_probs, entropy = utils.selective_log_softmax_and_entropy(logits, tokens, row_mask=torch.tensor([1, 0]))
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs[1] == entropy[1] == 0
    assert torch.equal(logits.grad[1], torch.zeros(VOCABULARY))


def test_an_index_that_is_no_class_is_not_ignored():
    logits, hidden, weight = numbers(2, VOCABULARY), numbers(2, 8), numbers(VOCABULARY, 8)
    none = torch.tensor([3, -100])
    with applied():
        for call in (
            lambda: utils.selective_log_softmax(logits, none),
            lambda: utils._ChunkedLogProbFunction.apply(hidden, weight, None, none, 1.0, 32768)[0],
        ):
            if route.INTERPRET:  # as on a GPU, which nobody waits for
                assert call().isnan().tolist() == [False, True]
            else:
                with pytest.raises(IndexError, match="-100"):
                    call()


@pytest.mark.parametrize("beta", [0, 0.3, 1.0])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(
    "reduced",
    [{}, {"reduction": "sum"}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7), "reduction": "none"}],
    ids=str,
)
def test_divergences_of_logits(beta, labelled, reduced):
    student = numbers(2, 5, VOCABULARY)
    teacher = numbers(2, 5, VOCABULARY, seed=1).detach()
    labels = torch.where(torch.arange(10).view(2, 5) % 3 == 0, -100, 4) if labelled else None
    given = {"student_logits": student[:, :-1], "teacher_logits": teacher[:, :-1], "beta": beta, "temperature": 1.3}
    labels = None if labels is None else labels[:, 1:]
    check_both(torch.float32, JSD, leaves=[student], **given, labels=labels, **reduced)
    if labels is not None:
        check_both(torch.float32, JSD, leaves=[student], **given, labels=torch.full_like(labels, -100), **reduced)


def test_a_batch_of_which_no_label_counts_has_gradients_of_0():
    student, teacher = numbers(2, 5, VOCABULARY), numbers(2, 5, VOCABULARY, seed=1).detach()
    for way in (nullcontext, applied):
        with way():
            loss = gkd.GKDTrainer.generalized_jsd_loss(
                student, teacher, labels=torch.full((2, 5), -100), num_items_in_batch=torch.tensor(0)
            )
        assert loss.isnan()
        assert (torch.autograd.grad(loss, student)[0] == 0).all()


def test_divergences_of_16_bit_logits():
    student, labels = numbers(2, 5, VOCABULARY, dtype=torch.bfloat16), torch.ones(2, 5, dtype=torch.int64)
    teacher = numbers(2, 5, VOCABULARY, seed=1, dtype=torch.bfloat16).detach()
    check_both(torch.bfloat16, JSD, student, teacher, labels, leaves=[student])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capped", [False, True])
def test_divergences_of_hidden_states(beta, dtype, capped, monkeypatch):
    monkeypatch.setattr(of_trl, "_LOGITS", 4 * VOCABULARY)  # chunks of four rows
    student = numbers(9, 8, dtype=dtype, scale=1), numbers(VOCABULARY, 8, seed=1, scale=1)
    bias = numbers(VOCABULARY, seed=2)
    teacher = [numbers(9, 6, seed=3, scale=1, dtype=dtype), numbers(VOCABULARY, 6, seed=4), numbers(VOCABULARY, seed=5)]
    caps = (0.7, 1.5, -0.5, 2.5) if capped else ()
    given = *student, bias, *[each.detach() for each in teacher], beta, 1.3, *caps
    check_both(dtype, PAIRS, *given, leaves=[*student, bias])


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_divergences_of_16_bit_hidden_states_are_of_logits_that_are_not_rounded(beta):
    """A teacher that is nearly the student has nearly no divergence, to which rounded logits would add as much."""
    hidden, weight = (numbers(n, 32, dtype=torch.bfloat16, scale=scale).detach() for n, scale in ((64, 1), (400, 0.5)))
    teacher = torch.cat([hidden, hidden], -1), torch.cat([weight, weight * 2**-9], -1)
    z, z_t = (x.double() @ w.double().t() for x, w in ((hidden, weight), teacher))
    pair = [each.log_softmax(-1) for each in ((z, z_t) if beta == 0 else (z_t, z))]
    wanted = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True).sum(-1)
    with applied():
        values, _ = chunked_divergence.ChunkedDivergenceFunction.apply(hidden, weight, None, *teacher, None, beta)
    torch.testing.assert_close(values.double(), wanted, rtol=5e-2, atol=1e-6)


# What is replaced, when, and what is left.


def test_names_that_are_bound_are_ours_until_they_are_trls_again(monkeypatch):
    from trl.experimental.sdpo import loss_utils

    own = (loss_utils.selective_log_softmax,)
    fused_softmax.trl.apply()
    fused_softmax.trl.apply()
    assert loss_utils.selective_log_softmax is utils.selective_log_softmax is not own[0]
    assert trl.kernels.ChunkedLogProbFunction is utils._ChunkedLogProbFunction
    assert utils.selective_log_softmax.__name__ == "selective_log_softmax"
    monkeypatch.delitem(sys.modules, "trl.experimental.sdft.loss_utils", raising=False)
    later = importlib.import_module("trl.experimental.sdft.loss_utils")
    assert later.selective_log_softmax is utils.selective_log_softmax
    assert trl.DistillationTrainer  # whose module binds a name as it is imported
    bound = sys.modules["trl.trainer.distillation_trainer"]
    assert bound.ChunkedDivergenceFunction is chunked_divergence.ChunkedDivergenceFunction is not OWN[PAIRS][0]
    kept = (utils.selective_log_softmax, utils._ChunkedLogProbFunction.apply)
    fused_softmax.trl.undo()
    assert loss_utils.selective_log_softmax is later.selective_log_softmax is own[0]
    assert bound.ChunkedDivergenceFunction is OWN[PAIRS][0]
    with fused_softmax.explain() as explained:  # whoever kept one gets TRL's own
        kept[0](numbers(2, 3), torch.tensor([0, 1]))
        kept[1](numbers(2, 3), numbers(4, 3), None, torch.tensor([0, 1]), 1.0, 32768)
    assert not list(explained)
    with pytest.raises(RuntimeError, match=r"undo\(\) without an apply\(\)"):
        fused_softmax.trl.undo()


def test_what_others_put_there_since_stays():
    fused_softmax.trl.apply()
    mine = staticmethod(lambda *args, **kwargs: None)
    gkd.GKDTrainer.generalized_jsd_loss = mine
    try:
        fused_softmax.trl.undo()
        assert found(JSD) is mine
    finally:
        gkd.GKDTrainer.generalized_jsd_loss = OWN[JSD][0]


@pytest.mark.parametrize("path", SEAMS)
@pytest.mark.parametrize("how", ["none", "other arguments", "other defaults", "no function"])
def test_a_seam_that_another_trl_does_not_have_is_named(path, how, monkeypatch):
    module, _, name = path.rpartition(".")
    where = gkd.GKDTrainer if path == JSD else importlib.import_module(module)
    if how == "none":
        monkeypatch.delattr(where, name)
    elif how == "no function":
        monkeypatch.setattr(where, name, 3)
    else:
        own = OWN[path][0]
        of = getattr(own, "__func__", getattr(own, "forward", own))
        given = [*inspect.signature(of).parameters.values()]
        if how == "other arguments":
            given.append(inspect.Parameter("label_smoothing", inspect.Parameter.KEYWORD_ONLY, default=0.0))
        else:
            given[-1] = given[-1].replace(default="other")

        def other(*args, **kwargs):
            raise AssertionError("it is not called")

        other.__signature__ = inspect.Signature(given)
        if isinstance(own, type):
            other = type("Other", (torch.autograd.Function,), {"forward": staticmethod(other)})
        monkeypatch.setattr(where, name, staticmethod(other) if path == JSD else other)
    with pytest.raises(RuntimeError, match=rf"replaces {re.escape(path)} of TRL 1\.16, and TRL .*nothing was replaced"):
        fused_softmax.trl.apply()
    assert not of_trl._replaced
    assert all(found(each) is OWN[each][0] for each in SEAMS if each != path)


LEFT = {
    "ZeRO-3": (HIDDEN, lambda: (*sharded_by_zero(), torch.tensor([1, 2]), 1.0, 32768), {}),
    "softcap 0": (HIDDEN, lambda: (*layer(), torch.tensor([1, 2]), 1.0, 32768, 0.0), {}),
    "scale 0": (HIDDEN, lambda: (*layer(), torch.tensor([1, 2]), 1.0, 32768, None, 0.0), {}),
    "a temperature below 0": (HIDDEN, lambda: (*layer(), torch.tensor([1, 2]), -1.0, 32768), {}),
    "float64": (HIDDEN, lambda: (*[each.double() for each in layer()[:2]], None, torch.tensor([1, 2]), 1.0, 9), {}),
    "an index of fewer rows": (ROWS, lambda: (numbers(1, 5, VOCABULARY), torch.tensor(words(1, 1, 2, seed=1))), {}),
    "a subclass": (ROWS, lambda: (numbers(2, VOCABULARY).detach().as_subclass(Watched), torch.tensor([1, 2])), {}),
    "a tensor of one temperature": (ROWS, lambda: (numbers(2, 9), torch.tensor([1, 2]), torch.tensor(2.0)), {}),
    "each element": (JSD, lambda: (numbers(2, 3, 9), numbers(2, 3, 9).detach()), {"reduction": "none"}),
    "a mean of elements": (JSD, lambda: (numbers(2, 3, 9), numbers(2, 3, 9).detach()), {"reduction": "mean"}),
    "a teacher that learns": (JSD, lambda: (numbers(2, 3, 9), numbers(2, 3, 9, seed=1)), {}),
    "ZeRO-3's teacher": (PAIRS, lambda: (*layer(), *sharded_by_zero(), 0.5), {}),
}  # fmt: skip


class Watched(torch.Tensor):
    pass


def layer():
    return numbers(2, 8), numbers(VOCABULARY, 8, seed=1), None


def sharded_by_zero():
    hidden, weight, _ = layer()
    weight.ds_id = 3
    return hidden, weight, None


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_trl(name):
    path, make, options = LEFT[name]
    outcomes = []
    for ours in (False, True):
        with applied() if ours else nullcontext(), fused_softmax.explain() as explained:
            function = found(path)
            function = getattr(function, "__func__", getattr(function, "apply", function))
            results = function(*make(), **options)
        outcomes.append(results if isinstance(results, tuple) else (results,))
    theirs, same = outcomes
    assert all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(theirs, same, strict=True))
    assert [(each.function, each.route) for each in explained] == [(path, "TRL")]
    assert explained[0].reason


def test_trls_errors_are_trls():
    with applied():
        with pytest.raises(ValueError, match="temperature must be positive"):
            utils.selective_log_softmax(numbers(2, 9), torch.tensor([1, 2]), temperature=0.0)
        with pytest.raises(TypeError):
            utils.selective_log_softmax(numbers(2, 9))


@pytest.mark.parametrize("path", [ROWS, BOTH])
def test_compiled_code_calls_ours_of_logits(path):
    logits, tokens = numbers(3, VOCABULARY), torch.tensor([1, 2, 3])
    wanted = OWN[path][0](logits, tokens)
    torch._dynamo.reset()
    with applied():
        function = found(path)
        result = torch.compile(lambda *given: function(*given), backend="aot_eager")(logits, tokens)
    torch.testing.assert_close(result, wanted)
    torch._dynamo.reset()


def test_without_trl(monkeypatch):
    monkeypatch.setattr(of_trl, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the trl package.*pip install 'fused-softmax\[trl\]'"):
        fused_softmax.trl.apply()


def test_the_import_needs_neither_trl_nor_transformers():
    script = "import sys, fused_softmax.trl; assert not {'trl', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_head_that_fsdp_shards(tmp_path):
    """Of one rank, whose head is a DTensor as it is taken: TRL gathers it before ours sees it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        outcomes = []
        for ours in (False, True):
            of, mesh = model(), init_device_mesh("cpu", (1,))
            utils.add_fused_lm_head(of, outputs=("log_probs", "entropy"))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(of.lm_head, mesh=mesh, mp_policy=policy)
            fully_shard(of, mesh=mesh, mp_policy=policy)
            tokens = torch.tensor(words(2, 6, seed=1))
            labels = tokens.masked_fill(torch.arange(6) < 2, -100)
            with applied() if ours else nullcontext(), fused_softmax.explain() as explained:
                out = of(input_ids=tokens, labels=labels, fused_lm_head=True)
                (out.loss + 0.1 * out.entropy.sum()).backward()
            outcomes.append([out.loss, *[each.grad.to_local() for each in of.parameters()]])
        for its, mine in zip(*outcomes, strict=True):
            torch.testing.assert_close(mine, its, rtol=3e-2, atol=3e-3)
        assert (explained[0].function, explained[1].function) == (HIDDEN, "linear_log_prob")
        assert explained[0].route != "TRL"
    finally:
        dist.destroy_process_group()
