"""Models by apply() under what trains them: Trainer, PEFT, gradient checkpointing, FSDP2, torch.compile."""

import contextlib
import copy
import inspect
import pickle
import types

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import hf_applied
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from hf_applied import LOSS, VOCABULARY, close, inputs, listened, made, pair, products, trained
from products import one_in
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import fused_softmax
from fused_softmax import hf

LENGTH = 7


def rows(n, seed=5):
    """Tokens of which every row has another number of labels, by which a mean of means is another than the mean."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (n, LENGTH), generator=generator)
    return [
        {
            "input_ids": each,
            "attention_mask": torch.ones_like(each),
            "labels": torch.where(torch.arange(LENGTH) < i % (LENGTH - 2), hf_applied.IGNORED, each),
        }
        for i, each in enumerate(tokens)
    ]


def by_trainer(model, folder, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=0.05, logging_steps=1, save_strategy="no", disable_tqdm=True,
        seed=0, optim="sgd", **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(16), eval_dataset=rows(4, seed=6))
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    predicted = trainer.predict(rows(4, seed=6))
    return losses, trainer.evaluate()["eval_loss"], torch.from_numpy(predicted.predictions), predicted.metrics


@pytest.mark.parametrize(
    "options",
    one_in(3, [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}]),
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_trainer(name, options, tmp_path):
    if name == "mixtral" and options:
        pytest.skip("of a router they ask nothing else")
    model, plain = pair(name)
    hf.apply(model)
    wanted = by_trainer(plain, tmp_path / "plain", **options)
    with fused_softmax.explain() as calls:
        found = by_trainer(model, tmp_path / "ours", **options)
    ran = [each.function for each in calls if not each.function.endswith("backward")]
    # Of smoothed labels Trainer makes the loss itself, of all logits.
    assert ran.count("linear_cross_entropy") == (0 if "label_smoothing_factor" in options else 6 + 1 + 1)
    assert (ran.count("route") > 0) == (name == "mixtral")
    close_to = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in options else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), **close_to)
    assert found[1] == pytest.approx(wanted[1], rel=close_to["rtol"])
    torch.testing.assert_close(found[2], wanted[2], rtol=close_to["rtol"], atol=10 * close_to["atol"])
    if "bf16" in options:
        return
    for (at, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=f"{at}: not close")


LORA = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "an adapted head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("first", ["apply", "peft"])
@pytest.mark.parametrize("name", LORA)
def test_lora(name, first):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(2)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **LORA[name]))

    model, plain = pair("llama")
    plain = adapted(plain)
    if first == "peft" and name == "an adapted head":
        with pytest.raises(ValueError, match=r"lm_head, its output embedding, must be torch.nn.Linear.*not Linear"):
            hf.apply(adapted(model))
        return
    if first == "apply":
        applied = hf.apply(model)
        model = adapted(model)
    else:
        model = adapted(model)
        applied = hf.apply(model)
    given = inputs()
    if name == "an adapted head":  # whose logits are a sum of two products
        hf.deferred._warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"all logits are made.*layer.py, forward, line"):
            close(trained(model, given), trained(plain, given))
        return
    *found, ran = listened(model, given)
    close(found, trained(plain, given))
    assert ran == LOSS
    torch.testing.assert_close(found[0].logits, plain(**given).logits)
    if name == "attention":
        merged = model.merge_and_unload()  # of which nothing is trained
        torch.testing.assert_close(merged(**given).loss, plain.merge_and_unload()(**given).loss)
        applied.undo()
        with fused_softmax.explain() as calls:
            merged(**given)
        assert list(calls) == []


def test_a_model_that_accelerate_unwraps_is_applied_still():
    model, plain = pair("llama")
    hf.apply(model)
    for each in (model, plain):
        each._original_forward = each.forward  # as Accelerator.prepare() has it with mixed precision
        each.forward = types.MethodType(convert_outputs_to_fp32(each.forward.__func__), each)
        extract_model_from_parallel(each, keep_fp32_wrapper=False)
    assert inspect.signature(model.forward) == inspect.signature(type(plain).forward.__get__(plain))
    *found, ran = listened(model, inputs())
    close(found, trained(plain, inputs()))
    assert ran == LOSS


def test_undo_finds_the_head_that_an_adapter_has_copied():
    peft = pytest.importorskip("peft")
    model = made("llama")
    kinds = {type(each) for each in model.modules()}
    applied = hf.apply(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **LORA["a trained head"]))
    applied.undo()
    assert type(adapted.base_model.model.lm_head.modules_to_save["default"]) in kinds
    again = hf.apply(adapted)
    assert listened(adapted, inputs())[2] == LOSS
    again.undo()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model, plain = pair(name)
    hf.apply(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    *found, ran = listened(model.train(), inputs())
    close(found, trained(plain.train(), inputs()))
    assert ran["linear_cross_entropy"] == 1
    assert ran.get("route", 0) == (2 * 2 if name == "gpt_oss" else 0)  # once more in the backward pass


@pytest.mark.parametrize("name", one_in(3, ["llama", "gemma2", "mixtral"]))
def test_compile(name):
    model, plain = pair(name)
    hf.apply(model)
    given = inputs()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "llama")
    *found, ran = listened(compiled, given)
    wanted = trained(plain, given)
    torch.testing.assert_close(found[0].loss, wanted[0].loss, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert ran["linear_cross_entropy"] >= 1
    keep = slice(None) if model.config.is_encoder_decoder else given["attention_mask"].bool()
    assert type(found[0].logits) is torch.Tensor
    torch.testing.assert_close(found[0].logits[keep], wanted[0].logits[keep], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given).loss, wanted[0].loss, rtol=1e-4, atol=1e-5)


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("more", "masked"),
    [({}, False), ({"position_ids": PACKED}, True), ({"attention_mask": inputs()["attention_mask"]}, True)],
    ids=["alone", "packed", "padded"],
)
@pytest.mark.parametrize("pickled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_compiled_code_makes_a_mask_only_where_a_row_may_be_more_than_one_sequence(more, masked, pickled):
    torch.compiler.reset()  # what other tests have compiled of this code counts towards a limit
    model, plain = pair("llama")
    hf.apply(model)
    model = pickle.loads(pickle.dumps(model)) if pickled else model
    given, masks = inputs(padded=False) | {"attention_mask": None, "use_cache": False} | more, []

    def graph(module, _):
        found = [node.meta.get("example_value") for node in module.graph.nodes]
        square = 2 * (hf_applied.LENGTH,)
        masks.extend(each for each in found if isinstance(each, torch.Tensor) and each.ndim == 4
                     and each.dtype == torch.bool and each.shape[2:] == square)  # fmt: skip
        return module.forward

    found = trained(torch.compile(model.train(), backend=graph, dynamic=False), given)
    wanted = trained(plain.train(), given)
    torch.testing.assert_close(found[0].loss, wanted[0].loss, rtol=1e-4, atol=1e-5)
    assert bool(masks) == masked
    for ours, theirs in zip(found[1].values(), wanted[1].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


class RestartingForCausalLM(LlamaForCausalLM):
    """A Llama whose rows have two sequences, by positions that it makes itself."""

    def forward(self, input_ids=None, labels=None, use_cache=False):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device) % 5
        position_ids = position_ids.unsqueeze(0)
        return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=use_cache)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_that_numbers_tokens_in_a_way_of_its_own_keeps_its_masks(compiles):
    plain = made("llama")
    plain.__class__ = RestartingForCausalLM
    model = copy.deepcopy(plain)
    hf.apply(model)
    given = {name: inputs(padded=False)[name] for name in ("input_ids", "labels")}
    run = torch.compile(model, backend="eager") if compiles else model
    torch.testing.assert_close(run(**given).loss, plain(**given).loss, rtol=1e-5, atol=1e-6)


def _by_hook(inner, positions, monkeypatch):
    inner.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | positions), with_kwargs=True)


def _by_instance(inner, positions, monkeypatch):
    forward = inner.forward
    inner.forward = lambda *args, **kwargs: forward(*args, **kwargs | positions)


def _by_class(inner, positions, monkeypatch):
    forward = type(inner).forward
    monkeypatch.setattr(
        type(inner), "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs | positions)
    )


@pytest.mark.parametrize("give", [_by_hook, _by_instance, _by_class], ids=["a hook", "an instance", "a class"])
def test_positions_that_only_the_inner_model_gets_are_looked_at(give, monkeypatch):
    torch.compiler.reset()
    model, plain = pair("llama")
    hf.apply(model)
    for each in (model, plain)[: 1 if give is _by_class else 2]:
        give(each.model, {"position_ids": PACKED}, monkeypatch)
    given = {name: inputs(padded=False)[name] for name in ("input_ids", "labels")} | {"use_cache": False}
    found = torch.compile(model, backend="eager")(**given)
    torch.testing.assert_close(found.loss, plain(**given).loss, rtol=1e-5, atol=1e-6)


class _OfTensors(torch.nn.Module):
    """A model whose forward pass takes and gives tensors alone, in order."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given):
        return tuple(self.model(*given[:2], labels=given[2], use_cache=False, return_dict=False)[:2])


