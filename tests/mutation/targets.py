"""Which tests exercise which module: files of tests, and a regular expression for names in each."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MUTATED = (
    "pyro_structvi/distributions/**/*.py",
    "pyro_structvi/maps/**/*.py",
    "pyro_structvi/lazy/**/*.py",
    "pyro_structvi/infer/elbo.py",
)

# Tests beside the file with the module's name, by folder and by module.
TESTS = {
    "distributions/inducing": ("distributions/inducing/test_*",),
    "maps": ("maps/test_*",),
    "lazy": ("lazy/test_*",),
    "infer": ("infer/test_elbo*", "infer/test_vectorized_particles"),
    "arguments": ("distributions/test_declared_arguments",),
    "auxiliary": ("distributions/inducing/test_*", "guides/test_inducing_weights"),
    "calls": ("lazy/test_lazy_weight", "lazy/test_embedding"),
    "dropout": ("distributions/test_point_mass", "guides/test_points"),
    "expected_log_prob": ("distributions/test_kl_to_laplace",),
    "kl_to_normals": ("distributions/test_kl_to_laplace",),
    "matheron": ("lazy/test_factored_draws",),
    "point_mass": ("distributions/test_dropout",),
    "pruned": ("posterior/test_pruning", "lazy/test_embedding"),
    "rowwise": ("distributions/test_full",),
}

# The structures with which the tests of the contract see a module, by folder or module.
CONTRACT = tuple(f"distributions/test_{name}" for name in ("kl_to_normals", "ways_*", "contract*"))
BASES = (
    r"\[(mean field|2-tied|low rank 2|inducing weights, diagonal|matrix normal|full)[],]|^[^[]*$"
)
STRUCTURES = {
    "full": r"\[full",
    "k_tied": r"\[\d-tied",
    "low_rank": r"\[low rank",
    "matrix_normal": r"\[matrix normal",
    "mean_field": r"\[mean field",
    "rowwise": r"\[rowwise",
    "distributions/inducing": r"\[(inducing weights|given)",
    **dict.fromkeys(("independent", "outputs", "required_members", "weight_distribution"), BASES),
    **dict.fromkeys(("kl_to_normals", "bias_column", "convolution", "dense", "linear_map"), BASES),
}
# Rows of a distribution, and its part in a random bias, are seen by these alone.
LAST = ("distributions/test_dropout", "lazy/test_lazy_bias", "lazy/test_embedding")


def modules():
    """Return the paths of all modules that are mutated."""
    files = [path for pattern in MUTATED for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


def tests_of(module):
    """Return the files of a module's tests with the names in each; the file of its name is first."""
    path = Path(module)
    folder, stem = str(path.parent).removeprefix("pyro_structvi/"), path.stem
    own = (f"{folder}/test_{stem}", *TESTS.get(folder, ()), *TESTS.get(stem, ()))
    found = {file: "" for pattern in own for file in _files(pattern)}
    structures = STRUCTURES.get(stem, STRUCTURES.get(folder))
    if structures is not None:
        files = [file for pattern in CONTRACT for file in _files(pattern)]
        found |= {file: structures if "contract" in file else "" for file in files}
        found |= {file: "" for pattern in LAST for file in _files(pattern)}
    if not found:
        raise LookupError(f"No tests of {module} are known; name some in {__file__}.")
    return found


def _files(pattern):
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/{pattern}.py"))
