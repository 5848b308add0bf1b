"""Matrix identities, factorizations and gradients that distributions share."""
