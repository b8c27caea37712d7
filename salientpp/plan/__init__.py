"""Decisions, made once and offline: pure functions of graph and numbers."""
