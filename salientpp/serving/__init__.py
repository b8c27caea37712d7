"""Storage server: a process of a storage host that outlives jobs, and starts a process for each session of a job."""
