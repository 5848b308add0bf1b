"""Which tests exercise which module: files of tests, and a regular expression for names in each."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MUTATED = (
    "pyro_structvi/structures/**/*.py",
    "pyro_structvi/maps/**/*.py",
    "pyro_structvi/weights/**/*.py",
    "pyro_structvi/infer/elbo.py",
)

# Tests of a module, by its folder and by its name. The contract comes first, since it is quick.
CONTRACT = "distributions/test_contract"
TESTS = {
    "structures": (
        *(CONTRACT, "distributions/test_gaussians", "distributions/test_{}", "guides/test_{}"),
    ),
    "structures/inducing": (
        *(CONTRACT, "distributions/inducing/test_*", "guides/test_inducing"),
        "linalg/test_factorizations",
    ),
    "structures/global_inducing": ("guides/test_global_inducing*", "families/test_contract"),
    "weights": (CONTRACT, "distributions/test_declared_arguments", "lazy/test_*"),
    "maps": ("maps/test_*", "lazy/test_lazy_weight", "lazy/test_embedding"),
    "infer": ("infer/test_elbo*", "infer/test_schedules", "infer/test_vectorized_particles"),
    "dropout": ("guides/test_points",),
    "points": ("distributions/test_point_mixture",),
    "full_covariance": ("guides/test_covariances",),
    "kl_between": ("distributions/test_kl_*",),
    "low_rank": ("guides/test_covariances",),
    "matrix_normal": ("guides/test_covariances",),
    "mean_field": (
        "distributions/test_transformed",
        "guides/test_structured",
        "posterior/test_pruning",
    ),
    "mixture": ("guides/test_points", "distributions/test_site_distributions"),
    "rowwise": ("guides/test_covariances",),
    "site_distributions": (
        *("distributions/test_kl_*", "distributions/test_site_distributions"),
        "guides/test_autoguide",
    ),
    "subnetwork": ("guides/test_subnetwork*",),
    "torch_distributions": ("distributions/test_site_distributions", "guides/test_structured"),
}
# The structures of the contract that see a module; every one by default.
STRUCTURES = {
    "full_covariance": r"full",
    "k_tied": r"\d-tied",
    "low_rank": r"low rank",
    "matrix_normal": r"matrix normal",
    "mean_field": r"mean field",
    "rowwise": r"rowwise",
}


def modules():
    """Return the paths of all modules that are mutated."""
    files = [path for pattern in MUTATED for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


def tests_of(module):
    """Return the files of a module's tests with the names in each."""
    path = Path(module)
    folder, stem = str(path.parent).removeprefix("pyro_structvi/"), path.stem
    patterns = (*TESTS.get(folder, ()), *TESTS.get(stem, ()))
    files = [file for pattern in patterns for file in _files(pattern.format(stem))]
    if not files:
        raise LookupError(f"No tests of {module} are known; name some in {__file__}.")
    return {file: STRUCTURES.get(stem, "") if CONTRACT in file else "" for file in files}


def _files(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/{pattern}.py"))
