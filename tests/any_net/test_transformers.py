"""Training by the ``Trainer`` of transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_structvi as ps
from tests.any_net.llama import LENGTH, SIZE, WORDS, adapters, base, inputs, make, rows, texts

pytestmark = [pytest.mark.nets, pytest.mark.filterwarnings("default")]
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("pyro_structvi.transformers")


def arguments(folder, **options):
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    quiet |= {"per_device_train_batch_size": 4, "learning_rate": 0.05, "max_steps": 6}
    return transformers.TrainingArguments(str(folder), **quiet | options)


def train(model, guide, folder, data=None, kind=None, resume=None, **options):
    own = {"kl_weight", "optimizers", "eval_dataset", "compute_metrics"} & {*options}
    given = {name: options.pop(name) for name in own}
    trainer = (kind or hf.StructuredTrainer)(
        model, guide, arguments(folder, **options), train_dataset=data or rows(), **given
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


def test_the_loss_has_an_equal_share_of_the_kl_for_each_example(tmp_path):
    model, guide = make(local_reparam=False)
    trainer = train(model, guide, tmp_path, kl_weight=0.7, max_steps=1)
    ids, labels = inputs(4), texts(4).clone()
    labels[0, :5] = -100
    torch.manual_seed(4)
    terms = ps.StructuredELBO().terms(model, guide, ids, labels)
    likelihood, kl = terms.log_likelihood["obs"] * 4 / SIZE, sum(terms.kl.values())
    torch.manual_seed(4)
    trainer.model.train()
    found = trainer.model(labels=labels, **ids)["loss"]
    count = 4 * (LENGTH - 1) - 4
    torch.testing.assert_close(found, (-likelihood + 0.7 * kl * 4 / SIZE) / count)


class OneSeed(hf.StructuredTrainer):
    """Each mini-batch has the same draw, and gradients of every step are kept."""

    def compute_loss(self, *args, **kwargs):
        torch.manual_seed(5)
        return super().compute_loss(*args, **kwargs)


@pytest.mark.nets_sample
@pytest.mark.parametrize("guide", [ps.MAPGuide, ps.MeanFieldGuide])
def test_accumulated_gradients_are_those_of_one_large_batch(guide, tmp_path):
    """Where mini-batches have different numbers of labels and, at the end, of examples."""
    found = []
    for size, parts in ((SIZE, 1), (5, 3)):
        options = {} if guide is ps.MAPGuide else {"local_reparam": False}
        model, own = make(guide, **options)
        before = state_of(own)
        sgd = torch.optim.SGD(own.parameters(), lr=1.0)
        steps = {"max_steps": 1, "max_grad_norm": 0.0, "gradient_accumulation_steps": parts}
        sizes = {"per_device_train_batch_size": size, "train_sampling_strategy": "sequential"}
        train(
            model,
            own,
            tmp_path,
            rows(hidden=3),
            OneSeed,
            kl_weight=1.0,
            optimizers=(sgd, None),
            **steps,
            **sizes,
        )
        after = state_of(own)
        found.append({name: before[name] - after[name] for name in before})
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-6)


class Given(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given)


@pytest.mark.nets_sample
def test_a_real_number_is_no_ignored_label(tmp_path):
    """The step and the evaluation of targets of -100 are those of targets close to it."""
    found = []
    for target in (-100.0, -100.001):
        torch.manual_seed(0)
        model = ps.Regressor(ps.bayesianize(Given(1, 1), prior=1.0), noise_scale=50.0)
        guide = ps.MAPGuide(model)
        data = [{"given": torch.ones(1), "labels": [target if n % 4 else 7.0]} for n in range(8)]
        sgd = torch.optim.SGD(guide.parameters(), lr=1.0)
        steps = {"max_steps": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
        trainer = train(model, guide, tmp_path, data, optimizers=(sgd, None), **steps)
        labels = torch.tensor([[target], [7.0]])
        losses = [trainer.evaluate(data)["eval_loss"]]
        losses.append(float(trainer.model(labels=labels, given=torch.ones(2, 1))["loss"]))
        found.append((state_of(guide), torch.tensor(losses)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


ON_PROCESSES = """
import sys
import torch
import pyro_structvi as ps
from tests.any_net import llama, test_transformers as own

