"""The history of a fit."""

from dataclasses import dataclass, field

from pyro_structvi.infer.steps.eager import StepTerms


@dataclass(repr=False)
class History:
    """The history of a fit: lists with one entry a step, and of validations one entry each.

    Attributes:
        elbo: The estimated evidence lower bound, in nats, with the KL at full weight.
        log_likelihood: Its expected log likelihood, scaled to all data.
        kl: Its KL divergence.
        kl_weight: The weight of the KL in the step's loss.
        lr: The learning rate of the first parameter group.
        validation: The values of the metric on the validation data.
        validation_steps: After how many steps each was measured.
        interrupted: Whether the fit was stopped from the keyboard.
        compilation: Notes on tracing and compilation, with the step and the reason, a line each.
    """

    elbo: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_weight: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    interrupted: bool = False
    compilation: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the number of steps and the last bound."""
        last = "".join(f", elbo={elbo:.6g}" for elbo in self.elbo[-1:])
        return f"History({len(self.elbo)} steps{last})"

    def add(self, terms: StepTerms, lr: float) -> None:
        """Write down a step."""
        self.log_likelihood.append(terms.log_likelihood)
        self.kl.append(terms.kl)
        self.elbo.append(terms.log_likelihood - terms.kl)
        self.kl_weight.append(terms.kl_weight)
        self.lr.append(lr)
