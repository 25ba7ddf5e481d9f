"""What fused_softmax.hf.apply puts into a model, and that all else about the model is as before."""

import copy
import gc
import pickle
import threading
import types
import warnings
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import hf_applied
import transformers
from conftest import kernels
from hf_applied import LENGTH, LOSS, MODELS, VOCABULARY, close, inputs, listened, made, pair, products, trained
from products import one_in
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import fused_softmax
from fused_softmax import hf
from fused_softmax.core.route import Route
from fused_softmax.hf.deferred import Deferred
from fused_softmax.ops.attention import attention
from fused_softmax.ops.routing import route


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_logits_are_plain_transformers(name):
    model, plain = pair(name)
    given = inputs()
    wanted = trained(plain, given)
    applied = hf.apply(model)
    *found, ran = listened(model, given)
    close(found, wanted)
    assert ran == MODELS[name][2]
    keep = slice(None) if model.config.is_encoder_decoder else given["attention_mask"].bool()
    logits = found[0].logits
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits[keep], wanted[0].logits[keep], rtol=1e-4, atol=1e-5)
    assert set(applied.replaced) == {"loss"} | {
        {"attention": "attention", "route": "routers"}[each]
        for each in MODELS[name][2]
        if each in ("attention", "route")
    }


@pytest.fixture
def llama():
    model, plain = pair("llama")
    hf.apply(model)
    return model, plain


@pytest.fixture
def made_rows():
    with products() as rows:
        yield rows


@pytest.mark.parametrize("named", [{}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(5)}])
def test_the_losses_of_trainer(llama, named):
    model, plain = llama
    *found, ran = listened(model, inputs(), **named)
    close(found, trained(plain, inputs(), **named))
    assert ran == LOSS


@pytest.mark.parametrize("n", [None, 0, torch.tensor(0)])
def test_a_step_of_which_no_label_counts_changes_nothing(llama, n):
    """Its loss is NaN, and its gradients are 0, by which a Trainer goes on."""
    given = inputs() | ({} if n is None else {"num_items_in_batch": n})
    given["labels"].fill_(hf_applied.IGNORED)
    for model in llama:
        output = model(**given)
        assert output.loss.isnan()
        output.loss.backward()
        assert all((each.grad == 0).all() for each in model.parameters())


@kernels
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 8, "accumulate": "input"}])
def test_chunks_of_logits(chunks, copied, monkeypatch):
    made, mm = [], torch.mm

    def counted(a, b, **out):
        if a.shape[1] == model.config.hidden_size:
            made.append(a.shape[0] * b.shape[1])
        return mm(a, b, **out)

    model, plain = pair("llama")
    hf.apply(model, **chunks)
    model = copy.deepcopy(model) if copied else model
    monkeypatch.setattr(torch, "mm", counted)
    found = trained(model, inputs())
    monkeypatch.undo()
    close(found, trained(plain, inputs()))
    rows = inputs()["labels"].numel()
    assert max(made) == rows * VOCABULARY if not chunks else max(made) <= 8 * VOCABULARY < rows * VOCABULARY


def test_shifted_labels_and_an_index_to_ignore(llama):
    model, plain = llama
    given = inputs()
    shifted = F.pad(given["labels"], (0, 1), value=7)[:, 1:].contiguous()
    close(trained(model, given, shift_labels=shifted), trained(plain, given, shift_labels=shifted))
    given["labels"] = given["labels"].clamp(min=7)
    close(trained(model, given, ignore_index=7), trained(plain, given, ignore_index=7))


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"reduction": "sum"}, {"weight": torch.linspace(0.5, 2, VOCABULARY)}]
)
def test_a_loss_of_the_models_own(llama, options):
    def loss_of(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), **options)

    for each in llama:
        each.loss_function = loss_of
    *found, ran = listened(llama[0], inputs())
    close(found, trained(llama[1], inputs()))
    assert ran == LOSS


def _masked(logits):
    logits[:, :, 3] = torch.finfo(logits.dtype).min
    return logits.float().view(-1, VOCABULARY)


def _sixteenths(dtype):
    return torch.arange(VOCABULARY, dtype=dtype) / 16


