"""What takes time in a report, replaced."""

import pytest

from pyro_structvi.diagnostics import GradientNoise, ImportanceDiagnosis, report_of_fit


@pytest.fixture
def quick(monkeypatch):
    """Leave out what takes time, and give numbers that are known in its place."""
    diagnosis = ImportanceDiagnosis(0.625, -12.5, -11.25, 345.5)
    noise = {"posteriors.net/weight.loc": GradientNoise(2.5, 1.75, 3.5)}
    monkeypatch.setattr(report_of_fit, "pareto_k", lambda *args, **options: diagnosis)
    monkeypatch.setattr(report_of_fit, "gradient_snr", lambda *args, **options: noise)
