"""What the benchmarks compute from times and memory, and that the page shows the committed results."""

import json

import pytest
import torch

from benchmarks import bench, measure, methods, nets, scaling, sweeps, tables


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
    _, _, base, row, _, foot = tables.net_table(net).splitlines()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:torch._inductor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("title", ["deterministic", "k-tied, k = 1"])
def test_all_is_compiled_after_the_warm_up(title):
    net = nets.NETS["small"]
    made, batch = net.make(), net.make_batch(torch.device("cpu"))
    method = methods.COMPILED_METHODS[f"{title}, compiled"](made, *batch)
    for _ in range(method.warm_up):
        method.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        method.step()


def test_results_come_back_from_their_file(tmp_path):
    results = {
        "machine": {"device": "a, b"},
        "nets": {"n": {"ratio": [1.0, 2.5], "list": [{"a": [1]}]}},
    }
    tables.write_results(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_the_page_shows_the_committed_results():
    text = tables.PAGE.read_text()
    assert tables.render(text) == text, "python -m benchmarks.tables writes the tables"
    shown = {match["file"] for match in tables.GENERATED.finditer(text)}
    results = {
        str(path.relative_to(tables.ROOT)) for path in tables.ROOT.glob("benchmarks/results/*")
    }
    assert shown == results


@pytest.mark.slow
def test_the_figure_is_drawn_from_results(tmp_path):
    results = json.loads((tables.ROOT / "benchmarks/results/scaling.json").read_text())
    scaling.draw(results, tmp_path / "figure.svg")
    assert "low rank" in (tmp_path / "figure.svg").read_text()
