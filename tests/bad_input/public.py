"""What is public: every function, class and method with arguments."""

import importlib
import inspect

MODULES = [
    *("pyro_structvi", "pyro_structvi.distributions", "pyro_structvi.families"),
    *("pyro_structvi.guides", "pyro_structvi.nn", "pyro_structvi.infer"),
    *("pyro_structvi.posterior", "pyro_structvi.posterior.pruning"),
    *("pyro_structvi.posterior.element_scores", "pyro_structvi.posterior.warm_start"),
    *("pyro_structvi.reference", "pyro_structvi.metrics", "pyro_structvi.plots"),
    *("pyro_structvi.diagnostics", "pyro_structvi.moments"),
]

# Made by the library and handed to users; not called by them.
RECORDS = {
    *("ELBOTerms", "History", "MemoryEstimate", "ChainDraws", "NUTSDraws", "Prediction"),
    "PruningReport",
    *("ClassificationScores", "GuideReport", "ParameterReport", "PredictiveDistance"),
    *("DetectionScores", "RegressionScores", "RiskCoverage"),
    *("Coverage", "GradientNoise", "ImportanceDiagnosis"),
    *("RandomTensor", "Settings", "Spectrum"),
}
# Base classes without instances; their subclasses are called.
ABSTRACT = {"GaussianWeight", "WeightDistribution"}
# Methods by which the parts of the library call each other, with what they have made themselves.
METHODS_BETWEEN_PARTS = {
    # of distributions, for lazy weights and divergences
    *("as_matrix", "as_weight", "draw_standard", "expected_neg_log_prob", "image_around"),
    *("image_under", "image_variance", "mahalanobis", "map_for_batch", "output_variance"),
    *("scale_noise", "spread", "ways_to_apply", "whiten"),
    # of likelihoods, for predictions and bounds by moments
    *("lower_bound", "observe", "run_net"),
    # of likelihoods, with torch's arguments
    "named_parameters",
    # of families, for guides
    *("check_memory", "distribution", "fits", "init", "prior_scales", "unit"),
    # of guides, for files
    *("change_families", "from_options"),
    # of guides, for objectives
    *("begin_pass", "joint_posterior", "make_plates"),
    # of guides, with the model's arguments as `initialize` has them
    *("median", "call"),
    # of torch's modules and optimizers, whose argument is torch's
    *("parameters", "add_param_group"),
    # of layers' descriptions, for `bayesianize`
    "convert",
}


# Methods that take nothing, or refuse every call.
WITHOUT_ARGUMENTS = {"BernoulliDropout.expand", "PointMass.__call__"}


def public_callables():
    """Return functions, classes and methods with arguments, by the names of the table."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        for name in names:
            value = getattr(module, name)
            is_warning = inspect.isclass(value) and issubclass(value, Warning)
            is_second_name = getattr(value, "__name__", name) != name
            if not callable(value) or is_warning or is_second_name or name in RECORDS | ABSTRACT:
                continue
            if has_arguments(value):
                found[name] = value
            if inspect.isclass(value):
                found |= {f"{name}.{method}": own for method, own in user_methods(value).items()}
    return {name: value for name, value in found.items() if name not in WITHOUT_ARGUMENTS}


def user_methods(cls):
    """Return the public methods of a class that are the library's and have arguments."""
    names = {name for name in dir(cls) if not name.startswith("_") or name == "__call__"}
    return {
        name: method
        for name in names - METHODS_BETWEEN_PARTS
        if callable(method := getattr(cls, name))
        and inspect.isroutine(method)  # so is a cached property, since Python 3.13
        and (getattr(method, "__module__", "") or "").startswith("pyro_structvi")
        and has_arguments(method, skip=not inspect.ismethod(method))
    }


def has_arguments(function, skip=False):
    return len(inspect.signature(function).parameters) > skip
