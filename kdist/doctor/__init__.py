"""`kdist doctor` and `kdist test`, which find problems that would stop or slow a job, and suggest fixes."""
