"""Values that are fine for an argument though they are unusual, and errors that stay as they are."""

from fnmatch import fnmatchcase

# By labels of values, patterns of `callable.argument`. These are no wrong values.
FINE = {
    # numbers in range
    "zero": (
        *("*.rate", "*Dropout.input_dim", "prune_*.amount", "PointMass.variance", "*.event_dim"),
        *("StructuredAdam.eps", "StructuredAdam.posterior_lr", "StructuredAdam.warm_up"),
        *("StructuredELBO.kl_weight", "fit.kl_weight", "tie_scales.steps", "*.padding"),
    ),
    "zero, huge": (
        *("LinearAnnealing.*", "CosineDecay.*"),
        "Dropout.input_dim",  # a guide compares it with the dimensions of its weights
    ),
    "zero, negative": ("IsotropicStudentT.dim",),
    "zero, negative, huge": (
        *("LinearAnnealing.__call__.step", "CosineDecay.__call__.step", "TokenClassifier.ignore_*"),
        *("*.draw.number", "nuts.seed", "mclmc.seed"),
    ),
    "huge": (
        *("*.num_data", "*.batch_size", "Checkpoint.every", "Validation.every"),
        *("Validation.patience", "nuts.max_tree_depth", "*.expand.batch_shape"),
        "Eigenbasis*.block_size",  # the largest size of a block
        *("plot_coverage.num_examples", "estimate_memory.rank"),
        "IsotropicStudentT.event_shape",
    ),
    "huge, fraction": ("*.init_scale", "*.init_relative_scale"),
    "two": ("HierarchicalScale.fan_in",),
    "number": ("FanIn*.fan_in",),
    # None and "" where a later default serves
    "none": ("*.init_loc_fn", "*.create_plates", "*.init_relative_scale"),
    "empty": ("*.site", "bayesianize.layers"),
    # numbers in the place of tensors, and tensors of numbers
    "number, scalar": ("*scale", "IsotropicStudentT.df"),
    "list, number, scalar": ("*.conditional_scale",),
    "list": ("AugmentedMatrixNormal.*scale",),
    "tensor": ("Regressor.noise_scale",),
    "scalar": ("*.kept",),
    # further dimensions in front, more rows, more columns, in any order
    "deeper": ("*Normal.loc", "ScaleMixtureNormal.*", "IsotropicStudentT.*"),
    "deeper, infinity": ("*.log_prob.value",),  # whose density is zero
    "scalar, empty, deeper": ("Auxiliary.log_prob.value", "ScaleMixtureNormal.log_prob.value"),
    "deeper, longer": ("*.image.x", "GlobalInducingGuide.inputs", "laplace_variances.x"),
    "deeper, longer, wider": ("*.forward.x",),
    "deeper, longer, wider, float32": ("BernoulliDropout.loc", "PointMixture.members"),
    "deeper, longer, wider, scalar, empty": ("*.rows.index",),
    "longer": ("LowRankNormal.factors", "*.batch_statistics"),
    # scores are computed in double for any dtype; more examples, or more draws
    "float32": (
        *("conformal_sets.calibration", "classification_scores.probabilities", "agreement.*"),
        "total_variation.*",
    ),
    "longer, float32": ("conformal_sets.probabilities",),
    "longer, whole, float32": ("predictive_distance.*", "wasserstein.*"),
    "longer, wider, whole, float32": ("detection_scores.*",),
    "longer, wider, float32": (
        "tie_scales.scale",
        "*.standardize",  # inputs are compared with it
    ),
    "whole, float32": (  # zeros and ones, or counts, of any dtype
        *("BinaryClassifier.forward.y", "PoissonRegressor.forward.y"),
        *("expected_coverage.y", "regression_scores.y", "risk_coverage.*"),
    ),
    "scalar, empty, deeper, complex, meta, longer, wider, whole, float32, nan, infinity": (
        "FanIn.standard_deviation.parameter",
    ),
    # The number of classes is known with the net's output; booleans are the classes 0 and 1.
    "empty, longer, wider, float32": ("Classifier.class_weights",),
    "true": ("*Classifier.forward.y",),
    # figures take lists and arrays too, and convert them
    "list, numpy": ("plot_reliability.y",),
    "numpy, float32": ("plot_reliability.probabilities",),
    "numpy, float32, longer, wider": ("plot_scale_matrix.scale",),
    "list, numpy, whole, float32": ("plot_band.*", "plot_coverage.*"),
    "list, numpy, whole, float32, zero": ("plot_band.scale",),
    "list, numpy, whole, float32, longer, wider": ("plot_importance.log_weights",),
    "fractions, huge": ("plot_band.widths",),
    # names that nothing can know yet, or that are any text
    "unknown key": ("largest.variances",),
    "unknown key, empty": (
        *("Subnetwork.chosen", "GlobalInducingGuide.families", "to_inference_data.functions"),
    ),
    "text, empty": ("Checkpoint.path", "plot_*.label"),
    "text": ("save.path",),
}

