"""A run as configuration for other programs."""
