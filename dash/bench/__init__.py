"""Benchmarks of the backward pass: problems, providers, runs, tables.

``python -m dash bench`` and the repository's ``benchmarks/`` are both made of this.
"""
