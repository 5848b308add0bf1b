"""Batch normalization at each draw by the statistics of that draw."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import pyro_structvi as ps
from pyro_structvi.posterior import SharedStatisticsWarning
from tests.posterior import passed_models

SIZE = 3


class Twice(nn.Module):
    """A net whose normalization is used twice, after a convolution and after a bend."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        once = self.norm(self.conv(x)).tanh()
        return self.last(self.norm(input=3 * once + 1).mean(-1))


def by_hand(x, reference, own):
    """Return the logits of :class:`Twice` at a draw."""

    def normalized(inputs, measured):
        mean, variance = measured.mean((0, 2)), measured.var((0, 2), correction=0)
        centered = (inputs - mean[:, None]) / (variance[:, None] + 1e-5).sqrt()
        return centered * own["norm.weight"][:, None] + own["norm.bias"][:, None]

    pair = [
        functional.conv1d(part, own["conv.weight"], own["conv.bias"]) for part in (x, reference)
    ]
    first = [normalized(part, pair[1]).tanh() for part in pair]
    second = [normalized(3 * part + 1, 3 * first[1] + 1) for part in first]
    return functional.linear(second[0].mean(-1), own["last.weight"], own["last.bias"])


def make(make_guide, net=None):
    torch.manual_seed(0)
    net = Twice() if net is None else net
    with torch.no_grad():
        net.norm.weight.copy_(torch.rand(4) + 0.5)
        net.norm.bias.copy_(torch.randn(4))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0, normalization=False), num_data=40)
    guide = make_guide(model)
    x, reference = torch.randn(5, 2, 6), 2 * torch.randn(20, 2, 6) + 1
    guide.initialize(x)
    return model, guide, x, reference


def ensemble(model):
    return ps.EnsembleGuide(model, SIZE, init_scale=0.5, vectorize=False)


def draws_of(guide, model):
    own = {name: value.detach() for name, value in model.net.named_parameters()}
    return [
        {name.removeprefix("net."): value for name, value in guide.draw(number=each).items()} | own
        for each in range(SIZE)
    ]


@pytest.mark.parametrize(("max_memory", "passes"), [(1 / 32, 2), (1e-9, SIZE)])
def test_each_member_has_statistics_of_its_own_measured_once_for_all_mini_batches(
    max_memory, passes
):
    """The first draw runs alone, other draws in one pass or one by one."""
    model, guide, x, reference = make(ensemble)
    expected = torch.stack([by_hand(x, reference, own) for own in draws_of(guide, model)])
    sizes = []
    model.net.conv.register_forward_pre_hook(lambda layer, args: sizes.append(len(args[0])))
    for batch_size, count in ((None, 1), (2, 3)):  # of five examples
        sizes.clear()
        options = {"batch_size": batch_size, "max_memory": max_memory}
        found = ps.predict(
            *(model, guide, x), num_samples=SIZE, batch_statistics=reference, **options
        )
        torch.testing.assert_close(found.functions, expected, rtol=1e-10, atol=1e-12)
        assert sizes.count(len(reference)) == passes
        assert len(sizes) == passes * (1 + count)


def test_inputs_that_are_their_own_reference_are_normalized_as_in_training():
    model, guide, x, _ = make(ps.MAPGuide)
    found = ps.predict(model, guide, x, num_samples=1, batch_statistics=x).functions[0]
    own = {f"net.{name}": value for name, value in model.net.named_parameters()} | guide.draw()
    net = Twice().train()
    net.load_state_dict({name.removeprefix("net."): own[name] for name in own}, strict=False)
    torch.testing.assert_close(found, net(x).detach())


def test_inference_data_and_given_draws_have_them_too():
    model, guide, x, reference = make(ensemble)
    found = ps.to_inference_data(
        *(model, guide, x, torch.tensor([0, 1, 2, 0, 1]), SIZE),
        batch_statistics=reference,
        outputs=True,
    )
    expected = torch.stack([by_hand(x, reference, own) for own in draws_of(guide, model)])
    values = torch.as_tensor(found["posterior"]["outputs"].values[0])
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
    draws = passed_models.draws_of(guide, SIZE)
    found = ps.predict(model, draws, x, batch_statistics=reference)
    torch.testing.assert_close(found.functions, expected)


