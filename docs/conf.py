"""How Sphinx builds the site: ``make docs``, or ``sphinx-build -W -b html docs docs/_build/html``.

Neither the build nor the site needs a network: MathJax is copied into the site, fonts are the system's.
With ``ONLINE=1`` in the environment, types of torch and others are linked to their own pages.
"""

import os

import pyro_structvi

project = "pyro-structvi"
author = "the pyro-structvi authors"
release = version = pyro_structvi.__version__

extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"),
    *("sphinx.ext.autosummary", "sphinx.ext.viewcode"),
    *("sphinx_copybutton", "sphinx-mathjax-offline"),
]
exclude_patterns = ["_build", "jupyter_execute", "scripts"]
templates_path = ["_templates"]

# Looked up only where a network is asked for: a build must not fail for want of one.
intersphinx_mapping = {
    name: (address, None)
    for name, address in {
        "arviz": "https://python.arviz.org/en/stable/",
        "numpyro": "https://num.pyro.ai/en/stable/",
        "pyro": "https://docs.pyro.ai/en/stable/",
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
    }.items()
    if os.environ.get("ONLINE")
}

# Pages
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_html_meta = {
    "description": "Structured variational posteriors for Bayesian neural networks in Pyro",
}

# Notebooks are executed at every build, and an error in one fails it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

# The reference, from docstrings in Google's style
autodoc_default_options = {
    "show-inheritance": True,
    "exclude-members": "set_fit_request, set_predict_request, set_score_request",  # of scikit-learn
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "pyro-structvi"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_favicon = "_static/favicon.svg"
