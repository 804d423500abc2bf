"""Another system's PPO configuration as a YAML file for step 3's --config: `python -m training.convert`."""
