"""Posteriors that are saved to a file and loaded from it."""

import functools
import json
from dataclasses import dataclass, replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import Dropout, KTied, MeanField
from pyro_structvi.posterior.warm_start import full_covariance_from, k_tied_from_mean_field
from tests.guide_cases import GUIDES, POINTS
from tests.models import make_regressor

MIXTURE = {"mixture": lambda model: ps.MixtureGuide(model, ps.KTiedGuide, 2)}
OF_MASK = {"net.0.weight": torch.arange(15).reshape(5, 3) % 2 == 0}
CHOSEN = {"subnetwork": lambda model: ps.SubnetworkGuide(model, OF_MASK)}


def make_net(size=5):
    layers = nn.Linear(3, size), nn.BatchNorm1d(size), nn.Tanh(), nn.Linear(size, 2)
    return nn.Sequential(*layers)


def make_model(prior=1.0, size=5):
    net = ps.bayesianize(make_net(size), prior=prior, normalization=False)
    return ps.Regressor(net, num_data=8, noise="learned")


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_unchanged(module, before):
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def assert_equal_states(one, other):
    own, found = one.state_dict(), other.state_dict()
    assert [*own] == [*found]
    assert all(torch.equal(own[name], found[name]) for name in own)


@pytest.mark.parametrize("name", [*GUIDES, *POINTS, *CHOSEN])
def test_a_loaded_posterior_is_the_saved_one(tmp_path, name):
    model, x, y = make_model(), torch.randn(8, 3), torch.randn(8, 2)
    guide = (GUIDES | POINTS | CHOSEN)[name](model)
    ps.fit(model, guide, (x, y), num_steps=2, progress=False, compiled=False)
    path = tmp_path / "posterior.safetensors"
    ps.save(path, model, guide)
    other = make_model()
    loaded = ps.load(path, other)
    assert type(loaded) is type(guide)
    assert_equal_states(guide, loaded)
    assert_equal_states(model, other)  # with running statistics and the noise
    predictions = []
    for parts in ((model, guide), (other, loaded)):
        torch.manual_seed(1)
        predictions.append(ps.predict(*parts, x, num_samples=3, batch_statistics=x).functions)
    assert torch.equal(*predictions)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def make_frozen(value):
    torch.manual_seed(0)
    net = make_net()
    net[0].requires_grad_(False).weight.fill_(value)[0] = torch.linspace(1, 2, 3)
    return ps.Regressor(ps.bayesianize(net, normalization=False), num_data=8, noise="learned")


def test_a_file_without_frozen_parameters_takes_those_of_the_model(tmp_path):
    model, path = make_frozen(0.5), tmp_path / "posterior.safetensors"
    guide = ps.KTiedGuide(model)
    guide.initialize(torch.randn(8, 3), torch.randn(8, 2))
    ps.save(path, model, guide, frozen=False)
    own = {*model.state_dict()} | {*guide.state_dict()}
    written = {key.split(".", 1)[1] for key in load_file(path)}
    assert own - written == {"net.0.weight", "net.0.bias"}
    same = make_frozen(0.5)
    assert_equal_states(ps.load(path, same), guide)
    assert_equal_states(same, model)
    for change in (lambda w: w.div_(2), lambda w: w[0, 0].neg_(), lambda w: w.copy_(w.flip(0))):
        other = make_frozen(0.5)
        change(other.net[0].weight)
        before = state_of(other)
        with pytest.raises(ValueError, match=r"file was saved, but 'model.net.0.weight' differ. "):
            ps.load(path, other)
        assert_unchanged(other, before)
    with pytest.raises(ValueError, match=r"but 'model.net.0.weight', 'model.net.0.bias' differ"):
        ps.load(path, make_model())


def test_a_parameter_that_is_frozen_later_is_loaded_from_the_file(tmp_path):
    def make(is_frozen):
        net = make_net()
        for value in net[0].requires_grad_(False).parameters():
            value.fill_(0.5)
        net[-1].bias.requires_grad_(not is_frozen)
        net = ps.bayesianize(net, {"*.bias": None, "*": 1.0}, normalization=False)
        return ps.Regressor(net, num_data=8, noise_scale=0.5)

    model, path = make(is_frozen=False), tmp_path / "posterior.safetensors"
    model.net[3].bias.data.fill_(7.0)
    ps.save(path, model, ps.KTiedGuide(model), frozen=False)
    other = make(is_frozen=True)
    ps.load(path, other)
    assert float(other.net[3].bias[0]) == 7.0


