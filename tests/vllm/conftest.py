"""These tests start vLLM; `make test-vllm` runs them in an environment that has it, elsewhere they are not collected."""

import importlib.util

found = importlib.util.find_spec("vllm")
collect_ignore_glob = (
    [] if found is not None and found.origin else ["test_*.py"]
)  # this folder is found by that name, too
