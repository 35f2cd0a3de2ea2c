"""Training a language model by one of several tensor-parallel stacks: equal weights, equal data, equal settings."""
