"""Files of posteriors: states that no file holds or gives, and files that change later."""

import functools
import importlib.metadata
import json
import os
import pickle
from dataclasses import dataclass
from stat import S_IMODE

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pyro_structvi as ps
from tests.posterior.test_files import assert_equal_states, make_model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "posterior.safetensors"  # the ending by which `torch.load` reads safetensors


def test_a_loaded_posterior_does_not_depend_on_its_file(path):
    """Tensors of safetensors are a map of the file, whose bytes are overwritten here."""
    model, x, mask = make_model(), torch.randn(8, 3), torch.arange(15).reshape(5, 3) % 2 == 0
    guide = ps.SubnetworkGuide(model, {"net.0.weight": mask})
    ps.save(path, model, guide)
    other = make_model()
    loaded = ps.load(path, other)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(8 + size)
        file.write(bytes(path.stat().st_size - size - 8))
    assert torch.equal(loaded["net.0.weight"].family.chosen["net.0.weight"], mask)
    ps.predict(other, loaded, x, num_samples=2)  # without a warning of another model


def test_parts_on_the_meta_device_are_refused(path):
    model = make_model()
    ps.save(path, model, ps.KTiedGuide(model))
    before = path.read_bytes()
    empty = make_model().to("meta")
    with pytest.raises(
        ValueError, match=r"`model.state_dict\(\)\['noise_.*\]` is on the meta device"
    ):
        ps.load(path, empty)
    for call in (ps.save, ps.load):
        with pytest.raises(
            ValueError, match=r"`guide.state_dict\(\)\['.*\]` is on the meta device"
        ):
            call(path, model, ps.KTiedGuide(model).to("meta"))
    assert path.read_bytes() == before


def save_posterior(path, _):
    model = make_model()
    ps.save(path, model, ps.KTiedGuide(model))


def save_checkpoint(path, num_steps):
    model, data = make_model(), (torch.randn(8, 3), torch.randn(8, 2))
    run = {"checkpoint": ps.Checkpoint(path, resume=True), "num_steps": num_steps}
    ps.fit(model, ps.KTiedGuide(model), data, progress=False, **run)


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
@pytest.mark.parametrize("write", [save_posterior, save_checkpoint])
def test_files_keep_their_modes_and_links(write, path):
    before = os.umask(0o026)
    try:
        write(path, 1)
    finally:
        os.umask(before)
    assert S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    first, link = path.stat().st_ino, path.with_name("link")
    link.symlink_to(path.name)
    write(link, 2)
    assert link.is_symlink()
    assert path.stat().st_ino != first
    assert S_IMODE(path.stat().st_mode) == 0o604
    assert {*path.parent.iterdir()} == {path, link}


class Expanded(nn.Linear):
    def __init__(self, factor):
        super().__init__(3, 2)
        self.register_buffer("factor", torch.full((1,), factor).expand(3))
        self.register_buffer("shift", torch.zeros(1).expand(2), persistent=False)

    def forward(self, x):
        return super().forward(x * self.factor) + self.shift


def test_states_with_expanded_buffers_are_loaded(path):
    def make(factor):
        model = ps.Regressor(ps.bayesianize(Expanded(factor)), 8, noise=0.1)
        return model, ps.MeanFieldGuide(model)

    data, parts, others = (torch.randn(8, 3), torch.randn(8, 2)), make(2.0), [make(1.0), make(1.0)]
    run = {"num_steps": 1, "progress": False, "checkpoint": ps.Checkpoint(path, resume=True)}
    for each in (parts, others[0]):
        ps.fit(*each, data, validation=ps.Validation(data, patience=1), **run)
    ps.save(path, *parts)
    ps.load(path, *others[1])
    for model, guide in others:
        assert_equal_states(model, parts[0])
        assert_equal_states(guide, parts[1])


def test_dtypes_that_no_file_holds_are_refused(path):
    net = nn.Linear(3, 2)
    net.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    net = ps.bayesianize(net)
    model = ps.Regressor(net, 8, noise=0.1)
    with pytest.raises(TypeError, match=r"'net.phases'\]` is torch.complex128. For a complex"):
        ps.save(path, model, ps.MeanFieldGuide(model))
    expected = net.phases = torch.randn(3, dtype=torch.complex64)
    ps.save(path, model, ps.MeanFieldGuide(model))
    net.phases = torch.zeros_like(expected)
    ps.load(path, model)
    assert torch.equal(net.phases, expected)
    assert [*path.parent.iterdir()] == [path]


def test_a_guide_of_another_model_is_refused(path):
    models = [make_model() for _ in range(2)]
    guides = [ps.KTiedGuide(model) for model in models]
    message = r"must be made of `model`, a Regressor.* Write `{}\(path, guide.model, guide\)`"
    with pytest.raises(ValueError, match=message.format("save")):
        ps.save(path, models[0], guides[1])
    assert not path.exists()
    ps.save(path, models[0], pickle.loads(pickle.dumps(guides[0])))  # which has no model
    with pytest.raises(ValueError, match=message.format("load")):
        ps.load(path, models[0], guides[1])


