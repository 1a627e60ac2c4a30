"""Plots and their static pictures, tables, explorer, monitor."""
