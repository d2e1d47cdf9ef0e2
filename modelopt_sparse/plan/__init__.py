"""The plan: what the user asks for, decided for every layer before any work."""
