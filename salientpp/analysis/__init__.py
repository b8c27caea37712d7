"""The cost of a plan in rows and bytes, computed without running the job."""
