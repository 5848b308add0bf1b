"""What the benchmarks compute from times and memory, and that the page shows the committed results."""

import json
import math

import numpy as np
import pytest
import torch

import pyro_structvi as ps
from benchmarks import (
    active_table,
    bench,
    convergence,
    deep_data,
    deep_nets_table,
    figures,
    measure,
    methods,
    moments_table,
    natural,
    nets,
    problems,
    recipes,
    scaling,
    sweeps,
    tables,
)
from pyro_structvi import _torch
from pyro_structvi.infer.steps.replayed import ReplayedStep
from tests.infer.compiled_steps import compiles

MACHINE = {"torch": "2", "pyro": "1", "device": "cpu", "threads": 1}


def test_the_exponent_of_a_power_law_is_exact():
    sizes = [64, 128, 256, 512]
    slope, error = scaling.fit_exponent(sizes, [3e-7 * size**2.5 for size in sizes])
    assert slope == pytest.approx(2.5, rel=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


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


def test_peak_memory_of_training_is_the_parameters_four_times():
    """The weight, its gradient, two moments, and what is small: a counter, or outputs for a backward."""
    x, weight_bytes = torch.ones(1, 1000), 1000 * 500 * 8

    def train():
        net = torch.nn.Linear(1000, 500, bias=False)
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        yield "made"
        for name in ("first", "second"):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield name

    peaks = measure.peak_bytes(train())
    assert peaks["made"] == weight_bytes
    assert 4 * weight_bytes < peaks["second"] < 4 * weight_bytes + 10_000


def test_rounds_are_interleaved_and_the_first_is_left_out():
    calls = []
    tasks = {name: {"task": lambda name=name: calls.append(name)} for name in "ab"}
    seconds = measure.time_rounds(tasks, rounds=3)
    assert calls == ["a", "b"] * 4
    assert {name: len(own["task"]) for name, own in seconds.items()} == {"a": 3, "b": 3}


def test_quartiles_are_within_what_was_seen():
    assert measure.quartiles([1.0, 5.0]) == [2.0, 3.0, 4.0]
    assert measure.quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == [2.0, 3.0, 4.0]


def test_the_table_of_a_net():
    def task(middle, size):
        ratio = [middle - 0.5, middle, middle + 0.5]
        return {"milliseconds": ratio, "ratio": ratio, "bytes": size * 2**20}

    net = {
        "rounds": 9,
        "methods": {
            "deterministic": {"step": task(1.0, 4), "prediction": task(1.0, 2)},
            "k-tied": {"step": task(1.5, 5), "prediction": task(12.34, 1000)},
        },
    }
    assert tables.step_medians(net, "k-tied") == "1.50"
    net["methods"]["k-tied, traced"] = {"step": task(1.25, 5)}
    assert tables.step_medians(net, "k-tied") == "1.50 / 1.25"
    line = tables.spread_line({"machine": MACHINE}, [net | {"rounds": 5}, net])
    assert line.endswith(
        "Medians of 5 to 9 rounds; quartiles are typically within 67 % of the median, and at most 100 % "
        "from it."
    )
    _, _, base, row, _, _, foot = tables.net_table(net).splitlines()
    assert base.startswith("| deterministic | 1.00 | 0.50 - 1.50 | 1.00 |")
    assert row == "| k-tied | 1.50 | 1.00 - 2.00 | 1.25 | 12.3 | 11.8 - 12.8 | 500 |"
    assert foot == "1.00 is: step 1.00 ms, 4.00 MiB; prediction 1.00 ms, 2.00 MiB. 9 rounds."


@pytest.mark.slow
def test_a_method_without_predictions_is_warmed_up_and_leaves_their_columns_empty():
    steps = []
    count = methods.Method(lambda: steps.append(0), None, warm_up=4)
    own = {methods.DETERMINISTIC: methods.make_deterministic, "counted": lambda *_: count}
    net = bench.measure_net(nets.NETS["small"], own, rounds=2, samples=2)
    assert set(net["methods"][methods.DETERMINISTIC]) == {"step", "prediction"}
    assert set(net["methods"]["counted"]) == {"step"}
    assert len(steps) == 4 + 1 + 4 + 1 + 2  # in the measure of memory; then untimed, and timed
    assert tables.net_table(net).splitlines()[3].endswith(" |  |  |  |")


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


def test_results_come_back_from_their_file(tmp_path):
    results = {
        "machine": {"device": "a, b"},
        "nets": {"n": {"ratio": [1.0, 2.5], "list": [{"a": [1]}]}},
    }
    tables.write_results(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == results


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draw", "text"),
    [
        ("scaling", scaling.draw, "low rank"),
        ("bench", figures.draw_costs, "traced step"),
        ("convergence", figures.draw_convergence, "2,000 steps"),
    ],
)
def test_a_figure_is_drawn_from_results(name, draw, text, tmp_path):
    results = json.loads((tables.ROOT / f"benchmarks/results/{name}.json").read_text())
    draw(results, tmp_path / "figure.svg")
    assert text in (tmp_path / "figure.svg").read_text()


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
    text = "mean field below k-tied 2 by 1.1; full below rowwise by 87.0 (of 4)"
    assert tables.out_of_order(rows) == text.replace("87.0", f"{87.05:.1f}")


def test_every_pair_is_of_guides_that_are_trained():
    assert {name for pair in tables.NESTED for name in pair} <= set(recipes.GUIDES)


def test_a_table_has_a_row_for_each_guide_and_marks_those_that_diverged():
    rows = {"mean field": ended(-10.0), "rowwise": {"elbo": [], "error": [], "seconds": []}}
    full = {"mean field": ended(-7.5)}
    recipes_of = {"default": rows, "whole KL": full}
    problem = {"title": "A problem, 3-2 ReLU, 9 examples", "evidence": -9.5, "recipes": recipes_of}
    results = {
        "machine": MACHINE,
        "steps": [100, 1000],
        "particles": 50,
        "convergence": {"a": problem},
    }
    text = tables.convergence_table(results)
    assert "| guide | 3-2 ReLU |" in text
    assert "ELBOs of 50 particles after 1,000 steps; standard errors are at most 0.0 nats." in text
    assert "| mean field | -10.0 |\n| rowwise | diverged |\n| log evidence | -9.5 |" in text
    assert text.endswith("- 3-2 ReLU: none (of 0); 1 higher by up to 2.5 (of 1).")
    own = tables.convergence_table(results, "whole KL")
    assert "| mean field | -7.5 |" in own
    assert own.endswith("- 3-2 ReLU: none (of 0).")


def test_the_bound_of_a_fitted_full_covariance_is_the_log_evidence():
    """The posterior of a linear regression is a normal: its ELBO has no variance but that of draws."""
    torch.manual_seed(0)
    problem = problems.linear()
    guide = recipes.GUIDES["full"](problem.model)
    problem.model.num_data = len(problem.x)
    x = torch.cat([problem.x, torch.ones(60, 1)], -1)
    precision = x.T @ x / 0.5**2 + torch.eye(9)
    posterior = guide["net.weight"]
    tril = torch.linalg.cholesky(torch.linalg.inv(precision))
    diagonal = tril.diagonal()
    with torch.no_grad():
        posterior.loc.copy_(torch.linalg.solve(precision, x.T @ problem.y / 0.5**2).T)
        posterior.log_diagonal.copy_(diagonal.log())
        rows, columns = torch.tril_indices(9, 9, -1)
        posterior.lower.copy_((tril / diagonal.unsqueeze(-1))[rows, columns])
    elbo, error = convergence.bound(problem, guide, 2000)
    assert abs(elbo - problem.evidence) < 5 * error < 1.0


def test_a_recipe_starts_each_site_at_its_share_of_the_prior():
    problem = problems.cosine()
    guide = recipes.GUIDES["mean field"](problem.model)
    loc = guide["net.0.weight"].loc.detach().clone()
    recipes.RECIPES["prior/10, lr 0.05"].prepare(guide)
    for name, scale in (("net.0.weight", 4.0), ("net.2.weight", 4 / 50**0.5), ("net.2.bias", 1.0)):
        actual = guide[name]().scale
        torch.testing.assert_close(actual, torch.full_like(actual, scale / 10))
    assert torch.equal(guide["net.0.weight"].loc, loc)


def test_a_recipe_gives_kinds_of_parameters_rates_of_their_own():
    guide = recipes.GUIDES["rowwise"](problems.cosine().model)  # rows of 2, and one of 51
    expected = {"log_diagonal": 0.15, "loc": 0.05}
    kinds = {"log_": 3.0, "lower": 1.0}
    adam = recipes.adam_by_kind(guide, kinds, [*guide.parameters()], lr=0.05)
    rates = {id(group["params"][0]): group["lr"] for group in adam.param_groups}
    for path, value in guide.named_parameters():
        rows = 50 if path.startswith("posteriors.net/2") else 1
        own = expected.get(path.rpartition(".")[2], 0.05 / rows**0.5)
        assert rates[id(value)] == pytest.approx(own)


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


def test_an_average_is_of_the_steps_after_the_first():
    layer = torch.nn.Linear(1, 1, bias=False)
    average = recipes.Average(layer, first=2, last=4)
    for step in range(1, 5):
        layer.weight.data.fill_(step)
        average.add()
    assert layer.weight.item() == 3.5


def test_data_from_a_file_are_standardized_and_split(tmp_path):
    generator = np.random.default_rng(0)
    data = {"x": 3 + generator.normal(size=(30, 4)), "y": 5 * generator.normal(size=30)}
    np.savez(tmp_path / "own.npz", **data, train_idx=np.arange(20)[None])
    problem = problems.from_file(tmp_path / "own.npz")
    assert (problem.x.shape, problem.y.shape) == ((20, 4), (20, 1))
    assert abs(problem.x.mean()) < 1e-5
    assert problem.y.std(correction=0) == pytest.approx(1)


def test_the_error_of_a_mean_of_runs_is_that_of_runs_and_particles():
    """Runs at 1 and 3, so that their mean has the error 1; particles give 0.3 and 0.4, the mean 0.25."""
    runs = [
        {"elbo": [1.0], "error": [0.3], "seconds": [2.0]},
        {"elbo": [3.0], "error": [0.4], "seconds": [4.0]},
    ]
    row = convergence.mean_of(runs)
    assert row == {
        "elbo": [2.0],
        "error": [round((1 + 0.25**2) ** 0.5, 2)],
        "seconds": [3.0],
        "runs": [[1.0, 3.0]],
    }
    assert convergence.mean_of(runs[:1]) == runs[0]


@pytest.mark.parametrize(
    "recipe", ["widened from rowwise", "prior/10, lr 0.05, constant, averaged"]
)
def test_there_is_a_fit_for_each_number_of_steps(recipe):
    results = {"steps": [2, 5, 10], "particles": 20}
    row = convergence.train(problems.linear, "full", recipes.RECIPES[recipe], results, 0)
    assert [len(values) for values in row.values()] == [3, 3, 3]


# ---- one pass, deep nets -------------------------------------------------------------------------


def test_the_table_of_one_pass_has_means_and_largest_errors_over_guides():
    untrained = {"diagonal: bias": (0.01, 0.03), "full: ratio of standard deviations": (0.98, 1.01)}
    rows = [("Trained: b", "k-tied: 100 draws", "0", "total variation", "0.5")]
    rows += [("Trained: b", "k-tied: one pass", "0", "total variation", "0.25")]
    for quantity, values in untrained.items():
        rows += [("Untrained a", f"guide {i}", "0", quantity, str(v)) for i, v in enumerate(values)]
    _, _, first, second, *others = moments_table.moments_table(rows).splitlines()
    assert first == "| Untrained a | 0.020 |  | 1.5 % (2.0 %) |  |  |"
    assert second == "| Trained: b |  |  |  | 0.250 | 0.500 |"
    assert others[-1] == "| 100 samples, normal outputs | 0.080 | 5.6 % |  |  |  |"


def test_errors_of_moments_by_draws_of_normal_outputs():
    """The table has them in closed form."""
    torch.manual_seed(0)
    draws = torch.randn(100, 20_000)
    mean = math.sqrt(2 / math.pi / 100)
    assert draws.mean(0).abs().mean().item() == pytest.approx(mean, rel=0.02)
    assert (draws.std(0) - 1).abs().mean().item() == pytest.approx(mean / 2**0.5, rel=0.02)


@pytest.fixture
def texts(tmp_path):
    """Return a file of two texts, of 40 tokens and of 3."""
    tokens = np.arange(43, dtype=np.int32) + 3
    parts = {"tokens": tokens, "offsets": np.array([0, 40, 43]), "y": np.array([0, 1])}
    own = {f"{name}_{part}": value for name, value in parts.items() for part in ("train", "test")}
    np.savez(tmp_path / "texts.npz", **own)
    return tmp_path / "texts.npz"


def test_a_language_model_predicts_the_next_token(texts):
    (x, y), _, _ = deep_data.load(texts, "GPT", None, None, None)
    assert x.tolist() == [[*range(3, 35)]]
    assert y.tolist() == [[*range(4, 36)]]


def test_a_short_text_is_at_the_end_of_its_row(texts):
    (x, y), _, _ = deep_data.load(texts, "LSTM", None, None, None)
    short, long = x[y == 1][0], x[y == 0][0]
    assert short[-4:].tolist() == [0, 43, 44, 45]
    assert long[-41:].tolist() == [0, *range(3, 43)]


def test_labels_are_saved_where_their_choice_reaches_the_error_sooner():
    rows = [
        ("energy", "mean field", choice, "0", str(count), str(error))
        for choice, errors in {"random": (4.0, 3.0, 2.0), "variance": (4.0, 1.0, 1.0)}.items()
        for count, error in zip((20, 30, 40), errors, strict=True)
    ]
    table = active_table.active_table(rows)
    assert table.splitlines()[-1] == "| energy | mean field | 2 | 1 | 27 of 40 |"
    assert active_table.labels_needed({20: 4.0, 30: 3.0}, 2.0) is None


def test_the_table_of_deep_nets_names_a_net_once():
    rows = [
        ("MLP", "10 epochs", "AdamW", "0", "0.98", "0.05", "40", "0.9"),
        ("MLP", "10 epochs", "AdamW", "1", "0.96", "0.07", "44", ""),
        ("MLP", "10 epochs", "k-tied 2", "0", "0.99", "0.04", "80", ""),
    ]
    assert deep_nets_table.deep_nets_table(rows).splitlines()[2:] == [
        "| MLP, 10 epochs | AdamW | 97.00 ± 1.00 | 0.060 ± 0.010 | 0.900 | 42 |",
        "|  | k-tied 2 | 99.00 | 0.040 |  | 80 |",
    ]
