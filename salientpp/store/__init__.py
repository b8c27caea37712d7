"""Keeps feature rows, and fetches the rows that other ranks own."""
