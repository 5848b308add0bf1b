"""The page about a fit: its numbers are those of the functions, and it needs nothing from elsewhere."""

import math
from dataclasses import asdict

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import (
    expected_coverage,
    report,
    spectra,
)
from pyro_structvi.diagnostics.report_page import Section, Table, cell_text, page
from pyro_structvi.infer import History
from pyro_structvi.metrics import (
    binary_scores,
    classification_scores,
    max_probability_score,
    regression_scores,
    risk_coverage,
)
from pyro_structvi.sites.starts import separate_randomness
from tests.diagnostics.pages import Page
from tests.diagnostics.reported_fits import curve, written

HISTORY = History(elbo=[-9.0, -5.0, -4.0], kl=[3.0, 2.0, 2.0])

pytestmark = pytest.mark.slow  # the example of the docstring is the fast one


def classes():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), 20)
    guide = ps.MeanFieldGuide(model, init_scale=0.2)
    return model, guide, *((torch.randn(n, 2), torch.randint(3, (n,))) for n in (20, 9))


def labels():
    model = ps.BinaryClassifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), 20)
    guide = ps.MatrixNormalGuide(model, init_scale=0.2)
    return model, guide, *((torch.randn(n, 3), torch.randint(2, (n, 2))) for n in (20, 9))


def as_cells(*values):
    return [cell_text(float(value)) for value in values]


def predicted(model, guide, data):
    """Return the prediction that a report makes first, with the same random numbers."""
    return ps.predict(model, guide, data[0], y=data[1])


# ---- what pages say ------------------------------------------------------------------------------


def test_the_page_of_a_regression(tmp_path):
    model, guide, data, test_data = curve()
    found = written(tmp_path / "page.html", model, guide, data, test_data, history=HISTORY)
    assert found.title == "KTiedGuide of a Regressor"
    with separate_randomness():
        prediction = predicted(model, guide, test_data)
        scores = regression_scores(prediction, test_data[1])
    assert [*found.column("Scores").values()] == as_cells(*asdict(scores).values())
    coverage = expected_coverage(prediction, test_data[1], (0.5, 0.8, 0.9, 0.95))
    observed = as_cells(*(each.observed for each in coverage.values()))
    assert found.column("Coverage of intervals") == dict(
        zip(("50%", "80%", "90%", "95%"), observed, strict=True)
    )
    assert found.sections["Predictions"][1] == "Scores at 9 examples of the test data."
    k_hat, elbo, bound, size = map(
        float, found.column("Importance weights of 1,000 draws").values()
    )
    assert k_hat > -1
    assert elbo < bound
    assert 1 <= size <= 1000
    assert {*found.column("Signal-to-noise ratios")} == dict(guide.named_parameters()).keys()
    # Coverage, band, trace; layers with one row or column have no spectrum.
    assert len(found.images) == 3


def test_parameters_are_those_of_the_guides_own_report(tmp_path, quick):
    model, guide, data, _ = curve()
    found, own = written(tmp_path / "page.html", model, guide, data), guide.report(*data)
    assert found.tables["Parameters of the model"][1:] == [
        [cell_text(value) for value in asdict(each).values()] for each in own.parameters
    ]
    numbers = found.column("Numbers")
    assert numbers["training examples"] == "20"
    assert numbers["random elements of the model"] == str(6 + 6 + 6 + 1)
    assert numbers["numbers trained in the guide"] == str(
        sum(each.numel() for each in guide.parameters())
    )
    assert "test examples" not in numbers


def test_the_bound_is_its_terms(tmp_path, quick):
    model, guide, data, _ = curve()
    found = written(tmp_path / "page.html", model, guide, data)
    with torch.no_grad():
        terms = ps.StructuredELBO().terms(model, guide, *data)
    kl = {name: float(own) for name, own in terms.kl.items()}
    shown = found.column("KL divergence by site")
    assert shown == {name: cell_text(value) for name, value in kl.items()}
    assert [*shown] == sorted(kl, key=lambda name: -kl[name])
    terms = {name: float(value) for name, value in found.column("Terms").items()}
    assert terms["KL divergence"] == pytest.approx(sum(kl.values()), rel=1e-3)
    rest = terms["log likelihood of obs"] - terms["KL divergence"]
    assert terms["ELBO"] == pytest.approx(rest, abs=0.05)
    with torch.no_grad():
        many = ps.StructuredELBO(num_particles=300).terms(model, guide, *data).elbo
    assert terms["ELBO"] == pytest.approx(float(many), rel=0.3)


def test_numbers_of_importance_weights_and_of_gradients(tmp_path, quick):
    model, guide, data, _ = curve()
    found = written(tmp_path / "page.html", model, guide, data, importance_samples=200)
    weights = found.column("Importance weights of 200 draws")
    assert [*weights.values()] == ["0.625", "-12.5", "-11.25", "345.5"]
    assert found.tables["Signal-to-noise ratios"][1:] == [
        ["posteriors.net/weight.loc", "2.5", "1.75"]
    ]