READERS = {
    "log_softmax": lambda logits: logits.view(-1, VOCABULARY).log_softmax(-1),
    "a class is masked in place": _masked,
    "a negative number": lambda logits: (logits * -0.5).view(-1, VOCABULARY),
    "a tensor of factors": lambda logits: (logits * torch.linspace(1, 2, VOCABULARY)).view(-1, VOCABULARY),
    "a number of NumPy's before": lambda logits: (np.float64(0.5) * logits).view(-1, VOCABULARY),
    "tanh alone": lambda logits: torch.tanh(logits).view(-1, VOCABULARY),
    "fewer classes": lambda logits: logits[..., :-1].reshape(-1, VOCABULARY - 1),
    "another order": lambda logits: logits.flip(-1).view(-1, VOCABULARY),
    "a bias after a scale": lambda logits: (logits * 2 + torch.linspace(1, 2, VOCABULARY)).view(-1, VOCABULARY),
    "rows chosen": lambda logits: logits[torch.ones(logits.shape[:2], dtype=torch.bool)],
    "classes of rows that an array chooses": lambda logits: logits[np.ones(logits.shape[:2], bool), :30],
    "classes of rows that a list chooses": lambda logits: logits[[[True] * LENGTH] * 2, :30],
    "classes of rows that bytes choose": lambda logits: logits[torch.ones(logits.shape[:2], dtype=torch.uint8), :30],
    "a bias of more bits": lambda logits: (logits.to(torch.float64) + _sixteenths(torch.float64)).flatten(0, 1),
    "a bias of fewer bits": lambda logits: (logits.to(torch.bfloat16) + _sixteenths(torch.bfloat16)).flatten(0, 1),
    "a scale after a softcap": lambda logits: (torch.tanh(logits / 2) * 2 * 3).view(-1, VOCABULARY),
    "a new dim": lambda logits: logits[:, None].flatten(0, 2),
    "halves": lambda logits: (logits.view(-1, 2, VOCABULARY) * 0.5).flatten(0, 1) + torch.linspace(0, 1, VOCABULARY),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_a_model_does_to_its_logits_has_its_own_result(llama, name):
    def loss_of(logits, labels, vocab_size, **_):
        rows = READERS[name](logits)
        return F.cross_entropy(rows, labels.flatten().clamp(0, rows.shape[-1] - 1))

    for each in llama:
        each.loss_function = loss_of
    close(trained(llama[0], inputs()), trained(llama[1], inputs()))


def test_no_logits_are_made_until_they_are_read(llama, made_rows):
    output, _ = trained(llama[0], inputs())
    assert made_rows == []
    assert output.logits is output["logits"] is output[1] is output.to_tuple()[1] is output.get("logits")
    assert made_rows == [2 * hf_applied.LENGTH]
    assert all(type(each) is torch.Tensor for each in output.to_tuple()[:2])


def test_logits_have_their_gradient_where_it_is_enabled(llama):
    model, plain = llama
    output, wanted = (each(**inputs()) for each in llama)
    with torch.no_grad():
        assert not output.logits.requires_grad
    assert output.logits.requires_grad
    for each in (output, wanted):
        (each.loss + each.logits.square().mean()).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_values_and_tuples_hold_tensors(llama):
    for model in llama:
        model.eval()
    output, wanted = (model(**inputs()) for model in llama)
    by_values = list(output.values())[1]
    assert isinstance(by_values, torch.Tensor)
    assert by_values.shape == wanted.logits.shape
    assert by_values.dtype == torch.float32
    assert by_values.requires_grad
    assert by_values.device.type == "cpu"
    torch.testing.assert_close(by_values.detach().argmax(-1), wanted.logits.argmax(-1))
    found = llama[0](**inputs(), return_dict=False)
    assert type(found) is tuple
    assert isinstance(found[1], torch.Tensor)
    torch.testing.assert_close(found[1] + 0, wanted.logits)
    torch.testing.assert_close(pickle.loads(pickle.dumps(output)).logits, wanted.logits)


@pytest.mark.parametrize("first", ["the hook", "float"])
def test_a_hook_of_16_bit_logits_hears_of_what_is_made_of_them(llama, first):
    heard, removed, asked = [], [], []
    for model in llama:
        _, logits = model.bfloat16()(**inputs(), return_dict=False)[:2]
        wide = logits.float() if first == "float" else None
        logits.register_hook(heard.append)
        handle = logits.register_hook(removed.append)
        wide = logits.float() if wide is None else wide
        asked += torch.autograd.grad(wide.square().mean(), logits, retain_graph=True)
        handle.remove()
        wide.square().mean().backward()
    assert [len(heard), len(removed)] == [4, 2]
    for found in (heard[:2], asked[:1]):
        torch.testing.assert_close(found, [heard[2]] * len(found))


def test_logits_read_after_a_step_raise(llama):
    model = llama[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output, _ = trained(model, inputs())
    optimizer.step()
    with pytest.raises(RuntimeError, match="read after the weight of their head has changed"):
        _ = output.logits


def _other_data(model, output):
    model.lm_head.weight.data = model.lm_head.weight.data * 2


def _bias_trained(model, output):
    with torch.no_grad():
        model.lm_head.bias += 1


def _bias_of_old_style(model, output):
    model.lm_head.bias.data += 1


def _gathered_again(model, output):
    """As DeepSpeed frees a parameter and gathers it, which may get the same memory."""
    weight = model.lm_head.weight
    wanted, place = weight.data * 2, weight.data_ptr()
    for _ in range(20):
        weight.data = torch.empty(0)
        weight.data = torch.empty(wanted.shape)
        if weight.data_ptr() == place:
            break
    weight.data.copy_(wanted)


def _freed(model, output):
    model.lm_head.weight.data = torch.empty(0)


def _hidden_written(model, output):
    with torch.no_grad():
        output.hidden_states[-1].zero_()


def _hidden_of_old_style(model, output):
    output.hidden_states[-1].data.zero_()


OTHERS = {
    _other_data: "the weight of their head has changed",
    _bias_trained: "the weight of their head has changed",
    _bias_of_old_style: "the weight of their head has changed",
    _gathered_again: "the weight of their head has changed",
    _freed: "the weight of their head has changed",
    _hidden_written: "hidden states of their head were written to in place",
    _hidden_of_old_style: "hidden states of their head were written to in place",
}


@pytest.mark.parametrize("when", ["before the loss", "before a read in the loss", "before a read of the output"])
@pytest.mark.parametrize("change", OTHERS, ids=lambda each: each.__name__.strip("_"))
def test_logits_that_would_be_others_raise(change, when):
    model, hidden = made("phi, a head with bias"), []
    hf.apply(model)
    model.model.final_layernorm.register_forward_hook(lambda module, args, output: hidden.append(output))

    def loss_of(logits, labels, vocab_size, **_):
        change(model, types.SimpleNamespace(hidden_states=hidden))
        rows = logits.float().view(-1, VOCABULARY)
        return rows.logsumexp(-1).mean() if "read" in when else F.cross_entropy(rows, labels.clamp(min=0).flatten())

    def reads():
        output = model(**inputs())
        change(model, types.SimpleNamespace(hidden_states=hidden))
        return output.logits

    if "loss" in when:
        model.loss_function = loss_of
    with pytest.raises(RuntimeError, match=OTHERS[change]), torch.no_grad():
        model(**inputs()) if "loss" in when else reads()


def test_logits_of_nan_are_read(llama):
    with torch.no_grad():
        llama[0].lm_head.weight[3] = torch.nan
    assert llama[0](**inputs()).logits[..., 3].isnan().all()


class _Unseen(torch.optim.SGD):
    """An optimizer whose kernels autograd does not see, as those of bitsandbytes and Apex."""

    def step(self):
        for each in self.param_groups[0]["params"]:
            each.data.sub_(each.grad)


def _compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _Unseen], ids=lambda each: each.__name__)
@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy, _compiled], ids=["as it is", "a copy", "compiled"])
def test_logits_of_weights_that_a_step_has_changed_raise(llama, optimizer, how):
    model = how(llama[0])
    before, after = (optimizer(model.parameters(), lr=0.1) for _ in range(2))
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    model(**inputs()).loss.backward()
    before.step()
    output = model(**inputs())
    optimizer([other], lr=0.1).step()
    torch.testing.assert_close(output.logits, model(inputs()["input_ids"], inputs()["attention_mask"]).logits)
    output = model(**inputs())
    after.step()
    with pytest.raises(RuntimeError, match="as an optimizer's step does"):
        _ = output.logits