KEPT = {
    "torch.export": lambda run, *given: torch.export.export(run, given, strict=False).module(),
    "torch.export, strict": lambda run, *given: torch.export.export(run, given, strict=True).module(),
    "torch.jit.trace": lambda run, *given: torch.jit.trace(run, given, check_trace=False),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_is_kept_has_loss_and_logits(how, grad):
    model, plain = (_OfTensors(each.eval()) for each in pair("llama"))
    hf.apply(model)
    given = [inputs()[name] for name in ("input_ids", "attention_mask", "labels")]
    others = [given[0].flip(1), given[1], torch.where(given[2] < 0, given[2], given[0].flip(1))]
    with torch.set_grad_enabled(grad):
        model(*given)  # whose calls are kept
        graph = KEPT[how](model, *given)
        for each in (given, others):
            found, wanted = graph(*each), plain(*each)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            if grad:
                kept, theirs = dict(graph.named_parameters()), dict(plain.named_parameters())
                assert len(kept) == len(theirs)
                for graph_or_plain, (loss, logits) in ((graph, found), (plain, wanted)):
                    graph_or_plain.zero_grad()
                    (loss + logits.square().mean()).backward()
                for name, parameter in theirs.items():
                    torch.testing.assert_close(kept[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)


UNITS = {
    "all at once": ([], {}),
    "layers": (["model.layers.0", "model.layers.1"], {"reshard_after_forward": True}),
    "a head alone": (["model.layers.0", "model.layers.1", "lm_head"], {"reshard_after_forward": True}),
    "another dtype of outputs": (["lm_head"], {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}),
    "a head alone, kept": (["lm_head"], {"reshard_after_forward": False}),
    "16 bits": (["model.layers.0", "lm_head"], {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
}


def own_inputs(rank):
    given = inputs()
    generator = torch.Generator().manual_seed(20 + rank)
    tokens = torch.randint(3, VOCABULARY, given["input_ids"].shape, generator=generator)
    return given | {"input_ids": tokens, "labels": torch.where(given["labels"] < 0, given["labels"], tokens)}


def of_shards(group, name, units, ours):
    """(losses of two steps, the last one's gradients, what ran, logits read without a gradient, what a read with one
    raised and what one after a step, how many rows of logits each step made) of a rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    model = made(name)
    if ours:
        hf.apply(model)
    parts, options = UNITS[units]
    for part in parts:
        fully_shard(model.get_submodule(part), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    given, losses, made_rows = own_inputs(dist.get_rank(group)), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        with fused_softmax.explain() as calls, products() as rows:
            output = model(**given)
            output.loss.backward()
        made_rows.append(sum(rows))
        losses.append(output.loss.item())
        with torch.no_grad():
            logits = output.logits.detach().clone()
        optimizer.step()
    gradients = {at: each.grad.full_tensor() for at, each in model.named_parameters()}
    raised, late = "", ""
    if ours:
        try:
            _ = model(**given).logits
        except RuntimeError as error:
            raised = str(error)
        output = model(**given)
        output.loss.backward()
        optimizer.step()
        try:
            with torch.no_grad():
                _ = output.logits
        except RuntimeError as error:
            late = str(error)
    ran = [each.function for each in calls if "backward" not in each.function]
    return losses, gradients, ran, logits, raised, late, made_rows


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_fsdp2(ranks, units, name):
    if "tied" in name and "lm_head" in UNITS[units][0]:
        pytest.skip("a weight of two modules belongs to a unit that has both")
    found = ranks.values(2, of_shards, name, units, True)
    wanted = ranks.values(2, of_shards, name, units, False)
    close_to = {"rtol": 2e-2, "atol": 2e-2} if units == "16 bits" else {"rtol": 1e-4, "atol": 1e-6}
    for (losses, gradients, ran, logits, raised, late, rows), (w_losses, w_gradients, _, w_logits, _, _, w_rows) in zip(
        found, wanted, strict=True
    ):
        assert (sum(rows), min(w_rows)) == (0, 2 * hf_applied.LENGTH)  # whose hooks walk over the output
        assert ran == ["linear_cross_entropy"]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(w_losses), **close_to)
        for at, each in w_gradients.items():
            torch.testing.assert_close(gradients[at], each, **close_to, msg=f"{at}: not close")
        torch.testing.assert_close(logits, w_logits, **close_to)
        assert ("their weight lies in shards again" in raised) == (units == "layers")
        assert "as an optimizer's step does" in late


def of_compiled_shards(group, units, ours):
    """(losses of two steps, the last one's gradients, logits) of a rank whose shards' model is compiled."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    model = made("llama")
    if ours:
        hf.apply(model)
    parts, options = UNITS[units]
    for part in (*(model.get_submodule(part) for part in parts), model):
        fully_shard(part, mesh=mesh, **options)
    run = torch.compile(model, backend="aot_eager") if ours else model
    given, losses = own_inputs(dist.get_rank(group)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        output = run(**given)
        output.loss.backward()
        losses.append(output.loss.item())
        with torch.no_grad():
            logits = output.logits.detach().clone()
        optimizer.step()
    return losses, {at: each.grad.full_tensor() for at, each in model.named_parameters()}, logits


@pytest.mark.parametrize("units", one_in(3, ["all at once", "layers", "a head alone"]))
def test_fsdp2_of_compiled_code(ranks, units):
    found, wanted = (ranks.values(2, of_compiled_shards, units, ours) for ours in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def of_replicas(group, options, ours):
    """(losses of two steps, the last one's gradients, logits, how many rows of logits the steps made) of a rank."""
    model, given = made("llama"), own_inputs(dist.get_rank(group))
    if ours:
        hf.apply(model)
    replica = DistributedDataParallel(model, process_group=group, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with products() as rows:
        for _ in range(2):
            optimizer.zero_grad()
            output = replica(**given)
            output.loss.backward()
            losses.append(output.loss.item())
            optimizer.step()
        n_rows = sum(rows)
    output = replica(**given)
    (output.loss + output.logits.square().mean()).backward()
    gradients = {at: each.grad for at, each in model.named_parameters()}
    return losses, gradients, output.logits.detach(), n_rows


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(ranks, options):
    found, wanted = (ranks.values(2, of_replicas, options, ours) for ours in (True, False))
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[:3], its[:3], rtol=1e-4, atol=1e-6)
        assert (mine[3], its[3] > 0) == (0, True)


def of_flat_shards(group, unit, original, ours):
    """(losses of two steps, logits, what reads of them raise after the backward pass, rows of logits) by FSDP1."""
    model, given = made("llama"), own_inputs(dist.get_rank(group))
    if ours:
        hf.apply(model)
    units = ModuleWrapPolicy({type(model.get_submodule(unit))})
    options = {"process_group": group, "device_id": torch.device("cpu"), "use_orig_params": original}
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=units, **options)
    optimizer, losses, raised = torch.optim.SGD(sharded.parameters(), lr=0.1), [], ""
    with products() as rows:
        for _ in range(2):
            optimizer.zero_grad()
            output = sharded(**given)
            output.loss.backward()
            losses.append(output.loss.item())
            try:
                _ = output.logits
            except RuntimeError as error:
                raised = str(error)
            optimizer.step()
        n_rows = sum(rows)
    return losses, sharded(**given).logits.detach(), raised, n_rows


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("unit", ["model.layers.0", "lm_head"])
@pytest.mark.filterwarnings("ignore")
def test_fsdp1(ranks, unit, original):
    found, wanted = (ranks.values(2, of_flat_shards, unit, original, ours) for ours in (True, False))
    for (losses, logits, raised, rows), (w_losses, w_logits, _, _) in zip(found, wanted, strict=True):
        torch.testing.assert_close((losses, logits), (w_losses, w_logits), rtol=1e-4, atol=1e-6)
        alone = unit == "lm_head"  # whose weight is gone before the loss is there, so that all logits are made
        assert (rows > 0) == alone
        assert alone or "their weight lies in shards again: read them before the backward pass" in raised


PLANS = {
    "a head that gathers": {"lm_head": ColwiseParallel(output_layouts=Replicate())},
    "a head in rows": {"lm_head": RowwiseParallel(input_layouts=Replicate())},
    "a loss of shards": {"lm_head": ColwiseParallel(use_local_output=False)},
    "DTensors": None,
}


def of_columns(group, plan, ours):
    """(the loss, gradients, logits, how many rows of logits the loss made) of a rank, by tensor parallelism."""
    model, given = made("llama", "eager"), inputs()
    if ours:
        hf.apply(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    if PLANS[plan] is None:
        distribute_module(model, mesh)
        weight = distribute_tensor(model.lm_head.weight.detach().full_tensor(), mesh, [Shard(0)])
        model.lm_head.weight = torch.nn.Parameter(weight)
    else:
        parallelize_module(model, mesh, PLANS[plan])
    scope = {"a loss of shards": loss_parallel, "DTensors": implicit_replication}.get(plan, contextlib.nullcontext)
    with scope():
        with products() as rows:
            output = model(**given)
            output.loss.backward()
            n_rows = sum(rows)
        found = output.loss.detach(), {at: each.grad for at, each in model.named_parameters()}, output.logits.detach()
    return *tree_map(lambda each: each.full_tensor() if hasattr(each, "full_tensor") else each, found), n_rows


@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallelism(ranks, plan):
    found, wanted = (ranks.values(2, of_columns, plan, ours) for ours in (True, False))
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[:3], its[:3], rtol=1e-4, atol=1e-6)
        assert (mine[3] == 0) == (plan == "DTensors")  # in the others hooks look at the head's output


def test_undo_after_fully_shard_raises_before_it_changes_anything(ranks):
    (raised,) = ranks(1, _undone)
    assert raised == "fully_shard"


def _undone(group):
    model = made("llama")
    applied = hf.apply(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    kinds = list(map(type, model.modules()))
    try:
        applied.undo()
    except RuntimeError as error:
        assert list(map(type, model.modules())) == kinds
        return "fully_shard" if "as fully_shard does" in str(error) else str(error)
    return "undone"


def test_a_copy_is_trained_apart():
    model = made("llama")
    hf.apply(model)
    other = copy.deepcopy(model)
    trained(other, inputs())
    assert all(each.grad is None for each in model.parameters())
