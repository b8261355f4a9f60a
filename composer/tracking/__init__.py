"""The record of a run: MLflow, the console, plots, and the parent of a sweep.

Importing this package or any of its modules loads neither MLflow nor matplotlib; the record's background thread does.
"""