def test_a_file_with_frozen_parameters_must_have_all_of_them(tmp_path):
    model, path = make_frozen(0.5), tmp_path / "posterior.safetensors"
    ps.save(path, model, ps.KTiedGuide(model))
    other = make_frozen(0.25)
    ps.load(path, other)
    assert float(other.net[0].weight[1, 0]) == 0.5
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.net.0.weight"]
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"the file has no 'model.net.0.weight'"):
        ps.load(path, other)


def mixture_with_a_pruned_member(model):
    make = functools.partial(ps.InducingWeightGuide, inducing_shape=(2, 2))
    guide = ps.MixtureGuide(model, make, 2, vectorize=False)
    ps.pruning.prune_inducing_factors(guide.members[1], 0.5)
    return guide


def pruned_global_inducing(model):
    guide = ps.GlobalInducingGuide(model, torch.randn(6, 3), first_layer=MeanField())
    ps.pruning.prune_mean_field(guide, 0.5)
    return guide


@pytest.mark.parametrize(
    "make",
    [
        *MIXTURE.values(),
        lambda model: ps.GlobalInducingGuide(model, torch.randn(6, 3), train_inputs=True),
        lambda model: ps.GlobalInducingGuide(model, torch.randn(6, 3), join_bias=False),
        pruned_global_inducing,
        mixture_with_a_pruned_member,
        lambda model: ps.EnsembleGuide(model, size=2),
        lambda model: ps.MixtureGuide(
            model, lambda model: ps.GlobalInducingGuide(model, torch.randn(4, 3)), 2
        ),
    ],
    ids=[
        "mixture",
        "points trained",
        "biases apart",
        "pruned",
        "pruned member",
        "ensemble",
        "in a mixture",
    ],
)
def test_guides_of_several_parts(tmp_path, make):
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    models = [make_regressor() for _ in range(2)]
    guide = make(models[0])
    ps.fit(models[0], guide, (x, y), num_steps=2, progress=False, compiled=False)
    ps.save(tmp_path / "file", models[0], guide)
    loaded = ps.load(tmp_path / "file", models[1])
    assert type(loaded) is type(guide)
    assert_equal_states(guide, loaded)


def test_families_by_patterns_and_what_pruning_changed(tmp_path):
    model = make_model()
    families = {
        "net.0.*": KTied(3, join_bias=False),
        "net.3.bias": MeanField(0.5),
        "*": Dropout(0.2),
    }
    options = {"init_scale": 0.02, "init_relative_scale": 0.1, "local_reparam": "exact"}
    guide = ps.StructuredGuide(model, families, **options)
    ps.save(tmp_path / "file", model, guide)
    loaded = ps.load(tmp_path / "file", make_model())
    assert loaded.families == guide.families
    assert {name: getattr(loaded, name) for name in options} == options
    assert {name: loaded[name].family for name in loaded.site_names} == {
        name: guide[name].family for name in guide.site_names
    }
    exact = {"net.0.weight": MeanField(), "*": MeanField()}
    for pruned in (ps.MeanFieldGuide(model), ps.StructuredGuide(model, exact)):
        ps.pruning.prune_mean_field(pruned, 0.5)
        ps.save(tmp_path / "file", model, pruned)
        loaded = ps.load(tmp_path / "file", make_model())
        assert_equal_states(pruned, loaded)
        q = loaded["net.0.weight"]()
        assert torch.equal(q.mean, pruned["net.0.weight"]().mean)
        assert (q.variance == 0).any()


