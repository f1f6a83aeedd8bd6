"""Doors for other people's code: drop-ins and plugins, each on the public API of headrace and nothing else."""
