"""Measurements of Kvant that are not part of the package: peers, grids, replays, judges and tables.

Run them from the repository's root: `python -m benchmarks.NAME`. `benchmarks/README.md` lists them.
"""