def test_compiled_code_that_reads_logits_is_one_graph(llama):
    given = inputs()

    def loss_of(model):
        output = model(**given)
        return output.loss + output.logits.square().mean()

    torch._dynamo.reset()
    found = torch.compile(loss_of, backend="eager", fullgraph=True)(llama[0])
    torch.testing.assert_close(found, loss_of(llama[1]))


def test_a_checkpoint_of_the_head_keeps_the_gradient_of_logits(llama):
    class Checkpointed(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = head

        def forward(self, hidden):
            return checkpoint(self.head, hidden, use_reentrant=True)

    gradients = []
    for model in llama:
        model.lm_head = Checkpointed(model.lm_head)
        output = model(**inputs())
        (output.loss + output.logits.square().sum()).backward()
        gradients.append(model.lm_head.head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


class _Dropped(torch.nn.Module):
    """A parametrization that makes another weight at each use."""

    def forward(self, weight):
        return F.dropout(weight, 0.5)


class _OfProperty(torch.nn.Linear):
    """A head whose weight is a product that its class makes."""

    weight = property(lambda self: F.dropout(self.left @ self.right, 0.5), lambda self, each: None)

    def __init__(self, head):
        super().__init__(head.in_features, head.out_features, bias=False)
        generator = torch.Generator().manual_seed(5)
        self.left, self.right = (
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((VOCABULARY, 4), (4, 16))
        )


MADE = {
    "dropout": lambda head: parametrize.register_parametrization(head, "weight", _Dropped()),
    "dropout of a bias": lambda head: parametrize.register_parametrization(head, "bias", _Dropped()),
    "a spectral norm": parametrizations.spectral_norm,
    "a weight norm": parametrizations.weight_norm,
}


@pytest.mark.parametrize(("how", "first"), [("as it is", True), ("compiled", True), ("evaluated", False)])
@pytest.mark.parametrize("name", one_in(4, [*MADE, "a property"]))
def test_a_weight_that_is_made_at_each_use_is_made_once(name, first, how):
    found, uses = [], []
    for model in pair("phi, a head with bias"):
        torch.manual_seed(4)
        plain = bool(found)
        if name == "a property":
            model.lm_head = _OfProperty(model.lm_head)
        if not plain and first:
            hf.apply(model)
        if name in MADE:
            MADE[name](model.lm_head)
        if not plain and not first:
            hf.apply(model)
        torch.manual_seed(5)
        with mock.patch.object(F, "dropout", lambda *of, plain=F.dropout: uses.append(1) or plain(*of)):
            run = _compiled(model) if how == "compiled" else model
            with torch.set_grad_enabled(how != "evaluated"):
                output = run(**inputs())
                logits = output.logits
            if how != "evaluated":
                (output.loss + logits.square().mean()).backward()
        gradients = [each.grad for each in model.parameters()]
        state = model.lm_head.state_dict()
        found.append((output.loss.detach(), logits.detach(), gradients, list(state.values()), len(uses)))
        uses.clear()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_head_whose_weight_is_made_makes_no_logits(llama, made_rows):
    parametrizations.weight_norm(llama[0].lm_head)
    parametrizations.weight_norm(llama[1].lm_head)
    *found, ran = listened(llama[0], inputs())
    assert (made_rows, ran) == ([], LOSS)
    close(found, trained(llama[1], inputs()))


def test_logits_that_inference_mode_has_read_are_no_inference_tensors(llama):
    with torch.no_grad():
        output = llama[0](**inputs())
    with torch.inference_mode():
        assert not output.logits.is_inference()
    (torch.ones(VOCABULARY, requires_grad=True) * output.logits).sum().backward()


def test_undo_leaves_no_hook_of_optimizers():
    gc.collect()
    hf.deferred._heads.clear()
    applied = [hf.apply(made("llama")) for _ in range(2)]
    applied[0].undo()
    assert list(_global_optimizer_post_hooks.values()).count(hf.deferred._stepped) == 1
    applied[1].undo()
    assert hf.deferred._stepped not in _global_optimizer_post_hooks.values()


def test_logits_are_those_of_the_weight_that_the_head_had(llama):
    for by in ("another parameter", "functional_call"):
        found = []
        for model in copy.deepcopy(llama):
            given = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
            if by == "functional_call":
                output = torch.func.functional_call(model, given, (), inputs())
            else:
                output, given = model(**inputs()), dict(model.named_parameters())
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
            output.logits.square().sum().backward()
            found.append((output.logits, given["lm_head.weight"].grad))
        torch.testing.assert_close(*found)


def test_the_shape_of_logits_is_that_of_the_weight(llama):
    for model in llama:  # whose Linear is not told of more classes
        model.config.vocab_size = VOCABULARY + 3
        model.lm_head.weight = torch.nn.Parameter(torch.ones(VOCABULARY + 3, 16))
    found, wanted = (model(**inputs(), return_dict=False) for model in llama)
    assert found[1].shape == wanted[1].shape
    torch.testing.assert_close(found[0], wanted[0])


def test_what_is_written_without_a_gradient_is_not_lost(llama):
    output = llama[0](**inputs())
    with torch.no_grad():
        output.logits[:, :, 3] = -1e4
        assert output.logits[0, 0, 3] == -1e4
    with pytest.raises(RuntimeError, match=r"written to in place under torch.no_grad\(\)"):
        _ = output.logits


class _CrossEntropy(torch.autograd.Function):
    """Of which autograd sees tensors alone."""

    @staticmethod
    def forward(ctx, logits, target):
        rows = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(rows, target)
        (ctx.gradient,) = torch.autograd.grad(loss, rows)
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient * gradient, None


@pytest.mark.parametrize("how", ["in the loss", "of a tuple"])
def test_an_autograd_function_that_would_lose_the_gradient_raises(llama, how):
    target = inputs()["labels"].clamp(min=0).flatten()

    def loss_of(logits, labels, vocab_size, copied=False, **_):
        rows = logits.float().view(-1, VOCABULARY)
        return _CrossEntropy.apply(rows.clone() if copied else rows, target) + 0.1 * logits.float().mean()

    def trained_on(model, **named):
        if how == "in the loss":
            model.loss_function = loss_of
            return trained(model, inputs(), **named)[1]
        model.zero_grad()
        loss, logits = model(**inputs(), return_dict=False)[:2]
        if not named:
            logits = logits.detach().clone()  # which wants no gradient
        (loss + _CrossEntropy.apply(_Same.apply(logits.clone() if named.get("copied") else logits), target)).backward()
        return {at: each.grad for at, each in model.named_parameters()}

    with pytest.raises(RuntimeError, match=r"\.apply\(\) is given logits that are not made.*logits\.clone\(\)"):
        trained_on(llama[0], copied=False)
    found, wanted = trained_on(llama[0], copied=True), trained_on(llama[1], copied=True)
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-6)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.reshape(-1, VOCABULARY).clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(2, -1, VOCABULARY)


def test_logits_that_the_loss_has_made_are_tensors(llama):
    """Which whoever takes a tuple apart, as DDP does, may give to an autograd.Function."""
    target = inputs()["labels"].clamp(min=0).flatten()
    gradients = []
    for model in llama:
        model.loss_function = lambda logits, *_, **__: logits.logsumexp(-1).mean()
        loss, logits = model(**inputs(), return_dict=False)[:2]
        assert type(logits) is torch.Tensor
        (loss + _CrossEntropy.apply(_Same.apply(logits), target)).backward()
        gradients.append(model.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def _replica(model):
    """As torch.nn.parallel.replicate makes one, which needs GPUs."""
    replicas = {name: each._replicate_for_data_parallel() for name, each in model.named_modules()}
    for name, each in model.named_modules():
        for child in each._modules:
            replicas[name]._modules[child] = replicas[f"{name}.{child}".removeprefix(".")]
        for key, parameter in each._parameters.items():
            if parameter is None:
                replicas[name]._parameters[key] = None
            else:
                setattr(replicas[name], key, parameter.view_as(parameter))
        replicas[name]._buffers = dict(each._buffers)
    return replicas[""]


def test_a_replica_of_data_parallel_trains_a_head_alone(llama):
    gradients = []
    for model in llama:
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_()
        output = _replica(model)(**inputs(), return_dict=False)
        assert type(output[1]) is torch.Tensor  # for DataParallel gathers all outputs, by an autograd.Function
        (output[0] + output[1].square().mean()).backward()
        gradients.append(model.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_device_without_an_index_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    is_same = hf.deferred._same_device
    assert [is_same("cuda", torch.device("cuda", i)) for i in range(2)] == [False, True]
    assert is_same("cpu", torch.device("cpu"))


def test_a_bias_that_alone_is_trained_has_its_gradient():
    gradients = []
    for model in pair("phi, a head with bias"):
        if not gradients:
            hf.apply(model)
        model.requires_grad_(False)
        model.lm_head.bias.requires_grad_()
        model(**inputs()).logits.square().sum().backward()
        gradients.append(model.lm_head.bias.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("taken", [lambda logits, of: logits[of[0]], lambda logits, of: logits + of[1]])
def test_what_is_given_to_a_step_may_be_written_to_after_it(llama, taken):
    def loss_of(logits, labels, vocab_size, **_):
        of = torch.arange(2 * hf_applied.LENGTH).view(2, -1) % 3 == 0, torch.linspace(0, 1, VOCABULARY)
        rows = taken(logits, of)
        of[0].logical_not_()
        of[1].zero_()
        rows = rows.flatten(0, -2)
        loss = F.cross_entropy(rows.view(-1, VOCABULARY), labels.clamp(min=0).flatten()[: rows.shape[0]])
        return loss + rows.logsumexp(-1).mean()

    for each in llama:
        each.loss_function = loss_of
    with torch.no_grad():
        torch.testing.assert_close(*(each(**inputs()).loss for each in llama))


IN_PLACE = {
    "logits, seen by rows of them": (lambda logits: (logits[:, :-1], logits), True),
    "rows of logits, seen by logits": (lambda logits: (logits, logits[:, :-1]), True),
    "logits, after they were copied": (lambda logits: (logits.to(torch.float64), logits), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_seen_as_in_tensors(llama, name):
    pick, seen = IN_PLACE[name]

    def loss_of(logits, labels, vocab_size, **_):
        read, written = pick(logits)
        written[:, :, 3] = 7
        return F.cross_entropy(read.reshape(-1, VOCABULARY), labels[:, : read.shape[1]].flatten())

    for each in llama:
        each.loss_function = loss_of
    if seen:
        close(*(trained(each, inputs()) for each in llama))
        return
    with pytest.raises(RuntimeError, match=r"written to in place after to\(\) of them"):
        llama[0](**inputs())


def test_threads_that_share_a_model_do_not_see_each_others_labels(llama):
    model, kinds = llama[0], []
    within, done = threading.Event(), threading.Event()

    def loss_of(logits, labels, vocab_size, **_):
        within.set()
        assert done.wait(60)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def trains():
        with fused_softmax.explain() as calls:
            model(**inputs())
        kinds.extend(each.function for each in calls)

    def before_the_head(*_):
        hook.remove()
        thread.start()
        assert within.wait(60)

    model.loss_function = loss_of
    thread = threading.Thread(target=trains)
    hook = model.model.register_forward_hook(before_the_head)
    kinds.append(type(model(inputs()["input_ids"]).__dict__["logits"]))
    done.set()
    thread.join()
    assert kinds == [torch.Tensor, "linear_cross_entropy"]


class _Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


OUTPUTS = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "list": lambda loss, logits: [loss, logits],
    "a named tuple": _Named,
    "an object": lambda loss, logits: types.SimpleNamespace(loss=loss, logits=logits),
    "a BatchEncoding": lambda loss, logits: transformers.BatchEncoding({"loss": loss, "logits": logits}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_subclass_may_return_its_logits_in_anything(name):
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **others):
            logits = super().forward(input_ids, **others).logits
            return OUTPUTS[name](F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)

    model = made("llama")
    model.__class__ = Own
    wanted = model(**inputs())
    hf.apply(model)
    with products() as made_rows:
        found = model(**inputs())
    assert made_rows == []
    assert type(found) is type(wanted)
    for each, plain in zip(_parts(found), _parts(wanted), strict=True):
        assert isinstance(each, torch.Tensor)
        torch.testing.assert_close(each + 0, plain)


def _parts(output):
    if isinstance(output, (tuple, list)):
        return output
    return vars(output).values() if isinstance(output, types.SimpleNamespace) else output.values()


def test_a_forward_that_its_class_gets_later_runs(llama, monkeypatch):
    kind = type(llama[1])
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, ids, truth: plain(self, ids, labels=truth, num_items_in_batch=3))
    found, wanted = (each(inputs()["input_ids"], inputs()["labels"]) for each in llama)
    torch.testing.assert_close(found.loss, wanted.loss)


def test_without_labels_and_in_generate_nothing_is_changed(llama, made_rows):
    model, plain = (each.eval() for each in llama)
    tokens = inputs()["input_ids"]
    output = model(tokens)
    assert type(output) is type(plain(tokens))
    assert type(output.__dict__["logits"]) is torch.Tensor
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))


def test_logits_to_keep(llama):
    given = inputs() | {"labels": inputs()["labels"][:, -4:]}
    found, wanted = (each(**given, logits_to_keep=4) for each in llama)
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.logits, wanted.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(llama, dtype):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, wanted = (each(**inputs()) for each in llama)
    assert found.loss.dtype == wanted.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-2, atol=1e-2)
    assert found.logits.dtype == dtype
    torch.testing.assert_close(found.logits, wanted.logits)  # read outside of it


def test_autocast_of_the_loss_is_not_that_of_the_head(llama):
    """A head that runs without autocast, for its logits to be exact, does so in its loss too."""

    class Exact:
        def __call__(self, input):
            with torch.autocast("cpu", enabled=False):
                return super().__call__(input.float())

    losses = []
    for model in llama:
        model.lm_head.__class__ = type("Exact", (Exact, type(model.lm_head)), {})
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**inputs()).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_autocast_leaves_float64_alone(llama):
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (each.double()(**inputs()) for each in llama)
    assert (found.loss.dtype, found.logits.dtype) == (wanted.loss.dtype, wanted.logits.dtype)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "t5", "gpt_oss"])
