"""Requests, pages, and who runs next."""
