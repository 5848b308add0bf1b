"""Embeddings: rows that are looked up have their distribution, and no table is drawn."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import PrunedNormal, WeightDistribution
from pyro_structvi.sites.finding import CountedWeight
from pyro_structvi.testing.contracts import Contract, with_leaves
from pyro_structvi.weights.lazy import LazyWeight
from pyro_structvi.weights.site_role import SiteUse
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, MATRIX, Case, positive
from tests.guide_cases import GUIDES, POINTS
from tests.lazy_weights import is_ordinary, lazy
from tests.particle_noise import terms_in_a_loop, terms_together
from tests.recorded_sizes import RecordsSizes
from tests.unit_noise import assert_close, assert_draws, unit_draws

NUM, DIM = MATRIX
SETTINGS = (True, "exact", "flipout")
INDEX = torch.tensor([[0, 2, 0], [2, 1, 1]])  # each example has an index twice, and none has row 3


def make_pruned(batch_shape, event_shape, dtype):
    loc, kept = torch.randn(event_shape, dtype=dtype), torch.rand(event_shape) < 0.7
    return PrunedNormal(loc, positive(*event_shape, dtype=dtype), kept)


def has_rows(case):
    return type(case.make((), MATRIX, torch.float64)).rows is not WeightDistribution.rows


PRUNED = Case("pruned", make_pruned, lambda q: dense.mean_field_covariance(q.scale, 2))
SERVED = [case for case in (*CASES, PRUNED) if has_rows(case)]
DRAWN = [case for case in CASES if not has_rows(case)]

served = pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)


def make(case, dtype=torch.float64):
    return case.make((), MATRIX, dtype)


def gathered(index, covariance):
    """Return the covariance ``(batch, P dim, P dim)`` of the rows of each example."""
    elements = (index.unsqueeze(-1) * DIM + torch.arange(DIM)).flatten(1)
    return torch.stack([covariance[own][:, own] for own in elements])


def rows_covariance(case, q, local_reparam=True, index=INDEX):
    """Return the covariance of the rows of each example, as this setting has it."""
    whole, shared = (gathered(index, part(q)) for part in (case.covariance, case.shared_covariance))
    if local_reparam in {"exact", "flipout"}:
        return whole
    same_position = torch.block_diag(*(torch.ones(DIM, DIM) for _ in index[0]))
    return shared + same_position * (whole - shared)


@served
@pytest.mark.parametrize("local_reparam", SETTINGS)
def test_draws_have_the_distribution_of_the_setting_and_its_gradients(case, local_reparam):
    """Examples are independent, also where they look up the same row."""
    q, leaves = with_leaves(make(case))
    found = unit_draws(lambda: F.embedding(INDEX, lazy(q, local_reparam=local_reparam)))
    contract = Contract("rows", leaves)
    contract.close("mean", found.mean, q.loc[INDEX])
    covariances = rows_covariance(case, q, local_reparam)
    contract.close("covariance", found.covariance, torch.block_diag(*covariances))
    assert (q.rows(INDEX).batch_shape, q.rows(INDEX).event_shape) == ((2,), (3, DIM))


@pytest.mark.parametrize("local_reparam", SETTINGS[:2])
def test_one_position_is_exact_and_independent_of_other_examples(local_reparam):
    case, index = SERVED[-2], torch.tensor([1, 1, 3])
    q = make(case)
    covariance = gathered(index.unsqueeze(-1), case.covariance(q))
    for x in (index, index.unsqueeze(-1)):
        draw = lambda x=x: F.embedding(x, lazy(q, local_reparam=local_reparam))  # noqa: E731
        assert_draws(draw, q.loc[x], covariance)


CALLS = {
    "positional": lambda x, w: F.embedding(x, w),
    "padding by position": lambda x, w: F.embedding(x, w, 1),
    "by keyword": lambda x, w: F.embedding(weight=w, padding_idx=None, input=x),
    "by a module": lambda x, w: torch.func.functional_call(
        nn.Embedding(NUM, DIM, padding_idx=0), {"weight": w}, x
    ),
}


def test_rows_are_drawn_whatever_the_shape_and_the_call():
    shapes = [(F.embedding, shape) for shape in ((), (5,), (5, 2, 3), (0, 2), (5, 0))]
    for call, shape in [*shapes, *((call, (5, 2)) for call in CALLS.values())]:
        for dtype, local_reparam in ((torch.int64, "exact"), (torch.int32, True)):
            weight = lazy(local_reparam=local_reparam)
            rows = call(torch.randint(NUM, shape, dtype=dtype), weight)
            assert is_ordinary(rows)
            assert rows.shape == (*shape, DIM)
            assert not weight.is_drawn
    strided = INDEX.mT.contiguous().mT
    first, _, again = F.embedding(strided, lazy(local_reparam="exact"))[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("padding_idx", [2, 2 - NUM])
def test_a_row_of_padding_is_drawn_and_has_no_gradient(padding_idx):
    q, draws = make(SERVED[-2]), []
    for name in q.argument_names:
        setattr(q, name, getattr(q, name).detach().requires_grad_())
    for padding in (None, padding_idx):
        torch.manual_seed(0)
        draws.append(F.embedding(INDEX, lazy(q), padding))
    assert torch.equal(*draws)
    is_padding = (INDEX == 2).unsqueeze(-1)
    parameters = [getattr(q, name) for name in q.argument_names]
    gradients = torch.autograd.grad((draws[1] * is_padding).sum(), parameters, retain_graph=True)
    assert all((gradient == 0).all() for gradient in gradients)
    others = [(rows * ~is_padding).sum() for rows in draws]
    for expected, actual in zip(*(torch.autograd.grad(o, parameters) for o in others), strict=True):
        assert torch.equal(expected, actual)


def test_an_index_that_torch_refuses_has_its_error():
    for index in (NUM, -1):
        counted = CountedWeight(torch.zeros(MATRIX), SiteUse("w"))
        for weight in (torch.zeros(MATRIX), lazy(), counted):
            with pytest.raises(IndexError, match="index out of range"):
                F.embedding(torch.tensor([[0, index]]), weight)
    for weight in (torch.zeros(MATRIX), lazy()):
        with pytest.raises(RuntimeError, match=r"indices.*Long, Int"):
            F.embedding(torch.zeros(2, 2), weight)
    message = r"site 'table' must have device cpu, but got meta\. .*`x\.to\('cpu'\)`"
    with pytest.raises(ValueError, match=message):
        F.embedding(INDEX.to("meta"), lazy(name="table"))


def test_rows_keep_the_dtype_under_autocast_and_form_nothing_of_the_tables_size():
    for case in SERVED:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = F.embedding(INDEX, lazy(make(case, torch.float32)))
        assert rows.dtype == torch.float32, case.name
        q = case.make((), (1000, DIM), torch.float64)
        with RecordsSizes(*(getattr(q, name) for name in q.argument_names)) as recorded:
            F.embedding(torch.randint(1000, (4, 3)), lazy(q, local_reparam="exact"))
        # The factors of rank 3, or of rows of size 3.
        assert max(recorded.sizes) <= 4 * 3 * DIM * 3, case.name


def assert_drawn(weight, x=INDEX, **options):
    rows = F.embedding(x, weight, **options)
    assert weight.is_drawn
    assert torch.equal(rows, F.embedding(x, weight.draw(), **options))
    return rows


def test_tables_that_cannot_give_rows_are_drawn():
    for case in DRAWN:
        assert_drawn(lazy(make(case)))
    for options in ({"count": None}, {"count": 2}, {"local_reparam": False}):
        assert_drawn(lazy(**options))
    assert_drawn(lazy(), scale_grad_by_freq=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_norm_that_is_written_into_the_weight_is_refused(kind):
    """The gradient of a point estimate sees the weight that is written, as in torch."""
    net = nn.Sequential(kind(NUM, DIM, max_norm=0.5), nn.Linear(DIM, 1))
    with pytest.raises(
        ValueError, match=r"embedding of '0.weight' must have no `max_norm` .* got 0.5"
    ):
        ps.bayesianize(net)
    point = ps.bayesianize(net, prior={"0.*": None, "*": 1.0})
    model = ps.Regressor(point, 2, noise=0.1)
    data = INDEX[:, :2], torch.ones(2, 1) if kind is nn.EmbeddingBag else torch.ones(2, 2, 1)
    guide = ps.MeanFieldGuide(model)
    ps.fit(model, guide, data, num_steps=2, progress=False)
    ps.predict(model, guide, data[0])
    norms = point[0].weight[[0, 1, 2]].norm(dim=-1)
    assert (norms < 0.5001).all()
    for weight in (lazy(), CountedWeight(torch.zeros(MATRIX), SiteUse("w"))):
        with pytest.raises(ValueError, match=r"`max_norm` .* None where its weight is random"):
            F.embedding(INDEX, weight, max_norm=0.5)
        with pytest.raises(ValueError, match=r"`max_norm` .* None where its weight is random"):
            F.embedding_bag(INDEX, weight, max_norm=0.5)


SERVED_GUIDES = ("mean field", "k-tied", "rowwise", "low rank")


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def make_bags():
    """Return a classifier of bags of five tokens, whose class tells which tokens are likely."""
    y = torch.arange(16) % 2
    return ps.Classifier(ps.bayesianize(Bag(), prior=1.0), 16), (
        torch.randint(3, (16, 5)) + 3 * y.unsqueeze(-1),
        y,
    )


def test_a_training_step_draws_the_table_only_without_a_rule(monkeypatch):
    model, data = make_bags()
    drawn, draw = [], LazyWeight.draw
    monkeypatch.setattr(LazyWeight, "draw", lambda w: (drawn.append(w.use.name), draw(w))[1])
    for name, make_guide in (GUIDES | POINTS).items():
        guide = make_guide(model)
        guide.initialize(*data)
        q = guide["net.embed.weight"]()
        drawn.clear()
        (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
        has_rule = name == "points" or type(q).rows is not WeightDistribution.rows
        assert has_rule or name not in SERVED_GUIDES
        assert drawn == ([] if has_rule else ["net.embed.weight"]), name
        for key, parameter in guide.named_parameters():
            assert torch.isfinite(parameter.grad).all(), (name, key)
            assert parameter.grad.ne(0).any(), (name, key)


@pytest.mark.parametrize("prior", [1.0, {"0.*": None, "*": 1.0}])
@pytest.mark.parametrize("make_guide", [ps.MAPGuide, ps.KTiedGuide])
def test_tables_with_sparse_gradients_are_trained_as_others(make_guide, prior):
    found = []
    for is_sparse in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.EmbeddingBag(6, 3, sparse=is_sparse), nn.Linear(3, 2))
        model, data = ps.Classifier(ps.bayesianize(net, prior), 16), make_bags()[1]
        options = {"num_steps": 2, "compiled": False, "progress": False}
        found.append(ps.fit(model, make_guide(model), data, **options).elbo)
    assert found[0] == found[1]


@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_particles_in_one_pass_have_the_terms_of_a_loop(local_reparam):
    model, data = make_bags()
    guide = ps.AutoLowRankLRT(model, init_scale=0.3, local_reparam=local_reparam)
    guide.initialize(*data)
    elbo = ps.StructuredELBO(num_particles=4, vectorize_particles=True)
    each = [terms(elbo, model, guide, *data).elbo for terms in (terms_together, terms_in_a_loop)]
    assert_close(*each)
