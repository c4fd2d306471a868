"""Offline: which problems, which candidates, how fast each one is, and a plan for every problem."""
