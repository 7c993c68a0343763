"""Loads as data, how they are sent, and what they mean in figures; knows neither gRPC nor the engine."""
