"""The processes of a job: process groups, collectives, failures, placement and shared memory."""
