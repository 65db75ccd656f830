"""`kdist manifest`: a job for Kubernetes or Slurm, written out. Nothing is started here.

`request.py` says what is wanted, `kubernetes.py` and `slurm.py` write it, `command.py` is the command line.
"""
