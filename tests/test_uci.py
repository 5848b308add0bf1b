"""UCI regressions: splits, the part that is held out, and tables against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import pyro_structvi as ps
from benchmarks import sampling, uci, uci_priors_table, uci_tables

RANDOM = [
    ("energy", "0", "heteroscedastic", "mean field", "-1.0", "0.5", "3"),
    ("energy", "1", "heteroscedastic", "mean field", "-1.2", "0.7", "3"),
    ("energy", "0", "heteroscedastic", "rowwise", "-0.8", "0.25", "3"),
    ("energy", "1", "heteroscedastic", "rowwise", "-0.9", "0.35", "3"),
    ("energy", "0", "heteroscedastic", "matrix normal", "-0.1", "0.2", "3"),
    ("kin8nm", "0", "heteroscedastic", "mean field", "1.02", "0.0878", "3"),
    ("kin8nm", "1", "heteroscedastic", "mean field", "1.04", "0.0918", "3"),
    ("kin8nm", "0", "heteroscedastic", "rowwise", "1.124", "0.0878", "3"),
    ("kin8nm", "1", "heteroscedastic", "rowwise", "1.124", "0.0918", "3"),
]
GAPS = [
    ("energy", "gap 0", "heteroscedastic", "mean field", "-9", "4", "3"),
    ("energy", "gap 1", "heteroscedastic", "mean field", "-3", "2", "3"),
    ("energy", "gap 0", "heteroscedastic", "rowwise", "-7", "3", "3"),
    ("energy", "gap 1", "heteroscedastic", "rowwise", "-2.6", "1.8", "3"),
]


@pytest.fixture
def data(tmp_path):
    """Save a regression of 90 examples and two inputs, in other units than standardized ones."""
    random = np.random.default_rng(0)
    x, y = 3 * random.normal(size=(90, 2)) + 1, 5 * random.normal(size=90) + 2
    order = np.stack([random.permutation(90) for _ in range(2)])
    np.savez(tmp_path / "data.npz", x=x, y=y, train_idx=order[:, :80], test_idx=order[:, 80:])
    return tmp_path / "data.npz"


def test_means_have_standard_errors_and_differences_are_paired_by_split():
    """Rowwise less mean field: 0.2 and 0.3, errors -0.25 and -0.35; of the gaps 2 and 0.4."""
    text = uci_tables.uci_tables(RANDOM + GAPS)
    random, gaps = text.split("### Gap splits, heteroscedastic noise")
    assert "| mean field | -1.10 ± 0.10; 0.600 ± 0.100 | 1.03 ± 0.01; 0.0898 ± 0.0020 |" in random
    assert "| rowwise | +0.25 ± 0.05; -0.300 ± 0.050 | +0.09 ± 0.01; +0.0000 ± 0.0000 |" in random
    assert "| matrix normal | +0.90; -0.300 |  |" in random
    assert "| mean field | -6.00 ± 3.00; 3.00 ± 1.00 |" in gaps
    assert "| rowwise | +1.20 ± 0.80; -0.60 ± 0.40 |" in gaps


def test_the_held_out_part_is_a_fifth_of_the_training_part(data):
    """In the targets' own units its examples are those of the training part, each once."""
    split = next(uci.splits(data, gaps=False))
    inner = uci.held_out(split)
    assert len(inner.test[0]) == 16
    assert len(inner.train[0]) == 64
    inner_targets = torch.cat([inner.train[1], inner.test[1]]) * inner.target_scale
    targets = split.train[1] * split.target_scale
    assert_close(inner_targets.sort(0).values.diff(dim=0), targets.sort(0).values.diff(dim=0))
    assert_close(inner.train[1].std(correction=0), torch.tensor(1.0))


def test_a_gap_is_the_middle_third_of_each_input(data):
    found = list(uci.splits(data, gaps=True))
    assert [each.name for each in found] == ["gap 0", "gap 1"]
    for column, each in enumerate(found):
        inside, outside = each.test[0][:, column], each.train[0][:, column]
        assert (len(inside), len(outside)) == (30, 60)
        assert ((outside < inside.min()) | (outside > inside.max())).all()