def test_a_package_that_is_on_the_path_but_not_installed_saves(path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ps.posterior.files, "version", missing)
    model = make_model()
    guide = ps.MeanFieldGuide(model)
    ps.save(path, model, guide)
    assert ps.load(path, model)["net.0.weight"].family == ps.MeanField()


def test_each_of_two_writers_of_a_path_writes_a_whole_file(path):
    """The second one writes while the first one is at it."""
    files = ps.posterior.files

    def second(partial):
        partial.write_bytes(b"second")
        assert path.read_bytes() == b"before"

    def first(partial):
        partial.write_bytes(b"first, ")
        files.write_atomically("path", path, second)
        assert path.read_bytes() == b"second"
        with partial.open("ab") as file:
            file.write(b"and whole")

    path.write_bytes(b"before")
    files.write_atomically("path", path, first)
    assert path.read_bytes() == b"first, and whole"
    assert [*path.parent.iterdir()] == [path]


def test_files_of_killed_writers_are_removed_when_they_are_old(path):
    old, recent, other = (
        path.with_name(f"{name}.0.partial") for name in (path.name, f"{path.name}.1", "posterior")
    )
    for each in (old, recent, other):
        each.touch()
    for each in (old, other):
        os.utime(each, (0, 0))
    save_posterior(path, 1)
    assert {*path.parent.iterdir()} == {path, recent, other}


class Around(nn.Module):
    """A random layer after plain features, of a user's own module."""

    def __init__(self, features, head):
        super().__init__()
        self.features, self.head = features.requires_grad_(False), ps.bayesianize(head)

    def forward(self, x):
        return self.head(self.features(x))


@pytest.mark.parametrize("kind", [functools.partial(ps.LastLayer, frozen=True), Around])
def test_frozen_parameters_beside_a_random_net_are_left_out(path, kind):
    def make(weight=0.5):
        features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        features[0].weight.data.fill_(weight)
        features[0].bias.data.zero_()
        return ps.Regressor(kind(features, nn.Linear(4, 2)), 8, noise="learned")

    model, own = (
        make(),
        {f"net.features.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
    )
    guide = ps.KTiedGuide(model)
    guide["net.head.weight"].loc.requires_grad_(False)  # of the posterior, so it is written
    model.net.features[1].running_mean.fill_(2.0)
    written = []
    for frozen in (True, False):
        ps.save(path, model, guide, frozen=frozen)
        written.append({*load_file(path)})
    assert written[0] - written[1] == {f"model.{name}" for name in own}
    same = make()
    assert_equal_states(ps.load(path, same), guide)
    assert_equal_states(same, model)
    trained = make()
    trained.requires_grad_(True)
    for other, names in (
        (make(0.25), "0.weight'"),
        (trained, "0.weight', .*0.bias', .*1.weight', "),
    ):
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(
            ValueError, match=f"was saved, but 'model.net.features.{names}.*these frozen"
        ):
            ps.load(path, other)
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@dataclass(frozen=True)
class Blocks(ps.MeanField):
    blocks: tuple = ((0, 2), (2, (3, "end")))
    limit: float = float("nan")


def test_nested_options_of_a_users_family_are_tuples(path):
    model = make_model()
    guide = ps.StructuredGuide(model, {"*": Blocks()})
    ps.save(path, model, guide)
    assert ps.load(path, make_model()).families["*"].blocks == Blocks().blocks
    assert ps.load(path, model, guide) is guide


def test_a_setting_that_is_nan_is_that_of_the_file(path):
    def make():
        net = nn.Sequential(nn.Linear(3, 2), nn.Threshold(float("nan"), float("inf")))
        return ps.Regressor(ps.bayesianize(net), 8, noise=0.1)

    model = make()
    ps.save(path, model, ps.MeanFieldGuide(model))
    ps.load(path, make())


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header | {"versions": [1], "format": 4},
        lambda header: header | {"model": {"net": 3}},
        lambda header: header | {"model": {"net": [[1]]}},
        lambda header: header | {"left_out": [1]},
        lambda header: header | {"guide": DEEP},
        lambda header: header | {"guide": {"a": 1}},
        lambda header: header | {"guide": header["guide"].replace('KTied"', 'MatrixFamily"')},
        lambda header: header | {"guide": header["guide"].replace('"rank": 2', '"rank": []')},
    ],
)
def test_a_header_of_another_form_is_refused(path, change):
    save_posterior(path, 1)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["pyro_structvi"])
    tensors = load_file(path)
    for text in (json.dumps(change(header)), DEEP):
        save_file(tensors, path, {"pyro_structvi": text})
        with pytest.raises(
            ValueError, match=r"`path` must be a file of `pyro|`rank` must|unknown here"
        ):
            ps.load(path, make_model())
