"""Problems, benchmarks, and the verifier with its worker processes."""
