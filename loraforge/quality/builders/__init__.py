"""Task data, rebuilt from packages that PyPI, npm and Debian hold: no data hub is needed."""
