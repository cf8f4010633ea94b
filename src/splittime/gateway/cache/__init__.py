"""The gateway's cache of answers: equal requests first, then, where a model's route opts in, questions of like wording.

`turn` is the cache's part in one request, `service` what all requests share, `answers` what is kept or under way.
"""
