"""Computes how much memory a run will take, from configurations alone, before the run starts.

planned = plan(spec, Workload(prompt=256, response=256, generated=16, responses=16, micro_batch=8), Cluster(gpus=8))
planned.phases["train"]["actor"]["optimizer"]     # bytes on one GPU, at the phase's peak
planned.fits
"""