def test_what_is_measured_is_in_the_targets_own_units(data):
    """Targets that are ten times as large: errors are, and the log density is lower by log 10."""
    found = []
    for factor in (1, 10):
        split = next(uci.splits(data, gaps=False))
        split = split._replace(target_scale=factor * split.target_scale)
        torch.manual_seed(0)
        model = uci.make_model(split, "learned", 5)
        found.append(uci.measure(split, model, ps.MeanFieldGuide(model), 10, 20))
    one, ten = found
    assert ten["RMSE"] == pytest.approx(10 * one["RMSE"])
    assert ten["log likelihood"] == pytest.approx(one["log likelihood"] - math.log(10), abs=1e-6)


def test_points_have_a_prior_of_a_fixed_scale(data):
    """The joint density of weights and their scale is highest where the weights are nearly zero."""
    split = next(uci.splits(data, gaps=False))
    model = uci.make_model(split, "heteroscedastic", 5, uci.POINTS_PRIOR)
    guide = uci.GUIDES["MAP"](model)
    assert not any("weight_scale" in name for name in guide.site_names)
    assert any(
        "weight_scale" in name
        for name in ps.MeanFieldGuide(uci.make_model(split, 1.0, 5)).site_names
    )
    assert set(uci.POINTS) <= set(uci.GUIDES)


PRIORS = [
    ("boston", "0", "mean field", "learned", "heteroscedastic", "0.5", "-2.5", "3", "-300", "9"),
    ("boston", "1", "mean field", "learned", "heteroscedastic", "0.5", "-2.7", "4", "-310", "9"),
    ("boston", "0", "mean field", "1", "heteroscedastic", "0.5", "-2.4", "3", "-320", "9"),
    ("boston", "1", "mean field", "1", "heteroscedastic", "0.5", "-2.4", "4", "-330", "9"),
    ("boston", "0", "mean field", "4", "heteroscedastic", "0.5", "-2.2", "3", "-500", "9"),
    ("boston", "1", "mean field", "4", "heteroscedastic", "0.5", "-2.36", "4", "-500", "9"),
    ("boston", "0", "mean field", "learned", "heteroscedastic", "0", "-2.0", "3", "-500", "9"),
    ("boston", "1", "mean field", "learned", "heteroscedastic", "0", "-2.0", "4", "-500", "9"),
    ("boston", "0", "mean field", "learned", "0.3", "0.5", "-4", "3", "-500", "9"),
]


def test_differences_of_learned_values_are_in_one_table():
    """Less prior 4: -0.3 and -0.34. Less those that are not annealed: -0.5 and -0.7."""
    assert uci_priors_table.learned_table(PRIORS).splitlines() == [
        "| difference in log likelihood | boston |",
        "| --- | --- |",
        "| mean field: learned prior's scale less the best fixed | -0.32 ± 0.02 (4) |",
        "| mean field: KL annealed less not | -0.60 ± 0.10 |",
    ]


@pytest.mark.slow
def test_sampling_from_points_prints_both_posteriors(data, capsys, monkeypatch):
    command = f"sampling --data {data} --map-steps 5 --steps 20 --samples 4 --chains 2 --threads 1"
    monkeypatch.setattr("sys.argv", command.split())
    sampling.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[:2]]
    assert [line[:3] for line in lines] == [["data", "0", "points"], ["data", "0", "draws"]]
    scale = uci_split(data).target_scale
    for _, _, _, own, error, standardized, scaled, *_ in lines:
        assert float(own) == pytest.approx(float(standardized) - math.log(scale), abs=1e-3)
        assert float(error) == pytest.approx(float(scaled) * scale, rel=1e-3)


def uci_split(path):
    return next(uci.splits(path, gaps=False))
