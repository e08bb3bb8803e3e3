"""A forward on CPUs: compiled code over weights in their storage formats."""
