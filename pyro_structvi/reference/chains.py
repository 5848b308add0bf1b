"""Microcanonical Langevin chains."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from pyro_structvi._torch import kernels_for_vmap
from pyro_structvi.infer.steps.recording import Record

MEMORY = 150  # steps that the adaptation of the step size remembers
TRUST = 10.0  # steps, in a step size before its first step and after a failed one
SPREAD = 1.5  # of the logarithm of the energy's change, within which the adaptation trusts it
SMALLEST_STEP = 1e-9  # of the decoherence length
GROWTH = 1.02  # of a step size that a failed step has halved
# The energy's change in a step that is not taken, in nats, and in target standard deviations besides.
LARGEST_CHANGE, LARGEST_DEVIATION = 1000.0, 30.0
WORTH_COMPILING = 60.0  # seconds of gradients to come
OPERATION, ELEMENT = 2e-6, 5e-10  # seconds of an operation and of an element, about
# Elements of results in a pass on a CPU: more leave the cache, and their memory is allocated anew.
LARGEST_PASS = 16_000_000
REFLECTED = 0.1931833275037836  # of a step: the minimal-norm integrator's first kick

Compiled = Literal["auto", True, False]
Gradients = Callable[[Tensor], tuple[Tensor, Tensor]]


class Chains:
    """Microcanonical Langevin chains, all in one pass, from coordinates ``(C, D)``.

    A step whose energy changes without bound is not taken: the chain stays with the opposite velocity,
    and its next steps are smaller. ``num_moved`` ``(C,)`` counts the steps taken since the warm-up.
    """

    def __init__(self, position: Tensor, gradients: Gradients) -> None:
        self._evaluate, self.position = gradients, position
        self.log_density, self._gradient = self._evaluate(position)
        if not bool(torch.isfinite(self.log_density).all()):
            raise RuntimeError(
                "The log joint is not finite at a draw of `guide`. Fit the guide before sampling, and "
                "look for infinite values in `data`."
            )
        self._velocity = normalize(torch.randn_like(position), dim=-1)
        self.length = math.sqrt(position.shape[-1])
        self.step_size = torch.full_like(position[:, :1], self.length / 4)
        self._shrunk = torch.ones_like(self.step_size)  # factor of step sizes, after failed steps
        self._most_change = LARGEST_CHANGE
        self.num_moved = torch.zeros(len(position), dtype=torch.long, device=position.device)
        self.num_steps = 0

    def warm_up(self, count: int, initial: float, variance: float, progress: bool) -> None:
        """Tune step sizes by the energy's change, and the length by the width of the posterior.

        The target variance of the change falls from ``initial`` to ``variance`` over three quarters of
        the steps. Large steps at first leave the start sooner (Sommer et al. 2025).
        """
        size = self.position.shape[-1]
        sums = self.position.new_zeros(3, size, dtype=torch.float64)  # of 1, positions and squares
        # In double precision, for the sixth power of small steps.
        step = self.step_size.double().squeeze(-1)
        # Each begins as if some steps of this size had had the target's change, so that one step with a
        # small change by chance does not enlarge it much; likewise after a failed step.
        weights = torch.full_like(step, TRUST)
        weighted = initial * weights / step**6
        # The mean over the last quarter has the rare large changes, too, which the adaptation forgets.
        total = torch.zeros_like(step)
        for number in tqdm(range(count), desc="warm-up", disable=not progress):
            target = variance * (initial / variance) ** max(0.0, 1 - number / (0.75 * count))
            self._most_change = LARGEST_CHANGE + LARGEST_DEVIATION * math.sqrt(size * target)
            change, moved = self._move()
            change = torch.where(moved, change, self._most_change)
            # The change is of the order of step^3: an average of change^2 / step^6 predicts the step.
            square = change.double().square() / size + 1e-8 * target
            weight = torch.exp(-0.5 * ((square / target).log() / (6 * SPREAD)).square())
            decay = (MEMORY - 1) / (MEMORY + 1)
            if number >= 3 * count // 4:
                total = total + square / step**6
            weighted = torch.where(
                moved,
                decay * weighted + weight * square / step**6,
                TRUST * target / (step / 2) ** 6,
            )
            weights = torch.where(moved, decay * weights + weight, TRUST)
            step = ((weighted / (target * weights)) ** (-1 / 6)).clamp_max(self.length)
            step = step.clamp_min(SMALLEST_STEP * self.length)
            if bool((step <= SMALLEST_STEP * self.length).all()):
                raise RuntimeError(
                    "The energy changes without bound however small the step is, so no chain can move. "
                    "Check the data, or sample in double precision."
                )
            self.step_size = step.unsqueeze(-1).to(self.position)
            if number >= count // 4:
                own = self.position.double()
                sums += torch.stack([torch.ones_like(own), own, own.square()]).sum(1)
            if number in (count // 2, 3 * count // 4):
                mean, squares = sums[1:] / sums[0]
                self.length = math.sqrt(float((squares - mean.square()).sum())) or self.length
                sums.zero_()
        tuned = (total / (variance * (count - 3 * count // 4))) ** (-1 / 6)
        self.step_size = tuned.clamp_max(self.length).unsqueeze(-1).to(self.position)

    def step(self) -> dict[str, Tensor]:
        """Take a step; return statistics of the chains."""
        change, moved = self._move(self._shrunk)
        self._shrunk = torch.where(
            moved.unsqueeze(-1), (GROWTH * self._shrunk).clamp_max(1.0), self._shrunk / 2
        )
        self.num_steps += 1
        self.num_moved = self.num_moved + moved
        return {"energy_change": change, "diverging": ~moved}

    def transition(self) -> dict[str, Tensor]:
        """Take a trajectory and accept or reject it (Metropolis-Hastings)."""
        position, log_density, gradient = self.position, self.log_density, self._gradient
        self._velocity = normalize(torch.randn_like(self.position), dim=-1)
        mean = max(1, round(self.length / float(self.step_size.median())))
        change = torch.zeros_like(self.log_density)
        has_moved = torch.ones_like(change, dtype=torch.bool)
        for _ in range(int(torch.randint(1, 2 * mean + 1, ()))):
            own, moved = self._move(refreshes=False)
            change, has_moved = change + own, has_moved & moved
        rate = torch.where(has_moved, (-change).clamp_max(0.0).exp(), 0.0)
        accepted = torch.rand_like(rate) < rate
        each = accepted.unsqueeze(-1)
        self.position = torch.where(each, self.position, position)
        self._gradient = torch.where(each, self._gradient, gradient)
        self.log_density = torch.where(accepted, self.log_density, log_density)
        self.num_steps += 1
        self.num_moved = self.num_moved + has_moved
        return {"energy_change": change, "acceptance_rate": rate, "diverging": ~has_moved}

    def _move(self, factor: Tensor | float = 1.0, refreshes: bool = True) -> tuple[Tensor, Tensor]:
        """Take a step of the minimal-norm integrator; return the energy's change, and who has moved."""
        h = factor * self.step_size
        velocity, first = _kick(self._velocity, self._gradient, REFLECTED * h)
        position = self.position + h / 2 * velocity
        velocity, second = _kick(velocity, self._evaluate(position)[1], (1 - 2 * REFLECTED) * h)
        position = position + h / 2 * velocity
        log_density, gradient = self._evaluate(position)
        velocity, third = _kick(velocity, gradient, REFLECTED * h)
        change = first + second + third - (log_density - self.log_density)
        moved = (change.abs() < self._most_change) & torch.isfinite(gradient).all(-1)
        each = moved.unsqueeze(-1)
        self.position = torch.where(each, position, self.position)
        self._gradient = torch.where(each, gradient, self._gradient)
        self.log_density = torch.where(moved, log_density, self.log_density)
        velocity = torch.where(each, velocity, -self._velocity)
        if refreshes:
            noise = ((2 * h / self.length).expm1() / velocity.shape[-1]).sqrt()
            velocity = normalize(velocity + noise * torch.randn_like(velocity), dim=-1)
        self._velocity = velocity
        return torch.where(moved, change, 0.0), moved


