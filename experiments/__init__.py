"""The claims about attention, positions and heads, run: `python -m experiments` (see __main__.py)."""
