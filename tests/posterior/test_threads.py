"""Several threads that predict and fit at once give what one gives."""

from concurrent.futures import ThreadPoolExecutor

import torch

import pyro_structvi as ps
from tests.models import make_classifier, make_regressor, regression_data


def draws_of(model, count):
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    each = [guide.draw() for _ in range(count)]
    return {name: torch.stack([draw[name] for draw in each]) for name in each[0]}


def test_predictions_of_one_net_in_several_threads():
    model, (x, y) = make_regressor(), regression_data()
    posteriors = [draws_of(model, 30) for _ in range(4)]
    expected = [ps.predict(model, draws, x, y=y) for draws in posteriors]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda draws: ps.predict(model, draws, x, y=y), posteriors)]
    for ours, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.functions, alone.functions, rtol=0, atol=0)
        torch.testing.assert_close(ours.log_density, alone.log_density, rtol=0, atol=0)
    assert model.training


def test_fits_and_predictions_in_several_threads():
    torch.set_default_dtype(torch.float64)  # a thread has the process's default dtype
    x, y = regression_data()

    def fit(kind):
        model = make_regressor() if kind == "regressor" else make_classifier()
        guide = ps.KTiedGuide(model)
        target = y if kind == "regressor" else torch.zeros(12, dtype=torch.long)
        history = ps.fit(model, guide, (x, target), num_steps=40, lr=0.05, progress=False)
        ps.predict(model, guide, x, num_samples=20)
        return history.elbo

    with ThreadPoolExecutor(3) as pool:
        histories = [*pool.map(fit, ["regressor", "classifier", "regressor"])]
    assert all(len(elbo) == 40 and elbo[-1] > elbo[0] for elbo in histories)
