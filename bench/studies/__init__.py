"""The paper's studies (ASPIRE, arXiv 2609.17943) on a model at hand, each beside the paper's figures.

One file a study; `table.py` lists them. A study is a function from a `runs.Runs`, which has traces and decodes on
demand, to plain data, and panels that draw it.
"""
