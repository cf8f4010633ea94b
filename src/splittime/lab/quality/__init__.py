"""What a cheaper form of a model costs in quality: two models over the same tokens, figures with intervals, a verdict.

    documents -> windows -> both models -> figures of each token -> bootstrap over documents -> margins -> verdict

No torch here: a `Model` gives log-probabilities as numpy arrays, whether it runs in this process (`local`)
or is a server elsewhere (`quality.server`).
"""
