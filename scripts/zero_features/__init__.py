"""What scripts/trial_zero_features.py tries, and how it starts ranks."""