folder = sys.argv[1]
model, guide = llama.make(ps.MAPGuide)
sgd = torch.optim.SGD(guide.parameters(), lr=1.0)
steps = {"max_steps": 1, "max_grad_norm": 0.0, "per_device_train_batch_size": llama.SIZE // 2}
steps |= {"train_sampling_strategy": "sequential", "optimizers": (sgd, None), "kl_weight": 1.0}
trainer = own.train(model, guide, folder, llama.rows(hidden=3), **steps)
torch.save((own.state_of(guide), torch.randn(3)), f"{folder}/{trainer.args.process_index}.pt")
"""


def test_two_processes_have_the_gradient_of_one_and_separate_noise(tmp_path):
    (tmp_path / "run.py").write_text(ON_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--standalone", str(tmp_path / "run.py"), str(tmp_path)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    (first, noise), (second, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(noise, other)
    model, guide = make(ps.MAPGuide)
    sgd = torch.optim.SGD(guide.parameters(), lr=1.0)
    options = {"max_steps": 1, "max_grad_norm": 0.0, "per_device_train_batch_size": SIZE}
    options |= {"optimizers": (sgd, None), "kl_weight": 1.0}
    train(model, guide, tmp_path, rows(hidden=3), **options)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, state_of(guide), rtol=1e-4, atol=1e-6)


@pytest.mark.nets_sample
def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    model, whole = make()
    train(model, whole, tmp_path, **options)
    files = {file.name: file.stat().st_size for file in (tmp_path / "checkpoint-3").iterdir()}
    base_size = sum(value.nbytes for value in base().state_dict().values())
    assert files["model.safetensors"] < base_size / 2
    model, parts = make(init_scale=0.1)
    trainer = train(model, parts, tmp_path, resume=str(tmp_path / "checkpoint-3"), **options)
    assert trainer.state.global_step == 6
    assert trainer.model.elbo.step == 5
    torch.testing.assert_close(state_of(parts), state_of(whole), rtol=0, atol=0)


def test_logs_have_the_kl_and_its_annealed_weight(tmp_path):
    model, guide = make()
    options = {"logging_steps": 1, "gradient_accumulation_steps": 3, "max_steps": 4, "bf16": True}
    trainer = train(model, guide, tmp_path, **options)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["kl_weight"] for line in lines] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert all(line["kl"] > 0 for line in lines)
    assert {value.dtype for value in guide.parameters()} == {torch.float32}


def test_evaluation_has_the_predictive_density_and_mean(tmp_path):
    model, guide = make(ps.MAPGuide)
    seen = []

    def metrics(found):
        seen.append(found)
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids[:, 1:]).mean())}

    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    options |= {"per_device_eval_batch_size": SIZE, "load_best_model_at_end": True}
    options |= {"save_strategy": "steps", "save_steps": 2}
    trainer = train(model, guide, tmp_path, eval_dataset=rows(), compute_metrics=metrics, **options)
    [line] = [line for line in trainer.state.log_history if "eval_loss" in line]
    prediction = ps.predict(model, guide, inputs(), num_samples=1, y=texts()[:, 1:])
    expected = -prediction.log_density.sum() / (SIZE * (LENGTH - 1))
    assert line["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert "eval_accuracy" in line
    torch.testing.assert_close(
        torch.from_numpy(seen[0].predictions), prediction.mean, rtol=1e-4, atol=1e-6
    )
    [predicted] = [trainer.predict(rows()).predictions]
    assert predicted.shape == (SIZE, LENGTH - 1, WORDS)


def test_an_ensemble_is_evaluated_by_each_of_its_members(tmp_path):
    model, guide = make(ps.EnsembleGuide, size=3)
    trainer = train(model, guide, tmp_path, max_steps=1, per_device_eval_batch_size=SIZE)
    expected = ps.predict(model, guide, inputs(), y=texts()[:, 1:])
    loss = trainer.evaluate(rows())["eval_loss"]
    assert loss == pytest.approx(-float(expected.log_density.sum()) / (SIZE * (LENGTH - 1)))


def test_an_evaluation_has_the_same_noise_each_time_and_changes_no_training(tmp_path):
    found = []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows()}):
        model, guide = make()
        trainer = train(model, guide, tmp_path, max_steps=3, **options)
        found.append(state_of(guide))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    last = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line][-1]
    assert trainer.evaluate()["eval_loss"] == last


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_recompute_with_the_same_weights(local, reentrant, tmp_path):
    """All weights are drawn in both runs: the first one is told so."""
    found = []
    for checkpoints in (False, True):
        model, guide = make(local_reparam=local)
        bound = hf.StructuredTrainer(model, guide, arguments(tmp_path)).model
        model.num_data = SIZE
        bound.train()
        if checkpoints:
            options = {"use_reentrant": reentrant}
            bound.activation_checkpointing_enable(
                activation_checkpointing_kwargs=options, every_n_layers=1, offload=False
            )
        guide.initialize(inputs(), texts())
        for use in guide.uses.values():
            assert bool(use.eager_reason) == checkpoints
            use.eager_reason = "a test"
        torch.manual_seed(6)
        bound(labels=texts(), **inputs())["loss"].backward()
        found.append({name: value.grad for name, value in guide.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_head_without_a_prior_is_trained_and_kept(tmp_path):
    torch.manual_seed(0)
    config = base().config
    config.num_labels = 3
    net = transformers.LlamaForSequenceClassification(config)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS"}
    net = peft.get_peft_model(net, peft.LoraConfig(**settings))
    model = ps.Classifier(ps.bayesianize(net, prior={"*lora_*": 0.3, "*": None}))
    guide = ps.MeanFieldGuide(model)
    data = [{**row, "labels": number % 3} for number, row in enumerate(rows())]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    options = {"save_strategy": "steps", "save_steps": 6}
    train(model, guide, tmp_path, data, eval_dataset=data, eval_strategy="steps", **options)
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    from safetensors.torch import load_file

    state = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert {f"model.{name}" for name in before} <= {*state}
    drawn = hf.draws_as_adapters(guide, 2)
    drawn.set_adapter("draw1")
    (head,) = [v for n, v in drawn.named_parameters() if "score" in n and "draw1" in n]
    assert torch.equal(head, next(iter(model.parameters())))


def test_tied_weights_without_a_prior_are_kept(tmp_path):
    net = base()
    net.lm_head.weight = net.model.embed_tokens.weight
    model = ps.TokenClassifier(ps.bayesianize(net, {"*q_proj*": 0.3, "*": None}), shift=True)
    train(model, ps.MeanFieldGuide(model), tmp_path, save_strategy="steps", save_steps=6)
    from safetensors.torch import load_file

    state = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    trained = model.net.model.embed_tokens.weight
    for name in ("model.embed_tokens", "lm_head"):
        assert torch.equal(state[f"model.net.{name}.weight"], trained)


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight_decay", 0.1), ("optim", "adafactor"), ("label_smoothing_factor", 0.1)],
)
def test_arguments_of_another_loss_or_optimizer_are_refused(option, value, tmp_path):
    model, guide = make()
    hf.StructuredTrainer(model, guide, arguments(tmp_path))
    with pytest.raises(ValueError, match=f"uses none of \\['{option}'\\]"):
        hf.StructuredTrainer(model, guide, arguments(tmp_path, **{option: value}))
    kind = torch.optim.SGD, {"lr": 0.1}
    with pytest.raises(ValueError, match=r"uses none of \['optimizer_cls_and_kwargs'\]"):
        hf.StructuredTrainer(model, guide, arguments(tmp_path), optimizer_cls_and_kwargs=kind)


def test_what_cannot_be_trained_is_refused(tmp_path):
    model, guide = make()
    model.num_data = SIZE
    guide.initialize(inputs(), texts())  # before the trainer switches them on
    with pytest.raises(RuntimeError, match=r"activation checkpoints"):
        train(model, guide, tmp_path, activation_checkpointing=True)
    given = arguments(tmp_path)
    given._n_gpu = 2
    with pytest.raises(ValueError, match="`args` must have one GPU for each process, but got 2"):
        hf.StructuredTrainer(model, guide, given)
    model, guide = make()
    with pytest.raises(ValueError, match="all of its labels are -100"):
        train(model, guide, tmp_path, rows(hidden=LENGTH)[2::3])
    model, guide = make()
    with torch.no_grad():
        next(iter(guide.parameters())).fill_(float("nan"))
    padded = ps.TokenClassifier(ps.bayesianize(base(), prior=0.1), shift=True, ignore_index=0)
    with pytest.raises(ValueError, match=r"`model` must have `ignore_index=-100`.*but got 0"):
        hf.StructuredTrainer(padded, ps.MeanFieldGuide(padded), arguments(tmp_path))
    with pytest.raises(FloatingPointError, match="bound of a mini-batch is not finite"):
        train(model, guide, tmp_path)


class Inside(torch.nn.Module):
    """Has a site that only a run finds."""

    def forward(self, given):
        return given @ pyro.sample("weight", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))


def test_a_guide_must_have_its_parameters(tmp_path):
    """As it has with inducing points, or where it is initialized."""
    data = [{"given": torch.randn(3), "labels": n % 2} for n in range(8)]
    lacking = r"`guide` must have its parameters .* `guide.initialize\(inputs, labels\)`"
    model = ps.Classifier(ps.bayesianize(Given(3, 2), prior=1.0))
    with pytest.raises(ValueError, match=lacking):
        train(model, ps.GlobalInducingGuide(model), tmp_path, data)
    pointed = ps.GlobalInducingGuide(model, torch.randn(5, 3))
    assert train(model, pointed, tmp_path, data).state.global_step == 6
    model = ps.Classifier(Inside(), num_data=8)
    guide = ps.MeanFieldGuide(model)
    with pytest.raises(ValueError, match=lacking):
        train(model, guide, tmp_path, data)
    guide.initialize({"given": torch.randn(8, 3)}, torch.arange(8) % 2)
    before = state_of(guide)
    train(model, guide, tmp_path, data)
    assert all(not torch.equal(value, before[name]) for name, value in state_of(guide).items())


class Scaled(Given):
    def forward(self, given):
        return super().forward(given) * pyro.param("scale", torch.ones(()))


def test_parameters_of_the_param_store_are_refused(tmp_path):
    model = ps.Classifier(ps.bayesianize(Scaled(3, 2), prior=1.0))
    data = [{"given": torch.ones(3), "labels": n % 2} for n in range(8)]
    with pytest.raises(ValueError, match=r"reads \['scale'\] by `pyro.param`"):
        train(model, ps.MeanFieldGuide(model), tmp_path, data)


@pytest.mark.parametrize("fp16", [False, True])
def test_a_gradient_that_is_not_finite_stops_before_the_step(fp16, tmp_path):
    """Also in half precision on a CPU, where no scaler leaves such steps out."""
    model, guide = make()
    model.num_data = SIZE
    guide.initialize(inputs(), texts())
    first = next(guide.parameters())
    first.register_hook(lambda gradient: gradient * torch.nan)
    known = [value.clone() for value in guide.parameters()]
    with pytest.raises(FloatingPointError, match="Gradients of a step are not finite"):
        train(model, guide, tmp_path, fp16=fp16)
    assert all(torch.equal(*pair) for pair in zip(guide.parameters(), known, strict=True))


def test_the_first_mini_batch_is_checked_once(tmp_path):
    model = ps.TokenClassifier(ps.bayesianize(adapters(base()), prior=1e-4), shift=True)
    with pytest.warns(UserWarning, match=r"start far outside of the prior") as found:
        train(model, ps.MeanFieldGuide(model), tmp_path)
    assert len([each for each in found if "far outside" in str(each.message)]) == 1