# Errors that are not ours to word, or values that are looked at later: by the reason.
EXCEPTIONS = {
    "memory that is not there: torch says how many bytes": {
        "huge": (
            *("*.rsample.sample_shape", "*.sample.sample_shape", "PointMass.expand.batch_shape"),
            *("*.rank", "*.num_bins", "*.size", "*.inducing_shape", "InducingWeights.shape"),
            "WalshHadamard*",
        ),
    },
    "a number of passes: it runs for as long as was asked, and can be interrupted": {
        "huge": (
            *("fit.num_steps", "*.num_samples", "*.num_particles", "tie_scales.steps"),
            *("nuts.num_*", "mclmc.num_*", "mclmc.thinning"),
        ),
    },
    "values on a device are read only where they are scored, so as not to wait for it": {
        "meta": ("*Classifier.forward.y",),
        "nan, infinity, none": ("*.forward.y", "*.initialize.y", "*.report.y"),
        "nan, infinity": (
            *("*.image.x", "*.forward.x", "*.initialize.x", "*.report.x"),
            "WalshHadamard*.weight.coefficients",
        ),
    },
    "Pyro's own errors of observed sites": {
        "none, infinity": ("StructuredELBO.*.y", "gradient_snr.y", "pareto_k.y"),
        "none, nan, infinity": ("CompiledSVI.*.y",),
        "none": ("weigh_by_bound.y",),
        "infinity": ("predict.y", "predict_moments.y", "to_inference_data.y"),
    },
    "the model is the user's: a call of it with these arguments is right for some model": {
        "unknown, numpy": ("CompiledSVI.*.x", "CompiledSVI.*.y"),
        "class": ("estimate_memory.make_guide", "MixtureGuide.make_guide"),
    },
    "an embedding says of an index what torch's own says; other structures have no rows to give": {
        "negative, too large, real, true, complex, meta": ("*.rows.index",),
    },
    "layers take what torch's layers take": {
        "float32, whole, deeper": ("RankOne*.forward.x",),
        "complex, float32, whole, deeper": ("WalshHadamard*.forward.x",),
    },
    "torch lists all names that are missing, however many": {
        "unknown key, text as entry, none as entry, class as entry, empty": (
            "*.load_state_dict.state_dict",
        ),
    },
    "torch's own error of a state without groups": {
        "number as key": ("StructuredAdam.load_state_dict.state_dict",),
    },
    "a file that is not there has Python's own class of error": {"text": ("load.path",)},
    "torch.compile is asked at the first step": {"text": ("CompiledSVI.backend",)},
}


def is_listed(listed, case, argument, label):
    """Whether a table has ``callable.argument`` for a label."""
    call = f"{case.name}.{argument}"
    return any(
        label in labels.split(", ") and any(fnmatchcase(call, pattern) for pattern in patterns)
        for labels, patterns in listed.items()
    )
