"""What benchmarks compute of times, memory, training and splits; pages show the committed results."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import pyro_structvi as ps
from benchmarks import (
    convergence,
    deep_data,
    measure,
    methods,
    natural,
    nets,
    problems,
    recipes,
    sampling,
    scaling,
    sweeps,
    tables,
    uci,
)
from pyro_structvi import _torch
from pyro_structvi.infer.steps.replayed import ReplayedStep
from tests.conjugate import exact, full_guide
from tests.infer.compiled_steps import compiles


def test_the_error_of_an_exponent():
    """Logs 0, 1, 1, 2 over logs 0, 1, 2, 3: slope 0.6, residuals -0.1, 0.3, -0.3, 0.1."""
    sizes, costs = (
        [torch.tensor(float(log)).exp().item() for log in logs]
        for logs in ((0, 1, 2, 3), (0, 1, 1, 2))
    )
    slope, error = scaling.fit_exponent(sizes, costs)
    assert slope == pytest.approx(0.6, rel=1e-6)
    assert error == pytest.approx((0.2 / 2 / 5) ** 0.5, rel=1e-6)


def test_the_upper_half_is_fitted_and_counts_are_those_of_the_paper():
    settings = [sweeps.Sizes(d=size) for size in (1, 2, 4, 8, 16, 32)]
    points = [
        {"size": s.d, "gradients": [0, 7.0 if s.d < 4 else s.d**2, 0], "step": [0, s.d, 0]}
        for s in settings
    ]
    fit = scaling.exponents(sweeps.METHODS["deterministic"], settings, points)
    assert fit["fitted"] == [4, 8, 16, 32]
    found = [fit["gradients"][0], fit["step"][0], fit["paper"], fit["ours"]]
    assert found == pytest.approx([2, 1, 2, 2], rel=1e-12)


def test_peak_memory_of_a_chain_of_tensors():
    """Of float64 tensors with 1000 numbers: at most 2, then 4, then 1 are there."""

    def chain():
        x = torch.ones(1000)
        y = x + x
        del x
        yield "two"
        z = y * 2
        w = torch.cat([y, z])
        del z, w
        yield "four"
        y.neg_()
        yield "one"

    outside = torch.ones(5000)  # is not counted
    assert measure.peak_bytes(chain()) == {"two": 16_000, "four": 32_000, "one": 8_000}
    assert len(outside) == 5000


def test_rounds_are_interleaved_and_the_first_is_left_out():
    calls = []
    tasks = {name: {"task": lambda name=name: calls.append(name)} for name in "ab"}
    seconds = measure.time_rounds(tasks, rounds=3)
    assert calls == ["a", "b"] * 4
    assert {name: len(own["task"]) for name, own in seconds.items()} == {"a": 3, "b": 3}
    assert measure.quartiles([1.0, 5.0]) == [2.0, 3.0, 4.0], "within what was seen"


@compiles
@pytest.mark.parametrize("title", ["deterministic", "k-tied, k = 1"])
def test_all_is_compiled_after_the_warm_up(title, monkeypatch):
    net = nets.NETS["small"]
    made, batch = net.make(), net.make_batch(torch.device("cpu"))
    method = methods.COMPILED_METHODS[f"{title}, compiled"](made, *batch)
    for _ in range(method.warm_up):
        method.step()
    monkeypatch.setattr(_torch, "by_inductor", None)
    monkeypatch.setattr(ReplayedStep, "_make_records", None)
    with torch.compiler.set_stance("fail_on_recompile"):
        method.step()


def test_the_pages_show_the_committed_results():
    for page in tables.PAGES:
        text = page.read_text()
        assert tables.render(text) == text, "python -m benchmarks.tables writes the tables"


def test_every_file_of_results_is_named_on_a_page():
    pages = [*tables.ROOT.glob("docs/**/*.md"), *tables.ROOT.glob("examples/papers/*/README.md")]
    texts = [page.read_text() for page in pages]
    results = {
        str(path.relative_to(tables.ROOT))
        for pattern in ("benchmarks/results/*", "examples/papers/*/results.csv")
        for path in tables.ROOT.glob(pattern)
    }
    assert {name for name in results if not any(name in text for text in texts)} == set()
    shown = {match["file"] for text in texts for match in tables.GENERATED.finditer(text)}
    assert shown <= results


# ---- training ------------------------------------------------------------------------------------


def ended(elbo, error=0.0):
    return {"elbo": [-900.0, elbo], "error": [1.0, error], "seconds": [1.0, 2.0]}


def test_a_pair_is_out_of_order_where_the_larger_ends_below_by_more_than_noise():
    rows = {
        "k-tied 1": ended(-10.0, 0.3),
        "k-tied 2": ended(-10.9, 0.4),  # within twice 0.5
        "mean field": ended(-12.0, 0.3),  # 1.1 below, twice 0.5
        "full": ended(-99.0),
        "rowwise": ended(-11.95),
    }
    found, pairs = tables.violations(rows)
    assert found == [("k-tied 2", "mean field", pytest.approx(1.1)), ("rowwise", "full", 87.05)]
    assert pairs == 4
    assert {name for pair in tables.NESTED for name in pair} <= set(recipes.GUIDES)


def test_the_bound_of_a_fitted_full_covariance_is_the_log_evidence():
    """The posterior of a linear regression is a normal: its ELBO has no variance but that of draws."""
    torch.manual_seed(0)
    problem = problems.linear()
    problem.model.num_data = len(problem.x)
    mean, covariance, _ = exact(F.pad(problem.x, (0, 1), value=1.0), problem.y)
    guide = full_guide(problem.model, mean, covariance)
    elbo, error = convergence.bound(problem, guide, 2000)
    assert abs(elbo - problem.evidence) < 5 * error < 1.0


def test_a_recipe_sets_starts_in_units_of_the_prior_and_rates_by_kind():
    model = problems.cosine().model
    guide = recipes.GUIDES["mean field"](model)
    loc = guide["net.0.weight"].loc.detach().clone()
    recipes.RECIPES["prior/10, lr 0.05"].prepare(guide)
    for name, scale in (("net.0.weight", 4.0), ("net.2.weight", 4 / 50**0.5), ("net.2.bias", 1.0)):
        actual = guide[name]().scale
        torch.testing.assert_close(actual, torch.full_like(actual, scale / 10))
    assert torch.equal(guide["net.0.weight"].loc, loc)
    parameters = [*guide.parameters()]
    adam = recipes.adam_by_kind(guide, {"log_": 3.0, "loc": 1.0}, parameters, lr=0.05)
    rates = {id(group["params"][0]): group["lr"] for group in adam.param_groups}
    for path, value in guide.named_parameters():
        assert rates[id(value)] == pytest.approx(0.15 if "log_" in path else 0.05)


def test_natural_steps_find_the_best_independent_normals():
    """Of a quadratic loss: means at its minimum, precisions its diagonal."""
    net = ps.bayesianize(torch.nn.Linear(3, 1, bias=False), prior=1.0)
    guide = ps.MeanFieldGuide(ps.Regressor(net, 1, 0.1), init_scale=0.3)
    posterior = guide["net.weight"]
    hessian, best = torch.tensor([1.0, 10.0, 100.0]), torch.tensor([1.0, 2.0, 3.0])
    optimizer = natural.NaturalSteps(guide, lr=0.3, rate=0.5)
    for _ in range(300):
        optimizer.zero_grad()
        variance = (2 * posterior.log_scale).exp()
        loss = (hessian * ((posterior.loc - best).square() + variance) / 2).sum()
        (loss - posterior.log_scale.sum()).backward()
        optimizer.step()
    torch.testing.assert_close(posterior.loc.squeeze(), best)
    torch.testing.assert_close(posterior().scale.squeeze() ** -2, hessian)
    with pytest.raises(ValueError, match="`guide` must have mean field at every site"):
        natural.NaturalSteps(ps.KTiedGuide(ps.Regressor(net, 1, 0.1)), 0.1, 0.1)


def test_the_error_of_a_mean_of_runs_is_that_of_runs_and_particles():
    """Runs at 1 and 3, so that their mean has the error 1; particles give 0.3 and 0.4, the mean 0.25."""
    runs = [
        {"elbo": [elbo], "error": [error], "seconds": [seconds]}
        for elbo, error, seconds in ((1.0, 0.3, 2.0), (3.0, 0.4, 4.0))
    ]
    error = round((1 + 0.25**2) ** 0.5, 2)
    expected = {"elbo": [2.0], "error": [error], "seconds": [3.0], "runs": [[1.0, 3.0]]}
    assert convergence.mean_of(runs) == expected
    assert convergence.mean_of(runs[:1]) == runs[0]


# ---- one pass, deep nets -------------------------------------------------------------------------


def test_texts_of_a_language_model_and_of_a_classifier(tmp_path):
    """Two texts, of 40 tokens and of 3: the next token is predicted; short texts end their rows."""
    tokens = np.arange(43, dtype=np.int32) + 3
    parts = {"tokens": tokens, "offsets": np.array([0, 40, 43]), "y": np.array([0, 1])}
    own = {f"{name}_{part}": value for name, value in parts.items() for part in ("train", "test")}
    np.savez(tmp_path / "texts.npz", **own)
    (x, y), _, _ = deep_data.load(tmp_path / "texts.npz", "GPT", None, None, None)
    assert (x.tolist(), y.tolist()) == ([[*range(3, 35)]], [[*range(4, 36)]])
    (x, y), _, _ = deep_data.load(tmp_path / "texts.npz", "LSTM", None, None, None)
    assert x[y == 1][0][-4:].tolist() == [0, 43, 44, 45]
    assert x[y == 0][0][-41:].tolist() == [0, *range(3, 43)]


# ---- UCI regressions -----------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    """Save a regression of 90 examples and two inputs, in other units than standardized ones."""
    random = np.random.default_rng(0)
    x, y = 3 * random.normal(size=(90, 2)) + 1, 5 * random.normal(size=90) + 2
    order = np.stack([random.permutation(90) for _ in range(2)])
    np.savez(tmp_path / "data.npz", x=x, y=y, train_idx=order[:, :80], test_idx=order[:, 80:])
    return tmp_path / "data.npz"


def test_the_held_out_part_is_a_fifth_of_the_training_part(table):
    """In the targets' own units its examples are those of the training part, each once."""
    split = next(uci.splits(table, gaps=False))
    inner = uci.held_out(split)
    assert len(inner.test[0]) == 16
    assert len(inner.train[0]) == 64
    inner_targets = torch.cat([inner.train[1], inner.test[1]]) * inner.target_scale
    targets = split.train[1] * split.target_scale
    assert_close(inner_targets.sort(0).values.diff(dim=0), targets.sort(0).values.diff(dim=0))
    assert_close(inner.train[1].std(correction=0), torch.tensor(1.0))


