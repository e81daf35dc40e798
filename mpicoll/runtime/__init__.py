"""Runs plans: programs, the engine that advances them, requests, what was called."""
