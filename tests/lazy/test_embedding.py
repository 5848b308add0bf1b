"""Embeddings: rows that are looked up have their distribution, and no table is drawn."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_structvi.distributions import MeanFieldNormal, PrunedNormal, WeightDistribution
from pyro_structvi.weights.placeholders import CountedWeight
from pyro_structvi.weights.site_role import SiteUse
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, MATRIX, Case, positive
from tests.exact_means import exact_mean
from tests.lazy_weights import is_ordinary, k_tied_normal, lazy
from tests.recorded_sizes import RecordsSizes
from tests.unit_noise import assert_close, assert_draws

NUM, DIM = MATRIX
SETTINGS = (True, "exact", "flipout")
INDEX = torch.tensor([[0, 2, 0], [2, 1, 3]])  # the first example has an index twice


def make_pruned(batch_shape, event_shape, dtype):
    loc, kept = torch.randn(event_shape, dtype=dtype), torch.rand(event_shape) < 0.7
    return PrunedNormal(loc, positive(*event_shape, dtype=dtype), kept)


def has_rows(case):
    return type(case.make((), MATRIX, torch.float64)).rows is not WeightDistribution.rows


PRUNED = Case("pruned", make_pruned, lambda q: dense.mean_field_covariance(q.scale, 2))
SERVED = [case for case in (*CASES, PRUNED) if has_rows(case)]
DRAWN = [case for case in CASES if not has_rows(case)]

served = pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
settings = pytest.mark.parametrize("local_reparam", SETTINGS)
either = pytest.mark.parametrize("local_reparam", SETTINGS[:2])


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


# ---- the distribution ----------------------------------------------------------------------------


@served
def test_the_distribution_of_rows_has_the_dense_moments(case):
    rows = (q := make(case)).rows(INDEX)
    assert (rows.batch_shape, rows.event_shape) == ((2,), (3, DIM))
    torch.testing.assert_close(rows.mean, q.loc[INDEX])
    torch.testing.assert_close(rows.covariance_matrix, rows_covariance(case, q))


@served
@either
def test_draws_have_the_distribution_of_the_setting(case, local_reparam):
    """Examples are independent, also where they look up the same row."""
    q = make(case)
    assert_draws(
        lambda: F.embedding(INDEX, lazy(q, local_reparam=local_reparam)),
        q.loc[INDEX],
        rows_covariance(case, q, local_reparam),
    )


@either
@pytest.mark.parametrize("positions", [(), (1,)], ids=["batch", "one position"])
def test_one_position_is_exact_and_independent_of_other_examples(local_reparam, positions):
    case = SERVED[-2]
    q, index = make(case), torch.tensor([1, 1, 3])
    assert_draws(
        lambda: F.embedding(index.reshape(-1, *positions), lazy(q, local_reparam=local_reparam)),
        q.loc[index].reshape(3, *positions, DIM),
        gathered(index.unsqueeze(-1), case.covariance(q)),
    )


@settings
def test_a_repeated_index_is_one_draw_only_where_exact_laws_are_asked_for(local_reparam):
    q = MeanFieldNormal(torch.zeros(MATRIX), torch.tensor(1.0))
    first, other, again = F.embedding(INDEX, lazy(q, local_reparam=local_reparam))[0]
    assert torch.equal(first, again) == (local_reparam is not True)
    assert (first != other).all()


@pytest.mark.parametrize("case", SERVED[:-1], ids=lambda case: case.name)
@pytest.mark.parametrize("local_reparam", ["exact"])
def test_gradients_have_the_mean_of_the_expected_loss(case, local_reparam):
    """For a loss that is quadratic in each example's rows, whose expectation is known."""
    q, index = make(case), INDEX.clamp_max(2)
    leaves = [getattr(q, name).requires_grad_() for name in q.argument_names]
    mean = q.loc[index].flatten(1)
    linear, root = torch.randn(mean.shape[-1]), torch.randn(2 * mean.shape[-1:])
    quadratic = root @ root.mT / len(root)
    covariance = rows_covariance(case, q, local_reparam, index)
    oracle = dense.expected_quadratic(mean, covariance, linear, quadratic).sum()

    def gradients_of(loss):
        parts = torch.autograd.grad(loss, leaves)
        lower = [
            part.tril() if "tril" in name else part for name, part in zip(names, parts, strict=True)
        ]
        return torch.cat([part.flatten() for part in lower])

    def gradients_of_a_draw():
        y = F.embedding(index, lazy(q, local_reparam=local_reparam)).flatten(1)
        return gradients_of((y @ linear + ((y @ quadratic) * y).sum(-1) / 2).sum())

    names = q.argument_names
    assert_close(exact_mean(gradients_of_a_draw), gradients_of(oracle))


