"""Differences between versions of ArviZ: the import, and the call that smooths weights."""

import sys
from types import SimpleNamespace

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


@pytest.mark.parametrize("sign", [1, -1])
def test_version_1_takes_minus_the_log_weights(sign, monkeypatch):
    """Fake modules return their argument; the function of version 1 is in another package."""
    function, nothing = SimpleNamespace(psislw=lambda values: (values, 0.5)), SimpleNamespace()
    base = SimpleNamespace(array_stats=function if sign == -1 else nothing)
    monkeypatch.setitem(sys.modules, "arviz", function if sign == 1 else nothing)
    monkeypatch.setitem(sys.modules, "arviz_stats", SimpleNamespace(base=base))
    monkeypatch.setitem(sys.modules, "arviz_stats.base", base)
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