def test_inference_mode(name):
    model, plain = pair(name)
    hf.apply(model)
    with torch.inference_mode():
        found, wanted = model(**inputs()), plain(**inputs())
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits[:1], wanted.logits[:1], rtol=1e-4, atol=1e-5)


def test_routers_of_float64_stay_transformers():
    model, plain = (each.double() for each in pair("gpt_oss"))
    hf.apply(model)
    *found, ran = listened(model, inputs(), output_router_logits=True)
    close(found, trained(plain, inputs(), output_router_logits=True), rtol=1e-6, atol=1e-7)
    assert "route" not in ran


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_half_precision(name):
    model, plain = (each.to(torch.bfloat16) for each in pair(name))
    hf.apply(model)
    found, wanted = model(**inputs()), plain(**inputs())
    assert found.loss.dtype == wanted.loss.dtype
    torch.testing.assert_close(found.loss, wanted.loss, rtol=2e-2, atol=2e-2)


def test_state_copies_and_saved_files_are_as_before(llama, tmp_path):
    model, plain = llama
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, transformers.LlamaForCausalLM)
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is transformers.LlamaForCausalLM
    wanted = trained(plain, inputs())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.lm_head.weight.zero_()  # which a copy does not share
        *found, ran = listened(each, inputs())
        close(found, wanted)
        assert ran == LOSS


