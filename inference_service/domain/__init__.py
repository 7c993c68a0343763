"""Requests, adapters, steps and errors as values, standard library only."""
