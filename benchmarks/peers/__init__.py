"""Other engines on the same CPU, each in a separate process that answers one case at a time.

A worker reads one case per line from standard input and answers with a line of JSON: the milliseconds of
each step (decode), or of each whole prompt. Prompts are `random.Random(seed).randrange(vocab size)`
in the order of requests and tokens, as in Kvant's own measurement.
"""