@pytest.mark.parametrize("parts", [None, ["attention"]])
def test_what_was_pickled_is_applied_in_another_process(parts, monkeypatch):
    for each in (attention, route):  # by torch's operations, which take less time
        monkeypatch.setattr(each, "route_of", lambda *tensors, **_: Route.COMPOSED)
    model, plain = pair("gpt_oss")
    hf.apply(model, parts)
    saved = pickle.dumps(model)
    del model
    gc.collect()
    # As it is in another process.
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, hf.attention.NAME)
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, hf.attention.NAME)
    monkeypatch.setattr(hf.attention, "_EAGERS_MASKS", set())
    monkeypatch.setattr(hf.attention, "attention_of", lambda kind: "eager's masks")
    monkeypatch.setattr(hf.routers, "_stand_ins", {})
    loaded = pickle.loads(saved)
    assert list(hf.attention._EAGERS_MASKS) == [transformers.GptOssConfig]
    assert list(hf.routers._stand_ins) == ([] if parts else ["transformers.models.gpt_oss.modeling_gpt_oss"])
    with torch.no_grad(), fused_softmax.explain() as calls:
        torch.testing.assert_close(loaded(**inputs()).loss, plain(**inputs()).loss, rtol=1e-4, atol=1e-5)
    wanted = {"attention"} if parts else set(hf_applied.MODELS["gpt_oss"][2])
    assert {each.function for each in calls} == wanted
    del loaded
    gc.collect()
    assert not hf.routers._stand_ins


