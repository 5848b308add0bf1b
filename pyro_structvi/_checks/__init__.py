"""The one place that checks arguments, and words the errors about them."""

from pyro_structvi._checks.tensors import *  # noqa: F403
from pyro_structvi._checks.types import *  # noqa: F403
from pyro_structvi._checks.user_line import warn_user as warn_user
