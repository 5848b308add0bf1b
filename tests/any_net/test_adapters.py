"""Adapters and sequences by draws of a posterior; the page and the examples of docstrings."""

import doctest
import functools
import re
from functools import partial
from pathlib import Path

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.families import Members
from tests.any_net.llama import LENGTH, SIZE, WORDS, adapters, base, inputs, make, rows, texts

pytestmark = [pytest.mark.nets, pytest.mark.filterwarnings("default")]
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("pyro_structvi.transformers")


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


def families(model):
    return ps.StructuredGuide(model, {"*": Members(3)})


@pytest.mark.nets_sample
@pytest.mark.parametrize(
    ("make_guide", "count"),
    [
        (partial(ps.EnsembleGuide, size=3), 3),
        (partial(ps.MixtureGuide, make_guide=ps.MeanFieldGuide, size=3), 10),
        (families, 10),
    ],
)
def test_draws_of_a_mixture_are_of_each_member_in_turn(make_guide, count):
    """The mean of its members is no net of the posterior, so the active adapter is a draw."""
    _, guide = make(lambda model, init_scale: make_guide(model))
    torch.manual_seed(3)
    net = hf.draws_as_adapters(guide)
    torch.manual_seed(3)
    draws = guide.joint_posterior().draw_many(range(count))
    assert [*net.peft_config] == ["default", *(f"draw{place}" for place in range(count))]
    for name, place in (("default", 0), ("draw0", 0), ("draw1", 1), (f"draw{count - 1}", -1)):
        net.set_adapter(name)
        expected = guide.to_net({site: draw[place] for site, draw in draws.items()})
        assert torch.equal(net(**inputs()).logits, expected(**inputs()).logits)
    mixture = hf.generate_from_mixture(net, inputs(2), max_new_tokens=2, min_new_tokens=2)
    assert mixture.shape == (2, LENGTH + 2)


def with_draws(guide, count):
    """Return a net with draws as adapters, and the outputs at the last of them."""
    torch.manual_seed(3)
    found = hf.draws_as_adapters(guide, count)
    torch.manual_seed(3)
    draws = guide.joint_posterior().draw_many(range(count))
    last = guide.to_net({name: draw[-1] for name, draw in draws.items()})
    return found, last(**inputs()).logits


def test_draws_are_those_of_the_active_adapter():
    net = adapters(base())
    net.add_adapter("other", net.peft_config["default"])
    net.set_adapter("other")
    _, guide = make(net=net)
    found, expected = with_draws(guide, 1)
    assert not torch.allclose(found(**inputs()).logits, expected)
    found.set_adapter("draw0")
    assert torch.equal(found(**inputs()).logits, expected)


@pytest.mark.parametrize(
    "changing",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"layer_replication": [[0, 2], [1, 2]]},
    ],
)
def test_draws_leave_the_base_where_new_adapters_change_it(changing, tmp_path):
    """Starts are the largest parts of a weight, and the base is the rest; or layers are repeated."""
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    net = peft.get_peft_model(base(), peft.LoraConfig(r=4, **options, **changing)).eval()
    for name, value in net.named_parameters():
        if "lora_B" in name:  # 0 in a new adapter
            torch.nn.init.normal_(value)
    _, guide = make(net=net)
    found, expected = with_draws(guide, 2)
    assert torch.equal(found(**inputs()).logits, guide.to_net()(**inputs()).logits)
    found.set_adapter("draw1")
    assert torch.equal(found(**inputs()).logits, expected)
    found.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "draw1")
    torch.testing.assert_close(loaded(**inputs()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["VBLoRA", "PromptTuning", "PrefixTuning", "PromptEncoder"])
def test_draws_of_other_kinds_of_adapters(kind, tmp_path):
    """The layers of VB-LoRA share a bank of vectors; the others are prompts, which wrap the net."""
    prompt = {"num_virtual_tokens": 4}
    layers = {"num_vectors": 8, "vector_length": 4, "r": 2, "target_modules": ["q_proj", "v_proj"]}
    options = layers if kind == "VBLoRA" else prompt
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)
    _, guide = make(net=peft.get_peft_model(base(), config).eval())
    found, expected = with_draws(guide, 2)
    mean = guide.to_net()(**inputs()).logits
    assert torch.equal(found(**inputs()).logits, mean)
    assert not torch.allclose(mean, expected, atol=0.01)
    found.set_adapter("draw1")
    assert torch.equal(found(**inputs()).logits, expected)
    found.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "draw1")
    torch.testing.assert_close(loaded(**inputs()).logits, expected)