def test_pruned_factors_of_inducing_weights_are_loaded(tmp_path):
    model, x = make_model(), torch.randn(8, 3)
    guide = ps.InducingWeightGuide(model, inducing_shape=(2, 2))
    ps.pruning.prune_inducing_factors(guide, 0.5)
    ps.save(tmp_path / "file", model, guide)
    loaded = ps.load(tmp_path / "file", make_model())
    assert_equal_states(guide, loaded)
    assert ps.pruning.prune_inducing_factors(loaded, 0.5).left == {
        name: (guide[name].row_factor_mask != 0).sum() + (guide[name].column_factor_mask != 0).sum()
        for name in ("net.0.weight", "net.3.weight")
    }
    predictions = []
    for own in (guide, loaded):
        torch.manual_seed(1)
        predictions.append(ps.predict(model, own, x, num_samples=3).functions)
    assert torch.equal(*predictions)


def test_a_guide_that_a_function_needs_is_passed(tmp_path):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.1), obs=y)

    x, y = torch.randn(8, 3), torch.randn(8)
    guides = [ps.MeanFieldGuide(model) for _ in range(2)]
    with pytest.raises(ValueError, match="`guide` must know its sites"):
        ps.save(tmp_path / "file", model, guides[0])
    ps.fit(model, guides[0], (x, y), num_steps=2, progress=False, compiled=False)
    ps.save(tmp_path / "file", model, guides[0])
    with pytest.raises(ValueError, match="declares no site before it runs"):
        ps.load(tmp_path / "file", model)
    guides[1].initialize(x, y)
    assert ps.load(tmp_path / "file", model, guides[1]) is guides[1]
    assert_equal_states(*guides)


def test_the_state_of_a_model_under_handlers_is_kept(tmp_path):
    models = [make_model() for _ in range(2)]
    handled = [pyro.poutine.block(model, hide=[]) for model in models]
    models[0].net[1].running_mean += 1.0
    ps.save(tmp_path / "file", handled[0], ps.KTiedGuide(models[0]))
    ps.load(tmp_path / "file", handled[1], ps.KTiedGuide(models[1]))
    assert torch.equal(models[1].net[1].running_mean, models[0].net[1].running_mean)


def test_families_of_the_package_win_over_others_of_their_names(tmp_path):
    class OtherMeanField(MeanField):
        pass

    OtherMeanField.__name__, model = "MeanField", make_model()
    ps.save(tmp_path / "file", model, ps.MeanFieldGuide(model))
    assert type(ps.load(tmp_path / "file", model)["net.0.weight"].family) is MeanField


def test_a_family_is_the_last_class_of_its_name(tmp_path):
    """As of a notebook's cell that ran twice."""
    _, kind = (dataclass(frozen=True)(type("Twice", (MeanField,), {})) for _ in range(2))
    model, path = make_regressor(), tmp_path / "posterior.safetensors"
    ps.save(path, model, ps.StructuredGuide(model, {"*": kind()}))
    assert type(ps.load(path, make_regressor()).families["*"]) is kind


