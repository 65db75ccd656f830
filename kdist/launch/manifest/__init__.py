"""`kdist manifest`: generates the description of a job for Kubernetes or Slurm, without starting it.

`request.py` contains the common options. `kubernetes.py` and `slurm.py` write the description.
"""