def test_the_name_of_the_adapter_may_be_in_other_names():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    net = peft.get_peft_model(base(), config, adapter_name="model").eval()
    _, guide = make(net=net)
    found, expected = with_draws(guide, 1)
    found.set_adapter("draw0")
    assert torch.equal(found(**inputs()).logits, expected)


def test_weights_that_adapters_share_are_refused():
    net = adapters(base())
    net.base_model.model.lm_head.requires_grad_(True)
    _, guide = make(net=net)
    with pytest.raises(ValueError, match=r"'default' only, but .*lm_head.weight'\] are outside"):
        hf.draws_as_adapters(guide)


def test_adapters_with_factored_weights_are_refused():
    net = ps.bayesianize(adapters(base()), prior=0.3, layers={"*lora_A.default": ps.nn.RankOne()})
    guide = ps.MeanFieldGuide(ps.TokenClassifier(net, shift=True))
    with pytest.raises(
        ValueError, match=r"peft's own layers, but '.*lora_A.default.input_scale' is"
    ):
        hf.draws_as_adapters(guide)


class Around(pyro.nn.PyroModule):
    def __init__(self, net):
        super().__init__()
        self.inner = net

    def forward(self, x, y=None):
        return self.inner(**x).logits


def test_a_net_without_adapters_is_refused():
    _, guide = make(net=base())
    own = ps.MeanFieldGuide(Around(ps.bayesianize(adapters(base()), prior=0.3)))
    for each in (guide, own):
        with pytest.raises(TypeError, match="`guide` must be of a likelihood around a net of peft"):
            hf.draws_as_adapters(each)
    with pytest.raises(ValueError, match="`net` must have draws as adapters"):
        hf.generate_from_mixture(adapters(base()), inputs())


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


def test_settings_may_come_from_a_configuration():
    _, guide = make()
    net, given = hf.draws_as_adapters(guide, 2), inputs(2)
    settings = {"max_new_tokens": 2, "min_new_tokens": 2, "num_beams": 4}
    expected = hf.generate_from_mixture(net, given, **settings)
    config = transformers.GenerationConfig(**settings)
    assert torch.equal(hf.generate_from_mixture(net, given, generation_config=config), expected)
    net.generation_config.update(**settings)
    assert torch.equal(hf.generate_from_mixture(net, given), expected)
    assert torch.equal(hf.generate_from_mixture(net, given, num_beams=4), expected)
    for options in ({}, {"generation_config": config}):
        with pytest.raises(ValueError, match="`num_beams` must be 1 where tokens are sampled"):
            hf.generate_from_mixture(net, given, sample=True, **options)


def test_what_the_mixture_would_leave_out_is_refused():
    _, guide = make()
    net = hf.draws_as_adapters(guide, 2)
    cold = transformers.GenerationConfig(temperature=0.5)
    for options in ({"temperature": 0.5}, {"generation_config": cold}):
        with pytest.raises(ValueError, match=r"none of \['temperature'\].*Write `warpers="):
            hf.generate_from_mixture(net, inputs(), sample=True, **options)
    for name in ("num_beams", "num_return_sequences"):
        with pytest.raises(
            ValueError, match=f"`{name}` must be 1 where tokens are sampled, but got"
        ):
            hf.generate_from_mixture(net, inputs(), sample=True, **{name: 3})
    config = transformers.GenerationConfig(do_sample=True)
    for options in ({"do_sample": True}, {"logits_processor": []}, {"generation_config": config}):
        with pytest.raises(ValueError, match=r"since tokens are sampled here.* `sample=True`"):
            hf.generate_from_mixture(net, inputs(), **options)
    with pytest.raises(ValueError, match=r"evaluation mode.* Write `net.eval\(\)`"):
        hf.generate_from_mixture(net.train(), inputs())
    config = peft.LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    _, guide = make(net=peft.get_peft_model(base(), config))
    with pytest.raises(ValueError, match=r"rows of a batch .*, such as LoRA, but has LOHA"):
        hf.generate_from_mixture(hf.draws_as_adapters(guide, 2), inputs())
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "use_dora": True}
    _, guide = make(net=peft.get_peft_model(base(), peft.LoraConfig(r=2, **options)))
    with pytest.raises(
        ValueError, match=r"such as LoRA, but has DoRA.*`net.set_adapter\('draw0'\)`"
    ):
        hf.generate_from_mixture(hf.draws_as_adapters(guide, 2), inputs())


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


def test_docstring_examples():
    torch.manual_seed(0)
    found = doctest.testmod(hf)
    assert found.attempted > 15
    assert not found.failed
