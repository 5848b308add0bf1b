"""What a call with a wrong argument says: an error that names it, an unclear one, or nothing."""

import re
import resource
import signal
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import pyro
import torch

import pyro_structvi
from tests.bad_input.wrong_values import wrong_values

PACKAGE = str(Path(pyro_structvi.__file__).parent)
SENSIBLE = (
    *(ValueError, TypeError, NotImplementedError, FloatingPointError),
    *(MemoryError, RuntimeError, KeyError, IndexError),
)
SECONDS = 10
LONGEST_MESSAGE = 900


class TookTooLong(BaseException):
    """A call did not end in time."""


@contextmanager
def limits(seconds=SECONDS, gibibytes=6):
    """Stop a call that computes too long, and let none allocate what the machine does not have."""

    def stop(*_):
        raise TookTooLong

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + gibibytes * 2**30, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(case, name, value):
    """Call with one wrong argument; return "clear", "unclear", "silent" or "hung", and the message."""
    arguments = prepared(case) | {name: value}
    try:
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = [arguments.pop(name) for name in case.unnamed_parameters]
            case.function(*first, **arguments)
    except TookTooLong:
        return "hung", ""
    except Exception as error:
        text = f"{type(error).__name__}: {message_of(error)}"
        return ("clear" if is_clear(error, name) else "unclear"), text
    return "silent", ""


def prepared(case):
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    return case.arguments()


def message_of(error):
    return "\n".join([str(error), *notes_of(error)])


def notes_of(error):
    """Return the notes of an error, and of those that it was raised from, which Python prints too."""
    cause = [] if error.__cause__ is None else notes_of(error.__cause__)
    return [*getattr(error, "__notes__", []), *cause]


def is_clear(error, name):
    """Whether the library raised the error, or added a note to it, that names the argument.

    A message that prints a tensor or is very long is not clear either: data are no part of it.
    """
    notes = "\n".join(notes_of(error))
    is_ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
    written = message_of(error) if is_ours else notes
    return (
        isinstance(error, SENSIBLE)
        and not isinstance(error, torch.OutOfMemoryError)
        and re.search(rf"`[^`]*\b{re.escape(name)}\b[^`]*`", written) is not None
        and not re.search(r"\btensor\(", message_of(error))
        and len(message_of(error)) <= LONGEST_MESSAGE
    )


def wrong_calls(case):
    """Yield the name of an argument, the label of a wrong value, and the value."""
    for name, valid in prepared(case).items():
        for label, value in wrong_values(name, valid, case.parameters.get(name)).items():
            yield name, label, value
