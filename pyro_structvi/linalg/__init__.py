"""Matrix identities, factorizations, sums and quadratures."""
