"""Runs inside: says so."""

print("up")
