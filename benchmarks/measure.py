"""Times in interleaved rounds, and the peak memory of what is done in turn."""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says that there is no GPU

Times = dict[str, dict[str, list[float]]]


def time_rounds(
    tasks: Mapping[str, Mapping[str, Callable[[], Any]]], rounds: int, title: str = ""
) -> Times:
    """Return the seconds of every round, by method and task.

    A round runs every method's tasks in turn, so that a busy machine slows all alike. One round
    before the first warms up. With one thread on a CPU the seconds are those of the processor, so that
    they do not count the time in which other programs ran.
    """
    clock = time.process_time if is_one_thread() else time.perf_counter
    seconds: Times = {name: {task: [] for task in own} for name, own in tasks.items()}
    with tqdm(total=(rounds + 1) * len(tasks), desc=title) as progress:
        for number in range(rounds + 1):
            for name, own in tasks.items():
                for task, run in own.items():
                    start = clock()
                    run()
                    synchronize()
                    if number >= 1:
                        seconds[name][task].append(clock() - start)
                progress.update()
    return seconds


def is_one_thread() -> bool:
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")  # none beyond what was seen


def peak_bytes(phases: Iterator[str]) -> dict[str, int]:
    """Return the largest bytes of live tensors in each phase of a generator.

    A phase is the code up to a ``yield``, which gives its name. Counted is what was allocated
    since the first phase began and not freed yet: parameters, gradients, the optimizer's state and
    what a phase forms; not what was there before. On CUDA it is the allocator's own statistic. On a
    CPU it is the sum over the profiler's events, one for every allocation: exact, and the same in
    every run.
    """
    gc.collect()  # else what an earlier method left in cycles would be given back here
    return cuda_peaks(phases) if torch.cuda.is_available() else cpu_peaks(phases)


def cuda_peaks(phases: Iterator[str]) -> dict[str, int]:
    peaks, before = {}, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name in phases:
        peaks[name] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
    return peaks


def cpu_peaks(phases: Iterator[str]) -> dict[str, int]:
    names: list[str] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for name in phases:
            names.append(name)
            with record_function("end of a phase"):
                pass
    events = recorded.profiler.kineto_results.events()
    peaks = [0]
    live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peaks[-1] = max(peaks[-1], live)
        elif event.name() == "end of a phase":
            peaks.append(live)
    return dict(zip(names, peaks, strict=False))  # the last is what a generator does at its end


def describe_machine() -> dict[str, Any]:
    """Return versions and hardware, for a file of results."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
