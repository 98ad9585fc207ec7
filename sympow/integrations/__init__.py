"""Connections to other libraries, each imported by its own name and with an extra of that name."""
