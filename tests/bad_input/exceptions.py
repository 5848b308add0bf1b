"""Values that are fine for an argument though they are unusual, and errors that stay as they are."""

from fnmatch import fnmatchcase

# By `callable.argument`, with wildcards. These are no wrong values.
FINE = {
    # any number in range
    "*.rate": "zero",
    "HierarchicalScale.fan_in": "two",
    "FanIn*.fan_in": "number",
    "*Dropout.input_dim": "zero",
    "Dropout.input_dim": "zero, huge",  # a guide compares it with the dimensions of its weights
    "Eigenbasis*.block_size": "huge",  # the largest size of a block
    "prune_*.amount": "zero",
    "PointMass.variance": "zero",
    "StructuredAdam.eps": "zero",
    "TokenClassifier.ignore_index": "zero, negative, huge",
    "StructuredAdam.posterior_lr": "zero",
    "StructuredAdam.warm_up": "zero",
    "StructuredELBO.kl_weight": "zero",
    "fit.kl_weight": "zero",
    "LinearAnnealing.*": "zero, huge",
    "CosineDecay.*": "zero, huge",
    "LinearAnnealing.__call__.step": "zero, negative, huge",
    "CosineDecay.__call__.step": "zero, negative, huge",
    "*.draw.number": "zero, negative, huge",
    "*.init_scale": "huge, fraction",
    "*.max_memory": "huge, fraction",
    "nuts.seed": "zero, negative, huge",
    "mclmc.seed": "zero, negative, huge",
    "mclmc.energy_variance": "huge",
    "mclmc.initial_energy_variance": "huge",
    "tie_scales.steps": "zero",
    "*.padding": "zero",
    "*.num_data": "huge",
    "fit.batch_size": "huge",
    "Checkpoint.path": "text, empty",
    "save.path": "text",
    "conformal_sets.probabilities": "longer, float32",
    "conformal_sets.calibration": "float32",
    "Checkpoint.every": "huge",
    "Validation.every": "huge",
    "Validation.patience": "huge",
    "predict.batch_size": "huge",
    "laplace_variances.batch_size": "huge",
    "nuts.max_tree_depth": "huge",
    # functions of any name, or none
    "to_inference_data.functions": "empty, unknown key",
    # None and "" where a later default serves
    "*.init_loc_fn": "none",
    "*.create_plates": "none",
    "StructuredAdam.clip": "none",
    "*.site": "empty",
    # numbers in the place of tensors, and tensors of numbers
    "*scale": "number, scalar",
    "AugmentedMatrixNormal.*scale": "list",
    "*.conditional_scale": "list, number, scalar",
    "Regressor.noise_scale": "tensor",
    "*.kept": "scalar",
    # further dimensions in front, more rows, more columns, in any order
    "*Normal.loc": "deeper",
    "BernoulliDropout.loc": "deeper, longer, wider, float32",
    "PointMixture.members": "deeper, longer, wider, float32",
    "LowRankNormal.factors": "longer",
    "tie_scales.scale": "longer, wider, float32",
    "ScaleMixtureNormal.*": "deeper, longer",
    "*.event_dim": "zero",
    "*.log_prob.value": "deeper, infinity",  # whose density is zero
    "Auxiliary.log_prob.value": "scalar, empty, deeper",
    "ScaleMixtureNormal.log_prob.value": "scalar, empty, deeper, longer, wider",
    "*.expand.batch_shape": "huge",
    "*.image.x": "deeper, longer",
    "*.batch_statistics": "longer",
    "*.rows.index": "longer, wider, deeper, scalar, empty",
    "BinaryClassifier.forward.y": "whole, float32",  # zeros and ones of any dtype
    "PoissonRegressor.forward.y": "whole, float32",
    "*.forward.x": "longer, wider, deeper",
    "*.standardize": "longer, wider, float32",  # inputs are compared with it
    "laplace_variances.x": "longer, deeper",
    "expected_coverage.y": "float32",
    "predictive_distance.*": "deeper, longer, float32",
    "FanIn.standard_deviation.parameter": (
        "scalar, empty, deeper, complex, meta, longer, wider, whole, float32, nan, infinity"
    ),
    # scores are computed in double for any dtype; more examples, or more draws
    **dict.fromkeys(
        (
            *("classification_scores.probabilities", "regression_scores.y"),
            *("agreement.*", "total_variation.*", "risk_coverage.*"),
        ),
        "float32",
    ),
    "wasserstein.*": "longer, float32",
    "detection_scores.*": "longer, wider, float32",
    "plot_coverage.num_examples": "huge",
    "plot_importance.log_weights": "list, numpy, whole, float32, longer, wider",
    # The number of classes is known with the net's output; booleans are the classes 0 and 1.
    "Classifier.class_weights": "empty, longer, wider, float32",
    "*Classifier.forward.y": "true",
    "predict_moments.batch_size": "huge",
    # figures take lists and arrays too, and convert them
    **dict.fromkeys(("plot_band.*", "plot_coverage.*"), "list, numpy, whole, float32"),
    "plot_reliability.y": "list, numpy",
    "plot_reliability.probabilities": "numpy, float32",
    "plot_scale_matrix.scale": "numpy, whole, float32, longer, wider",
    "plot_band.scale": "list, numpy, whole, float32, zero",
    "plot_band.widths": "fractions, huge",
    # what the function is there to answer
    "estimate_memory.rank": "huge",
    # names that nothing can know yet, or that are any text
    "Subnetwork.chosen": "unknown key, empty",
    "GlobalInducingGuide.families": "unknown key, empty",
    "GlobalInducingGuide.inputs": "deeper, longer",
    "largest.variances": "unknown key",
    "plot_elbo.kl_by_site": "unknown key, empty",
    **dict.fromkeys(
        ("plot_band.label", "plot_coverage.label", "plot_importance.label"), "text, empty"
    ),
    "bayesianize.layers": "empty",
}