def test_undo_gives_all_back():
    gc.collect()  # of models that are gone and have had no undo()
    model = made("gpt_oss")
    kinds = {at: type(each) for at, each in model.named_modules()}
    home = transformers.models.gpt_oss.modeling_gpt_oss
    balance = home.load_balancing_loss_func
    was = model.config._attn_implementation
    applied = hf.apply(model)
    assert home.load_balancing_loss_func is not balance
    assert model.config._attn_implementation != was
    applied.undo()
    applied.undo()
    assert {at: type(each) for at, each in model.named_modules()} == kinds
    assert home.load_balancing_loss_func is balance
    assert model.config._attn_implementation == was
    assert listened(model, inputs())[2] == {}
    assert "deferred" not in model.lm_head.__dict__
    assert "balances" not in model.__dict__
    hf.apply(model)


def _several(config=None):
    """A model of a vision tower and a language model, whose configs are parts of its own."""
    of = transformers.LlavaForConditionalGeneration
    return of(config if config is not None else of.config_class(
        text_config=transformers.Gemma2Config(**hf_applied.TEXT, attn_logit_softcapping=1.5),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ),
    ))  # fmt: skip


SHARED = {
    "one config": lambda config=None: made("gpt_oss") if config is None else transformers.GptOssForCausalLM(config),
    "configs within a config": _several,
}