def test_running_statistics_stay_also_after_an_error():
    model, guide, x, reference = make(ps.MAPGuide)
    before = {name: value.clone() for name, value in model.net.named_buffers()}
    ps.predict(model, guide, x, num_samples=2, batch_statistics=reference)
    with pytest.raises(RuntimeError, match="expected input"):
        ps.predict(model, guide, x, num_samples=2, batch_statistics=reference[:, :1])
    after = dict(model.net.named_buffers())
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not model.net.norm._forward_pre_hooks
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0, normalization=False), num_data=4)
    guide, x = ps.MAPGuide(model), torch.randn(4, 2)
    with pytest.raises(ValueError, match="with batch normalization that has running statistics"):
        ps.predict(model, guide, x, num_samples=1, batch_statistics=x)


def test_members_that_share_running_statistics_are_warned_of():
    inducing = lambda model: ps.InducingWeightGuide(model, (2, 2), "ensemble")  # noqa: E731
    for make_guide in (ensemble, inducing):
        model, guide, x, reference = make(make_guide)
        with pytest.warns(SharedStatisticsWarning, match="statistics of 1 normalizations"):
            ps.predict(model, guide, x, num_samples=2)
        # Warnings are errors in tests.
        ps.predict(model, guide, x, num_samples=2, batch_statistics=reference)
    model, guide, x, _ = make(ps.MeanFieldGuide)
    ps.predict(model, guide, x, num_samples=2)


@pytest.mark.parametrize(
    ("make_guide", "scale", "is_warned"),
    [
        (partial(ps.MeanFieldGuide, local_reparam="exact"), 1.0, True),  # the weight is drawn once
        (partial(ps.MeanFieldGuide, local_reparam="exact"), 0.01, False),
        (ps.MeanFieldGuide, 1.0, False),
        (ps.MAPGuide, 1.0, False),
    ],
)
def test_running_statistics_that_are_averages_over_draws_are_warned_of(
    make_guide, scale, is_warned
):
    """A posterior with a wide bias before the normalization, whose effect it takes out in training."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(20, 3))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), noise_scale=0.1)
    guide, x = make_guide(model, init_scale=scale), torch.randn(64, 2, 6) / 4
    ps.fit(model, guide, (x, torch.zeros(64, 3)), num_steps=40, lr=1e-6, progress=False)
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prediction = ps.predict(model, guide, x, num_samples=3)
    assert [each.category for each in found] == [SharedStatisticsWarning] * is_warned
    if is_warned:
        assert "The running statistics of 1 normalizations are averages over draws" in str(
            found[0].message
        )
    # The check draws nothing of the stream of the prediction. Warnings are errors in tests.
    torch.set_rng_state(state)
    few = ps.predict(model, guide, x[:31], num_samples=3)
    torch.testing.assert_close(few.functions, prediction.functions[:, :31])
    ps.predict(model, guide, x, num_samples=3, batch_statistics=x)


def test_a_layer_with_more_uses_than_in_training_is_predicted():
    """A pass as in training would raise."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            for part in x.split(3, 1):
                found = self.norm(self.layer(part))
            return found

    model = ps.Regressor(ps.bayesianize(Net(), normalization=False), 40, 0.1)
    guide, x = ps.MeanFieldGuide(model), torch.randn(40, 6)
    guide.initialize(x[:, :3], x[:, :3])
    assert ps.predict(model, guide, x, num_samples=2).functions.shape == (2, 40, 3)


def test_draws_that_depend_on_running_statistics_take_no_others():
    model, guide, x, reference = make(partial(ps.GlobalInducingGuide, inputs=4))
    mixture = ps.MixtureGuide(model, partial(ps.GlobalInducingGuide, inputs=x), 2)
    for each in (guide, mixture):
        with pytest.raises(NotImplementedError, match="is not for a GlobalInducingGuide"):
            ps.predict(model, each, x, batch_statistics=reference)


def test_instance_normalization_has_the_average_variance_of_an_example():
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    net = nn.Sequential(nn.Conv1d(2, 4, 2), norm, nn.Flatten(), nn.Linear(20, 3))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), 40, 0.1)
    guide, x, reference = ensemble(model), torch.randn(5, 2, 6), 2 * torch.randn(20, 2, 6) + 1
    guide.initialize(x)
    with pytest.warns(SharedStatisticsWarning, match="statistics of 1 normalizations"):
        ps.predict(model, guide, x)
    expected = []
    for number in range(SIZE):
        net = guide.to_net(guide.draw(number=number)).eval()
        inputs = net[0](reference).detach()
        net[1].running_mean = inputs.mean((0, 2))
        net[1].running_var = inputs.var(2, correction=0).mean(0)
        expected.append(net(x))
    found = ps.predict(model, guide, x, batch_statistics=reference).functions
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)
