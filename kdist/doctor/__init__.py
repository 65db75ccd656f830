"""`kdist doctor` and `kdist test`: what would stop or slow a job, and what to do about it."""
