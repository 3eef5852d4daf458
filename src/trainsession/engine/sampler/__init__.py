"""Sampling: scheduler, sequences and blocks on integers; cache, runner and draws on tensors.

`Sampler` composes them. Import it from `trainsession.engine.sampler.sampler`: this package itself
imports no torch, so that the scheduler can be used and tested without it.
"""
