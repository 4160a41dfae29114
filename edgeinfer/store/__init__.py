"""Installed bundles and which of them is active: files only, no processes, no models loaded."""