def _configs(model):
    return {
        (at, name): each
        for at, part in model.named_modules()
        for name, each in vars(part).items()
        if isinstance(each, transformers.PreTrainedConfig)
    }


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("first", [True, False])
def test_another_model_of_the_same_config_is_as_before(name, first):
    model = SHARED[name]()
    other = SHARED[name](model.config)
    was, of_other = _configs(model), _configs(other)
    implementations = {key: each._attn_implementation for key, each in of_other.items()}
    assert hf.attention.NAME not in implementations.values()
    model, other = (model, other) if first else (other, model)
    applied = hf.apply(model, ["attention"])
    assert {key: each._attn_implementation for key, each in _configs(other).items()} == implementations
    found = _configs(model)
    assert hf.attention.NAME in {each._attn_implementation for each in found.values()}
    # Whoever had one config has one still, by itself and as a part of another.
    before = was if first else of_other
    ids = {id(each): id(found[key]) for key, each in before.items()}
    assert len(set(ids.values())) == len(ids)
    assert all(ids[id(each)] == id(found[key]) for key, each in before.items())
    assert not set(ids) & set(ids.values())
    for sub in model.config.sub_configs:
        assert id(getattr(model.config, sub)) == ids[id(getattr(other.config, sub))]
    applied.undo()
    assert {key: id(each) for key, each in _configs(model).items()} == {key: id(each) for key, each in before.items()}
    assert {key: each._attn_implementation for key, each in _configs(model).items()} == implementations


def test_two_applied_models_of_the_same_config_are_undone_apart():
    model = made("gpt_oss")
    other = transformers.GptOssForCausalLM(model.config)
    was, applied = model.config._attn_implementation, [hf.apply(each) for each in (model, other)]
    applied[0].undo()
    assert (model.config._attn_implementation, other.config._attn_implementation) == (was, hf.attention.NAME)
    assert listened(other, inputs())[2] == MODELS["gpt_oss"][2]
    applied[1].undo()
    assert other.config._attn_implementation == was


def test_what_was_changed_in_the_config_of_an_applied_model_is_kept():
    model = made("gpt_oss")
    applied, was = hf.apply(model), model.config
    model.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    applied.undo()
    assert model.config is model.model.config is was
    assert model.config.vocab_size == VOCABULARY + 2
    assert model.config._attn_implementation != hf.attention.NAME


def test_what_wraps_an_applied_model_has_its_config():
    wrapper = torch.nn.Module()
    wrapper.inner, wrapper.beside = made("gpt_oss"), torch.nn.Module()
    wrapper.config = wrapper.beside.config = config = wrapper.inner.config
    applied = hf.apply(wrapper)
    assert wrapper.config is wrapper.inner.config is not config
    assert wrapper.beside.config is config
    applied.undo()
    assert wrapper.config is wrapper.inner.config is config


def test_parts_are_applied_apart():
    for part, ran in (("loss", LOSS), ("attention", {"attention": 2}), ("routers", {"route": 2})):
        model, plain = pair("gpt_oss")
        applied = hf.apply(model, parts=[part])
        assert list(applied.replaced) == [part]
        *found, listed = listened(model, inputs())
        assert listed == ran
        close(found, trained(plain, inputs()))


def test_it_prints_what_was_replaced_and_what_was_left():
    assert str(hf.apply(made("qwen3_moe"))) == (
        "loss       Qwen3MoeForCausalLM.lm_head, 40 classes: linear_cross_entropy\n"
        "routers    2 x Qwen3MoeTopKRouter: route\n"
        'attention  left: Qwen3MoeConfig: "sdpa" is as fast'
    )


def _no_labels():
    class Bare(transformers.LlamaForCausalLM):
        def forward(self, input_ids):
            return self.lm_head(self.model(input_ids).last_hidden_state)

    return Bare(transformers.LlamaConfig(**hf_applied.TEXT))


def _odd_head():
    class Odd(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) - 1

    model = made("llama")
    model.lm_head = Odd(16, VOCABULARY)
    return model


def _forward_of_its_own(name):
    model = made("llama")
    part = model.get_submodule(name)
    part.forward = part.forward
    return model


