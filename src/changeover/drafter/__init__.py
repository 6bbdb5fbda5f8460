"""EAGLE-3 draft models: training with training-time test, evaluation as simulated acceptance, export.

It reads states from the store and writes folders that servers load; it never talks to a server.
"""