def options_of(guide):
    return guide["options"]["families"]["*"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header, guide: header.update(format=99),
            f"must be a file of format 5, but .* has format 99, by pyro-structvi {ps.__version__}",
        ),
        (lambda header, guide: header.pop("model"), "must be a file of `pyro_structvi.save`, but"),
        (lambda header, guide: header.update(left_out=0), "must be a file of `pyro_structvi.save`"),
        (lambda header, guide: guide.clear(), r"its header describes no guide \('dict' object"),
        (lambda header, guide: header.pop("guide"), r"its header describes no guide \('guide'\)"),
        (
            lambda header, guide: guide["options"].pop("families"),
            r"its header describes no guide \(.* 'families'\)",
        ),
        (
            lambda header, guide: guide.update(guide="OtherGuide"),
            "has the class OtherGuide, which is unknown here",
        ),
        (
            lambda header, guide: options_of(guide).update(family="Other"),
            r"has the family Other\(join_bias, rank\), which is unknown",
        ),
        (
            lambda header, guide: options_of(guide)["options"].update(more=1),
            r"has the family KTied\(join_bias, rank, more\), which is unknown",
        ),
    ],
)
def test_files_of_other_versions_are_refused(tmp_path, change, message):
    model, path = make_model(), tmp_path / "file"
    ps.save(path, model, ps.KTiedGuide(model))
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["pyro_structvi"])
    guide = json.loads(header["guide"])
    change(header, guide)
    header |= {"guide": json.dumps(guide)} if "guide" in header else {}
    save_file(load_file(path), path, {"pyro_structvi": json.dumps(header)})
    with pytest.raises(ValueError, match=message):
        ps.load(path, model)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="where there is none"):
        ps.load(tmp_path / "none", make_model())
    torch.save({"a": torch.zeros(1)}, tmp_path / "saved.pt")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    for name in ("saved.pt", "plain.safetensors"):
        with pytest.raises(ValueError, match=r"must be a file of `pyro_structvi.save`"):
            ps.load(tmp_path / name, make_model())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_model(size=6),
            r"'model\.net\.1\.weight' has shape \(5,\) torch.float64 in the file and \(6,\)",
        ),
        (lambda: make_model().float(), "torch.float64 in the file and .* torch.float32 here"),
        (make_regressor, "the file has no 'model.noise_scale'"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(tmp_path, make, message):
    model, other = make_model(), make()
    model.net[1].running_mean += 1.0
    ps.save(tmp_path / "file", model, ps.KTiedGuide(model))
    before = state_of(other)
    with pytest.raises(ValueError, match=message):
        ps.load(tmp_path / "file", other)
    assert_unchanged(other, before)


def test_what_cannot_be_saved_or_loaded_leaves_file_and_guide(tmp_path):
    model, path = make_model(), tmp_path / "file"
    ps.save(path, model, ps.KTiedGuide(model))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is a folder"):
        ps.save(tmp_path, model, ps.KTiedGuide(model))
    for wrong in (tmp_path / "none" / "file", path / "file", tmp_path / ("a" * 250)):
        with pytest.raises(OSError, match="`path` could not be written to"):
            ps.save(wrong, model, ps.KTiedGuide(model))
    guide = ps.MeanFieldGuide(model, create_plates=lambda *args: pyro.plate("data", 8))
    with pytest.raises(TypeError, match="must have no `create_plates`"):
        ps.save(path, model, guide)
    assert path.read_bytes() == before
    guide = ps.MeanFieldGuide(model)
    before = state_of(guide)
    with pytest.raises(RuntimeError, match="has family = KTied instead of MeanField at the site"):
        ps.load(path, model, guide)
    assert_unchanged(guide, before)


def make_small(kind=ps.Regressor, activation=None, prior=1.0, last=(), **options):
    net = nn.Sequential(nn.Linear(3, 2), activation or nn.LeakyReLU(0.1), nn.Linear(2, 2), *last)
    return kind(ps.bayesianize(net, prior=prior), 8, **options)


class ByHand(PyroModule):
    """A linear regression whose prior is in no state dict."""

    def __init__(self, scale):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, scale).expand([3]).to_event(1))

    def forward(self, x, y=None):
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ self.weight, 1.0), obs=y)


OF_DF = {"noise": 0.5, "df": 4}
FLOOR = {"noise": "heteroscedastic", "noise_floor": 0.5}
TOKENS = {"kind": ps.TokenClassifier}
SCALES, LAPLACE = ps.HierarchicalScale(dist.HalfCauchy(1.0)), dist.Laplace(0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "others", "message"),
    [
        (OF_DF, {"noise": 0.5, "df": 5.0}, "'model' has df 4.0 in the file and 5.0 here"),
        (OF_DF, {"noise": 0.5}, "'model' has df 4.0 in the file and None here"),
        (
            FLOOR,
            FLOOR | {"noise_floor": 0.1},
            "'model' has noise_floor 0.5 in the file and 0.1 here",
        ),
        (
            TOKENS,
            {"kind": ps.Classifier},
            "'model' has class TokenClassifier in the file and Class",
        ),
        (TOKENS, TOKENS | {"shift": True}, "'model' has shift False in the file and True here"),
        (
            TOKENS,
            TOKENS | {"activation": nn.Tanh()},
            r"'model\.net\.1' has class LeakyReLU in .* Tanh",
        ),
        (TOKENS, TOKENS | {"activation": nn.LeakyReLU(0.2)}, "negative_slope 0.1 .* and 0.2 here"),
        (TOKENS, TOKENS | {"last": [nn.Tanh()]}, r"file has no 'model\.net\.3', of class Tanh"),
        (
            TOKENS | {"last": [nn.Tanh()]},
            TOKENS,
            r"only the file has 'model\.net\.3', of class Tanh",
        ),
        (
            TOKENS | {"prior": LAPLACE},
            TOKENS,
            r"'model\.net\.0' has prior of weight Laplace in the",
        ),
        (
            TOKENS | {"prior": SCALES},
            TOKENS | {"prior": replace(SCALES, fan_in=4.0)},
            "Normal of scale 1 weight_scale in the file and Normal of scale 0.5 weight_scale here",
        ),
        (
            {"scale": 1.0},
            {"scale": 2.0},
            "weight Normal of 0 to 0, 1 to 1 in .* 0 to 0, 2 to 2 here",
        ),
    ],
)
def test_models_of_other_parts_are_refused(tmp_path, options, others, message):
    model, other = (ByHand(**o) if "scale" in o else make_small(**o) for o in (options, others))
    ps.save(tmp_path / "file", model, ps.MeanFieldGuide(model))
    before = state_of(other)
    with pytest.raises(ValueError, match=message):
        ps.load(tmp_path / "file", other)
    assert_unchanged(other, before)


