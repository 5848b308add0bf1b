"""Two processes: parameters sharded by ``fully_shard``, and a loop by ``DistributedDataParallel``."""

import pyro
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyro_structvi as ps
from tests.infer.two_ranks import assert_close, make_fit, on_two_ranks
from tests.models import make_regressor, regression_data

GUIDES = {
    "k-tied": ps.KTiedGuide,
    "low rank": ps.AutoLowRankLRT,
    "full covariance": ps.FullCovarianceGuide,
    "rowwise": ps.RowwiseGuide,
    "MAP": ps.MAPGuide,
}


def make(name):
    pyro.set_rng_seed(0)
    model = make_regressor(24)
    guide = (GUIDES | {"ensemble": ps.EnsembleGuide})[name](model)
    x, y = regression_data(24)
    guide.initialize(x, y)
    return model, guide, ps.StructuredELBO()(model, guide), x, y


def shard(guide, loss):
    for posterior in guide.all_posteriors():
        fully_shard(posterior, reshard_after_forward=False)
    fully_shard(loss)


def sharded(name):
    model, guide, loss, x, y = make(name)
    shard(guide, loss)
    torch.manual_seed(1)
    loss(x, y).backward()
    adam = torch.optim.Adam(loss.parameters(), lr=0.01)
    gradients = {key: p.grad.full_tensor() for key, p in guide.named_parameters()}
    adam.step()
    rows = guide["net.0.weight"].loc if name == "k-tied" else None
    whole = StateDictOptions(full_state_dict=True)
    torch.manual_seed(2)
    return (
        gradients,
        get_model_state_dict(guide, options=whole),
        None if rows is None else rows.to_local().shape,
        ps.predict(model, guide, x, num_samples=3).mean,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_sharded_parameters_train_as_whole_ones(tmp_path, name):
    model, guide, loss, x, y = make(name)
    torch.manual_seed(1)
    loss(x, y).backward()
    expected = {key: p.grad for key, p in guide.named_parameters()}
    torch.optim.Adam(loss.parameters(), lr=0.01).step()
    torch.manual_seed(2)
    mean = ps.predict(model, guide, x, num_samples=3).mean
    for gradients, state, rows, predicted in on_two_ranks(sharded, tmp_path, name):
        torch.testing.assert_close(gradients, expected)
        torch.testing.assert_close(state, dict(guide.state_dict()))
        torch.testing.assert_close(predicted, mean)
        if name == "k-tied":
            assert rows in {(3, 4), (2, 4)}, "a rank has a part of the five rows, with their biases"


def pass_of_sharded_members():
    _, guide, loss, x, y = make("ensemble")
    shard(guide, loss)
    try:
        loss(x, y)
    except NotImplementedError as error:
        return str(error)


@pytest.mark.slow
def test_a_mixture_refuses_sharded_parameters(tmp_path):
    for found in on_two_ranks(pass_of_sharded_members, tmp_path):
        assert found.startswith("A mixture stacks the parameters of its members, so they cannot be")


@pytest.fixture
def group_of_one():
    """A group of this process alone, which shards as well."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fit_refuses_sharded_parameters(group_of_one):
    model, guide, loss, x, y = make("k-tied")
    shard(guide, loss)
    message = "`guide` must have whole parameters, but got sharded ones. Train it in a"
    with pytest.raises(TypeError, match=message):
        ps.fit(model, guide, (x, y), num_steps=1, progress=False)


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def own_loop():
    model, guide, (x, y) = make_fit(ps.MAPGuide)
    guide.initialize(x, y)
    loss = DistributedDataParallel(ps.StructuredELBO(kl_weight=0.5)(model, guide))
    x, y = (value.chunk(2)[dist.get_rank()] for value in (x, y))
    loss(x, y).backward()
    return gradients_of(guide)


@pytest.mark.slow
def test_an_own_loop_gets_the_gradients_of_the_whole_batch(tmp_path):
    model, guide, data = make_fit(ps.MAPGuide)
    ps.StructuredELBO(kl_weight=0.5)(model, guide)(*data).backward()
    for found in on_two_ranks(own_loop, tmp_path):
        assert_close(found, gradients_of(guide))
