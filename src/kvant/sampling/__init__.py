"""Sampling: parameters of a request, logit rules, grammars, and the choice of a token."""
