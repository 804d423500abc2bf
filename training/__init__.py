"""The training programs. training/commands.py has their names."""
