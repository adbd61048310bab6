"""Scoring oomdoc against labelled logs; `scripts/evaluate.py` is the command.

`cases` reads the logs and labels, `predict` asks oomdoc and two baselines, `facts` and `score` compare, `table` prints.
"""
