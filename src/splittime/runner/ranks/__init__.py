"""Tensor parallelism: one model over several processes (ranks), each with its part of every layer and its KV heads.

The first rank is the runner that the engine calls. It starts the others (`members`), hands every plan on to them
(`members`), and all run the same step in lockstep (`group`: the sums between). What ends one of
them ends all (`members.Members`), with an error that names it.
"""
