"""Two processes of one group, over gloo: calling a function in each, and what such functions share."""

import multiprocessing
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pyro
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

import pyro_structvi as ps
from tests.models import make_regressor, regression_data

SIZE = 2
PATIENCE = 60.0  # seconds for all, and for one to wait for the other
PRELOADED = ["pyro_structvi", "torch._dynamo"]  # optimizers import the second
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def on_two_ranks(function, folder, *args):
    """Call ``function(*args)``, a function of a module, on each rank; return the values by rank.

    Processes are forked from a server that has imported the package, and meet at a file.

    Raises:
        ProcessRaisedException: If a rank raises; the message holds its traceback.
        TimeoutError: If they take too long.
    """
    folder = Path(folder)
    processes = start_processes(
        _run, (folder, function, args), nprocs=SIZE, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + PATIENCE
    while not processes.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} took more than {PATIENCE} seconds.")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def _run(rank, folder, function, args):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(True)
    pyro.set_rng_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting_point",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    torch.save(function(*args), folder / f"{rank}.pt")
    dist.destroy_process_group()


def make_fit(guide=ps.KTiedGuide, size=24, **options):
    pyro.set_rng_seed(0)
    model = make_regressor(size)
    return model, guide(model, **options), regression_data(size)


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-10, atol=1e-12)
