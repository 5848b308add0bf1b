"""Posteriors in transformers and peft: the page "Posteriors in transformers" as tests."""

import doctest
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyro_structvi as ps
from benchmarks import adapter_draws

pytestmark = [pytest.mark.nets, pytest.mark.filterwarnings("default")]
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("pyro_structvi.transformers")

WORDS, LENGTH, SIZE = 40, 8, 12


def base(layers=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_hidden_layers=layers, max_position_embeddings=64, **sizes, **ends
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapters(net):
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # random, so that the adapters change the net
    )
    return peft.get_peft_model(net, config).eval()


def make(guide=ps.MeanFieldGuide, net=None, **options):
    net = net or adapters(base())
    model = ps.TokenClassifier(ps.bayesianize(net, prior=0.3), shift=True)
    return model, guide(model, **{"init_scale": 0.3} | options)


def texts(size=SIZE):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randint(3, WORDS, (size, LENGTH))


def inputs(size=SIZE):
    ids = texts(size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def rows(size=SIZE, hidden=0):
    """Return a data set of texts as their own labels; the first ones have fewer labels."""
    found = []
    for number, ids in enumerate(texts(size)):
        labels = ids.clone()
        labels[: hidden * (number % 3)] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


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


# ---- adapters ------------------------------------------------------------------------------------


@pytest.mark.nets_sample
@pytest.mark.parametrize("at", ["mean", "draw"])
def test_adapters_are_saved_loaded_and_merged(at, tmp_path):
    _, guide = make()
    net = guide.to_net() if at == "mean" else guide.to_net(guide.draw())
    expected = net(**inputs()).logits
    assert not torch.allclose(expected, base()(**inputs()).logits, atol=0.01)
    net.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(loaded(**inputs()).logits, expected)
    merged = net.merge_and_unload()
    assert type(merged) is transformers.LlamaForCausalLM
    torch.testing.assert_close(merged(**inputs()).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_folder_has_the_adapter_and_the_posterior(tmp_path):
    model, guide = make(ps.KTiedGuide)
    guide.to_net().save_pretrained(tmp_path)
    ps.save(tmp_path / "posterior.safetensors", model, guide, frozen=False)
    base_size = sum(value.nbytes for value in base().state_dict().values())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < base_size / 2
    net = peft.PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    other = ps.TokenClassifier(ps.bayesianize(net, prior=0.3), shift=True)
    loaded = ps.load(tmp_path / "posterior.safetensors", other)
    found = []
    for parts in ((model, guide), (other, loaded)):
        torch.manual_seed(2)
        found.append(ps.predict(*parts, inputs(), num_samples=3).functions)
    assert torch.equal(*found)


def test_draws_are_adapters_of_one_net(tmp_path):
    _, guide = make()
    torch.manual_seed(3)
    net = hf.draws_as_adapters(guide, 3)
    torch.manual_seed(3)
    draws = guide.joint_posterior().draw_many(range(3))
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}) for i in range(3)]
    expected = torch.stack([each(**inputs()).logits for each in (guide.to_net(), *nets)])
    names = ["default", "draw0", "draw1", "draw2"]
    for name, own in zip(names, expected, strict=True):
        net.set_adapter(name)
        assert torch.equal(net(**inputs()).logits, own)
    rows_of = {name: value.repeat(4, 1) for name, value in inputs().items()}
    together = net(**rows_of, adapter_names=[name for name in names for _ in range(SIZE)])
    torch.testing.assert_close(
        together.logits.unflatten(0, (4, SIZE)), expected, rtol=1e-4, atol=1e-5
    )
    net.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "draw1")
    assert torch.equal(loaded(**inputs()).logits, expected[2])


def test_a_net_without_adapters_is_refused():
    _, guide = make(net=base())
    with pytest.raises(TypeError, match="`guide` must be of a model around a net of peft"):
        hf.draws_as_adapters(guide)
    with pytest.raises(ValueError, match="`net` must have draws as adapters"):
        hf.generate_from_mixture(adapters(base()), inputs())


# ---- training ------------------------------------------------------------------------------------


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


