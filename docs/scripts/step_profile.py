"""Where the time of a training step goes, and the largest tensor that it forms, for each guide.

    python docs/scripts/step_profile.py                       # MLP 1024-2048-2048-10, batch 512
    python docs/scripts/step_profile.py --net mnist --guide "k-tied, k = 2" --top 10

A step is that of ``benchmarks/methods.py``: ``StructuredELBO`` or cross-entropy, gradients, fused Adam.
The first columns are milliseconds a step spent in operations of one kind, without those that they call:
on a CPU the operation's own time, on a GPU that of its kernels. *Optimizer* is all that
``Optimizer.step`` does, on a CPU with its Python. *Python, launches* is what is left of the time of the
profiled steps, so that the columns add up to *total*: Python, autograd, views, allocation, and on a GPU
the time in which it waits. It includes the profiler's own time, and so is too large for small nets;
*unprofiled* is the median step without a profiler.

*Largest* is the largest allocation of a step over the size of the largest weight: 1 is a tensor such as
its gradient, K the gradient of K factors of its size. A weight for each example would be the batch size.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import describe_machine, synchronize
from benchmarks.methods import DETERMINISTIC, METHODS
from benchmarks.nets import NETS

GUIDES = ["MAP", "mean field, drawn", "mean field", "k-tied, k = 1", "k-tied, k = 2"]
GUIDES += ["low rank, K = 2", "matrix normal", "inducing 64"]
KINDS = {
    "products": re.compile(r"(add|b|badd|addb)?mm|(add)?mv|addr|v?dot|.*conv(olution)?.*"),
    "random": re.compile(r"normal_?|bernoulli_|uniform_|random_|exponential_|native_dropout"),
    "factorizations": re.compile(
        r"_?linalg_(?!vector_norm|norm).*|_?cholesky.*|(linalg_)?(solve_)?triangular.*|.*_svd|.*_qr|ormqr|lu_.*"
    ),
    # These form nothing: they call others, or give a tensor another shape, or memory.
    "launches": re.compile(
        r"view.*|_unsafe_view|_reshape_alias|reshape.*|as_strided.*|t|transpose|permute|expand.*"
        r"|(un)?squeeze.*|select|slice|narrow|split.*|chunk|unbind.*|detach_?|alias|numpy_T|mT"
        r"|movedim|flatten|unflatten|linear|matmul|einsum|to|_to_copy|contiguous|clone|zeros(_like)?"
        r"|ones(_like)?|full(_like)?|randn(_like)?|empty.*|resize_|lift_fresh|broadcast_.*"
        r"|result_type|item|_local_scalar_dense|is_nonzero"
    ),
}
COLUMNS = ["products", "elementwise", "random", "factorizations", "optimizer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="wide")
    parser.add_argument("--guide", choices=METHODS, action="append")
    parser.add_argument("--steps", type=int, default=5, help="profiled, after two that are not")
    parser.add_argument("--top", type=int, default=0, help="operations to list of each")
    options = parser.parse_args()
    net = NETS[options.net]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe_machine()
    print(f"torch {torch.__version__}, {machine['device']}, {machine['threads']} threads")
    print(
        f"{net.title}; milliseconds a step; largest: {net.shape[0]} would be a weight each example"
    )
    titles = options.guide or [DETERMINISTIC, *GUIDES]
    heads = [*COLUMNS, "Python, launches", "total", "unprofiled", "largest"]
    widths = {head: max(len(head), 8) + 2 for head in heads}
    print(" " * 20 + "".join(f"{head:>{widths[head]}}" for head in heads))
    tops = {}
    for title in titles:
        torch.manual_seed(0)
        plain = net.make().to(device)
        weight_bytes = max(4 * value.numel() for value in plain.parameters())
        step = METHODS[title](plain, *net.make_batch(device)).step
        row = measure(step, options.steps)
        row["largest"], tops[title] = look_at_tensors(step, options.top)
        row["largest"] /= weight_bytes
        print(f"{title:<20}" + "".join(f"{row[head]:>{widths[head]}.2f}" for head in heads))
    for title, top in tops.items():
        for spent, calls, kind, name, shapes in top:
            print(f"{title:<20}{spent:>10.3f}{calls:>5} x  {kind:<16}{name:<36}{shapes}")


def measure(step, steps):
    """Return milliseconds a step by kind, of profiled steps, and without a profiler."""
    timed(step, 2)
    alone = [timed(step, 1) for _ in range(steps)]
    with profile(activities=activities()) as recorded:
        total = timed(step, steps)
    spent = defaultdict(float)
    for event in recorded.events():
        spent[kind_of(event)] += own_time(event) / 1e3 / steps
    row = {kind: spent[kind] for kind in COLUMNS}
    rest = total / steps - sum(row.values())
    alone = statistics.median(alone)
    return row | {"Python, launches": rest, "total": total / steps, "unprofiled": alone}


def timed(step, count):
    """Return the milliseconds of so many steps."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def kind_of(event):
    ancestor = event
    while ancestor is not None:
        if ancestor.name.startswith("Optimizer."):
            return "optimizer"
        ancestor = ancestor.cpu_parent
    space, _, name = event.name.partition("::")
    if space != "aten":
        return "launches"
    fitting = (kind for kind, names in KINDS.items() if names.fullmatch(name))
    return next(fitting, "elementwise")


def own_time(event):
    """Return the microseconds of an operation, without those that it calls."""
    if event.device_type != torch.autograd.DeviceType.CPU:
        return 0.0  # a kernel: it is counted at the operation that launched it
    return event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total


def look_at_tensors(step, top):
    """Return the bytes of a step's largest allocation, and its operations that take the longest."""
    with profile(activities=activities(), profile_memory=True, record_shapes=True) as recorded:
        timed(step, 1)
    events = recorded.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    spent, calls = defaultdict(float), defaultdict(int)
    for event in recorded.events():
        kind = kind_of(event)
        if kind != "launches":
            shapes = ", ".join("x".join(map(str, shape)) for shape in event.input_shapes if shape)
            spent[kind, event.name, shapes] += own_time(event) / 1e3
            calls[kind, event.name, shapes] += 1
    first = sorted(spent, key=spent.get, reverse=True)[:top]
    return largest, [(spent[key], calls[key], *key) for key in first]


def activities():
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]


if __name__ == "__main__":
    main()
