"""Differences between versions of ArviZ: the import, and the call that smooths weights."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pyro_structvi.posterior.inference_data import import_arviz, pareto_smoothed


def test_arviz_announces_itself_to_those_who_import_it_only(tmp_path, monkeypatch):
    """In a fake module, since the announcement is made once a day; other warnings are not hidden."""
    folder = tmp_path / "arviz"
    folder.mkdir()
    notice = 'import warnings\nwarnings.warn("\\nArviZ is undergoing a refactor", FutureWarning)\n'
    monkeypatch.syspath_prepend(tmp_path)

    def import_again(function):
        monkeypatch.delitem(sys.modules, "arviz", raising=False)
        return function()

    (folder / "__init__.py").write_text(notice)
    assert import_again(import_arviz).__file__ == str(folder / "__init__.py")
    with pytest.warns(FutureWarning, match="undergoing"):
        import_again(lambda: __import__("arviz"))
    (folder / "__init__.py").write_text(notice.replace("is undergoing", "drops what you use in"))
    with pytest.warns(FutureWarning, match="drops what you use"):
        import_again(import_arviz)


def test_where_arviz_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r'pip install "pyro-structvi\[diagnostics\]"'):
        import_arviz()


def with_arviz_stats(monkeypatch, array_stats):
    base, stats = ModuleType("arviz_stats.base"), ModuleType("arviz_stats")
    base.array_stats = array_stats
    monkeypatch.setitem(sys.modules, "arviz_stats", stats)
    monkeypatch.setitem(sys.modules, "arviz_stats.base", base)


@pytest.mark.parametrize("sign", [1, -1])
def test_version_1_takes_minus_the_log_weights(sign, monkeypatch):
    """Fake modules return their argument; the function of version 1 is in another package."""
    function = SimpleNamespace(psislw=lambda values: (values, np.array(0.5)))
    monkeypatch.setitem(sys.modules, "arviz", function if sign == 1 else SimpleNamespace())
    with_arviz_stats(monkeypatch, function if sign == -1 else SimpleNamespace())
    log_weights = np.arange(4.0)
    given, k_hat = pareto_smoothed(log_weights)
    np.testing.assert_array_equal(given, sign * log_weights)
    assert k_hat == 0.5


@pytest.mark.parametrize("version", ["installed", "1.x"])
def test_the_tail_of_a_pareto_distribution_has_its_shape(version, monkeypatch):
    """The quantiles are like the largest of many draws, without noise."""
    if version == "1.x":
        pytest.importorskip("arviz_stats")
        monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace())
    shares = (np.arange(4000) + 0.5) / 4000
    smoothed, k_hat = pareto_smoothed(-0.6 * np.log1p(-shares))
    assert k_hat == pytest.approx(0.6, abs=0.03)
    assert np.exp(smoothed).sum() == pytest.approx(1.0)