def test_the_page_of_classes(tmp_path, quick):
    model, guide, data, test_data = classes()
    found = written(tmp_path / "page.html", model, guide, data, test_data, history=HISTORY)
    with separate_randomness():
        p = predicted(model, guide, test_data).mean
    scores = classification_scores(p, test_data[1])
    assert [*found.column("Scores").values()] == as_cells(*asdict(scores).values())
    errors = (p.argmax(-1) != test_data[1]).double()
    answered = risk_coverage(max_probability_score(p), errors)
    areas = found.column("When the least sure examples are not answered")
    assert [*areas.values()] == as_cells(answered.area, answered.excess_area)
    own = spectra(guide)["net.0.weight"]
    shares = [own.scale_share[:1], own.scale_share[:2], own.mean_share[:1], own.mean_share[:2]]
    row = found.tables["Share of the sum of squares that low ranks explain"][1]
    assert row == ["net.0.weight", "2", *as_cells(*(share.sum() for share in shares))]
    # Reliability, risk, entropy and mutual information over the plane, trace, two spectra, scales.
    assert len(found.images) == 8


def test_the_page_of_labels(tmp_path, quick):
    model, guide, data, _ = labels()
    found = written(tmp_path / "page.html", model, guide, data)
    with separate_randomness():
        p = predicted(model, guide, data).mean
    scores = binary_scores(p, data[1])
    assert [*found.column("Scores").values()] == as_cells(*asdict(scores).values())
    flat = torch.where(p > 0.5, p, 1 - p).flatten()
    wrong = ((p > 0.5) != (data[1] == 1)).double().flatten()
    area = risk_coverage(1 - flat, wrong).area
    areas = found.column("When the least sure examples are not answered")
    assert areas["area under the curve"] == cell_text(area)
    assert "looks better than at new ones: pass `test_data`." in found.sections["Predictions"][1]
    assert len(found.images) == 5  # reliability, risk, two spectra, scales


def test_probabilities_over_the_plane_where_there_are_two_classes(tmp_path, quick, monkeypatch):
    """The figure has the heights of a function that is known: the probability rises with x[0]."""
    drawn = []
    real = report_of_predictions_module().plot_decision
    monkeypatch.setattr(
        report_of_predictions_module(),
        "plot_decision",
        lambda *args, **options: drawn.append(args) or real(*args, **options),
    )
    model = ps.BinaryClassifier(ps.bayesianize(nn.Linear(2, 1, bias=False), prior=1.0), 20)
    guide = ps.MAPGuide(model, init_loc_fn=lambda site: torch.tensor([[3.0, 0.0]]))
    data = torch.randn(20, 2), torch.randint(2, (20, 1))
    written(tmp_path / "page.html", model, guide, data, importance_samples=0)
    first, second, heights, x, y = drawn[0]
    expected = (3 * first).sigmoid().expand(len(second), -1)
    torch.testing.assert_close(heights, expected, rtol=0, atol=1e-9)
    assert first[0] < x[:, 0].min()
    assert first[-1] > x[:, 0].max()
    assert {tuple(row) for row in x.tolist()} == {tuple(row) for row in data[0].tolist()}
    assert int(y.sum()) == int(data[1].sum())


def report_of_predictions_module():
    from pyro_structvi.diagnostics import report_of_predictions

    return report_of_predictions


def test_the_same_random_state_gives_the_same_page_and_stays(tmp_path):
    model, guide, data, _ = curve()
    model.train()
    before, state = [each.clone() for each in guide.parameters()], torch.get_rng_state()
    paths = [
        report(model, guide, data, tmp_path / name, importance_samples=100) for name in ("a", "b")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, guide.parameters()))
    assert all(each.grad is None for each in guide.parameters())
    assert model.training


# ---- the page itself -----------------------------------------------------------------------------


def test_all_texts_are_escaped():
    evil = "<script>&\"'</p>"
    tables = [Table(f"{evil} table", (evil, "n"), [(evil, 1)] * rows) for rows in (1, 30)]
    text = page(evil, evil, [Section(evil, evil, [evil, *tables])])
    assert "<script" not in text
    found = Page(text)
    assert found.title == evil
    assert found.sections == {evil: [evil, evil]}
    assert found.tables[f"{evil} table"] == [[evil, "n"], [evil, "1"]]
    assert len(found.tables[f"{evil} table (30 rows)"]) == 31


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ((3, 2), "(3, 2)"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (-12345.6, "-12,346"),
        (math.inf, "inf"),
        (1e20, "1e+20"),
        ("a_b", "a_b"),
    ],
)
def test_cells(value, text):
    assert cell_text(value) == text


def test_an_empty_table_has_its_head():
    assert Page(page("t", "s", [Section("a", "b", [Table("c", ("d",), [])])])).tables == {
        "c": [["d"]]
    }
