"""Computes how much memory a run will take, from its flags and the models' configurations alone."""