REFUSED = {
    "no head": (lambda: made("llama").model, {}, ValueError, r"LlamaModel has no model of transformers with an output"),
    "no model of transformers": (lambda: torch.nn.Linear(2, 2), {}, ValueError, r"Linear has no model.*get_output_emb"),
    "no module": (lambda: "meta-llama/Llama-3.2-1B", {}, TypeError, r"must be a module, not str"),
    "no labels": (_no_labels, {}, ValueError, r"Bare.forward takes no labels"),
    "a head of its own": (_odd_head, {}, ValueError, r"LlamaForCausalLM.lm_head, its output.*torch.nn.Linear.*not Odd"),
    "no routers": (
        lambda: made("llama"), {"parts": ["loss", "routers"]}, ValueError, r"LlamaForCausalLM has no routers: looked",
    ),
    "no attention": (
        lambda: made("llama"), {"parts": ["attention"]}, ValueError, r'no attention: looked for.*"sdpa" is as fast',
    ),
    "a forward of its own": (
        lambda: _forward_of_its_own(""), {}, ValueError, r"LlamaForCausalLM.forward is a function of this module alone",
    ),
    "a head's forward of its own": (
        lambda: _forward_of_its_own("lm_head"), {}, ValueError, r"LlamaForCausalLM.lm_head.forward is a function of",
    ),
    "an unknown part": (lambda: made("llama"), {"parts": ["logits"]}, ValueError, r"parts must be some of.*'logits'"),
    "a chunk of no rows": (lambda: made("llama"), {"chunk_size": 0}, ValueError, r"must be at least 1, got 0"),
    "half a row": (lambda: made("llama"), {"chunk_size": 0.5}, TypeError, r"chunk_size must be an int, not float"),
    "an unknown sum": (lambda: made("llama"), {"accumulate": "fp16"}, ValueError, r'"fp32" or "input", got .fp16'),
    "parts that are a number": (lambda: made("llama"), {"parts": 3}, ValueError, r"parts must be some of.*got 3"),
    "a part that is no list": (lambda: made("llama"), {"parts": "loss"}, ValueError, r"parts must be some of.*'loss'"),
    "two models": (
        lambda: torch.nn.ModuleList([made("llama"), made("gpt2")]), {}, ValueError,
        r"several language models \(LlamaForCausalLM, GPT2LMHeadModel\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_raises_and_is_as_before(name):
    make, options, error, said = REFUSED[name]
    model = make()
    kinds = [] if isinstance(model, str) else list(map(type, model.modules()))
    with pytest.raises(error, match=said):
        hf.apply(model, **options)
    assert kinds == ([] if isinstance(model, str) else list(map(type, model.modules())))


def test_a_model_is_applied_once(llama):
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM is applied already; call undo\(\)"):
        hf.apply(llama[0])


def test_a_router_that_routes_otherwise_raises_and_nothing_is_applied(monkeypatch):
    model = made("mixtral")
    kind = type(model.model.layers[0].mlp.gate)
    plain = kind.forward

    def forward(self, hidden_states):
        logits, weights, indices = plain(self, hidden_states)
        return logits, weights * 2, indices

    monkeypatch.setattr(kind, "forward", forward)
    kinds = list(map(type, model.modules()))
    with pytest.raises(RuntimeError, match=r"MixtralTopKRouter of the installed transformers does not route as route"):
        hf.apply(model)
    assert list(map(type, model.modules())) == kinds
    hf.apply(model, parts=["loss"])


@pytest.fixture
def said():
    """What apply warns of, though it has said so before."""
    hf.deferred._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught if "fused_softmax.hf.apply" in str(each.message)]


def test_a_model_that_reads_its_logits_gets_them_and_says_where(llama, said):
    def loss_of(logits, labels, vocab_size, **_):
        return logits.float().logsumexp(-1).mean()

    for each in llama:
        each.loss_function = loss_of
    for _ in range(2):
        close(trained(llama[0], inputs()), trained(llama[1], inputs()))
    (text,) = said()
    assert "all logits are made" in text
    assert "test_hf_apply.py, loss_of, line" in text


@pytest.mark.parametrize("how", ["a hook", "a hook of all modules", "a forward"])
def test_whoever_looks_at_the_heads_output_sees_logits(llama, said, how, request):
    heads = [each.lm_head for each in llama]

    def doubled(module, args, output):
        return output * 2 if module in heads else output

    if how == "a hook of all modules":
        request.addfinalizer(torch.nn.modules.module.register_module_forward_hook(doubled).remove)
    for each in llama:
        if how == "a hook":
            each.lm_head.register_forward_hook(doubled)
        elif how == "a forward":
            plain = each.lm_head.forward
            each.lm_head.forward = lambda input, plain=plain: plain(input) * 2
    close(trained(llama[0], inputs()), trained(llama[1], inputs()))
    (text,) = said()
    assert "LlamaForCausalLM.forward does not call its head, or hooks" in text


@pytest.mark.parametrize("before", [False, True])
def test_whoever_looks_at_the_heads_gradient_sees_that_of_logits(llama, said, before):
    for each in llama:
        if before:
            each.lm_head.register_full_backward_pre_hook(lambda head, of_output: (of_output[0].clamp(max=0.01),))
        else:
            each.lm_head.register_full_backward_hook(
                lambda head, of_input, of_output: (of_output[0] @ head.weight * 2,)
            )
    close(trained(llama[0], inputs()), trained(llama[1], inputs()))
    assert len(said()) == 1


def test_a_head_that_took_the_place_of_ours_is_told_of(llama, said):
    for each in llama:
        torch.manual_seed(3)
        each.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    with torch.no_grad():
        for ours, plain in zip(llama[0].parameters(), llama[1].parameters(), strict=True):
            ours.copy_(plain)
    close(trained(llama[0], inputs()), trained(llama[1], inputs()))
    (text,) = said()
    assert "has been replaced since apply(): call it again" in text


def test_a_loss_that_fails_leaves_the_head_as_it_was(llama):
    with pytest.raises(ValueError, match=r"."):
        llama[0](input_ids=inputs()["input_ids"], labels=torch.zeros(2, 3, dtype=torch.int64))
    assert type(llama[0].lm_head(torch.randn(1, 16))) is torch.Tensor


def test_second_derivatives_of_the_loss_are_torchs(llama):
    norms = []
    for each in llama:
        loss = each(**inputs(), num_items_in_batch=4).loss
        (gradient,) = torch.autograd.grad(loss, each.lm_head.weight, create_graph=True)
        norms.append(torch.autograd.grad(gradient.square().sum(), each.lm_head.weight)[0])
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-5)


def test_explain_lists_the_loss_of_evaluation_too(llama):
    model = llama[0].eval()
    with torch.no_grad(), fused_softmax.explain() as calls:
        output = model(**inputs())
    assert [each.function for each in calls] == ["linear_cross_entropy"]
    torch.testing.assert_close(output.logits, llama[1].eval()(**inputs()).logits)


def test_later_logits_have_all_that_the_first_have():
    head = torch.nn.Linear(4, 6)
    head.steps = 0
    first = Deferred(head, torch.zeros(2, 4))
    later = first.to(torch.bfloat16)
    assert vars(first).keys() == vars(later).keys() == set(Deferred.state)
