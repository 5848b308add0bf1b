"""The history in TensorBoard's files, read back by TensorBoard."""

import sys

import pyro
import pytest

import pyro_structvi as ps
from pyro_structvi.infer import History, TensorBoard
from tests.models import make_regressor, regression_data

NAMES = ["elbo", "kl", "kl_weight", "log_likelihood", "lr"]


@pytest.fixture
def board():
    pytest.importorskip("tensorboard")
    return TensorBoard


def read(folder):
    """Return steps and values by name, without what a later run has hidden."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, pytest.approx(event.value, rel=1e-5)) for event in events.Scalars(name)]
        for name in sorted(events.Tags()["scalars"])
    }


def fit(board, steps=6, **options):
    pyro.set_rng_seed(0)
    model = make_regressor()
    data = regression_data()
    options = {"lr": 0.05, "lr_schedule": None, "kl_weight": 1.0, "progress": False} | options
    return ps.fit(
        model, ps.MeanFieldGuide(model), data, num_steps=steps, callbacks=[board], **options
    )


def test_all_values_are_there_at_their_steps(board, tmp_path):
    history = fit(board(tmp_path), validation=regression_data(), validate_every=4)
    found = read(tmp_path)
    for name in NAMES:
        assert [*enumerate(getattr(history, name))] == found.pop(name)
    assert found == {"validation": [*zip([0, 4, 6], history.validation, strict=True)]}


def test_every_so_many_steps(board, tmp_path):
    history = fit(board(tmp_path, every=4))
    assert read(tmp_path)["elbo"] == [(0, history.elbo[0]), (4, history.elbo[4])]


@pytest.mark.filterwarnings("ignore:.*purge:UserWarning")
def test_a_run_that_goes_on_hides_what_was_written_after_its_checkpoint(board, tmp_path):
    options = {"validation": regression_data(), "validate_every": 2}
    expected = fit(board(tmp_path / "whole"), 8, **options)
    path, folder = tmp_path / "run.pt", tmp_path / "parts"

    def fail(step):
        if step == 5:
            raise OSError
        return 1.0

    with pytest.raises(OSError):  # noqa: PT011
        fit(board(folder), 8, checkpoint=path, every=3, lr_schedule=fail, **options)
    fit(board(folder), 8, checkpoint=path, resume=True, **options)
    found = read(folder)
    assert found == read(tmp_path / "whole")
    assert [*enumerate(expected.elbo)] == found["elbo"]


def test_a_board_serves_again_after_its_end(board, tmp_path):
    own = board(tmp_path)
    own.close()
    history = fit(own, 3)
    own(history)
    own.close()
    assert read(tmp_path)["elbo"][-1] == (2, history.elbo[-1])


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install \"pyro-structvi\[tensorboard\]\""):
        TensorBoard(tmp_path)


def test_it_takes_a_history(board, tmp_path):
    with pytest.raises(TypeError, match="`history` must be a History"):
        board(tmp_path)([1.0])
    assert History().elbo == []
