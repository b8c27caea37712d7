"""Connections of a job to storage servers: the protocol, and the client's end."""
