"""Which tests exercise which module: files of tests, and a regular expression for names of tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MUTATED = (
    "pyro_structvi/distributions/**/*.py",
    "pyro_structvi/maps/**/*.py",
    "pyro_structvi/lazy/**/*.py",
    "pyro_structvi/infer/elbo.py",
)

CONTRACT = "tests/distributions/test_contract*.py"
ALL_OTHERS = r"^[^\[]*$"
# The subjects of the contract that a distribution's module serves; the base serves one of each kind.
SUBJECTS = {
    "full": r"\[full",
    "k_tied": r"\[\d-tied",
    "low_rank": r"\[low rank",
    "matrix_normal": r"\[matrix normal",
    "mean_field": r"\[mean field",
    "rowwise": r"\[rowwise",
    "conditional": r"\[given",
    "inducing": r"\[(inducing weights|given)",
}
ONE_OF_EACH = (
    r"\[(mean field,|2-tied|low rank 2|inducing weights, diagonal,|matrix normal|rowwise|full)|"
    + ALL_OTHERS
)
FOLDERS = {
    "distributions/inducing": ("tests/distributions/inducing/test_*.py",),
    "maps": ("tests/maps/test_*.py", "tests/lazy/test_flipout.py"),
    "lazy": ("tests/lazy/test_*.py", "tests/guides/test_joined_bias.py"),
    "infer": ("tests/infer/test_elbo*.py", "tests/infer/test_vectorized_particles.py"),
}
# Tests that say what a module does, beside the file with its name.
ELSEWHERE = {
    "auxiliary": (
        "tests/distributions/inducing/test_*.py",
        "tests/guides/test_inducing_weights.py",
    ),
    "dropout": ("tests/distributions/test_point_mass.py", "tests/guides/test_points.py"),
    "expected_log_prob": ("tests/distributions/test_kl_to_laplace.py",),
    "matheron": ("tests/lazy/test_factored_draws.py",),
    "point_mass": ("tests/distributions/test_dropout.py",),
    "pruned": ("tests/posterior/test_pruning.py", "tests/lazy/test_embedding.py"),
    "rowwise": ("tests/distributions/test_full.py",),
}
WITHOUT_CONTRACT = {
    "auxiliary",
    "dropout",
    "expected_log_prob",
    "point_mass",
    "point_mixture",
    "pruned",
}
WITHOUT_CONTRACT |= {"scale_mixture"}
KL = ("tests/distributions/test_kl_to_normals.py",)


def modules():
    """Return the paths of all modules that are mutated."""
    files = [path for pattern in MUTATED for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


def tests_of(module):
    """Return the files of a module's tests, those with its name first, and the names in each."""
    folder, stem = str(Path(module).parent).removeprefix("pyro_structvi/"), Path(module).stem
    patterns = [
        f"tests/{folder}/test_{stem}.py",
        *FOLDERS.get(folder, ()),
        *ELSEWHERE.get(stem, ()),
    ]
    if folder.startswith("distributions") and stem not in WITHOUT_CONTRACT:
        patterns += (CONTRACT, *KL)
    subjects = SUBJECTS.get(stem, SUBJECTS.get(Path(folder).name, ONE_OF_EACH))
    found = {}
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            found.setdefault(name, subjects if pattern == CONTRACT else "")
    if not found:
        raise LookupError(f"No tests of {module} are known; add them to {__file__}.")
    return found
