"""The planner: it chooses ways and their shares of memory, so that an epoch of the slowest rank takes the least time."""
