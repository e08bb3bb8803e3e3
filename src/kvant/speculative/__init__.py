"""Proposers, which draft tokens for the target to verify, and the rule by which drafts are accepted."""
