"""The processes of a job: who they are, how they talk, what they share."""
