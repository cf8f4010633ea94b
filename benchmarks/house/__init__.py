"""Figures of a Python source tree, by one script for any tree and any commit: how large its parts are, how they hang
together, and how many files a reader walks through to follow one streamed completion.

    python -m benchmarks.house                            the tree beside this folder
    python -m benchmarks.house --source OTHER/src/package
    python -m benchmarks.house --walk                     also the walk, measured on a real server of that tree
"""