def attention(heads=2, activation="relu"):
    """Return a block of attention whose parameters have the same shapes for all heads and functions."""
    block = nn.TransformerEncoderLayer(4, heads, 4, 0.0, activation, batch_first=True)
    return nn.Sequential(block, nn.Flatten(), nn.Linear(12, 2))


def hadamard(**options):
    return nn.Sequential(ps.nn.WalshHadamardConv1d(3, 4, 3, **options), nn.Flatten())


@pytest.mark.parametrize(
    ("net", "other", "message"),
    [
        (
            attention,
            functools.partial(attention, 4),
            "attn' has num_heads 2 in the file and 4 here",
        ),
        (
            attention,
            functools.partial(attention, activation="gelu"),
            "activation_relu_or_gelu 1 in .* 2 here",
        ),
        (
            hadamard,
            functools.partial(hadamard, stride=2),
            r"stride \[1\] in the file and \[2\] here",
        ),
        (
            hadamard,
            functools.partial(hadamard, padding=1),
            r"margins \[0, 0\] in .* \[1, 1\] here",
        ),
    ],
)
def test_layers_of_equal_shapes_but_other_settings_are_refused(tmp_path, net, other, message):
    nets = (ps.bayesianize(make(), normalization=False) for make in (net, other))
    model, own = (ps.Regressor(each, 8, noise_scale=1.0) for each in nets)
    ps.save(tmp_path / "file", model, ps.MeanFieldGuide(model))
    with pytest.raises(ValueError, match=message):
        ps.load(tmp_path / "file", own)


@pytest.mark.parametrize("change", [k_tied_from_mean_field, full_covariance_from])
@pytest.mark.parametrize("name", ["net.0.weight", "net.0.*"])
def test_posteriors_that_were_replaced_have_their_new_families(tmp_path, change, name):
    """Also at sites whose own family is given by their names."""
    model = make_model()
    guide = change(ps.StructuredGuide(model, {name: MeanField(), "*": MeanField()}))
    ps.save(tmp_path / "file", model, guide)
    loaded = ps.load(tmp_path / "file", make_model())
    assert_equal_states(guide, loaded)
    assert [loaded[site].family for site in loaded.site_names] == [
        guide[site].family for site in guide.site_names
    ]


def test_settings_of_training_may_differ_and_scales_are_those_of_the_file(tmp_path):
    shared = nn.ReLU()
    last = [nn.PReLU(), nn.Dropout(0.1), shared, nn.Identity()]
    model = make_small(activation=shared, last=last, noise=0.5)
    ps.save(tmp_path / "file", model, ps.MeanFieldGuide(model))
    last = [nn.PReLU(init=0.1), nn.Identity(), nn.ReLU(), nn.Dropout(0.5), nn.Sequential()]
    other = make_small(activation=nn.ReLU(inplace=True), prior=2.0, last=last, noise=1.0).eval()
    other.num_data = 99
    ps.load(tmp_path / "file", other)
    assert other.num_data == 99
    assert_equal_states(model, other)  # with the scales of priors and noise
