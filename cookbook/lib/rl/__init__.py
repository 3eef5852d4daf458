"""Reinforcement learning in parts that compose: environments, rollouts, advantages, datums, a pipeline."""