def _kick(velocity: Tensor, gradient: Tensor, time: Tensor | float) -> tuple[Tensor, Tensor]:
    """Turn unit velocities ``(C, D)`` towards the gradient; return the change of kinetic energy, too.

    The exact flow of the velocity at a fixed position (Robnik et al. 2023, Eq. 16), by exponentials of
    negative numbers only.
    """
    size = velocity.shape[-1]
    norm = gradient.norm(dim=-1, keepdim=True)
    direction = gradient / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    turn = time * norm / (size - 1)
    cosine = (direction * velocity).sum(-1, keepdim=True)
    decay = (-turn).exp()
    turned = direction * (1 - decay) * (1 + decay + cosine * (1 - decay)) + 2 * decay * velocity
    change = turn - math.log(2) + (1 + cosine + (1 - cosine) * decay.square()).log()
    return normalize(turned, dim=-1), (size - 1) * change.squeeze(-1)


def gradients_of(
    target: Callable[[Tensor], Tensor], example: Tensor, num_calls: int, compiled: Compiled
) -> Gradients:
    """Return a function from positions ``(C, D)`` to log densities and gradients of a target."""
    both = vmap(grad_and_value(target), randomness="error")

    def evaluate(positions: Tensor) -> tuple[Tensor, Tensor]:
        with kernels_for_vmap(positions):
            gradient, value = both(positions)
        return value.detach(), gradient.detach()

    try:
        evaluate(example)
    except RuntimeError as error:
        raise RuntimeError(
            "`model` cannot run several draws in one pass of `torch.func.vmap`: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return without_python(evaluate, example, num_calls, compiled)


def without_python(
    function: Callable[[Tensor], Any], example: Tensor, num_calls: int, compiled: Compiled
) -> Callable[[Tensor], Any]:
    """Return a function to a tuple of tensors as its recorded operations, or as it is if it has none.

    With many examples the chains run in groups, so that their operations stay in the cache.
    """
    record: Any = None
    try:
        record = _record_of_group(function, example)
        first = example[: len(record.outputs[0])]
        # Measured times would make the rounding of draws depend on what else the computer does.
        seconds = OPERATION * len(record.operations) + ELEMENT * record.num_elements
        num_calls *= len(example) // len(first)
        if compiled is True or (compiled == "auto" and num_calls * seconds > WORTH_COMPILING):
            record.compile("inductor", [first])
            record([first])  # an error of its first run is one of compiling
    except Exception as error:  # of a record, of inductor, or of a compiler for C++
        if compiled is True:
            raise RuntimeError(f"`model` cannot be compiled: {error}") from error
        if record is None:
            return function
        record.interpret()

    def of_group(positions: Tensor) -> Any:
        return record([positions]) if record.holds([positions]) else function(positions)

    def replay(positions: Tensor) -> Any:
        if len(positions) == len(first):
            return of_group(positions)
        found = zip(*map(of_group, positions.split(len(first))), strict=True)
        return tuple(torch.cat(parts) for parts in found)

    return replay


def _record_of_group(function: Callable[[Tensor], Any], example: Tensor) -> Record:
    """Return the record of a pass of as many chains as fit into the cache and divide their number."""
    count, record = len(example), Record(function, [example])
    if example.device.type != "cpu":
        return record
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    small = [size for size in sizes if record.num_elements * size <= LARGEST_PASS * count]
    size = max(small, default=1)
    return record if size == count else Record(function, [example[:size]])
