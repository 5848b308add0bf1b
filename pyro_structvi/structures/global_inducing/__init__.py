"""Global inducing points."""