# Errors that are not ours to word, or values that are looked at later: by the reason.
EXCEPTIONS = {
    "memory that is not there: torch says how many bytes": {
        "*.rsample.sample_shape": "huge",
        "*.sample.sample_shape": "huge",
        "PointMass.expand.batch_shape": "huge",
        "*.rank": "huge",
        "*.num_bins": "huge",
        "*.size": "huge",
        "*.inducing_shape": "huge",
        "InducingWeights.shape": "huge",
        "WalshHadamard*": "huge",
    },
    "a number of passes: it runs for as long as was asked, and can be interrupted": {
        "fit.num_steps": "huge",
        "predict.num_samples": "huge",
        "*.sample_functions.num_samples": "huge",
        "gradient_snr.num_samples": "huge",
        "pareto_k.num_samples": "huge",
        "weigh_by_bound.num_particles": "huge",
        "weigh_by_stacking.num_samples": "huge",
        "to_inference_data.num_samples": "huge",
        "laplace_variances.num_samples": "huge",
        "StructuredELBO.num_particles": "huge",
        "nuts.num_*": "huge",
        "mclmc.num_*": "huge",
        "mclmc.thinning": "huge",
        "tie_scales.steps": "huge",
    },
    "values on a device are read only where they are scored, so as not to wait for it": {
        "*Classifier.forward.y": "meta",
        "*.forward.weights": "meta",
        "*.forward.y": "nan, infinity, none",
        "*.initialize.y": "nan, infinity, none",
        "*.report.y": "nan, infinity, none",
        "*.image.x": "nan, infinity",
        "*.forward.x": "nan, infinity",
        "*.initialize.x": "nan, infinity",
        "*.report.x": "nan, infinity",
        "WalshHadamard*.weight.coefficients": "nan, infinity",
    },
    "Pyro's own errors of observed sites": {
        "StructuredELBO.*.y": "none, nan, infinity",
        "CompiledSVI.*.y": "none, nan, infinity",
        "gradient_snr.y": "none, nan, infinity",
        "pareto_k.y": "none, nan, infinity",
        "weigh_by_bound.y": "none",
        "predict.y": "infinity",
        "predict_moments.y": "infinity",
        "to_inference_data.y": "infinity",
    },
    "the model is the user's: a call of it with these arguments is right for some model": {
        "CompiledSVI.*.x": "unknown, numpy",
        "CompiledSVI.*.y": "unknown, numpy",
        "estimate_memory.make_guide": "class",
        "MixtureGuide.make_guide": "class",
    },
    "an embedding says of an index what torch's own says; other structures have no rows to give": {
        "*.rows.index": "negative, too large, real, true, complex",
    },
    "layers take what torch's layers take": {
        "RankOne*.forward.x": "float32, whole, deeper",
        "WalshHadamard*.forward.x": "complex, float32, whole, deeper",
    },
    "torch lists all names that are missing, however many": {
        "*.load_state_dict.state_dict": (
            "unknown key, text as entry, none as entry, class as entry, empty"
        ),
    },
    "a file that is not there has Python's own class of error": {"load.path": "text"},
    "torch.compile is asked at the first step": {"CompiledSVI.backend": "text"},
}


def is_listed(listed, case, argument, label):
    """Whether a table of patterns has ``callable.argument = label``."""
    call = f"{case.name}.{argument}"
    return any(
        fnmatchcase(call, pattern) and label in labels.split(", ")
        for pattern, labels in listed.items()
    )
