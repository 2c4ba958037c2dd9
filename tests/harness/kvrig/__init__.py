"""Shared parts of the end-to-end tests: the server process, simulated engines, waiting."""