ON_PROCESSES = """
import sys
import torch
import pyro_structvi as ps
from tests.any_net import test_transformers as own

folder = sys.argv[1]
model, guide = own.make(ps.MAPGuide)
sgd = torch.optim.SGD(guide.parameters(), lr=1.0)
steps = {"max_steps": 1, "max_grad_norm": 0.0, "per_device_train_batch_size": own.SIZE // 2}
steps |= {"train_sampling_strategy": "sequential", "optimizers": (sgd, None), "kl_weight": 1.0}
trainer = own.train(model, guide, folder, own.rows(hidden=3), **steps)
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
    options = {"logging_steps": 1, "gradient_accumulation_steps": 3, "max_steps": 4}
    trainer = train(model, guide, tmp_path, **options)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["kl_weight"] for line in lines] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert all(line["kl"] > 0 for line in lines)


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


def test_mixed_precision_and_activation_checkpoints_train(tmp_path):
    model, guide = make(init_scale=0.02)
    options = {"bf16": True, "activation_checkpointing": True, "max_steps": 150}
    before = ps.predict(model, guide, inputs(), num_samples=8, y=texts()[:, 1:]).log_density
    trainer = train(model, guide, tmp_path, kl_weight=1e-3, **options)
    assert {value.dtype for value in guide.parameters()} == {torch.float32}
    layers = trainer.model.net.model.layers
    assert all(layer.gradient_checkpointing for layer in layers)
    after = ps.predict(model, guide, inputs(), num_samples=8, y=texts()[:, 1:]).log_density
    assert after.mean() > before.mean() + 1


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


def test_checkpoints_that_the_count_of_uses_did_not_see_are_an_error(tmp_path):
    model, guide = make()
    model.num_data = SIZE
    guide.initialize(inputs(), texts())  # before the trainer switches them on
    with pytest.raises(RuntimeError, match=r"activation checkpoints"):
        train(model, guide, tmp_path, activation_checkpointing=True)


def test_several_gpus_of_one_process_are_refused(tmp_path):
    given = arguments(tmp_path)
    given._n_gpu = 2
    with pytest.raises(ValueError, match="`args` must have one GPU for each process, but got 2"):
        hf.StructuredTrainer(*make(), given)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    model, guide = make()
    with torch.no_grad():
        next(iter(guide.parameters())).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        train(model, guide, tmp_path)


# ---- sequences -----------------------------------------------------------------------------------


@pytest.mark.nets_sample
def test_one_draw_generates_a_whole_sequence():
    model, guide = make()
    options = {"max_new_tokens": 6, "do_sample": False}
    with guide.sampled() as draw:
        found = model.net.generate(**inputs(), **options)
        again = model.net.generate(**inputs(), **options)
    expected = guide.to_net(draw).generate(**inputs(), **options)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    assert not torch.equal(guide.to_net(guide.draw()).generate(**inputs(), **options), expected)


def mixture(net, ids, mask, draws=3):
    """Return log probabilities of the next token, averaged over the draws by hand."""
    each = []
    for number in range(draws):
        net.set_adapter(f"draw{number}")
        each.append(net(input_ids=ids, attention_mask=mask).logits[:, -1].softmax(-1))
    return torch.stack(each).mean(0)


@pytest.mark.nets_sample
def test_each_token_has_the_average_of_the_probabilities():
    _, guide = make()
    net, given = hf.draws_as_adapters(guide, 3), inputs()
    given["attention_mask"][0, :3] = 0  # padding on the left
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "output_scores": True}
    found = hf.generate_from_mixture(net, given, return_dict_in_generate=True, **options)
    ids, mask = given["input_ids"], given["attention_mask"]
    for scores in found.scores:
        expected = mixture(net, ids, mask)
        seen = scores[:SIZE].isfinite()
        assert int((~seen).sum()) == SIZE  # only the end of a sequence is excluded
        torch.testing.assert_close(scores[:SIZE].exp()[seen], expected[seen], rtol=1e-4, atol=1e-7)
        token = expected.masked_fill(~seen, 0).argmax(-1, keepdim=True)
        ids, mask = torch.cat([ids, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
    assert torch.equal(found.sequences, ids.repeat(3, 1))
    again = hf.generate_from_mixture(net, given, max_new_tokens=5, min_new_tokens=5)
    assert torch.equal(again, ids)


def test_sampled_tokens_have_the_probabilities_of_the_mixture():
    _, guide = make(init_scale=0.5)
    net, ids = hf.draws_as_adapters(guide, 3), texts(1)
    mask, many = torch.ones_like(ids), 4000
    warper = transformers.TemperatureLogitsWarper(0.5)
    expected = mixture(net, ids, mask).squeeze(0).square()
    expected /= expected.sum()
    given = {"input_ids": ids.repeat(many, 1), "attention_mask": mask.repeat(many, 1)}
    torch.manual_seed(7)
    found = hf.generate_from_mixture(net, given, sample=True, warpers=[warper], max_new_tokens=1)
    counts = torch.bincount(found[:, -1], minlength=WORDS) / many
    error = (expected * (1 - expected) / many).sqrt()
    assert ((counts - expected).abs() < 4.5 * error + 1e-3).all()


def test_beams_of_the_mixture():
    _, guide = make()
    net, given = hf.draws_as_adapters(guide, 3), inputs(2)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "num_beams": WORDS}
    found = hf.generate_from_mixture(net, given, **options)
    for row in range(2):
        ids = given["input_ids"][row : row + 1]
        first = mixture(net, ids, torch.ones_like(ids)).squeeze(0)
        longer = torch.cat([ids.expand(WORDS, -1), torch.arange(WORDS).unsqueeze(1)], 1)
        both = first.unsqueeze(1) * mixture(net, longer, torch.ones_like(longer))
        both[2], both[:, 2] = 0, 0  # no end
        best = int(both.argmax())
        assert found[row, -2:].tolist() == [best // WORDS, best % WORDS]
    several = hf.generate_from_mixture(net, given, num_return_sequences=3, **options)
    assert torch.equal(several[::3], found)


def test_options_with_another_meaning_are_refused():
    _, guide = make()
    net = hf.draws_as_adapters(guide, 2)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'do_sample'"):
        hf.generate_from_mixture(net, inputs(), do_sample=True)


def test_scores_of_sequences_are_those_of_the_nets_at_the_draws():
    model, guide = make()
    draws = guide.joint_posterior().draw_many(range(4))
    prediction = ps.predict(model, draws, inputs(), y=texts()[:, 1:])
    scores = prediction.likelihood.log_prob(texts()[:, 1:])
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}) for i in range(4)]
    for net, own in zip(nets, scores, strict=True):
        logits = net(**inputs()).logits[:, :-1].log_softmax(-1)
        expected = logits.gather(-1, texts()[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        prediction.log_density, scores.logsumexp(0) - torch.tensor(4.0).log()
    )


def test_functions_share_the_frozen_base():
    _, guide = make()
    torch.manual_seed(8)
    functions = guide.sample_functions(3)
    torch.manual_seed(8)
    draws = guide.joint_posterior().draw_many(range(3))
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}) for i in range(3)]
    expected = torch.stack([net(**inputs()).logits for net in nets])
    found = functions(**inputs(), use_cache=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    base_size = sum(value.nbytes for value in base().state_dict().values())
    assert sum(value.nbytes for value in functions.state_dict().values()) < 1.5 * base_size


# ---- examples ------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "transformers.md"


def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = functools.partial(transformers.TrainingArguments, use_cpu=True)
    monkeypatch.setattr(transformers, "TrainingArguments", on_cpu)
    labels = texts().clone()
    labels[0, -2:] = -100
    given = {"load_base": base, "train": rows(), "test": rows(), "prompts": inputs(3)}
    given |= {"texts": inputs(), "labels": labels}
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    exec("\n".join(blocks), given)
    assert given["tokens"].shape == (3, LENGTH + 20) or 2 in given["tokens"]  # the end of a text
    assert given["scores"].shape == (10, SIZE)
    assert {file.name for file in tmp_path.glob("draws/draw*")} >= {"draw0", "draw9"}


def test_the_benchmark_of_draws_runs(monkeypatch, capsys):
    options = ["--hidden", "16", "--layers", "2", "--repeats", "1", "--batch", "1", "--length", "4"]
    monkeypatch.setattr(sys, "argv", ["adapter_draws", *options])
    adapter_draws.main()
    header, _, first, *others = capsys.readouterr().out.splitlines()
    assert header == "| adapters on | all layers, 1 x 4 tokens | the last layer, 1 x 4 tokens |"
    assert first == "| one pass | 1 | 1 |"
    assert len(others) == 5


def test_docstring_examples():
    torch.manual_seed(0)
    found = doctest.testmod(hf)
    assert found.attempted > 15
    assert not found.failed
