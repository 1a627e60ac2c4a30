"""A real JupyterLab in headless Chromium; skipped where there is no browser."""