def test_a_gap_is_the_middle_third_of_each_input(table):
    found = list(uci.splits(table, gaps=True))
    assert [each.name for each in found] == ["gap 0", "gap 1"]
    for column, each in enumerate(found):
        inside, outside = each.test[0][:, column], each.train[0][:, column]
        assert (len(inside), len(outside)) == (30, 60)
        assert ((outside < inside.min()) | (outside > inside.max())).all()


def test_what_is_measured_is_in_the_targets_own_units(table):
    """Targets that are ten times as large: errors are, and the log density is lower by log 10."""
    found = []
    for factor in (1, 10):
        split = next(uci.splits(table, gaps=False))
        split = split._replace(target_scale=factor * split.target_scale)
        torch.manual_seed(0)
        model = uci.make_model(split, "learned", 5)
        found.append(uci.measure(split, model, ps.MeanFieldGuide(model), 10, 20))
    one, ten = found
    assert ten["RMSE"] == pytest.approx(10 * one["RMSE"])
    assert ten["log likelihood"] == pytest.approx(one["log likelihood"] - math.log(10), abs=1e-6)


def test_points_have_a_prior_of_a_fixed_scale(table):
    split = next(uci.splits(table, gaps=False))
    models = (
        uci.make_model(split, "heteroscedastic", 5, uci.POINTS_PRIOR),
        uci.make_model(split, 1.0, 5),
    )
    fixed, learned = (uci.GUIDES["MAP"](model).site_names for model in models)
    assert not [name for name in fixed if "weight_scale" in name]
    assert [name for name in learned if "weight_scale" in name]
    assert set(uci.POINTS) <= set(uci.GUIDES)


@pytest.mark.slow
def test_sampling_from_points_prints_both_posteriors(table, capsys, monkeypatch):
    command = f"sampling --data {table} --map-steps 5 --steps 20 --samples 4 --chains 2 --threads 1"
    monkeypatch.setattr("sys.argv", command.split())
    sampling.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[:2]]
    assert [line[:3] for line in lines] == [["data", "0", "points"], ["data", "0", "draws"]]
    scale = next(uci.splits(table, gaps=False)).target_scale
    for _, _, _, own, error, standardized, scaled, *_ in lines:
        assert float(own) == pytest.approx(float(standardized) - math.log(scale), abs=1e-3)
        assert float(error) == pytest.approx(float(scaled) * scale, rel=1e-3)
