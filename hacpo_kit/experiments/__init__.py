"""Many runs: notebooks through papermill, grids, sweeps, comparisons, reports."""

from importlib import import_module

# a name is imported when it is first used, because notebooks and workers need few of them
_MODULE_OF = {
    "Experiment": "parameters",
    "check_parameters": "parameters",
    "run_notebook": "notebooks",
    "notebook_parameters": "notebooks",
    "write_html": "pages",
    "find_notebook": "paths",
    "NOTEBOOKS": "paths",
    "PROJECT": "paths",
}


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hacpo_kit.experiments' has no attribute {name!r}")
    return getattr(import_module(f"hacpo_kit.experiments.{_MODULE_OF[name]}"), name)
