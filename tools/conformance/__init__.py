"""Runs ways of context parallelism on tiny models and says which are right: `python -m tools.conformance`.

`ways.py` says how each is used, `models.py` what it is used on, `judge.py` what becomes of a cell, `page.py` the table.
"""
