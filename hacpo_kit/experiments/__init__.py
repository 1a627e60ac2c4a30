"""Many runs: notebooks through papermill, grids, sweeps, comparisons, reports."""