def test_rows_that_are_not_looked_up_have_no_gradient():
    q = k_tied_normal(MATRIX)
    F.embedding(INDEX.clamp_max(2), lazy(q)).sum().backward()
    assert q.loc.grad[:3].ne(0).all()
    assert q.loc.grad[3].eq(0).all()


# ---- the call ------------------------------------------------------------------------------------

CALLS = {
    "positional": lambda x, w: F.embedding(x, w),
    "padding by position": lambda x, w: F.embedding(x, w, 1),
    "by keyword": lambda x, w: F.embedding(weight=w, padding_idx=None, input=x),
    "by a module": lambda x, w: torch.func.functional_call(
        nn.Embedding(NUM, DIM, padding_idx=0), {"weight": w}, x
    ),
}


def assert_rows_are_drawn(call, shape, dtype=torch.int64, **options):
    weight = lazy(**options)
    rows = call(torch.randint(NUM, shape, dtype=dtype), weight)
    assert is_ordinary(rows)
    assert rows.shape == (*shape, DIM)
    assert not weight.is_drawn


@pytest.mark.parametrize("shape", [(), (5,), (5, 2, 3), (0, 2), (5, 0)], ids=str)
def test_rows_are_drawn_whatever_the_shape(shape):
    assert_rows_are_drawn(F.embedding, shape, local_reparam="exact")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_rows_are_drawn_whatever_the_call(call):
    assert_rows_are_drawn(call, (5, 2), torch.int32)


def test_positions_may_be_strided_in_memory():
    weight = lazy(local_reparam="exact")
    first, _, again = F.embedding(INDEX.mT.contiguous().mT, weight)[0]
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


@pytest.mark.parametrize("index", [NUM, -1])
def test_an_index_out_of_range_has_the_error_of_torch(index):
    for weight in (torch.zeros(MATRIX), lazy(), CountedWeight(torch.zeros(MATRIX), SiteUse("w"))):
        with pytest.raises(IndexError, match="index out of range"):
            F.embedding(torch.tensor([[0, index]]), weight)


def test_an_index_of_another_kind_has_the_error_of_torch():
    for weight in (torch.zeros(MATRIX), lazy()):
        with pytest.raises(RuntimeError, match=r"indices.*Long, Int"):
            F.embedding(torch.zeros(2, 2), weight)


def test_an_index_on_another_device_is_explained():
    message = r"site 'table' must have device cpu, but got meta\. .*`x\.to\('cpu'\)`"
    with pytest.raises(ValueError, match=message):
        F.embedding(INDEX.to("meta"), lazy(name="table"))


@served
def test_rows_keep_the_dtype_under_autocast(case):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = F.embedding(INDEX, lazy(make(case, torch.float32)))
    assert rows.dtype == torch.float32


# ---- where the table is drawn --------------------------------------------------------------------


def assert_drawn(weight, x=INDEX, **options):
    rows = F.embedding(x, weight, **options)
    assert weight.is_drawn
    assert torch.equal(rows, F.embedding(x, weight.draw(), **options))
    return rows


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.name)
def test_structures_without_a_rule_draw_the_table(case):
    assert_drawn(lazy(make(case)))


@pytest.mark.parametrize(
    "options",
    [{"count": None}, {"count": 2}, {"local_reparam": False}],
    ids=["not counted", "used twice", "switched off"],
)
def test_a_table_that_may_not_give_rows_is_drawn(options):
    assert_drawn(lazy(**options))


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_another_gradient_than_the_usual_one_is_left_to_torch(option):
    assert_drawn(lazy(), **{option: True})


def test_max_norm_renormalizes_the_drawn_table():
    weight = lazy(MeanFieldNormal(torch.ones(MATRIX), torch.tensor(0.1)))
    rows = assert_drawn(weight, INDEX[:, :1], max_norm=0.5)
    torch.testing.assert_close(rows.norm(dim=-1), torch.full((2, 1), 0.5), rtol=1e-5, atol=0)
    assert (weight.draw()[[1, 3]].norm(dim=-1) > 1).all()  # these were not looked up


# ---- uses, and what is formed --------------------------------------------------------------------


@served
def test_nothing_of_the_tables_size_is_formed(case):
    q = case.make((), (1000, DIM), torch.float64)
    known = [getattr(q, name) for name in q.argument_names]
    with RecordsSizes(*known) as recorded:
        F.embedding(torch.randint(1000, (4, 3)), lazy(q, local_reparam="exact"))
    assert max(recorded.sizes) <= 4 * 3 * DIM * 3  # the factors of rank 3, or of rows of size 3
